"""The shape of a decoder that the native code runs: Llama and its kin, described in one dataclass.

What differs between the families is written down here and nowhere else: names of norms, biases, head norms, windows,
soft caps, rope. A model that does not fit gets a reason, and runs through transformers' own code instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kv.groups import LayerKV

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "smollm3", "granite")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
TensorOf = Callable[[str], torch.Tensor | None]  # name in the checkpoint → tensor, None if there is none


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer. `rope`: index into `DecoderSpec.frequencies`, None: no positions (NoPE)."""

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    rope: int | None
    scale: float
    softcap: float


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """What the native code must know besides the weights.

    frequencies      inverse frequencies of each kind of rotary embedding, float32 [rotary_dim / 2]
    norm_offset      added to the weights of RMS norms (Gemma stores weight - 1)
    sandwich         norms after attention and MLP, too (Gemma)
    logit_scale      factor of the logits, applied through the last norm
    """

    family: str
    layers: tuple[DecoderLayer, ...]
    hidden: int
    intermediate: int
    vocabulary: int
    activation: str
    eps: float
    frequencies: tuple[NDArray[np.float32], ...]
    norm_offset: float
    sandwich: bool
    head_norms: bool
    tied: bool
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    logit_softcap: float


class NotNative(Exception):
    """The native code cannot run this model; the message says why, as a clause."""


def decoder_spec(config: Any, shapes: Sequence[LayerKV], shared: dict[int, int], dtype: torch.dtype) -> DecoderSpec:
    """The decoder that a transformers config describes. Raises NotNative.

    `shapes`: the layers' KV shapes, as the cache is laid out; `dtype`: of the weights.
    """
    text = config.get_text_config(decoder=True)
    family = text.model_type
    if family not in FAMILIES:
        raise NotNative(f"model_type {family} is not one of {', '.join(FAMILIES)}")
    activation = getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", None)
    if activation not in ACTIVATIONS:
        raise NotNative(f"activation {activation} is not one of {', '.join(ACTIVATIONS)}")
    if shared or len(shapes) != text.num_hidden_layers:
        raise NotNative("some layers share another layer's KV")
    heads = text.num_attention_heads
    _check_sizes(text, shapes, heads, dtype)
    gemma = family.startswith("gemma")
    ropes, frequencies = _ropes(text, shapes)
    scale = _scale(text, shapes[0].k_dim)
    return DecoderSpec(
        family=family,
        layers=tuple(
            DecoderLayer(
                i,
                heads,
                shape.kv_heads,
                shape.k_dim,
                shape.window,
                ropes[i],
                scale,
                float(getattr(text, "attn_logit_softcapping", None) or 0.0),
            )
            for i, shape in enumerate(shapes)
        ),
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        vocabulary=text.vocab_size,
        activation=ACTIVATIONS[activation],
        eps=text.rms_norm_eps,
        frequencies=frequencies,
        norm_offset=1.0 if gemma else 0.0,
        sandwich=gemma,
        head_norms=family in ("qwen3", "gemma3_text"),
        tied=bool(text.tie_word_embeddings),
        embedding_scale=_embedding_scale(text, gemma, dtype),
        residual_scale=float(getattr(text, "residual_multiplier", 1.0)),
        logit_scale=1.0 / float(getattr(text, "logits_scaling", 1.0)),
        logit_softcap=float(getattr(text, "final_logit_softcapping", None) or 0.0),
    )


def _check_sizes(text: Any, shapes: Sequence[LayerKV], heads: int, dtype: torch.dtype) -> None:
    unit = 32 if dtype == torch.bfloat16 else 16
    for shape in shapes:
        if shape.k_dim != shape.v_dim or shape.k_dim % unit or shape.k_dim > 256:
            raise NotNative(f"head sizes {shape.k_dim} and {shape.v_dim} are not one multiple of {unit} up to 256")
        if heads % shape.kv_heads or heads // shape.kv_heads > 64:
            raise NotNative(f"{heads} heads over {shape.kv_heads} KV heads")
    if len({shape.kv_heads for shape in shapes}) > 1:
        raise NotNative("its layers have different numbers of KV heads")
    for field in ("hidden_size", "intermediate_size"):
        if getattr(text, field) % 16:
            raise NotNative(f"{field} {getattr(text, field)} is no multiple of 16")


def _scale(text: Any, head_dim: int) -> float:
    if text.model_type.startswith("gemma"):
        return float(text.query_pre_attn_scalar) ** -0.5
    return float(getattr(text, "attention_multiplier", None) or head_dim**-0.5)


