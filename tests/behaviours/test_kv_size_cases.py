"""The cases K1 to K10 and X1 of shared/cases.md: KV sizes that other tools get wrong, with the right numbers."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.kv.budget import GIB, BudgetError, Pool, kv_bytes_for, require_length
from octavo.kv.params import count_parameters
from octavo.kv.spec import ConfigError, KVSpec, LayerKind, spec_from_config
from octavo.kv.weights import FORMATS
from octavo.planner.catalogue import find_model
from octavo.planner.sizing import SizeRequest, size_model


def shape(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int | None = None, **more: Any
) -> dict[str, Any]:
    config = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    config |= {"num_key_value_heads": kv_heads, **more}
    return config if head_dim is None else {**config, "head_dim": head_dim}


def catalogue(name: str, **options: Any) -> KVSpec:
    entry = find_model(name)
    assert entry is not None
    return spec_from_config(entry.config, **options)


QWEN3_06B = shape(28, 1024, 16, 8, 128, model_type="qwen3", max_position_embeddings=40960)
GPT_OSS_20B = shape(24, 2880, 64, 8, 64, model_type="gpt_oss", sliding_window=128)
GEMMA_3_27B = shape(62, 5376, 32, 16, 128, model_type="gemma3_text", sliding_window=1024)


class TestK1HeadDim:
    def test_published_head_dim_wins_over_hidden_by_heads(self) -> None:
        assert spec_from_config(shape(40, 5120, 32, 8, 128)).bytes_per_token == 163_840
        assert spec_from_config(GPT_OSS_20B).bytes_per_token == 49_152
        qwen = spec_from_config(QWEN3_06B)
        assert qwen.bytes_per_token == 114_688
        assert qwen.bytes_at(40_960) / GIB == 4.375

    def test_an_absent_head_dim_is_derived_and_said(self) -> None:
        spec = spec_from_config(shape(40, 5120, 32, 8))
        assert spec.bytes_per_token == 204_800
        assert spec.sources["head_dim"] == "hidden_size / num_attention_heads = 5120 / 32 = 160"
        with pytest.raises(ConfigError, match="is not a whole number"):
            spec_from_config(shape(40, 5120, 33, 11))


class TestK3MLA:
    def test_both_forms_are_given_and_one_is_stated(self) -> None:
        latent, expanded = (catalogue("deepseek-v3", mla_form=form) for form in ("latent", "expanded"))
        assert latent.mla is not None
        assert expanded.mla is not None
        assert (latent.mla.form, expanded.mla.form) == ("latent", "expanded")
        assert latent.bytes_per_token == latent.mla.latent == expanded.mla.latent == 70_272
        assert expanded.bytes_per_token == latent.mla.expanded == expanded.mla.expanded == 4_997_120
        assert round(latent.bytes_at(163_840) / GIB, 2) == 10.72
        assert latent.groups[0].kind is LayerKind.LATENT

    def test_v2_lite_as_llama_cpp_measured_it(self) -> None:
        spec = catalogue("deepseek-v2-lite", mla_form="expanded")
        assert spec.bytes_per_token == 276_480
        assert spec.bytes_at(32_768) == 8640 * 2**20
        assert catalogue("deepseek-v2-lite").bytes_at(32_768) == 972 * 2**20

    def test_every_rank_holds_the_latent_and_heads_are_split(self) -> None:
        spec = catalogue("deepseek-v3", tp=8)
        assert spec.bytes_per_token == 70_272
        assert spec.mla is not None
        assert spec.mla.expanded == 4_997_120 // 8


class TestK4Windows:
    def test_gpt_oss_in_both_regimes(self) -> None:
        spec = spec_from_config(GPT_OSS_20B)
        assert round(32 * spec.bytes_at(8192) / GIB, 2) == 6.09
        assert round(32 * spec.bytes_unwindowed(8192) / GIB, 2) == 12.00
        assert spec.bytes_at(1) == 49_152  # no layer is left out

    def test_gemma_3_27b(self) -> None:
        spec = spec_from_config(GEMMA_3_27B)
        assert {group.kind: len(group.layers) for group in spec.groups} == {LayerKind.WINDOW: 52, LayerKind.FULL: 10}
        assert round(spec.bytes_at(131_072) / GIB, 2) == 10.41
        assert spec.bytes_unwindowed(131_072) / GIB == 62.0

    @pytest.mark.parametrize("chunk", [1, 512, 2048])
    def test_blocks_are_within_one_of_the_window_and_never_beyond_the_length(self, chunk: int) -> None:
        pool = Pool(spec_from_config(GEMMA_3_27B), 0, 16, chunk)
        window = next(group for group in pool.spec.groups if group.window)
        assert pool.group_blocks(window, 128) == 8  # window 1,024 with 128 tokens reserves 128
        for tokens in (1, 16, 1024, 8192, 131_072):
            allowed = -(-min(1024 + chunk, tokens) // 16)
            assert pool.group_blocks(window, tokens) <= allowed + 1

    def test_growth_is_not_linear(self) -> None:
        spec = spec_from_config(GEMMA_3_27B)
        assert spec.bytes_at(2048) - spec.bytes_at(1024) == 1024 * spec.growing
        assert spec.bytes_at(1024) - spec.bytes_at(0) == 1024 * spec.bytes_per_token


class TestK6SharedLayers:
    def test_gemma_3n_e4b(self) -> None:
        spec = catalogue("gemma-3n-e4b")
        assert spec.bytes_per_token == 40_960
        assert (spec.owners, spec.num_layers) == (20, 35)
        assert sorted(spec.shared) == list(range(20, 35))
        assert all(layer not in group.layers for group in spec.groups for layer in spec.shared)
        # The last full layer of the first twenty is 19, the last sliding one 18.
        assert set(spec.shared.values()) == {18, 19}


class TestK7Configs:
    TOWER = shape(32, 1280, 16, 16)

    @pytest.mark.parametrize("path", ["text_config", "llm_config", "language_config", "thinker_config.text_config"])
    def test_nested_dims(self, path: str) -> None:
        config: Any = dict(QWEN3_06B)
        for key in reversed(path.split(".")):
            config = {key: config}
        spec = spec_from_config({**self.TOWER, **config})
        assert spec.bytes_per_token == 114_688
        assert spec.sources["num_key_value_heads"] == f"{path}.num_key_value_heads"

    def test_a_text_part_without_its_layer_count(self) -> None:
        text = {k: v for k, v in QWEN3_06B.items() if k != "num_hidden_layers"}
        with pytest.raises(ConfigError, match="num_hidden_layers is missing: looked in text_config"):
            spec_from_config({**self.TOWER, "text_config": text})

    def test_aliases_and_a_scaled_length(self) -> None:
        old = {"n_layer": 28, "n_head": 16, "n_embd": 1024, "n_head_kv": 8, "head_dim": 128, "n_positions": 32768}
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        spec = spec_from_config({**old, "rope_scaling": scaling})
        assert spec.bytes_per_token == 114_688
        assert spec.max_positions == 131_072
        assert spec.sources["num_hidden_layers"] == "n_layer"
        assert "yarn factor 4 x 32768 = 131072" in spec.sources["max_position_embeddings"]


class TestK9Precision:
    def test_qwen_2_5_7b_at_262144(self) -> None:
        config = shape(28, 3584, 28, 4, 128)
        specs = {name: spec_from_config(config, kv_dtype=name) for name in ("fp16", "q8_0", "fp8", "fp8_per_tensor")}
        sizes = {name: spec.bytes_at(262_144) / GIB for name, spec in specs.items()}
        assert sizes["fp16"] == 14.0
        assert round(sizes["q8_0"], 2) == 7.44
        assert sizes["fp8_per_tensor"] == 7.0
        assert sizes["fp8"] == 7.0 * 130 / 128  # a row of 128 elements has its scale of 2 bytes

    def test_a_head_that_holds_no_whole_group_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="int4 stores one scale per 32 values; a row has 80"):
            spec_from_config(shape(32, 2560, 32, 32, 80), kv_dtype="int4")


class TestK10Budget:
    @pytest.mark.parametrize(("block", "longest"), [(128, 37_376), (16, 37_440), (1, 37_449)])
    def test_four_gib_of_qwen3_06b(self, block: int, longest: int) -> None:
        pool = Pool(spec_from_config(QWEN3_06B), 4 * GIB, block)
        assert pool.longest() == longest
        assert pool.slots == longest
        require_length(pool, longest)  # the number printed is reachable
        with pytest.raises(BudgetError):
            require_length(pool, longest + 1)

    def test_a_start_that_cannot_work_says_needed_possible_and_both_remedies(self) -> None:
        pool = Pool(spec_from_config(QWEN3_06B), 4 * GIB, 16)
        needed = 40_960 * 114_688
        sentence = rf"needs {needed} bytes .* {needed - 4 * GIB} bytes short.*length to 37440.*give {needed} bytes"
        with pytest.raises(BudgetError, match=sentence):
            require_length(pool, 40_960)

    @pytest.mark.parametrize("model", ["qwen3-0.6b", "gemma-3-27b", "gpt-oss-20b", "mistral-7b-v0.1"])
    def test_the_possible_length_never_falls_when_the_maximum_does(self, model: str) -> None:
        """vllm 10517: 20k and 35k fitted, 29k did not."""
        possible = []
        for limit in (32_768, 29_000, 20_000, 4_096, 1_024):
            result = size_model(SizeRequest(model, memory=96 * GIB, kv_memory=8 * GIB, max_model_len=limit))
            possible.append(result.pools[0].longest() or 10**12)
        assert possible == sorted(possible)

    def test_a_pool_of_exactly_one_request(self) -> None:
        spec = spec_from_config(QWEN3_06B)
        exact = kv_bytes_for(spec, 1, 40_960)
        assert Pool(spec, exact).users(40_960) == 1
        assert Pool(spec, exact - 1).users(40_960) == 0

    def test_opt_13b_in_12_gib_holds_seven_regions(self) -> None:
        """Orca (Max) in the PagedAttention paper: regions of the maximum length 2,048."""
        pool = Pool(catalogue("opt-13b"), 12 * GIB)
        assert pool.users(2048) == 7


class TestX1ImpossibleOrOverridden:
    def test_weights_that_do_not_fit(self) -> None:
        with pytest.raises(BudgetError, match=r"The weights need 16060522496 bytes .* \d+ bytes short"):
            size_model(SizeRequest("llama-3.1-8b", memory=12 * GIB))

    def test_kv_below_one_request(self) -> None:
        with pytest.raises(BudgetError, match=rf"{131072 * 131072 - GIB} bytes short"):
            size_model(SizeRequest("llama-3.1-8b", kv_memory=GIB, max_model_len=131_072))

    def test_measured_blocks_win_over_the_plan_and_say_so(self) -> None:
        """LLMServingSim PR 59: 2,588 measured blocks are 41,408 tokens, not 54,400."""
        result = size_model(SizeRequest("llama-3.1-8b", gpu="RTX 4090", num_blocks=2588, max_model_len=32_768))
        assert [pool.slots for pool in result.pools] == [41_408]
        assert result.kv is not None
        assert result.kv.source == "--num-blocks 2588 x 2097152 bytes"

    def test_the_measured_pool_lies_in_the_planned_interval(self) -> None:
        """RTX 4090, vLLM 0.19, utilization 0.9, 256 sequences, 2,048 tokens a step: 2,588 blocks."""
        result = size_model(SizeRequest("llama-3.1-8b", gpu="RTX 4090", max_batched_tokens=2048))
        low, high = (pool.blocks for pool in result.pools)
        assert low is not None
        assert high is not None
        assert low <= 2588 <= high

    def test_flags_that_disagree_are_refused(self) -> None:
        with pytest.raises(BudgetError, match="2588 and --kv-memory 1073741824 disagree: those bytes are 512 blocks"):
            size_model(SizeRequest("llama-3.1-8b", num_blocks=2588, kv_memory=GIB))

    def test_unknown_overhead_is_an_interval(self) -> None:
        plan = size_model(SizeRequest("llama-3.1-8b", gpu="RTX 4090")).plan
        assert plan is not None
        assert plan.workspace.low < plan.workspace.high
        assert plan.activations.low < plan.activations.high
        assert plan.weights.low == plan.weights.high

    def test_untied_is_larger_by_exactly_one_embedding(self) -> None:
        config = {**QWEN3_06B, "vocab_size": 151_936, "intermediate_size": 3072}
        tied, untied = (count_parameters({**config, "tie_word_embeddings": tie}) for tie in (True, False))
        for name, size in (("bf16", 2), ("float32", 4), ("int4", 2)):  # the output matrix is not quantised
            assert FORMATS[name].bytes(untied) - FORMATS[name].bytes(tied) == 151_936 * 1024 * size
