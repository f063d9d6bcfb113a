"""Write a tiny GGUF file as llama.cpp's converter would (its permutation of Q and K, norms plus one), float32 unless
another kind is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch

F32 = gguf.GGMLQuantizationType.F32


def write_tiny_gguf(
    module: torch.nn.Module,
    architecture: str,
    path: Path,
    kind: gguf.GGMLQuantizationType = F32,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    rope_factors: np.ndarray | None = None,
) -> None:
    """`kind`: of all matrices but those whose GGUF name has a part that `kinds` names."""
    config = module.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if architecture in ("llama", "phi3"):
        writer.add_rope_dimension_count(head_dim)
    if architecture in ("qwen3", "gemma2", "gemma3"):
        writer.add_key_length(head_dim)
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    rope = config.rope_parameters
    writer.add_rope_freq_base(float(rope.get("full_attention", rope)["rope_theta"]))
    alphabet = sorted("abcdefghijklmnopqrstuvwxyz")
    tokens = ["<pad>", "<s>", "</s>", *alphabet, "ab"]
    tokens += [f"t{i}" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(
        next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture), config.num_hidden_layers
    )
    for name, value in module.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, suffix = name.rsplit(".", 1)
        stored, data = names.get_name(stem), value.numpy().astype(np.float32)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            data = data.reshape(heads, 2, data.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(data.shape)
        if architecture.startswith("gemma") and "norm" in name:
            data = data + 1
        own = next((k for part, k in (kinds or {}).items() if part in stored), kind) if data.ndim == 2 else F32
        raw = np.ascontiguousarray(data) if own == F32 else gguf.quantize(data, own)
        writer.add_tensor(f"{stored}.{suffix}", raw, raw_dtype=own)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
