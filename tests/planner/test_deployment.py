"""`resolve`: what the simulator runs is what the engine would run, and every value says where it came from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.errors import OctavoError
from octavo.kv.budget import GIB, BudgetError
from octavo.kv.strategies import STRATEGIES
from octavo.planner.deployment import Deployment, resolve
from octavo.planner.engines import EngineError, find_engine

#: A device that holds any model of these tests; its times do not matter here.
ROOMY = "MI355X"
LLAMA_4090 = Deployment("llama-3.1-8b", gpu="RTX 4090", engine="vllm-0.19", max_model_len=32_768)


def small(**more: object) -> Deployment:
    return replace(Deployment("qwen3-0.6b", gpu=ROOMY, kv_memory=4 * GIB), **more)  # type: ignore[arg-type]


class TestSameAsTheEngine:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "gpt-oss"])
    def test_the_same_bytes_give_the_same_pool(self, tmp_path: Path, name: str, strategy: str) -> None:
        from tests.equivalence.harness import tiny_subject

        from octavo.build import build_engine
        from octavo.config import EngineConfig

        loaded = tiny_subject(name).model
        (tmp_path / "config.json").write_text(json.dumps(loaded.module.config.to_dict(), default=str))
        memory, block = 300_000, 4
        settings = {"block_size": block, "max_num_batched_tokens": 64, "max_num_seqs": 8}
        config = EngineConfig(loaded.name, kv_memory=memory, kv_strategy=strategy, **settings)
        real = build_engine(config, loaded=loaded)
        simulated = resolve(
            Deployment(
                str(tmp_path),
                gpu=ROOMY,
                strategy=strategy,
                kv_memory=memory,
                kv_dtype="float32",
                weight_dtype="float32",
                **settings,
            )
        )
        assert simulated.pages == real.pages
        assert simulated.windows == real.layout.windows
        assert simulated.block_bytes == real.layout.page_bytes
        assert simulated.scheduler == real.engine.scheduler.config

    def test_latents_are_expanded_by_octavo_and_kept_by_vllm(self) -> None:
        octavo, vllm = (resolve(Deployment("deepseek-v2-lite", gpu=ROOMY, engine=e)) for e in ("octavo", "vllm-0.19"))
        assert octavo.block_bytes == 16 * 276_480
        assert vllm.block_bytes == 16 * 31_104

    def test_a_default_length_is_cut_to_the_pool_and_a_given_one_is_refused(self) -> None:
        cut = resolve(small())
        assert cut.scheduler.max_model_len == 37_440
        assert cut.sources["max_model_len"] == "what the pool holds; the model takes 40960"
        assert resolve(small(max_model_len=37_440)).pages == cut.pages
        with pytest.raises(BudgetError, match=r"max_model_len 37441 tokens needs .* longest possible length is 37440"):
            resolve(small(max_model_len=37_441))

    def test_a_planned_pool_is_at_most_max_num_seqs_full_sequences(self) -> None:
        resolved = resolve(small(kv_memory=None, max_num_seqs=2, max_model_len=1024))
        assert resolved.pages == 2 * 64


class TestVLLM:
    def test_it_refuses_to_start_where_octavo_shortens(self) -> None:
        with pytest.raises(BudgetError, match=r"40960 tokens needs 4697620480 bytes .* 403701760 bytes short"):
            resolve(small(engine="vllm-0.19"))

    @pytest.mark.parametrize(
        ("gpu", "limits"),
        [("RTX 4090", (2048, 256)), ("A100 SXM 80GB", (2048, 256)), ("H100 SXM 80GB", (8192, 1024))],
    )
    def test_its_step_limits_follow_the_device(self, gpu: str, limits: tuple[int, int]) -> None:
        """EngineArgs.get_batch_defaults: from 70 GiB on, except for the A100 (vllm PR 17885)."""
        config = resolve(Deployment("qwen3-0.6b", gpu=gpu, engine="vllm-0.19")).scheduler
        assert (config.max_num_batched_tokens, config.max_num_seqs) == limits
        assert (config.admission, config.victims, config.max_skips) == ("prompt", "newest", 0)

    def test_a_small_step_lowers_its_default_of_sequences_and_not_a_given_one(self) -> None:
        resolved = resolve(small(engine="vllm-0.19", max_model_len=1024, max_num_batched_tokens=128))
        assert resolved.scheduler.max_num_seqs == 128
        assert "lowered" in resolved.sources["max_num_seqs"]
        with pytest.raises(OctavoError, match="max_num_batched_tokens is 128, less than max_num_seqs"):
            resolve(small(engine="vllm-0.19", max_model_len=1024, max_num_batched_tokens=128, max_num_seqs=256))

    def test_graphs_count_and_the_default_share_rises_from_0_21_on(self) -> None:
        """vllm PR 38284."""
        old, new = (resolve(small(engine=f"vllm-0.{minor}", max_model_len=64)) for minor in (19, 21))
        assert old.plan is not None
        assert new.plan is not None
        assert (old.deployment.utilization, new.deployment.utilization) == ("0.9", "0.92")
        assert old.plan.graphs.high == 0 < new.plan.graphs.low < new.plan.graphs.high

    def test_a_version_without_measurements_takes_the_one_before_and_says_so(self) -> None:
        assert find_engine("vllm-0.13.2")[0].name == "vllm-0.11"
        assert find_engine("vllm==0.5")[0].name == "vllm-0.6"
        assert find_engine("vllm-0.19.1") == (find_engine("vllm-0.19")[0], None)
        note = find_engine("vllm-0.13.2")[1]
        assert note == "vLLM 0.13 was not measured: memory costs and defaults are those of vllm-0.11."
        with pytest.raises(EngineError, match="engine is 'sglang'; it must be one of octavo"):
            find_engine("sglang")

    def test_its_fp8_has_one_scale_per_tensor(self) -> None:
        octavo, vllm = (resolve(small(kv_dtype="fp8", engine=e, max_model_len=64)) for e in ("octavo", "vllm-0.19"))
        assert vllm.block_bytes == 16 * 114_688 // 2
        assert octavo.block_bytes == vllm.block_bytes * 130 // 128

    def test_layers_are_grouped_with_padding(self) -> None:
        """Gemma-3-27B: 10 full and 52 windowed layers become 1 + 6 groups of 10, eight places of them empty."""
        wanted = Deployment("gemma-3-27b", gpu=ROOMY, kv_memory=16 * GIB, max_model_len=32_768)
        vllm, octavo = resolve(replace(wanted, engine="vllm-0.19")), resolve(wanted)
        assert sorted(vllm.windows, key=str) == [1024] * 6 + [None]
        assert vllm.block_bytes == 10 * 16 * 8192
        assert any("padding" in note for note in vllm.notes)
        assert sorted(octavo.windows, key=str) == [1024] * 26 + [None] * 5
        assert not any("padding" in note for note in octavo.notes)


class TestRanks:
    def test_kv_heads_are_split_then_replicated(self) -> None:
        sizes = [resolve(Deployment("llama-3.1-8b", gpu=ROOMY, tp=tp)).block_bytes for tp in (1, 2, 8, 16)]
        assert sizes == [16 * 131_072 // heads for heads in (1, 2, 8, 8)]

    def test_a_latent_is_held_by_every_rank(self) -> None:
        sizes = {resolve(Deployment("deepseek-v3", gpu=ROOMY, engine="vllm", tp=tp)).block_bytes for tp in (4, 8)}
        assert sizes == {16 * 70_272}

    def test_weights_are_split(self) -> None:
        plans = [resolve(Deployment("llama-3.1-8b", gpu=ROOMY, tp=tp)).plan for tp in (1, 2)]
        one, two = (plan.weights.low for plan in plans if plan is not None)
        assert one == 2 * two


class TestOrigins:
    def test_every_setting_says_where_it_came_from(self) -> None:
        resolved = resolve(replace(LLAMA_4090, num_blocks=2588, max_num_seqs=128))
        sources = resolved.sources
        assert sources["max_model_len"] == sources["max_num_seqs"] == "flag"
        assert sources["max_num_batched_tokens"] == sources["admission"] == "engine profile vllm-0.19"
        assert sources["utilization"] == "engine profile vllm-0.19"
        assert sources["memory"] == "RTX 4090: total as its driver reports it"
        assert sources["kv pool"] == "flag: num_blocks 2588 x 16 = 41408 tokens"
        assert "torch_dtype bfloat16" in sources["weights"]
        assert resolve(Deployment("qwen3-0.6b", gpu=ROOMY)).sources["max_model_len"].startswith("model config")

    def test_the_low_end_of_an_interval_is_used_and_said(self) -> None:
        resolved = resolve(LLAMA_4090)
        assert resolved.plan is not None
        kv = resolved.plan.kv()
        assert resolved.pages == kv.low // resolved.block_bytes < kv.high // resolved.block_bytes
        said = f"interval, {kv.low / GIB:.2f} to {kv.high / GIB:.2f} GiB"
        assert any(said in note for note in resolved.notes)

    def test_memory_given_beats_that_of_the_device(self) -> None:
        resolved = resolve(replace(LLAMA_4090, memory=48 * GIB))
        assert resolved.plan is not None
        assert resolved.plan.total.low == 48 * GIB
        assert resolved.sources["memory"] == "--memory"

    def test_recurrent_state_is_set_aside(self) -> None:
        with_state = Deployment("qwen3-next-80b-a3b", gpu=ROOMY, kv_memory=32 * GIB, max_num_seqs=16)
        resolved = resolve(with_state)
        states = 16 * resolved.spec.fixed_bytes
        assert states > 0
        assert resolved.pages == (32 * GIB - states) // resolved.block_bytes
        assert resolved.scheduler.max_num_seqs == 16
        with pytest.raises(BudgetError, match=r"recurrent state of 16 sequences needs \d+ bytes, there are 1024"):
            resolve(replace(with_state, kv_memory=1024))

    def test_default_sequences_leave_half_of_the_memory_to_kv(self) -> None:
        """256 states of Qwen3-Next would not fit 8 GiB."""
        resolved = resolve(Deployment("qwen3-next-80b-a3b", gpu=ROOMY, kv_memory=8 * GIB))
        each = resolved.spec.fixed_bytes
        assert resolved.scheduler.max_num_seqs == 4 * GIB // each < 256
        assert resolved.sources["max_num_seqs"] == "recurrent states that half of the KV memory holds"
        assert resolved.pages * resolved.block_bytes > 4 * GIB - resolved.block_bytes


class TestImpossible:
    def test_nothing_is_known_of_the_memory(self) -> None:
        with pytest.raises(OctavoError, match="size of the KV pool is unknown: give gpu or memory"):
            resolve(Deployment("qwen3-0.6b"))

    def test_less_than_one_block(self) -> None:
        with pytest.raises(
            BudgetError, match=r"less than one block: 16 tokens need 1835008 bytes, 1835008 bytes short"
        ):
            resolve(small(kv_memory=1000))

    def test_kv_memory_beside_the_weights_must_lie_on_the_device(self) -> None:
        with pytest.raises(BudgetError, match=r"Weights \(\d+ bytes\) and kv_memory \(\d+ bytes\) need .* bytes short"):
            resolve(replace(LLAMA_4090, kv_memory=20 * GIB))

    def test_costs_too_uncertain_to_simulate(self) -> None:
        """Between the low and the high end of the costs lies the difference between serving and not."""
        with pytest.raises(BudgetError, match=r"At the high end of the costs \d+ bytes are missing .* too uncertain"):
            resolve(replace(LLAMA_4090, memory=18 * GIB, max_model_len=64))

    @pytest.mark.parametrize(
        "field", ["num_blocks", "kv_memory", "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens"]
    )
    def test_counts_below_one(self, field: str) -> None:
        with pytest.raises(BudgetError, match=f"{field} is 0; it must be at least 1"):
            resolve(small(**{field: 0}))

    def test_auto_is_the_dtype_of_the_model(self, tmp_path: Path) -> None:
        config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
        config |= {"num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 100, "tie_word_embeddings": True}
        path = tmp_path / "config.json"
        wanted = Deployment(str(path), gpu=ROOMY, kv_dtype="auto", max_model_len=64, weight_dtype="bf16")
        for dtype, size in (("float32", 4), ("float16", 2)):
            path.write_text(json.dumps({**config, "torch_dtype": dtype}))
            assert resolve(wanted).block_bytes == 16 * 2 * 2 * 64 * size
        path.write_text(json.dumps(config))
        with pytest.raises(OctavoError, match=r"kv_dtype is 'auto' and .* names no dtype"):
            resolve(wanted)

    def test_a_length_beyond_the_model(self) -> None:
        with pytest.raises(BudgetError, match="max_model_len is 50000, the model takes at most 40960"):
            resolve(small(max_model_len=50_000))

    def test_a_model_without_attention(self, tmp_path: Path) -> None:
        mamba = {"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64, "expand": 2, "state_size": 16}
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**mamba, "conv_kernel": 4, "vocab_size": 100, "torch_dtype": "float32"}))
        with pytest.raises(OctavoError, match=r"no layer keeps keys and values, only a state of \d+ bytes"):
            resolve(Deployment(str(path), kv_memory=GIB, max_model_len=64))
