"""Tiny random models, one for each architecture that the runner must support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

BASE = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SLIDING, FULL = "sliding_attention", "full_attention"


def _with(**more: Any) -> dict[str, Any]:
    return BASE | more


TINY: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**_with(head_dim=16)),
    "qwen2": lambda: tf.Qwen2Config(**BASE),
    "qwen3": lambda: tf.Qwen3Config(**_with(head_dim=20)),
    "mistral": lambda: tf.MistralConfig(**_with(sliding_window=24)),
    "gemma2": lambda: tf.Gemma2Config(
        **_with(head_dim=16, sliding_window=20, num_hidden_layers=4, query_pre_attn_scalar=16)
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **_with(head_dim=16, sliding_window=12, num_hidden_layers=6, query_pre_attn_scalar=16)
    ),
    "phi3": lambda: tf.Phi3Config(**BASE),
    "gpt2": lambda: tf.GPT2Config(vocab_size=199, n_embd=48, n_layer=3, n_head=4, n_positions=512),
    "opt": lambda: tf.OPTConfig(
        vocab_size=199,
        hidden_size=48,
        ffn_dim=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=512,
        word_embed_proj_dim=32,
    ),
    "falcon-mqa": lambda: tf.FalconConfig(
        vocab_size=199, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, multi_query=True
    ),
    "falcon-mha": lambda: tf.FalconConfig(
        vocab_size=199,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        multi_query=False,
        parallel_attn=False,
        bias=True,
    ),
    "falcon-new": lambda: tf.FalconConfig(
        vocab_size=199,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    "gpt-oss": lambda: tf.GptOssConfig(
        **_with(
            head_dim=16,
            sliding_window=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=[SLIDING, FULL, SLIDING, FULL],
            num_hidden_layers=4,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ),
    "mixtral": lambda: tf.MixtralConfig(**_with(num_local_experts=4, num_experts_per_tok=2)),
    "gemma3n": lambda: tf.Gemma3nTextConfig(
        **_with(
            head_dim=16,
            sliding_window=12,
            num_hidden_layers=6,
            num_kv_shared_layers=2,
            layer_types=[SLIDING, FULL] * 3,
            vocab_size_per_layer_input=199,
            hidden_size_per_layer_input=8,
            laurel_rank=8,
            altup_num_inputs=2,
            activation_sparsity_pattern=[0.0] * 6,
            intermediate_size=[64] * 6,
        )
    ),
    "cohere": lambda: tf.CohereConfig(**_with(logit_scale=0.5)),  # scales its logits: the head is the model's own
    "deepseek": lambda: tf.DeepseekV3Config(  # MLA expanded: K and V of different dims
        **_with(
            num_key_value_heads=4,
            kv_lora_rank=24,
            q_lora_rank=24,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=12,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            n_shared_experts=1,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        )
    ),
}


def tiny_module(name: str, seed: int = 0) -> torch.nn.Module:
    """A random float32 model with weights large enough that its greedy text does not repeat one token."""
    torch.manual_seed(seed)
    module = tf.AutoModelForCausalLM.from_config(TINY[name](), dtype=torch.float32)
    for parameter in module.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.15)
        else:
            parameter.data += torch.randn_like(parameter) * 0.1
    return module.eval()
