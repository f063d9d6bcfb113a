"""Closed tables of what the model families of `transformers` mean by fields that their configs leave out.

Source: the configuration classes of transformers 5.24 (`models/*/configuration_*.py`), read one by one. A
family that is not here gets nothing: an absent field stays an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Model types of multimodal wrappers → the family of their text part, for a text part without its own
#: model_type.
CANONICAL: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "kimi_k25": "kimi_k2",
}

#: Class defaults of fields that published configs of the family really omit.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # google/gemma-3-4b-it publishes neither head counts nor head_dim nor a length.
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "vocab_size": 262208,
    },
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256},
    "gemma4_text": {"global_head_dim": 512},
    "gpt_oss": {"head_dim": 64},
    "llama4_text": {"head_dim": 128},
    "qwen3": {"head_dim": 128},
    # The first Falcon configs predate the field.
    "falcon": {"new_decoder_architecture": False},
}

#: Families whose configs have no KV head count because attention is multi-head: one KV head per query head.
MULTI_HEAD = _names(
    "gpt2 opt gpt_neox gpt_neox_japanese gptj gpt_neo bloom codegen persimmon biogpt xglm baichuan qwen "
    "mpt falcon RefinedWeb RefinedWebModel gpt_bigcode chatglm"
)
#: Families whose class takes an absent KV head count as the number of query heads.
KV_HEADS_DEFAULT_TO_HEADS = _names(
    "llama phi phi3 cohere cohere2 olmo olmo2 olmo3 granite deepseek internlm hunyuan_v1_dense recurrent_gemma"
)

#: Families whose caches are of a kind that has no formula here, and why.
REFUSED: Mapping[str, str] = {
    "deepseek_v4": "compressed sparse attention (compress_ratios) keeps one entry per several tokens",
}

#: Every layer slides when `sliding_window` is set (and `use_sliding_window` is not false).
ALL_LAYERS_SLIDE = _names("mistral mixtral ministral ministral3 starcoder2 phi3 phi4mm phi4_multimodal phimoe")
#: `use_sliding_window` counts as false when it is absent.
WINDOW_OFF_BY_DEFAULT = _names(
    "qwen2 qwen2_moe qwen3 qwen3_moe qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen3_vl_text "
    "qwen3_vl_moe_text qwen2_5_omni_text smollm3"
)
#: Each period-th layer is full, the others slide.
EVERY_NTH_FULL: Mapping[str, int] = {
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
    "gpt_oss": 2,
    "cohere2": 4,
    "exaone4": 4,
    "exaone_moe": 4,
    "olmo3": 4,
    "afmoe": 4,
}
#: Each period-th layer is full attention, the others keep a recurrent state.
EVERY_NTH_ATTENDS: Mapping[str, int] = {
    "qwen3_next": 4,
    "qwen3_5_text": 4,
    "qwen3_5_moe_text": 4,
    "olmo_hybrid": 4,
}

#: Families whose class ties the output matrix to the embedding unless the config says otherwise.
TIED_BY_DEFAULT = _names(
    "gpt2 opt bloom falcon gpt_bigcode gpt_neo mpt gemma gemma2 gemma3_text gemma3n_text gemma4_text "
    "cohere cohere2 starcoder2 smollm3 lfm2 recurrent_gemma falcon_mamba zamba2 minicpm3"
)
#: Families whose class does not tie unless the config says so.
UNTIED_BY_DEFAULT = _names(
    "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5_text qwen3_5_moe_text phi "
    "phi3 phimoe gpt_neox gptj codegen olmo olmo2 olmo3 deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 "
    "glm4_moe glm_moe_dsa glm4_moe_lite gpt_oss llama4_text minimax minimax_m2 minimax_m3 ministral "
    "ministral3 stablelm persimmon jamba bamba falcon_h1 mamba2 nemotron_h step3p7 mimo_v2_flash dbrx "
    "granitemoehybrid exaone4"
)
