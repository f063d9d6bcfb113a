"""Memory that vLLM measured at its start, against the plan of the engine profile for its version.

shared/facts/profiles/memory and the lines of shared/facts/kv_log_oracles.json that name version, total and utilization.
What is measured must lie in the interval that the plan gives.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.kv.budget import GIB, BudgetError
from octavo.models.config_source import find_source
from octavo.planner.costs import model_shape
from octavo.planner.engines import engine_costs, find_engine
from octavo.planner.sizing import SizeRequest, size_model

#: Catalogue names of the measured checkpoints; the others are found by their own name.
NAMES = {"RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": "llama-3.3-70b"}
#: Not in the catalogue: shape unknown.
UNKNOWN = ("mistralai/Mistral-Small-3.2-24B-Instruct-2506",)
#: One model of each architecture class, and the ranks it takes on 80 GB cards.
CLASSES = {
    "LlamaForCausalLM": ("llama-3.1-8b", 1),
    "Qwen2ForCausalLM": ("qwen2.5-7b", 1),
    "Qwen3ForCausalLM": ("qwen3-8b", 1),
    "DeepseekV2ForCausalLM": ("deepseek-v2-lite", 1),
    "MixtralForCausalLM": ("mixtral-8x7b-v0.1", 2),
    "Phi3ForCausalLM": ("phi-4", 1),
    "Qwen3MoeForCausalLM": ("qwen3-30b-a3b", 1),
    "Gemma2ForCausalLM": ("gemma-2-9b", 1),
    "Gemma3ForCausalLM": ("gemma-3-27b", 1),
    "GemmaForCausalLM": ("gemma-7b", 1),
}


def measured(shared: Path) -> list[Mapping[str, str]]:
    path = shared / "facts" / "profiles" / "memory" / "vllm_memory_measured.csv"
    return [row for row in csv.DictReader(path.open()) if row["model"] not in UNKNOWN]


def planned(row: Mapping[str, str]) -> SizeRequest:
    """The request of a measured row, with its measured weights where they are given."""
    return SizeRequest(
        NAMES.get(row["model"], row["model"]),
        memory=round(float(row["gpu_total_gib"]) * GIB),
        tp=int(row["tp"]),
        utilization=row["gpu_memory_utilization"],
        engine="vllm-" + row["engine"].split()[1].lstrip("~"),
        weight_memory=round(float(row["weights_gib"]) * GIB) if row["weights_gib"] else None,
        # Limits of the API server on the card: the memory given is that of the driver, so they are named.
        max_num_seqs=1024 if "H100" in row["gpu"] else 256,
        max_batched_tokens=8192 if "H100" in row["gpu"] else 2048,
    )


def test_measured_kv_lies_in_the_plan(shared: Path) -> None:
    """Seven H100 rows of vLLM ~0.11, near the low end of the interval, and the RTX 4090 with vLLM 0.19."""
    rows = measured(shared)
    assert len(rows) == 8
    for row in rows:
        kv = size_model(planned(row)).kv
        assert kv is not None
        assert kv.low <= float(row["kv_cache_gib"]) * GIB + 0.01 * GIB <= kv.high + 0.02 * GIB, row["model"]


def test_the_rtx_4090_pool_is_within_one_percent_of_the_middle(shared: Path) -> None:
    row = next(row for row in measured(shared) if row["num_gpu_blocks"] == "2588")
    low, high = (pool.blocks for pool in size_model(planned(row)).pools)
    assert low is not None
    assert high is not None
    assert (low + high) / 2 == pytest.approx(2588, rel=0.01)


def test_activations_by_architecture(shared: Path) -> None:
    """vLLM 0.19 on an H100: peaks of llm-d-planner's 49 runs, by architecture class."""
    path = shared / "facts" / "profiles" / "memory" / "llmd_vllm_0.19.0_h100_constants.json"
    peaks = json.loads(path.read_text())["activation_profiles"]
    profile, _ = find_engine("vllm-0.19")
    for architecture, (model, tp) in CLASSES.items():
        shape = model_shape(find_source(model), [])
        costs = engine_costs(profile, shape, tp=tp, max_batched_tokens=8192, max_num_seqs=1024)
        assert costs.activations.low <= peaks[architecture] * GIB <= costs.activations.high, architecture


@pytest.mark.parametrize(
    ("line", "request_", "kv_gib"),
    [
        ("L18", SizeRequest("qwen3-14b"), 11.57),
        ("L19", SizeRequest("qwen3-14b", weight_memory=round(9.44 * GIB)), 29.63),
        ("L20", SizeRequest("qwen3-14b", weight_memory=round(9.44 * GIB), utilization="0.95"), 31.02),
    ],
)
def test_vllm_0_28_on_an_l40s(line: str, request_: SizeRequest, kv_gib: float) -> None:
    """kv_log_oracles: 44.99 GiB, no utilization printed: the default of 0.92 explains all three lines."""
    request_ = replace(request_, memory=round(44.98828125 * GIB), engine="vllm-0.28")
    kv = size_model(request_).kv
    assert kv is not None
    assert kv.low <= kv_gib * GIB <= kv.high, line


def test_vllm_v0_profiles_a_step_of_the_whole_length() -> None:
    """L01, L02 (vllm issue 10517), RTX 3090: 20,000 tokens leave 3.81 GiB, 29,000 leave 2.89: too little for one."""
    total = round(23.58 * GIB)
    kv = size_model(SizeRequest("llama-3.1-8b", memory=total, engine="vllm-0.6", max_model_len=20_000)).kv
    assert kv is not None
    assert kv.low <= 3.81 * GIB <= kv.high
    with pytest.raises(BudgetError, match="A sequence of 29000 tokens needs"):
        size_model(SizeRequest("llama-3.1-8b", memory=total, engine="vllm-0.6", max_model_len=29_000))


@pytest.mark.parametrize(("model", "loaded"), [("gpt-oss-20b", 13.47), ("gpt-oss-120b", 64.38)])
def test_vllm_pads_mxfp4_experts(model: str, loaded: float) -> None:
    """Weights as vLLM ~0.11 loaded them lie above what is counted, at the padded end."""
    plan = size_model(SizeRequest(model, memory=96 * GIB, engine="vllm-0.11")).plan
    assert plan is not None
    assert plan.weights.low < loaded * GIB
    assert plan.weights.high == pytest.approx(loaded * GIB, rel=0.005)
