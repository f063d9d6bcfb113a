"""The KV-size and planner cases K1 to K10 and X1 of shared/cases.md, through `resolve` and the managers that serve."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.simulation import Bench

from octavo.errors import OctavoError
from octavo.kv.budget import GIB, BudgetError
from octavo.kv.spec import ConfigError
from octavo.planner.deployment import Deployment, Resolved, resolve

#: A device that holds any model of these tests; its times do not matter here.
ROOMY = "MI355X"
QWEN3_06B: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}


def local(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def token_bytes(resolved: Resolved) -> float:
    """Bytes of one token over all layer groups, as the pool is dealt."""
    return resolved.block_bytes * len(resolved.windows) / resolved.deployment.block_size


@pytest.mark.parametrize(
    ("model", "expected"),
    [("mistral-small", 163_840), ("gpt-oss-20b", 49_152), ("qwen3-0.6b", 114_688)],
)
def test_head_dim_is_not_hidden_by_heads(model: str, expected: int, tmp_path: Path) -> None:
    """K1: the pool is dealt by the published head size."""
    if model == "mistral-small":  # Mistral-Small-24B-2501
        shape = {"num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 32, "intermediate_size": 32_768}
        model = local(tmp_path, {**QWEN3_06B, "model_type": "mistral", **shape, "tie_word_embeddings": False})
    assert token_bytes(resolve(Deployment(model, gpu=ROOMY))) == expected


def test_what_is_stored_of_a_latent_is_said() -> None:
    """K3: DeepSeek-V3's 70,272 bytes in vLLM, 4,997,120 expanded in Octavo, and a note that says which."""
    for engine, expected, form in (("vllm", 70_272, "latent"), ("octavo", 4_997_120, "expanded")):
        resolved = resolve(Deployment("deepseek-v3", gpu=ROOMY, tp=8, engine=engine))
        assert token_bytes(resolved) == (expected if form == "latent" else expected // 8)
        assert any(f"cached in its {form} form" in note for note in resolved.notes)


def test_gpt_oss_in_both_regimes() -> None:
    """K4: 32 sequences of 8,192 tokens: 6.09 GiB when blocks that left the window are freed, 12.00 when not."""
    resolved = resolve(Deployment("gpt-oss-20b", gpu=ROOMY, max_num_batched_tokens=1, max_num_seqs=1))
    kv = bench(resolved).kv
    freed = 32 * kv.ceiling_blocks(8192, 8192) * resolved.block_bytes
    one_block_each = 32 * len(resolved.windows) * resolved.block_bytes
    assert 0 <= freed - 32 * resolved.spec.bytes_at(8192) <= one_block_each
    assert round(32 * resolved.spec.bytes_at(8192) / GIB, 2) == 6.09
    assert 32 * 8192 * token_bytes(resolved) / GIB == 12.0


def test_a_window_reserves_no_more_than_the_length() -> None:
    """K4: a window of 1,024 with M 128 holds 128 tokens of each layer, not 1,024."""
    resolved = resolve(Deployment("gemma-3-27b", gpu=ROOMY, max_model_len=128))
    needed = bench(resolved).kv.ceiling_blocks(128, 128) * resolved.block_bytes
    assert needed == 128 * resolved.spec.bytes_per_token


def test_shared_layers_hold_no_blocks() -> None:
    """K6: 20 of Gemma-3n-E4B's 35 layers own a cache."""
    resolved = resolve(Deployment("gemma-3n-e4b", gpu=ROOMY, kv_memory=GIB))
    assert (resolved.spec.owners, resolved.spec.num_layers) == (20, 35)
    assert token_bytes(resolved) == 40_960


@pytest.mark.parametrize("path", ["text_config", "llm_config", "thinker_config.text_config"])
def test_the_language_model_is_deployed_not_its_vision_tower(path: str, tmp_path: Path) -> None:
    """K7: dimensions of the text part; a missing one is an error that names field and place."""
    config = dict(QWEN3_06B)
    tower = {"num_hidden_layers": 32, "hidden_size": 1280, "num_attention_heads": 16}
    for key in reversed(path.split(".")):
        config = {key: config}
    resolved = resolve(Deployment(local(tmp_path, {**tower, "torch_dtype": "bfloat16", **config}), gpu=ROOMY))
    assert token_bytes(resolved) == 114_688
    assert resolved.spec.sources["num_key_value_heads"] == f"{path}.num_key_value_heads"
    text = {key: value for key, value in QWEN3_06B.items() if key != "num_hidden_layers"}
    with pytest.raises(ConfigError, match="num_hidden_layers is missing: looked in text_config"):
        resolve(Deployment(local(tmp_path, {**tower, "text_config": text}), gpu=ROOMY))


def test_formats_count_their_scales_and_strange_ones_are_refused() -> None:
    """K9: Octavo's fp8 has a scale per row; what an engine cannot store is refused with what it can."""
    wanted = Deployment("qwen2.5-7b", gpu=ROOMY, max_model_len=1024)
    full, fp8 = (token_bytes(resolve(replace(wanted, kv_dtype=name))) for name in ("bf16", "fp8"))
    assert fp8 == full * 130 / 256
    with pytest.raises(OctavoError, match="kv_dtype is 'q8_0', which octavo does not store KV in; choose one of auto"):
        resolve(replace(wanted, kv_dtype="q8_0"))
    with pytest.raises(OctavoError, match=r"kv_dtype is 'int8', which vllm-0.19 does not store KV in"):
        resolve(replace(wanted, engine="vllm-0.19", kv_dtype="int8"))


def bench(resolved: Resolved) -> Bench:
    config = resolved.scheduler
    return Bench(
        resolved.deployment.strategy,
        pages=resolved.pages,
        block=resolved.deployment.block_size,
        windows=resolved.windows,
        config={name: getattr(config, name) for name in config.__slots__},
        watched=False,
    )


def test_the_length_that_is_promised_is_reached() -> None:
    """K10 (vllm 29233, 47272): 4 GiB of Qwen3-0.6B are 37,440 tokens; a request of so many ends with "length"."""
    resolved = resolve(Deployment("qwen3-0.6b", gpu=ROOMY, kv_memory=4 * GIB, max_num_batched_tokens=8192))
    assert resolved.scheduler.max_model_len == 37_440
    work = bench(resolved)
    name = work.add(37_430, 10)
    while work.scheduler.busy:
        work.step()
    (seq,) = work.all[name]
    assert len(seq.output) == 10
    with pytest.raises(OctavoError, match="37440"):
        work.add(37_441, 1)


def test_the_possible_length_never_falls_with_the_maximum() -> None:
    """K10 (vllm 10517): 20k and 35k fitted and 29k did not."""
    pages = []
    for limit in (32_768, 29_000, 20_000, 4_096, 1_024):
        wanted = Deployment("llama-3.1-8b", memory=32 * GIB, gpu="RTX 3090", engine="vllm-0.6", max_model_len=limit)
        pages.append(resolve(wanted).pages)
    assert pages == sorted(pages)


class TestX1:
    """X1: impossible or overridden configurations."""

    LLAMA = Deployment("llama-3.1-8b", gpu="RTX 4090", engine="vllm-0.19", max_model_len=32_768)

    def test_weights_above_the_memory(self) -> None:
        """inference-sim 1160: no default number of blocks; the shortfall in bytes."""
        with pytest.raises(BudgetError, match=r"The weights need 16060522496 bytes .* 4464110797 bytes short"):
            resolve(replace(self.LLAMA, memory=12 * GIB))

    def test_kv_below_one_request(self) -> None:
        with pytest.raises(
            BudgetError, match=r"needs 4294967296 bytes .* the pool has 1073741824 .* 3221225472 bytes sh"
        ):
            resolve(replace(self.LLAMA, kv_memory=GIB))

    def test_measured_blocks_are_used(self) -> None:
        """LLMServingSim PR 59: 2,588 blocks of 16 are 41,408 tokens, not 54,400."""
        resolved = resolve(replace(self.LLAMA, num_blocks=2588))
        assert resolved.pages * resolved.deployment.block_size == 41_408
        assert resolved.sources["kv pool"] == "flag: num_blocks 2588 x 16 = 41408 tokens"
        assert any(
            "num_blocks 2588 is used, as measured; the memory plan would give" in note for note in resolved.notes
        )

    def test_measured_blocks_beat_bytes_and_a_plan_that_cannot_work(self) -> None:
        """inference-sim 286: a flag for blocks was ignored."""
        resolved = resolve(replace(self.LLAMA, num_blocks=2588, kv_memory=GIB, memory=12 * GIB))
        assert resolved.pages == 2588
        assert any("kv_memory 1073741824 would be 512 blocks" in note for note in resolved.notes)
        assert any("the memory plan itself says: The weights need" in note for note in resolved.notes)

    def test_the_flag_wins_over_the_file(self, tmp_path: Path) -> None:
        """Weights measured in the files, and --weight-dtype; the model's length, and --max-model-len."""
        model = local(tmp_path, QWEN3_06B)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1_500_000_000}}))
        filed = resolve(Deployment(model, gpu="RTX 4090"))
        flagged = resolve(Deployment(model, gpu="RTX 4090", weight_dtype="int8", max_model_len=4096))
        assert filed.plan is not None
        assert flagged.plan is not None
        assert filed.plan.weights.low == 1_500_000_000
        assert filed.sources["weights"].startswith("model.safetensors.index.json")
        assert filed.sources["max_model_len"].startswith("model config")
        assert flagged.plan.weights.low < 1_000_000_000
        assert "--weight-dtype" in flagged.sources["weights"]
        assert flagged.sources["max_model_len"] == "flag"

    def test_untied_differs_by_one_embedding(self, tmp_path: Path) -> None:
        """vllm-fit 27."""
        plans = []
        for tied in (True, False):
            plans.append(
                resolve(Deployment(local(tmp_path, {**QWEN3_06B, "tie_word_embeddings": tied}), gpu=ROOMY)).plan
            )
        tied_plan, untied = plans
        assert tied_plan is not None
        assert untied is not None
        assert untied.weights.low - tied_plan.weights.low == 151_936 * 1024 * 2

    def test_unknown_overhead_is_an_interval(self) -> None:
        """The measured 2,588 blocks lie in it; its low end is what is simulated."""
        resolved = resolve(self.LLAMA)
        assert resolved.plan is not None
        kv = resolved.plan.kv()
        assert resolved.pages == kv.low // resolved.block_bytes < 2588 < kv.high // resolved.block_bytes
