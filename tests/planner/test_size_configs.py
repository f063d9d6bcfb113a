"""Reading configs: nesting, aliases, missing fields, dtypes, tensor parallelism, and the families' own layouts."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.kv.spec import ConfigError, LayerKind, spec_from_config

PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def without(*names: str, **more: Any) -> dict[str, Any]:
    return {**{k: v for k, v in PLAIN.items() if k not in names}, **more}


# --- where a value is read, and what is said about it ----------------------------------------------------------------


@pytest.mark.parametrize("path", ["text_config", "llm_config", "language_config", "thinker_config.text_config"])
def test_the_language_model_is_found_wherever_it_is_nested(path: str) -> None:
    config: Any = dict(PLAIN)
    for key in reversed(path.split(".")):
        config = {key: config}
    tower = {"num_hidden_layers": 27, "num_attention_heads": 16, "hidden_size": 1152, "num_key_value_heads": 16}
    spec = spec_from_config({**tower, **config, "vision_config": tower})
    assert spec.bytes_per_token == 4 * 2 * 2 * 32 * 2
    assert spec.sources["num_hidden_layers"] == f"{path}.num_hidden_layers"
    assert spec.sources["head_dim"] == "hidden_size / num_attention_heads = 256 / 8 = 32"
    assert spec.values["head_dim"] == 32


def test_a_field_is_not_taken_from_the_top_when_the_text_part_lacks_it() -> None:
    text = without("num_hidden_layers")
    with pytest.raises(ConfigError, match=r"num_hidden_layers is missing: looked in text_config for .*n_layer"):
        spec_from_config({"num_hidden_layers": 27, "text_config": text})


def test_a_text_part_that_only_names_another_model() -> None:
    """LLaVA-1.5 publishes no dimensions, only the name of its language model."""
    config = {"model_type": "llava", "text_config": {"_name_or_path": "lmsys/vicuna-7b-v1.5", "model_type": "llama"}}
    with pytest.raises(ConfigError, match=r"only names another model \(lmsys/vicuna-7b-v1\.5\): size that one"):
        spec_from_config(config)


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_missing_field_is_named_and_null_is_missing(name: str) -> None:
    for config in (without(name), without(name, **{name: None})):
        with pytest.raises(ConfigError, match=rf"{name} is missing: looked in the top level of the config"):
            spec_from_config(config)


def test_kv_heads_are_not_guessed_for_an_unknown_family() -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads is missing"):
        spec_from_config(without("num_key_value_heads", model_type="brand_new"))
    absent = spec_from_config(without("num_key_value_heads"))
    assert absent.groups[0].kv_heads == 8
    assert absent.sources["num_key_value_heads"] == "num_attention_heads (family default of llama in transformers)"


@pytest.mark.parametrize("bad", [0, -1, 2.5, "8", True])
def test_a_count_must_be_a_whole_number(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_key_value_heads is .*; it must be a whole number of at least 1"):
        spec_from_config({**PLAIN, "num_key_value_heads": bad})


def test_head_size_that_is_no_whole_number() -> None:
    with pytest.raises(ConfigError, match=r"num_attention_heads = 250 / 8 = 31\.25 is not a whole number"):
        spec_from_config({**PLAIN, "hidden_size": 250})
    assert spec_from_config({**PLAIN, "hidden_size": 250, "head_dim": 32}).bytes_per_token == 1024


def test_gpt2_names_and_multi_query() -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
    assert spec_from_config(gpt2).bytes_per_token == 12 * 12 * 2 * 64 * 2
    starcoder = {**gpt2, "model_type": "gpt_bigcode", "multi_query": True}
    assert spec_from_config(starcoder).bytes_per_token == 12 * 1 * 2 * 64 * 2
    assert spec_from_config({**starcoder, "multi_query": False}).bytes_per_token == 12 * 12 * 2 * 64 * 2
    glm = {"model_type": "chatglm", "num_layers": 28, "num_attention_heads": 32, "hidden_size": 4096}
    glm |= {"kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2, "seq_length": 8192}
    assert spec_from_config(glm).bytes_per_token == 28 * 2 * 2 * 128 * 2
    mpt = {"model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096, "max_seq_len": 2048}
    assert spec_from_config({**mpt, "attn_config": {"attn_type": "multiquery_attention"}}).groups[0].kv_heads == 1


def test_falcon_publishes_71_kv_heads_and_caches_one() -> None:
    falcon = {"model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544}
    falcon |= {"num_kv_heads": 71, "multi_query": True}
    for config in (falcon, {**falcon, "new_decoder_architecture": False}):  # older configs lack the field
        assert spec_from_config(config).bytes_per_token == 32 * 1 * 2 * 64 * 2
    new = {**falcon, "num_attention_heads": 128, "hidden_size": 8192, "num_kv_heads": 8}
    new["new_decoder_architecture"] = True
    assert spec_from_config(new).bytes_per_token == 32 * 8 * 2 * 64 * 2


def test_rope_scaling_stretches_the_length() -> None:
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}
    assert spec_from_config({**PLAIN, **yarn}).max_positions == 4096  # already in it
    assert spec_from_config({**PLAIN, "rope_scaling": {"type": "linear", "factor": 2}}).max_positions == 8192
    llama3 = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}}
    assert spec_from_config({**PLAIN, **llama3}).max_positions == 4096


def test_what_is_not_a_decoder_or_not_a_config() -> None:
    with pytest.raises(ConfigError, match="decoder-only"):
        spec_from_config({**PLAIN, "is_encoder_decoder": True})
    with pytest.raises(ConfigError, match="must be a JSON object"):
        spec_from_config([1])  # type: ignore[arg-type]


# --- fail closed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [
        {"sliding_window": 1024},
        {"attention_chunk_size": 8192},
        {"mamba_d_state": 16},
        {"compress_ratios": [4, 128]},
        {"linear_attn_config": {"head_dim": 128}},
        {"layer_group_size": 8},
        {"cross_attention_layers": [3, 8]},
    ],
)
def test_an_unknown_family_with_windows_or_states_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(field))}, which Octavo has no rule for"):
        spec_from_config({**PLAIN, "model_type": "brand_new", **field})


def test_an_unknown_layer_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="layers of kind quantum_attention"):
        spec_from_config({**PLAIN, "layer_types": ["full_attention"] * 3 + ["quantum_attention"]})
    with pytest.raises(ConfigError, match="has 3 entries but the model has 4 layers"):
        spec_from_config({**PLAIN, "layer_types": ["full_attention"] * 3})


def test_a_recurrent_family_without_a_state_rule_is_refused() -> None:
    config = {**PLAIN, "model_type": "brand_new", "layer_types": ["full_attention", "linear_attention"] * 2}
    with pytest.raises(ConfigError, match="recurrent layers whose state Octavo cannot size"):
        spec_from_config(config)


def test_a_sliding_family_without_its_window() -> None:
    gemma2 = without(model_type="gemma2", head_dim=32)
    with pytest.raises(ConfigError, match="sliding_window is missing"):
        spec_from_config(gemma2)
    assert spec_from_config({**gemma2, "sliding_window": None}).windowed == 0
    with pytest.raises(ConfigError, match="sliding_window is missing"):
        spec_from_config({**PLAIN, "layer_types": ["sliding_attention"] * 4})


# --- dtypes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("float32", 2048),
        ("bf16", 1024),
        ("fp16", 1024),
        ("int8", 544),  # 16 rows of 32 elements and a bfloat16 scale
        ("fp8", 544),
        ("fp8_per_tensor", 512),
        ("fp8_e4m3", 512),
        ("int4", 288),
        ("q8_0", 544),
    ],
)
def test_kv_dtypes_count_their_scales(name: str, bytes_per_token: int) -> None:
    assert spec_from_config(PLAIN, kv_dtype=name).bytes_per_token == bytes_per_token


def test_kv_dtypes_that_do_not_exist_or_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"KV dtype 'int3' is unknown; use one of float32, bf16"):
        spec_from_config(PLAIN, kv_dtype="int3")
    with pytest.raises(ConfigError, match="q8_0 stores one scale per 32 values; a row has 80"):
        spec_from_config({**PLAIN, "head_dim": 80}, kv_dtype="q8_0")
    assert spec_from_config(PLAIN, kv_dtype="BFloat16").dtype == "bf16"


# --- tensor parallelism ----------------------------------------------------------------------------------------------


def test_tensor_parallelism_splits_then_replicates() -> None:
    sizes = [spec_from_config(PLAIN, tp=tp).bytes_per_token for tp in (1, 2, 4, 8)]
    assert sizes == [1024, 512, 512, 512]  # two KV heads: whole, one each, then replicated


def test_tensor_parallelism_that_does_not_divide() -> None:
    six = {**PLAIN, "num_attention_heads": 12, "hidden_size": 384, "num_key_value_heads": 6}
    with pytest.raises(ConfigError, match="num_key_value_heads 6 and tp 4 do not divide each other"):
        spec_from_config(six, tp=4)
    with pytest.raises(ConfigError, match="num_attention_heads 8 is not a multiple of tp 3"):
        spec_from_config(PLAIN, tp=3)
    with pytest.raises(ConfigError, match="tp is 0"):
        spec_from_config(PLAIN, tp=0)


# --- layouts of families ---------------------------------------------------------------------------------------------


def kinds(config: dict[str, Any]) -> dict[LayerKind, tuple[int, ...]]:
    return {group.kind: group.layers for group in spec_from_config(config).groups}


def test_qwen_windows_start_at_max_window_layers() -> None:
    qwen = without(model_type="qwen2", sliding_window=1024, max_window_layers=3)
    assert kinds(qwen) == {LayerKind.FULL: (0, 1, 2, 3)}  # the class default of use_sliding_window is false
    assert kinds({**qwen, "use_sliding_window": True}) == {LayerKind.FULL: (0, 1, 2), LayerKind.WINDOW: (3,)}


def test_a_window_that_never_acts_is_full_attention() -> None:
    spec = spec_from_config(without(model_type="phi3", sliding_window=262144))
    assert spec.windowed == 0
    assert "never acts" in spec.notes[0]
    assert spec_from_config(without(model_type="phi3", sliding_window=2047)).window_tokens == 2047


def test_llama4_chunks_three_of_four_layers() -> None:
    llama4 = without(model_type="llama4_text", attention_chunk_size=1024, head_dim=32)
    assert kinds(llama4) == {LayerKind.CHUNKED: (0, 1, 2), LayerKind.FULL: (3,)}
    listed = {**llama4, "no_rope_layers": [1, 0, 1, 0]}
    assert kinds(listed) == {LayerKind.CHUNKED: (0, 2), LayerKind.FULL: (1, 3)}


def test_mimo_v2_flash_has_another_shape_on_sliding_layers() -> None:
    """XiaomiMiMo/MiMo-V2-Flash: 9 full layers of 4 KV heads, 39 sliding ones of 8, K 192 and V 128 wide."""
    config = {
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": 48,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "attention_chunk_size": 128,
        "hybrid_layer_pattern": [int(not (i == 0 or (i + 1) % 6 == 0)) for i in range(48)],
        "max_position_embeddings": 262144,
    }
    spec = spec_from_config(config)
    assert spec.growing == 9 * 4 * (192 + 128) * 2
    assert spec.windowed == 39 * 8 * (192 + 128) * 2
    assert spec.window_tokens == 128


def test_step_3_sliding_layers_with_their_own_heads() -> None:
    other = {"attention_type": "sliding_attention", "num_attention_groups": 4, "head_dim": 64}
    config = without("num_key_value_heads", model_type="step3p5", num_attention_groups=2, sliding_window=512)
    config |= {"layer_types": ["full_attention", "sliding_attention"] * 3, "num_nextn_predict_layers": 2}
    spec = spec_from_config({**config, "attention_other_setting": other})  # two of the six layers are draft layers
    assert spec.growing == 2 * 2 * 2 * 32 * 2
    assert spec.windowed == 2 * 4 * 2 * 64 * 2


def test_minimax_lists_attention_types_even_when_all_are_full() -> None:
    assert kinds(without(model_type="minimax_m2", attn_type_list=[1, 1, 1, 1])) == {LayerKind.FULL: (0, 1, 2, 3)}


def test_falcon_h1_layers_hold_kv_and_state() -> None:
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_conv": 4}
    spec = spec_from_config({**PLAIN, "model_type": "falcon_h1", **mamba, "torch_dtype": "bfloat16"})
    assert spec.bytes_per_token == 1024
    assert spec.fixed_bytes == 4 * 2 * (4 * 16 * 8 + (64 + 2 * 8) * 3)
    assert spec.owners == 4
    halves = spec_from_config({**PLAIN, "model_type": "falcon_h1", **mamba, "torch_dtype": "bfloat16"}, tp=2)
    assert halves.fixed_bytes == 4 * 2 * (2 * 16 * 8 + (32 + 2 * 8) * 3)  # the single group is replicated


def test_pure_mamba_has_a_state_and_no_tokens() -> None:
    config = {"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64, "expand": 2, "state_size": 16}
    spec = spec_from_config({**config, "conv_kernel": 4, "torch_dtype": "float32"})
    assert spec.bytes_per_token == 0
    assert spec.fixed_bytes == 2 * 4 * (128 * 16 + 128 * 3)
    assert spec.bytes_at(1) == spec.bytes_at(100_000)


def test_recurrent_gemma_keeps_a_window_and_a_state() -> None:
    config = without("num_key_value_heads", model_type="recurrent_gemma", attention_window_size=2048, lru_width=256)
    config |= {"block_types": ["recurrent", "recurrent", "attention"], "conv1d_width": 4, "dtype": "bfloat16"}
    spec = spec_from_config(config)
    assert kinds(config) == {LayerKind.WINDOW: (2,), LayerKind.STATE: (0, 1, 3)}
    assert spec.fixed_bytes == 3 * 2 * (256 + 256 * 3)


def test_kimi_linear_mixes_latent_and_state() -> None:
    config = without("num_key_value_heads", model_type="kimi_linear", kv_lora_rank=512, qk_rope_head_dim=64)
    linear = {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 4, "head_dim": 32}
    config |= {"qk_nope_head_dim": 128, "v_head_dim": 128, "dtype": "bfloat16"}
    config["linear_attn_config"] = {**linear, "short_conv_kernel_size": 4}
    spec = spec_from_config(config)
    assert kinds(config) == {LayerKind.LATENT: (3,), LayerKind.STATE: (0, 1, 2)}
    assert spec.bytes_per_token == 576 * 2
    assert spec.fixed_bytes == 3 * 2 * (4 * 32 * 32 + 3 * 4 * 32 * 3)


def test_cross_layer_attention_shares_kv() -> None:
    spec = spec_from_config({**PLAIN, "model_type": "hunyuan_v1_dense", "use_cla": True, "cla_share_factor": 2})
    assert spec.shared == {1: 0, 3: 2}
    assert spec.bytes_per_token == 512


def test_indexer_keys_are_said_and_not_counted() -> None:
    config = without("num_key_value_heads", model_type="deepseek_v32", kv_lora_rank=512, qk_rope_head_dim=64)
    config |= {"qk_nope_head_dim": 128, "v_head_dim": 128, "index_head_dim": 128}
    spec = spec_from_config(config)
    assert spec.bytes_per_token == 4 * 576 * 2
    assert "128-wide key per token in 4 layers, 1024 B per token" in spec.notes[0]
