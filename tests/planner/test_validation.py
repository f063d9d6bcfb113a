"""Measured runs of real engines, replayed: the regression check of `octavo validate`, and how runs are read."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.commands.validate import validate as command
from octavo.planner.validation.runs import BUNDLED, MeasuredRun, RunError, find_runs, read_run
from octavo.planner.validation.validation import BOUNDS, Validation, as_json, validate

RUNS = ["RTX4090_Llama-3.1-8B", "RTXPRO6000_Llama-3.1-8B"]


def bundled(name: str) -> MeasuredRun:
    return read_run(BUNDLED / "vllm_runs" / name)


@pytest.fixture(scope="module", params=RUNS)
def validation(request: pytest.FixtureRequest) -> Validation:
    return validate(bundled(request.param))


def test_the_bundled_runs_are_within_their_bounds(validation: Validation) -> None:
    missed = [f"{row.metric} {row.statistic} {row.error:+.1%}" for row in validation.rows if not row.within]
    assert not missed
    assert BOUNDS[validation.run], "a bundled run states its bounds"


def test_a_starved_pool_preempts_as_the_engine_did(validation: Validation) -> None:
    assert (validation.preemptions > 0) == validation.run.startswith("RTX4090")


def test_the_run_is_the_real_one() -> None:
    run = bundled("RTX4090_Llama-3.1-8B")
    assert len(run.requests) == 300
    assert (run.deployment.num_blocks, run.deployment.max_num_seqs) == (2588, 256)
    assert sum(request.prompt_tokens for request in run.requests) == 257_239
    assert run.gauges["kv_cache_pct"][0] == 13.22
    assert all(run.first[r.id] > r.arrival and run.last[r.id] > run.first[r.id] for r in run.requests)


def test_a_gauge_that_was_not_recorded_is_not_compared() -> None:
    run = bundled("RTXPRO6000_Llama-3.1-8B")
    assert run.gauges["kv_cache_pct"] == ()


def test_a_reserving_pool_is_found_to_be_wrong() -> None:
    """The allocator is the model: the same run with regions of the greatest length is far off."""
    run = bundled("RTX4090_Llama-3.1-8B")
    deployment = replace(run.deployment, strategy="reserve-max", max_model_len=4800)
    wrong = validate(replace(run, deployment=deployment, requests=run.requests[:80]))
    assert not wrong.within
    worst = max(abs(row.error) for row in wrong.rows)
    assert worst > 0.15


def test_json_has_every_row(validation: Validation) -> None:
    data = json.loads(json.dumps(as_json([validation])))
    assert data["schema"] == "octavo.validation/1"
    assert len(data["runs"][0]["rows"]) == len(validation.rows) >= 11
    first = data["runs"][0]["rows"][0]
    assert {"metric", "statistic", "measured", "simulated", "error", "bound", "within"} == first.keys()


def copy_of(name: str, folder: Path) -> Path:
    shutil.copytree(BUNDLED, folder / "runs")
    return folder / "runs" / "vllm_runs" / name


def test_a_run_of_several_replicas_is_left_out_with_the_reason(tmp_path: Path) -> None:
    folder = copy_of("RTXPRO6000_Llama-3.1-8B", tmp_path)
    meta = json.loads((folder / "meta.json").read_text())
    meta["engine_kwargs"]["data_parallel_size"] = 2
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(RunError, match="data_parallel_size is 2"):
        read_run(folder)


def test_a_folder_of_nothing_but_such_runs_is_an_error(tmp_path: Path) -> None:
    folder = copy_of("RTXPRO6000_Llama-3.1-8B", tmp_path)
    shutil.rmtree(folder.parent / "RTX4090_Llama-3.1-8B")
    folder.rename(folder.parent / "H100_Llama-3.1-8B")
    with pytest.raises(RunError, match=r"none of the runs .* the device H100 is unknown"):
        command(data=tmp_path, as_data=False)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    folder = copy_of("RTXPRO6000_Llama-3.1-8B", tmp_path)
    meta = json.loads((folder / "meta.json").read_text())
    del meta["engine_kwargs"]["max_num_seqs"]
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(RunError, match="max_num_seqs is missing"):
        read_run(folder)


def test_a_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no measured runs"):
        find_runs(tmp_path)


def test_an_error_above_its_bound_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that claims fewer blocks than it had cannot be reproduced."""
    folder = copy_of("RTX4090_Llama-3.1-8B", tmp_path)
    meta = json.loads((folder / "meta.json").read_text())
    meta["kv_cache"]["num_gpu_blocks"] = 2000
    meta["engine_kwargs"]["max_model_len"] = 8000
    (folder / "meta.json").write_text(json.dumps(meta))
    shutil.rmtree(folder.parent / "RTXPRO6000_Llama-3.1-8B")
    with pytest.raises(SystemExit) as stop:
        command(data=tmp_path, as_data=False)
    assert stop.value.code == 1
    assert "above the bound: ttft mean" in capsys.readouterr().out


def test_the_shared_runs_are_the_bundled_ones(shared: Path) -> None:
    for folder in find_runs(shared / "facts" / "profiles" / "llmservingsim"):
        if folder.name in RUNS:
            assert read_run(folder) == bundled(folder.name)
