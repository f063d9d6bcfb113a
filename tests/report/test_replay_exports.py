"""CSV and Chrome trace of a replay: rows that a spreadsheet reads, events that Perfetto accepts."""

from __future__ import annotations

import csv
import json
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.planner.outcome import KV_LINES, Distribution, Life
from octavo.report.perfetto import trace, write_trace
from octavo.report.replay_csv import requests_csv, strategies_csv, write_csv
from octavo.report.replay_phases import end_of, phases
from tests.report.replaying import LIVES, outcome, replayed, report


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(text)))


def test_a_row_for_each_strategy_holds_its_figures():
    rows = read(strategies_csv([outcome("reserve-max", waited={"slots": 2.0}), outcome()]))
    assert [row["strategy"] for row in rows] == ["reserve-max", "paged"]
    paged = rows[1]
    assert float(paged["running_mean"]) == 31.4
    assert float(paged["ttft_p99_s"]) == pytest.approx(0.83 * 2.3, rel=1e-5)
    assert float(paged["waited_memory_full_s"]) == 81
    assert float(rows[0]["waited_memory_full_s"]) == 0
    assert paged["ideal_hit_tokens"] == "16000"
    assert paged["binding"] == "memory: full"
    assert sum(float(paged[f"kv_mean_{line}"]) for line in KV_LINES) == pytest.approx(1)


def test_what_is_not_known_is_empty():
    (row,) = read(strategies_csv([outcome(goodput=None, attained=None, bounds=None, ttft=Distribution())]))
    assert [row[name] for name in ("goodput_per_s", "attained", "bound_running_peak", "ttft_p50_s")] == [""] * 4


def test_a_row_for_each_request_and_strategy():
    rows = read(requests_csv([outcome(), outcome("growing")]))
    assert [row["id"] for row in rows] == [life.id for life in LIVES] * 2
    assert rows[1]["waited_behind_s"] == "1"
    assert rows[1]["preemptions"] == "1"
    assert rows[3]["admitted_s"] == ""


def test_an_id_cannot_become_a_formula():
    life = Life("=1+2", 0.0, 1, 1, waited={})
    assert read(requests_csv([outcome(lives=(life,))]))[0]["id"] == "'=1+2"


def test_files_are_written_side_by_side(tmp_path: Path):
    write_csv(tmp_path / "out.csv", report())
    assert len(read((tmp_path / "out.csv").read_text())) == 2
    assert len(read((tmp_path / "out.requests.csv").read_text())) == 8
    write_csv(tmp_path / "none.csv", report(outcomes=(outcome(lives=()),)))
    assert not (tmp_path / "none.requests.csv").exists()


def test_a_life_is_phases_without_gaps():
    names = [[phase.name for phase in phases(life, 10.0)] for life in LIVES]
    assert names == [
        ["queued", "prefill", "decode"],
        ["queued", "prefill", "decode", "preempted", "decode"],
        ["queued", "prefill", "decode", "preempted"],
        [],
    ]
    assert phases(LIVES[1], 10.0)[3].start == 4.0


TIME = st.floats(0, 100, allow_nan=False)


@given(st.lists(TIME, min_size=4, max_size=4).map(sorted), st.lists(st.tuples(TIME, TIME), max_size=3), TIME)
def test_phases_cover_a_life_exactly(times, gaps, end):
    lost, last = [], 0.0
    for begin, length in sorted(gaps):
        lost.append((max(begin, last), max(begin, last) + length))
        last = lost[-1][1]
    for known in range(4):
        admitted, first, finished = (time if i < known else None for i, time in enumerate(times[1:]))
        life = Life("x", times[0], 1, 1, admitted, first, finished, preempted=tuple(lost), waited={})
        parts = phases(life, end)
        assert all(a.end == b.start for a, b in pairwise(parts))
        assert all(part.end > part.start for part in parts)
        covered = sum(part.end - part.start for part in parts)
        assert covered == pytest.approx(end_of(life, end) - life.arrival)


@pytest.fixture(scope="module")
def made() -> dict:
    return trace(replayed(("growing", "paged")))


def test_the_trace_has_only_events_that_perfetto_knows(made):
    assert made == json.loads(json.dumps(made, allow_nan=False))
    for event in made["traceEvents"]:
        assert event["ph"] in ("X", "C", "M")
        assert {"name", "ph", "pid", "tid", "args"} <= set(event)
        if event["ph"] != "M":
            assert isinstance(event["ts"], int)
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
    names = {(e["name"], e["args"]["name"]) for e in made["traceEvents"] if e["name"] == "process_name"}
    assert names == {("process_name", "growing"), ("process_name", "paged")}


def test_slices_of_a_lane_nest_or_follow_each_other(made):
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in made["traceEvents"]:
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert lanes
    for spans in lanes.values():
        open_: list[tuple[int, int]] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ and open_[-1][1] <= start:
                open_.pop()
            assert not open_ or end <= open_[-1][1]
            open_.append((start, end))


def test_every_request_is_a_slice_with_its_cause(made):
    events = trace(report(outcomes=(outcome(),)))["traceEvents"]
    requests = {event["name"]: event for event in events if event.get("cat") == "request"}
    assert set(requests) == {life.id for life in LIVES}
    assert requests["a-1"]["args"]["recomputed_tokens"] == 310
    assert (requests["a-1"]["ts"], requests["a-1"]["dur"]) == (500_000, 8_500_000)
    queued = [event["name"] for event in events if event.get("cat") == "queued"]
    assert queued == ["queued: next step", "queued: memory: full", "queued: memory: full"]
    counters = [event for event in events if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"running", "waiting", "KV pool, %", "step, ms", "preemptions"}
    assert [event["args"]["requests"] for event in counters if event["name"] == "running"] == [4, 38, 6]
    assert [event["ts"] for event in counters if event["name"] == "running"] == [0, 3_000_000, 7_000_000]


def test_the_trace_is_a_json_file(tmp_path: Path):
    write_trace(tmp_path / "t.json", report())
    assert set(json.loads((tmp_path / "t.json").read_text())) == {"displayTimeUnit", "otherData", "traceEvents"}
