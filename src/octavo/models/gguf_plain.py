"""The config of a GGUF file without transformers: see `plain_config`."""

from __future__ import annotations

from typing import Any

from octavo.models.gguf_config import config_from_gguf
from octavo.models.gguf_header import GgufHeader
from octavo.models.plain_config import PlainConfig, plain_config

EOS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_SLIDING_EVERY = {"gemma2": 2, "gemma3": 6}  # the last of so many layers attends to everything
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of the one size whose attention scale is not that of its head_dim
_SOFTCAPS = {"gemma2": (50.0, 30.0), "gemma3": (None, None)}  # of attention and logits, where the file does not say


def plain_gguf_config(file: GgufHeader) -> PlainConfig | None:
    """The config that the metadata describes; None if transformers has to make it."""
    arch, meta = file.architecture, file.metadata
    if meta.get(f"{arch}.rope.scaling.type", "none") != "none":
        return None
    values, _ = config_from_gguf(file)
    values.setdefault("vocab_size", len(meta.get("tokenizer.ggml.tokens", ())))
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    values["rms_norm_eps"] = meta.get(f"{arch}.attention.layer_norm_rms_epsilon")
    values["eos_token_id"] = meta.get(EOS[0])
    theta = meta.get(f"{arch}.rope.freq_base", 10000.0)
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    values["hidden_act"] = "silu"
    if arch == "llama" and "head_dim" not in values and f"{arch}.rope.dimension_count" in meta:
        values["head_dim"] = meta[f"{arch}.rope.dimension_count"]
    if arch == "qwen3":
        values.setdefault("head_dim", 128)
    if arch in _SLIDING_EVERY:
        values |= _gemma(file, values)
    else:
        values.pop("sliding_window", None)
    return plain_config(values)


def _gemma(file: GgufHeader, values: dict[str, Any]) -> dict[str, Any]:
    arch, meta = file.architecture, file.metadata
    count, every = values.get("num_hidden_layers", 0), _SLIDING_EVERY[arch]
    attention, logits = _SOFTCAPS[arch]
    per_head = values.get("hidden_size", 0) // (values.get("num_attention_heads") or 1)
    theta = values["rope_parameters"]["rope_theta"]
    more: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)],
        "query_pre_attn_scalar": per_head if count == _GEMMA_27B[arch] else values.get("head_dim"),
        "attn_logit_softcapping": meta.get(f"{arch}.attn_logit_softcapping", attention),
        "final_logit_softcapping": meta.get(f"{arch}.final_logit_softcapping", logits),
    }
    if arch == "gemma3":
        more["rope_parameters"] = {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    return more
