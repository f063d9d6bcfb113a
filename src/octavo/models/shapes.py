"""The KV shape of each layer, read from a transformers config, and what such a config rules out.

Written for models that transformers has already built; `runner/torch_runner.py` compares every shape with the tensors
that the first profiling step really produces, so a wrong reading can never corrupt a cache silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from octavo.kv.dtypes import KVDtype, kv_dtype
from octavo.kv.groups import LayerKV
from octavo.kv.spec import spec_from_config
from octavo.models.errors import ModelError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_KV_DTYPES = {torch.float32: "float32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def check_supported(config: Any, name: str) -> None:
    """Raise ModelError for a model that is not a decoder with plain attention, naming the field that says so."""

    def refuse(field: str, value: object, why: str, choose: str) -> None:
        raise ModelError(f"{name}: {field} is {value!r}; {why}. Choose {choose}.")

    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        refuse("is_encoder_decoder", True, "encoder-decoder models are not supported", "a decoder-only model")
    if getattr(text, "alibi", False) or text.model_type in ("bloom", "mpt"):
        refuse("alibi", True, "ALiBi position biases are not supported", "a model with rotary or learned positions")
    if getattr(text, "use_bidirectional_attention", None) or getattr(text, "is_causal", True) is False:
        refuse("use_bidirectional_attention", True, "attention must be causal", "a causal model")
    for part in (config, text):
        if (quantised := getattr(part, "quantization_config", None)) is not None:
            refuse(
                "quantization_config.quant_method",
                _get(quantised, "quant_method"),
                "quantised safetensors are not read",
                "the float32, bfloat16 or float16 weights of this model, or a quantised .gguf file of it",
            )
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in (_FULL, _SLIDING):
            refuse(
                "layer_types",
                kind,
                f"only {_FULL} and {_SLIDING} layers have a paged cache here",
                "a model whose layers are all of these kinds",
            )


def layer_shapes(config: Any, dtype: torch.dtype) -> tuple[tuple[LayerKV, ...], dict[int, int]]:
    """The layers that own a cache, and for those that read another layer's: {layer: the layer it reads}.

    transformers expands an MLA latent to one K and V per head before it attends, so that form is what is cached.
    """
    spec = spec_from_config(config.to_dict(), kv_dtype=_KV_DTYPES[dtype], mla_form="expanded")
    if spec.fixed_bytes:
        raise ModelError(
            f"{spec.model_type}: the model has layers with recurrent state ({spec.fixed_bytes:,} bytes per sequence), "
            "which the torch runner does not keep; choose a model whose layers all attend."
        )
    owners = [
        LayerKV(layer, group.kv_heads, group.k_dim, group.v_dim, dtype.itemsize, group.window)
        for group in spec.groups
        for layer in group.layers
    ]
    return tuple(sorted(owners, key=lambda shape: shape.layer)), dict(spec.shared)


def cache_dtype(name: str, model: torch.dtype) -> KVDtype:
    """The storage format called `name`; `auto` is the model's dtype."""
    return kv_dtype(_KV_DTYPES[model] if name == "auto" else name)


def cache_layers(layers: Sequence[LayerKV], dtype: KVDtype) -> tuple[LayerKV, ...]:
    """The same layers with K and V stored in `dtype`."""
    return tuple(replace(layer, element_bytes=dtype.bytes, scale_bytes=dtype.scale_bytes) for layer in layers)


def max_positions(config: Any) -> int:
    """The longest sequence: see `position_limit`."""
    return position_limit(config)[0]


def position_limit(config: Any) -> tuple[int, str]:
    """The longest length at which a token's output does not depend on its neighbours in the batch, and, where that is
    less than the config's length, why: a clause for error messages.

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
    parts: list[dict[str, Any]] = [rope, *(p for p in rope.values() if isinstance(p, dict))]
    named, note = int(limit), ""
    for part in parts:
        kind = part.get("rope_type") or part.get("type")
        original = int(part.get("original_max_position_embeddings") or limit)
        if kind in ("dynamic", "longrope") and original < limit:
            limit = original
            note = (
                f"its {kind} rotary positions change for the whole batch beyond the original length of {original}, so "
                f"Octavo holds it to that and not to the {named} of its config"
            )
    return int(limit), note


def _get(holder: Any, key: str) -> Any:
    return holder.get(key) if isinstance(holder, dict) else getattr(holder, key, None)
