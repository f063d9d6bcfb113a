"""A model's config without transformers, whose import takes longer than reading a small model.

Only for the families that the native code runs, and only if the file itself says everything that matters, plainly:
whoever gets None lets transformers read the file, fill in its defaults, and say what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from types import SimpleNamespace
from typing import Any

import torch

from octavo.kv.layers import MOST_LAYERS
from octavo.models.decoder import ACTIVATIONS

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
_GEMMA = ("layer_types", "query_pre_attn_scalar", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "mistral": ("sliding_window",),
    "qwen3": ("head_dim",),
    "gemma2": ("head_dim", *_GEMMA),
    "gemma3_text": ("head_dim", *_GEMMA),
}
_UNUSUAL = (  # each of these is for transformers to understand
    "auto_map",
    "is_encoder_decoder",
    "partial_rotary_factor",
    "quantization_config",
    "text_config",
    "use_bidirectional_attention",
    "use_sliding_window",
)
_DTYPES = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PlainConfig(SimpleNamespace):
    """The attributes and the two methods that Octavo uses of a transformers config."""

    def get_text_config(self, decoder: bool = True) -> PlainConfig:
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def plain_config(data: Mapping[str, Any]) -> PlainConfig | None:
    """The config that a config.json holds; None if transformers has to read it."""
    family = data.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES or any(data.get(name) for name in _UNUSUAL):
        return None
    needed = (*_COUNTS, "rms_norm_eps", "tie_word_embeddings", "eos_token_id", *_NEEDED.get(family, ()))
    if any(name not in data for name in needed) or not _sound(data):
        return None
    dtype = data.get("dtype") or data.get("torch_dtype")
    rope = _rope(data)
    activation = data.get("hidden_activation" if family.startswith("gemma") else "hidden_act")
    known = isinstance(dtype, (str, type(None))) and dtype in _DTYPES and isinstance(activation, str)
    if rope is None or not known or activation not in ACTIVATIONS:
        return None
    values = dict(data) | {"dtype": _DTYPES[dtype], "rope_parameters": rope}
    if values.get("head_dim") is None:
        values["head_dim"] = data["hidden_size"] // data["num_attention_heads"]
    if family in ("llama", "qwen2", "qwen3"):
        values |= {"sliding_window": None, "layer_types": ["full_attention"] * data["num_hidden_layers"]}
    return PlainConfig(**{name: value for name, value in values.items() if isinstance(name, str)})


def _sound(data: Mapping[str, Any]) -> bool:
    """Whether the numbers are numbers and fit together."""
    counts = [data[name] for name in _COUNTS]
    counts += [data[name] for name in ("head_dim", "sliding_window") if data.get(name) is not None]
    if not all(type(count) is int and count > 0 for count in counts):
        return False
    if data["num_hidden_layers"] > MOST_LAYERS or data["hidden_size"] % data["num_attention_heads"]:
        return False
    kinds = data.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != data["num_hidden_layers"]):
        return False
    if any(kind not in ("full_attention", "sliding_attention") for kind in kinds or ()):
        return False
    if "sliding_attention" in (kinds or ()) and data["model_type"] in ("llama", "mistral", "qwen2", "qwen3"):
        return False
    return _positive(data["rms_norm_eps"]) and type(data["tie_word_embeddings"]) is bool


def _rope(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rotary parameters in today's form: one dict, or one for each kind of layer (Gemma 3)."""
    given, old = data.get("rope_parameters"), data.get("rope_scaling")
    theta = data.get("rope_theta")
    if data["model_type"] == "gemma3_text":
        if not isinstance(given, dict) or set(given) != {"full_attention", "sliding_attention"} or old:
            return None
        return dict(given) if all(_plain_rope(part) for part in given.values()) else None
    if given and old:
        return None
    rope = given or old or {"rope_type": "default"}
    if not isinstance(rope, dict):
        return None
    rope = {"rope_theta": theta, **rope}
    return rope if _plain_rope(rope) else None


def _plain_rope(rope: Any) -> bool:
    if not isinstance(rope, dict) or not _positive(rope.get("rope_theta")) or "type" in rope:
        return False
    kind = rope.get("rope_type")
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return all(_positive(rope.get(name)) for name in names)
    return kind == "default" or (kind == "linear" and _positive(rope.get("factor")))


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and isfinite(value)
