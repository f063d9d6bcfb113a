"""GGUF metadata as a model config: the same fields under transformers' names, and the key each came from.

Keys are those of llama.cpp's converter (gguf-py/gguf/constants.py). What a key means differently there is undone here:
a KV head count of 0 marks a layer without attention, and MLA files give the widths of whole heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.gguf_header import GgufHeader

#: llama.cpp's architecture → model_type, where they differ.
FAMILIES: Mapping[str, str] = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gptneox": "gpt_neox",
    "gpt-oss": "gpt_oss",
    "phi2": "phi",
    "starcoder": "gpt_bigcode",
    "command-r": "cohere",
    "deepseek2": "deepseek_v3",
    "llama4": "llama4_text",
    "glm4moe": "glm4_moe",
    "granitehybrid": "granitemoehybrid",
    "falcon-h1": "falcon_h1",
    "mimo2": "mimo_v2_flash",
    "deci": "nemotron-nas",
}
#: Key below the architecture → field.
KEYS: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
    "attention.key_length_swa": "swa_head_dim",
    "attention.value_length_swa": "swa_v_head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "attention.chunk_size": "attention_chunk_size",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.indexer.key_length": "index_head_dim",
    "full_attention_interval": "full_attention_interval",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.inner_size": "ssm_inner_size",
    "ssm.time_step_rank": "ssm_time_step_rank",
    "ssm.group_count": "n_groups",
    "shortconv.l_cache": "conv_L_cache",
}
_MAMBA1 = ("mamba", "jamba")
_MAMBA2 = ("mamba2", "nemotron_h", "granitemoehybrid", "falcon_h1")
_DELTA_NET = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def config_from_gguf(header: GgufHeader) -> tuple[dict[str, Any], dict[str, str]]:
    """The header as (config, names): fields under transformers' names, and field → GGUF key."""
    arch, meta = header.architecture, header.metadata
    names = {field: f"{arch}.{key}" for key, field in KEYS.items()}
    config: dict[str, Any] = {"model_type": FAMILIES.get(arch, arch)}
    for field, key in names.items():
        if meta.get(key) not in (None, [], 0):
            config[field] = meta[key]
    if "vocab_size" not in config and "tokenizer.ggml.tokens" in header.lengths:
        config["vocab_size"] = header.lengths["tokenizer.ggml.tokens"]
        names["vocab_size"] = "length of tokenizer.ggml.tokens"
    config["tie_word_embeddings"] = "output.weight" not in header.tensor_names
    widths = config.get("intermediate_size")
    if isinstance(widths, list):
        config["intermediate_size"] = max(widths)
    _undo_mla(config, names, header)
    _undo_state(config, names)
    _undo_layer_kinds(config, names, widths)
    _undo_rope_scaling(config, header)
    return config, names


def _undo_mla(config: dict[str, Any], names: dict[str, str], header: GgufHeader) -> None:
    """Head widths of an MLA file. Newer files give those of the latent as key_length and add `_mla` ones."""
    if "kv_lora_rank" not in config:
        if config.get("v_head_dim") == config.get("head_dim"):
            config.pop("v_head_dim", None)
        return
    arch, meta = header.architecture, header.metadata
    suffix = "_mla" if f"{arch}.attention.key_length_mla" in meta else ""
    key, value = f"{arch}.attention.key_length{suffix}", f"{arch}.attention.value_length{suffix}"
    rope = f"{arch}.rope.dimension_count"
    names |= {"qk_rope_head_dim": rope, "qk_nope_head_dim": f"{key} - {rope}", "v_head_dim": value}
    config.pop("v_head_dim", None)
    if rope in meta and key in meta and value in meta:
        config["qk_rope_head_dim"] = meta[rope]
        config["qk_nope_head_dim"] = meta[key] - meta[rope]
        config["v_head_dim"] = meta[value]


def _undo_state(config: dict[str, Any], names: dict[str, str]) -> None:
    """Recurrent sizes: llama.cpp gives the inner size and the number of heads (time_step_rank)."""
    family = config["model_type"]
    inner, heads = config.pop("ssm_inner_size", None), config.pop("ssm_time_step_rank", None)
    if inner is None:
        return
    inner_key, heads_key = names["ssm_inner_size"], names["ssm_time_step_rank"]
    if family in _MAMBA1 and config.get("hidden_size"):
        config["mamba_expand"], config["mamba_d_state"] = inner // config["hidden_size"], config.pop("ssm_state_size")
        names["mamba_expand"] = f"{inner_key} / {names['hidden_size']}"
        names["mamba_d_state"] = names["ssm_state_size"]
    elif family in _MAMBA2 and heads:
        config["mamba_num_heads"], config["mamba_head_dim"] = heads, inner // heads
        names |= {"mamba_num_heads": heads_key, "mamba_head_dim": f"{inner_key} / {heads_key}"}
    elif family in _DELTA_NET and heads:
        config["linear_num_value_heads"], config["linear_value_head_dim"] = heads, inner // heads
        config["linear_num_key_heads"] = config.pop("n_groups")
        config["linear_key_head_dim"] = config.pop("ssm_state_size")
        config["linear_conv_kernel_dim"] = config.pop("conv_kernel")
        names |= {"linear_num_value_heads": heads_key, "linear_value_head_dim": f"{inner_key} / {heads_key}"}
        names |= {"linear_num_key_heads": names["n_groups"], "linear_key_head_dim": names["ssm_state_size"]}
        names["linear_conv_kernel_dim"] = names["conv_kernel"]
    else:
        config["ssm_inner_size"] = inner  # no rule: the reader of the config refuses what it does not know


def _undo_layer_kinds(config: dict[str, Any], names: dict[str, str], widths: Any) -> None:
    """Layers with a KV head count of 0 have no attention; with an MLP width of their own they are only an MLP."""
    heads = config.get("num_key_value_heads")
    if not isinstance(heads, list):
        return
    if 0 in heads:
        recurrent = any(key in config for key in ("conv_kernel", "linear_conv_kernel_dim", "conv_L_cache"))

        def without_attention(index: int) -> str:
            mlp_only = config["model_type"] == "nemotron_h" and isinstance(widths, list) and widths[index]
            return "linear_attention" if recurrent and not mlp_only else "mlp"

        config["layer_types"] = ["full_attention" if h else without_attention(i) for i, h in enumerate(heads)]
        names["layer_types"] = f"{names['num_key_value_heads']} (0: no attention)"
    elif len(set(heads)) == 1:
        config["num_key_value_heads"] = heads[0]


def _undo_rope_scaling(config: dict[str, Any], header: GgufHeader) -> None:
    prefix = f"{header.architecture}.rope.scaling."
    kind, factor = header.metadata.get(prefix + "type"), header.metadata.get(prefix + "factor")
    if kind and factor:
        original = header.metadata.get(prefix + "original_context_length")
        config["rope_scaling"] = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