def _embedding_scale(text: Any, gemma: bool, dtype: torch.dtype) -> float:
    if gemma:  # the factor is rounded to the model's dtype there
        return float(torch.tensor(text.hidden_size**0.5, dtype=dtype))
    return float(getattr(text, "embedding_multiplier", 1.0))


def _ropes(text: Any, shapes: Sequence[LayerKV]) -> tuple[list[int | None], tuple[NDArray[np.float32], ...]]:
    """For each layer which of the returned frequencies it turns with."""
    parameters = dict(getattr(text, "rope_parameters", None) or {})
    head_dim = shapes[0].k_dim
    rotary = int(head_dim * float(parameters.get("partial_rotary_factor", getattr(text, "partial_rotary_factor", 1.0))))
    if rotary % 2:
        raise NotNative(f"rotary size {rotary} is odd")
    none = getattr(text, "no_rope_layers", None) if text.model_type == "smollm3" else None
    kinds = getattr(text, "layer_types", None)
    if "rope_type" in parameters or not parameters:
        own = [None if none is not None and not none[i] else 0 for i in range(len(shapes))]
        return own, (_frequencies(parameters, text, rotary),)
    names = list(parameters)
    if kinds is None or any(kind not in names for kind in kinds):
        raise NotNative(f"rope parameters are given for {', '.join(map(str, names))}")
    return [names.index(kind) for kind in kinds], tuple(_frequencies(parameters[n], text, rotary) for n in names)


def _frequencies(parameters: dict[str, Any], text: Any, rotary: int) -> NDArray[np.float32]:
    """Inverse frequencies [rotary / 2]: Su et al. 2021; `linear` and `llama3` scaling as transformers defines them."""
    theta = float(parameters.get("rope_theta") or getattr(text, "rope_theta", 10000.0))
    kind = parameters.get("rope_type", "default")
    exponents = torch.arange(0, rotary, 2, dtype=torch.int64).float() / rotary
    plain: NDArray[np.float32] = (1.0 / (theta**exponents)).numpy()
    if kind == "default":
        return plain
    if kind == "linear":
        return (plain / np.float32(parameters["factor"])).astype(np.float32)
    if kind != "llama3":
        raise NotNative(f"rope type {kind} is not default, linear or llama3")
    factor, low, high = (float(parameters[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(parameters["original_max_position_embeddings"])
    lengths = 2 * math.pi / plain
    smooth = (original / lengths - low) / (high - low)
    scaled = np.where(lengths > original / low, plain / factor, plain)
    between = (lengths >= original / high) & (lengths <= original / low)
    return np.where(between, (1 - smooth) * plain / factor + smooth * plain, scaled).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a fused matrix: a tensor of the checkpoint, or some of its rows. `half`: gate 1, up 2, else 0."""

    name: str
    rows: tuple[int, int] | None = None
    half: int = 0


def attention_parts(spec: DecoderSpec, i: int) -> tuple[Part, ...]:
    """What the fused [q k v] matrix of layer `i` is made of, by checkpoint name without `.weight`."""
    at = f"model.layers.{i}.self_attn."
    if spec.family == "phi3":
        return (Part(f"{at}qkv_proj"),)
    return tuple(Part(f"{at}{name}_proj") for name in "qkv")


def mlp_parts(spec: DecoderSpec, i: int) -> tuple[Part, ...]:
    """What the interleaved [gate up] matrix of layer `i` is made of."""
    at = f"model.layers.{i}.mlp."
    if spec.family == "phi3":
        size = spec.intermediate
        return (Part(f"{at}gate_up_proj", (0, size), 1), Part(f"{at}gate_up_proj", (size, 2 * size), 2))
    return (Part(f"{at}gate_proj", None, 1), Part(f"{at}up_proj", None, 2))


def norm_names(spec: DecoderSpec, i: int) -> dict[str, str]:
    """Checkpoint names of layer `i`'s norms by their place."""
    at = f"model.layers.{i}."
    names = {"norm_in": f"{at}input_layernorm"}
    if spec.sandwich:
        names |= {
            "norm_after_attention": f"{at}post_attention_layernorm",
            "norm_before_mlp": f"{at}pre_feedforward_layernorm",
            "norm_after_mlp": f"{at}post_feedforward_layernorm",
        }
    else:
        names["norm_before_mlp"] = f"{at}post_attention_layernorm"
    if spec.head_norms:
        names |= {"q_norm": f"{at}self_attn.q_norm", "k_norm": f"{at}self_attn.k_norm"}
    return names
