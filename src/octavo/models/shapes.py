"""The KV shape of each layer, read from a transformers config, and what such a config rules out.

Written for models that transformers has already built; `runner/torch_runner.py` compares every shape with the tensors
that the first profiling step really produces, so a wrong reading can never corrupt a cache silently.
"""

from __future__ import annotations

from typing import Any

from octavo.kv.groups import LayerKV
from octavo.models.errors import ModelError

_FULL, _SLIDING = "full_attention", "sliding_attention"


def check_supported(config: Any, name: str) -> None:
    """Raise ModelError for a model that is not a decoder with plain attention, naming the field that says so."""

    def refuse(field: str, value: object, why: str) -> None:
        raise ModelError(
            f"{name}: {field} is {value!r}; {why}. Choose a decoder-only model with rotary or learned positions."
        )

    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        refuse("is_encoder_decoder", True, "encoder-decoder models are not supported")
    if getattr(text, "alibi", False) or text.model_type in ("bloom", "mpt"):
        refuse("alibi", True, "ALiBi position biases are not supported")
    if getattr(text, "use_bidirectional_attention", None) or getattr(text, "is_causal", True) is False:
        refuse("use_bidirectional_attention", True, "attention must be causal")
    if getattr(config, "quantization_config", None) is not None:
        method = _get(config.quantization_config, "quant_method")
        refuse("quantization_config.quant_method", method, "only plain weights and GGUF files are supported")
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in (_FULL, _SLIDING):
            refuse("layer_types", kind, f"only {_FULL} and {_SLIDING} layers have a paged cache here")


def layer_shapes(config: Any, element_bytes: int) -> tuple[tuple[LayerKV, ...], dict[int, int]]:
    """The layers that own a cache, and for those that read another layer's: {layer: the layer it reads}."""
    text = config.get_text_config(decoder=True)
    count = text.num_hidden_layers
    shared = _shared(text, count)
    layers = tuple(
        LayerKV(i, *_heads(text, i), element_bytes, _window(text, i)) for i in range(count) if i not in shared
    )
    return layers, shared


def _heads(text: Any, layer: int) -> tuple[int, int, int]:
    """(KV heads, K dimension, V dimension) of a layer."""
    heads = text.num_attention_heads
    if getattr(text, "kv_lora_rank", None):  # MLA: transformers expands the latent to one K and V per head
        return heads, text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
    if text.model_type == "falcon":
        one = text.multi_query and not text.new_decoder_architecture
        dim = text.hidden_size // heads
        return (1 if one else text.num_kv_heads), dim, dim
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    full = not _is_sliding(text, layer)
    if full and getattr(text, "global_head_dim", None):  # Gemma 4: full layers have their own shape
        dim = text.global_head_dim
        if getattr(text, "attention_k_eq_v", False):
            kv_heads = text.num_global_key_value_heads or kv_heads
    return kv_heads, dim, dim


def _is_sliding(text: Any, layer: int) -> bool:
    types = getattr(text, "layer_types", None)
    return bool(types) and types[layer] == _SLIDING


def _window(text: Any, layer: int) -> int | None:
    """Tokens a query of this layer sees, itself included; None: all."""
    window = getattr(text, "sliding_window", None)
    if window is None or getattr(text, "use_sliding_window", True) is False:
        return None
    types = getattr(text, "layer_types", None)
    return window if not types or types[layer] == _SLIDING else None


def _shared(text: Any, count: int) -> dict[int, int]:
    """Layers that reuse the KV of the last layer of their kind before the shared part (Gemma 3n, Gemma 4)."""
    number = getattr(text, "num_kv_shared_layers", 0) or 0
    first = count - number
    sources = {kind: i for i, kind in enumerate(text.layer_types[:first])} if number else {}
    return {i: sources[text.layer_types[i]] for i in range(first, count)}


def max_positions(config: Any) -> int:
    """The longest length at which a token's output does not depend on its neighbours in the batch.

    `dynamic` and `longrope` switch all rotary frequencies when the longest position in a *batch* passes the
    original length, so that a long neighbour would change a short request: such models are held to that length.
    """
    text = config.get_text_config(decoder=True)
    limit = next(
        (v for k in ("max_position_embeddings", "n_positions", "seq_length") if (v := getattr(text, k, None))),
        None,
    )
    if limit is None:
        raise ModelError(f"{text.model_type}: the config has no max_position_embeddings; the length is unknown.")
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for part in [rope, *(p for p in rope.values() if isinstance(p, dict))]:
        if (part.get("rope_type") or part.get("type")) in ("dynamic", "longrope"):
            limit = min(limit, int(part.get("original_max_position_embeddings") or limit))
    return int(limit)


def _get(holder: Any, key: str) -> Any:
    return holder.get(key) if isinstance(holder, dict) else getattr(holder, key, None)
