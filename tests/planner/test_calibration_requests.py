"""Calibration from a request log: known rates are found again, a log that the replay cannot explain is refused."""

from __future__ import annotations

import csv
import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.planner.deployment import Deployment, Level, resolve
from octavo.planner.replay import ReplayOptions, replay
from octavo.planner.timing.calibration import load, save
from octavo.planner.timing.from_requests import COLUMNS, calibrate_requests, read_requests, scaled
from octavo.planner.timing.step_times import CalibrationError
from octavo.planner.traces.api import TraceRequest
from octavo.planner.validation.runs import BUNDLED, find_runs, read_run
from octavo.runner.timing import RooflineTimer

DEPLOYMENT = Deployment(
    model="Llama-3.1-8B", gpu="H100 SXM 80GB", engine="vllm-0.19", num_blocks=1500, max_model_len=4096, max_num_seqs=64
)
TRUE = {"compute": 0.7, "memory": 0.85, "overhead": 1.3}


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    with gzip.open(path, "wt", newline="") if path.suffix == ".gz" else path.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(rows)
    return path


def engine_log(path: Path, deployment: Deployment = DEPLOYMENT, count: int = 120) -> Path:
    """What an engine would have written whose device is slower than ours in `TRUE`: idle at first, then overloaded."""
    resolved = resolve(deployment)
    base = resolved.timer
    assert isinstance(base, RooflineTimer)
    slower = RooflineTimer(base.work, scaled(base.coefficients, list(TRUE), list(TRUE.values())), resolved.block_bytes)
    requests = [TraceRequest(7.0 + i * i / 3000, 40 + 637 * i % 3000, 10 + 53 * i % 160, f"r{i}") for i in range(count)]
    options = ReplayOptions(lives=count, known_lengths=True)
    lives = {life.id: life for life in replay(requests, replace(resolved, timer=slower), options).lives}
    rows = [
        (r.id, r.prompt_tokens, r.output_tokens, r.arrival, lives[r.id].first_token, lives[r.id].finished)
        for r in requests
    ]
    return write(path, [dict(zip(COLUMNS, row, strict=True)) for row in rows])


def test_known_rates_are_found_again(tmp_path: Path) -> None:
    made = calibrate_requests(read_requests(engine_log(tmp_path / "log.csv.gz")), DEPLOYMENT)
    assert made.factors["memory"] == pytest.approx(TRUE["memory"], rel=0.1)
    assert made.factors["compute"] == pytest.approx(TRUE["compute"], rel=0.1)
    assert made.held_out.median < 0.02
    assert (made.used, made.held_out.points) == (90, 30)
    save(made, tmp_path / "c.json")
    assert load(tmp_path / "c.json") == made
    resolved = resolve(replace(DEPLOYMENT, calibration=str(tmp_path / "c.json")))
    assert resolved.fidelity.level is Level.CALIBRATED
    assert "memory x 0.8" in resolved.fidelity.statement
    assert resolved.fidelity.error == made.held_out.median


def test_latencies_that_no_rates_explain_are_refused(tmp_path: Path) -> None:
    log = read_requests(engine_log(tmp_path / "log.csv"))
    last_come_first_served = replace(log, ttft=log.ttft[::-1], e2e=log.e2e[::-1])
    with pytest.raises(CalibrationError, match=r"refused: on 30 held-out requests of log.csv .* bound is 10% and 30%"):
        calibrate_requests(last_come_first_served, DEPLOYMENT)


def test_a_pool_that_cannot_serve_the_log_is_named(tmp_path: Path) -> None:
    log = read_requests(engine_log(tmp_path / "log.csv"))
    with pytest.raises(CalibrationError, match="its replay does not: give its pool with --num-blocks"):
        calibrate_requests(log, replace(DEPLOYMENT, num_blocks=40, max_model_len=600))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"queued_s": "soon"}, "line 4: not a number"),
        ({"output_toks": 0}, "line 4: it needs at least a token"),
        ({"first_token_s": 0.0}, "line 4: it needs .*queued_s < first_token_s"),
    ],
)
def test_a_bad_line_is_named(change: dict[str, object], sentence: str, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        dict(zip(COLUMNS, (f"r{i}", 9, 9, 5 + i, 6 + i, 7 + i), strict=True)) for i in range(50)
    ]
    rows[2] |= change
    with pytest.raises(CalibrationError, match=sentence):
        read_requests(write(tmp_path / "log.csv", rows))


def test_what_is_no_request_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(CalibrationError, match="needs the columns id, input_toks"):
        read_requests(tmp_path / "other.csv")
    with pytest.raises(CalibrationError, match=r"none\.csv cannot be read"):
        read_requests(tmp_path / "none.csv")
    short: list[dict[str, object]] = [dict(zip(COLUMNS, ("r", 9, 9, 5, 6, 7), strict=True))]
    with pytest.raises(CalibrationError, match="has 1 requests; a calibration needs at least 40"):
        read_requests(write(tmp_path / "short.csv", short))


@pytest.mark.slow
def test_a_real_engines_log_leaves_the_bundled_rates_as_they_are() -> None:
    folder = next(path for path in find_runs(BUNDLED) if path.name.startswith("RTX4090"))
    made = calibrate_requests(read_requests(folder / "requests.csv.gz"), read_run(folder).deployment)
    assert all(0.9 < factor < 1.1 for factor in made.factors.values())
    assert made.held_out.median < 0.03
