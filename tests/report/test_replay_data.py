"""The replay's JSON has exactly the documented keys, goes there and back, and says what is wrong with another."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from octavo.kv.budget import GIB
from octavo.planner.outcome import KV_LINES, Bounds, Distribution, Life, PoolMap, Timeline
from octavo.report.replay_data import POOL, ReplayReport, read_json, write_json
from octavo.report.replay_inputs import plan_budget
from octavo.report.replay_json import ReportError
from tests.report.replaying import PLAN, outcome, replayed, report

KEYS = [
    *("schema", "title", "command", "trace", "model", "device", "strategy", "outcomes", "slo", "settings", "budget"),
    *("fidelity", "curves", "changes", "bottleneck", "bad_lines", "notes"),
]
OUTCOME = [
    *(
        "strategy",
        "pool_tokens",
        "pool_bytes",
        "block_size",
        "requests",
        "finished",
        "refused",
        "unfinished",
        "seconds",
    ),
    *("busy_seconds", "steps", "running_mean", "running_peak", "waiting_mean", "kv_mean", "kv_peak", "ttft", "itl"),
    *("tpot", "e2e", "queue", "attained", "goodput", "output_tokens", "prompt_tokens", "preemptions", "discarded"),
    *("recomputed", "hit_tokens", "query_tokens", "waited", "timeline", "map", "lives", "refusals", "bounds"),
]


def names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]  # type: ignore[arg-type]


def test_the_json_has_exactly_the_documented_keys():
    data = report().to_json()
    assert list(data) == KEYS
    assert data["schema"] == "octavo.replay/1"
    first = data["outcomes"][0]
    assert list(first) == OUTCOME
    assert list(first["ttft"]) == ["count", "mean", "p50", "p90", "p95", "p99", "highest"] == names(Distribution)
    assert (
        list(first["timeline"])
        == names(Timeline)
        == [*("t", "running", "waiting", "kv", "preemptions", "finished", "step")]
    )
    assert list(first["map"]) == names(PoolMap) == ["t", "owner", "written", "requests"]
    assert list(first["bounds"]) == names(Bounds) == ["running_mean", "running_peak", "ideal_hits", "belady_hits"]
    assert list(first["lives"][0]) == names(Life)
    assert set(first["kv_mean"]) == set(KV_LINES)
    assert list(data["budget"]["lines"][0]) == ["name", "low", "high", "source", "parts"]
    assert list(data["changes"][0]) == ["name", "flag_octavo", "flag_vllm", "before", "after", "error", "note"]
    assert list(data["changes"][0]["before"]) == ["concurrency", "goodput", "ttft_p99", "e2e"]
    assert list(data["curves"][0]) == [
        *("strategy", "rates", "goodput", "attained", "running", "ttft_p99", "knee", "error")
    ]
    assert list(data["fidelity"]) == ["level", "error", "statement", "assumptions"]


@pytest.mark.parametrize("made", [report(), report(outcomes=(), slo=None, budget=None, curves=None, changes=None)])
def test_the_json_goes_there_and_back(made):
    assert ReplayReport.from_json(json.loads(json.dumps(made.to_json(), allow_nan=False))) == made


def test_a_real_replay_goes_there_and_back_through_a_file(tmp_path: Path):
    made = replayed(("paged", "growing"))
    write_json(tmp_path / "out.json", made)
    assert read_json(tmp_path / "out.json") == made


def test_a_newer_file_with_more_keys_can_be_read():
    data = report().to_json()
    data["later"] = 1
    data["outcomes"][0]["later"] = {"x": 1}
    assert ReplayReport.from_json(data) == report()


def edited(*path: str | int, value: object = None, delete: bool = False) -> dict:
    data = json.loads(json.dumps(report().to_json()))
    place = data
    for step in path[:-1]:
        place = place[step]
    if delete:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (edited("schema", value="octavo.replay/2"), r"schema is 'octavo\.replay/2'.*'octavo\.replay/1'"),
        (edited("outcomes", 1, "seconds", delete=True), r"report\.outcomes\[1\] has no field 'seconds'"),
        (edited("outcomes", 0, "running_mean", value="many"), r"report\.outcomes\[0\]\.running_mean is 'many'.*float"),
        (edited("outcomes", 0, "steps", value=True), r"steps is True.*int"),
        (edited("outcomes", 0, "kv_mean", "live", value=None), r"kv_mean\.live is None"),
        (edited("fidelity", "level", value="guess"), r"fidelity\.level is 'guess'.*'datasheet'"),
        (edited("outcomes", 0, "lives", 1, "preempted", 0, value=[1.0]), r"preempted\[0\] has 1 entries.*must have 2"),
        (edited("notes", value="one"), r"notes is 'one'.*list"),
    ],
)
def test_json_of_another_kind_is_refused_with_the_field(data, words):
    with pytest.raises(ReportError, match=words):
        ReplayReport.from_json(data)


def test_a_file_that_is_not_json_is_refused_by_name(tmp_path: Path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ReportError, match=r"x\.json is not JSON"):
        read_json(tmp_path / "x.json")


def test_the_budget_lines_add_up_to_the_device():
    budget = plan_budget(PLAN, 6 * GIB)
    assert sum(line.low for line in budget.lines) == budget.total == 24 * GIB
    assert budget.pool == budget.lines[-1]
    assert [line.name for line in budget.lines] == [
        *("left to others", "weights", "activations", "workspace", "not given out", POOL)
    ]
    assert budget.lines[2].parts == (("logits: vocabulary × sequences", GIB // 8),)


def test_a_measured_pool_above_the_estimates_leaves_no_rest():
    budget = plan_budget(PLAN, 8 * GIB)
    assert "not given out" not in [line.name for line in budget.lines]


def test_the_verdict_is_about_the_deployed_strategy_or_else_the_first():
    assert report().main == outcome()
    assert report(strategy="growing").main is not None
    assert report(strategy="growing").main.strategy == "reserve-max"
    assert report(outcomes=()).main is None
