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


def _wide(**more: Any) -> dict[str, Any]:
    """Heads that the C++ kernels take; 48 hidden values are no multiple of their panels of 32."""
    return _with(head_dim=32) | more


def _two_heads(**more: Any) -> dict[str, Any]:
    """For configs without a head size of their own: 64 hidden values, 2 heads of 32."""
    return _with(hidden_size=64, intermediate_size=80, num_attention_heads=2, num_key_value_heads=1) | more


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# Every family of models/decoder.py, with what sets its members apart.
NATIVE: dict[str, Callable[[], Any]] = {
    "native-llama": lambda: tf.LlamaConfig(**_wide()),
    "native-llama-tied-mqa": lambda: tf.LlamaConfig(
        **_wide(num_attention_heads=12, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True)
    ),
    "native-llama3-rope": lambda: tf.LlamaConfig(**_wide(rope_parameters=_LLAMA3)),
    "native-llama-linear-rope-biases": lambda: tf.LlamaConfig(
        **_wide(
            rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            attention_bias=True,
            mlp_bias=True,
        )
    ),
    "native-llama-gelu": lambda: tf.LlamaConfig(**_wide(hidden_act="gelu", head_dim=48)),
    "native-mistral": lambda: tf.MistralConfig(**_wide(sliding_window=24)),
    "native-qwen2": lambda: tf.Qwen2Config(**_two_heads()),
    "native-qwen3": lambda: tf.Qwen3Config(**_wide()),
    "native-gemma2": lambda: tf.Gemma2Config(
        **_wide(sliding_window=20, num_hidden_layers=4, query_pre_attn_scalar=16, attn_logit_softcapping=2.0)
    ),
    "native-gemma3": lambda: tf.Gemma3TextConfig(
        **_wide(sliding_window=12, num_hidden_layers=6, query_pre_attn_scalar=16, tie_word_embeddings=False)
    ),
    "native-phi3": lambda: tf.Phi3Config(**_two_heads()),
    "native-phi3-partial-rotary": lambda: tf.Phi3Config(
        **_two_heads(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75})
    ),
    "native-smollm3": lambda: tf.SmolLM3Config(**_two_heads(no_rope_layers=[1, 0, 1])),
    "native-granite": lambda: tf.GraniteConfig(
        **_two_heads(embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=4.0, attention_multiplier=0.3)
    ),
}

# Models that run through transformers' code, with heads that `CpuAttention` takes.
ATTENDED: dict[str, Callable[[], Any]] = {
    "wide-gpt2": lambda: tf.GPT2Config(vocab_size=199, n_embd=64, n_layer=3, n_head=2, n_positions=512),
    "wide-opt": lambda: tf.OPTConfig(
        vocab_size=199,
        hidden_size=64,
        ffn_dim=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=512,
        word_embed_proj_dim=32,
    ),
    "wide-falcon-71-heads": lambda: tf.FalconConfig(
        vocab_size=199, hidden_size=71 * 16, num_hidden_layers=1, num_attention_heads=71, multi_query=True
    ),
    "wide-phi": lambda: tf.PhiConfig(**_two_heads()),
    "wide-olmo2": lambda: tf.Olmo2Config(**_two_heads()),
    "wide-glm": lambda: tf.GlmConfig(**_two_heads(head_dim=32)),
    "wide-mixtral": lambda: tf.MixtralConfig(**_two_heads(num_local_experts=4, num_experts_per_tok=2)),
    "wide-gpt-oss": lambda: tf.GptOssConfig(
        **_wide(
            sliding_window=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=[SLIDING, FULL, SLIDING, FULL],
            num_hidden_layers=4,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ),
    "wide-deepseek": lambda: tf.DeepseekV3Config(
        **_with(
            num_key_value_heads=4,
            kv_lora_rank=24,
            q_lora_rank=24,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
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
    module = tf.AutoModelForCausalLM.from_config((TINY | NATIVE | ATTENDED)[name](), dtype=torch.float32)
    for parameter in module.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.15)
        else:
            parameter.data += torch.randn_like(parameter) * 0.1
    return module.eval()
