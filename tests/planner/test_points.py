"""Measured serving points: rows as deployments, rows left out by rule, and the errors of reruns."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.errors import OctavoError
from octavo.planner.validation.points import Point, Rerun, deployment_of, left_out, read_points, rerun, workload

ROW = Point(
    id="a row",
    engine="vllm",
    version="",
    model="meta-llama/Llama-3.1-70B",
    system="h100_sxm",
    precision="fp8",
    mode="agg",
    prompt=1024,
    output=1024,
    concurrency=4,
    tp=4,
    pipeline=1,
    attention_replicas=1,
    expert_ranks=4,
    source="source_file=2026-04-06.csv",
    ttft=0.0805,
    tpot=0.011776,
)


def test_a_row_becomes_a_deployment_under_the_stated_conventions() -> None:
    deployment = deployment_of(ROW)
    assert (deployment.gpu, deployment.tp, deployment.engine) == ("H100 SXM 80GB", 4, "vllm-0.11")
    assert (deployment.weight_dtype, deployment.kv_dtype, deployment.max_model_len) == ("fp8", "bf16", 2304)
    assert deployment_of(replace(ROW, system="h200_sxm")).kv_dtype == "fp8"
    assert deployment_of(replace(ROW, system="h200_sxm", precision="")).kv_dtype == "bf16"
    assert deployment_of(replace(ROW, version="0.12.0")).engine == "vllm-0.12"
    assert deployment_of(replace(ROW, engine="sglang", version="0.5.9")).engine == "vllm-0.11"
    assert deployment_of(replace(ROW, model="nvidia/Llama-3.1-8B-Instruct-FP8")).model == "Llama-3.1-8B-Instruct"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mode": "disagg"}, "different workers"),
        ({"system": "gb200"}, "no kernel times of this device"),
        ({"pipeline": 2}, "pipeline stages"),
        ({"attention_replicas": 8}, "data-parallel attention"),
        ({"expert_ranks": 16}, "data-parallel attention"),
        ({"tp": 16}, "more ranks than a node has"),
        ({"model": "zhipuai/GLM-5"}, "not in the catalogue"),
        ({"precision": "fp4"}, "NVFP4"),
        ({"source": "source_file=data/h100_sxm/vllm/a.csv"}, "protocol is not published"),
    ],
)
def test_rows_outside_the_model_are_left_out_by_rule(change: dict[str, object], reason: str) -> None:
    row = replace(ROW, **change)
    found = left_out(row)
    assert found is not None
    assert reason in found
    with pytest.raises(OctavoError, match="is not rerun"):
        rerun(row)


def test_a_model_published_in_mxfp4_is_not_left_out() -> None:
    row = replace(ROW, model="openai/gpt-oss-120b", precision="fp4")
    assert left_out(row) is None
    assert deployment_of(row).weight_dtype == "mxfp4"


def test_the_workload_is_ten_rounds_of_lengths_up_to_the_stated_ones() -> None:
    requests = list(workload(ROW))
    assert len(requests) == 40
    assert all(819 <= r.prompt_tokens <= 1024 and 819 <= r.output_tokens <= 1024 for r in requests)
    assert requests == list(workload(replace(ROW, id="another")))


def test_errors_are_relative_to_what_was_measured() -> None:
    found = rerun(ROW)
    assert isinstance(found, Rerun)
    assert found.tpot_error == pytest.approx(found.tpot / 0.011776 - 1)
    assert abs(found.tpot_error) < 0.15
    assert abs(found.ttft_error) < 0.30


@pytest.mark.slow
def test_llama_70b_on_h100_under_vllm(shared: Path) -> None:
    """All 45 rows of one public benchmark: median errors of the means."""
    points = read_points(shared / "facts" / "profiles" / "aic" / "silicon_e2e.csv.gz")
    rows = [p for p in points if (p.engine, p.system, p.model) == ("vllm", "h100_sxm", "meta-llama/Llama-3.1-70B")]
    assert len(rows) == 45
    found = [rerun(row) for row in rows]
    assert statistics.median(abs(each.tpot_error) for each in found) <= 0.06
    assert statistics.median(abs(each.ttft_error) for each in found) <= 0.15
