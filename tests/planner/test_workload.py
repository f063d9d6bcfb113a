"""Workload files: what is read, and that every bad line is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.planner.workload import WorkItem, WorkloadError, read_workload, scale

GOOD = b'{"prompt_tokens": 3, "output_tokens": 1}\n'
HEAD = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"


def refusal(path: Path) -> str:
    with pytest.raises(WorkloadError) as caught:
        read_workload(path)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 500
    return sentence


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('{"prompt": "café", "output_tokens": 1}'.encode("latin-1"), "line 2: not UTF-8 text"),
        (b'{"prompt_tokens": ' + b"9" * 5000 + b', "output_tokens": 1}', "line 2: the JSON cannot be read, a number"),
        (b"[" * 200_000, "line 2: the JSON cannot be read, it is nested too deeply"),
        (b'{"prompt": "\\ud800", "output_tokens": 1}', "line 2: prompt is '\\ud800', which has half of a surrogate"),
        (b'{"prompt_tokens": 3, "output_tokens": 1, "arrival": NaN}', "line 2: arrival is nan"),
        (b'{"prompt_tokens": 3, "output_tokens": 1, "arrival": 1' + b"0" * 400 + b"}", "line 2: arrival is 1000"),
        (b'{"prompt_tokens": 3, "output_tokens": 1, "arrival": true}', "line 2: arrival is True"),
        (
            b'{"prompt_tokens": 3, "output_tokens": 1000000000000}',
            "line 2: output_tokens is 1000000000000; it must be at",
        ),
        (b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}", "line 2: prompt is [[[[["),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, wanted: str) -> None:
    path = tmp_path / "work.jsonl"
    path.write_bytes(GOOD + line + b"\n")
    assert wanted in refusal(path)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (b"2023-11-16 18:15:46.68,5", "line 2: GeneratedTokens is missing"),
        (b"2023-11-16 18:15:46.68", "line 2: ContextTokens is missing"),
        (b"2023-11-16 18:15:46.68,5,", "line 2: GeneratedTokens is missing"),
        (b"yesterday,5,5", "line 2: TIMESTAMP is 'yesterday'"),
        (b"2023-11-16 18:15:46.68,many,5", "line 2: ContextTokens is 'many'; it must be a whole number"),
        (b"2023-11-16 18:15:46.68," + b"9" * 5000 + b",5", "line 2: ContextTokens is '999"),
        (b"2023-11-16 18:15:46.68,5,0", "line 2: GeneratedTokens is 0; it must be a whole number of at least 1"),
        (b"2023-11-16 18:15:46.68,5,\xe9", "line 2: not UTF-8 text"),
        (b'"' + b"x" * 200_000, "line 2: not CSV"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: bytes, wanted: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(HEAD + line + b"\n")
    assert wanted in refusal(path)


def test_a_byte_order_mark_is_allowed(tmp_path: Path) -> None:
    jsonl, trace = tmp_path / "work.jsonl", tmp_path / "trace.CSV"
    jsonl.write_bytes(b"\xef\xbb\xbf" + GOOD)
    trace.write_bytes(b"\xef\xbb\xbf" + HEAD + b"2023-11-16 18:15:46.6805900,7,9\r\n")
    assert read_workload(jsonl) == [WorkItem(0.0, 1, prompt_tokens=3)]
    assert read_workload(trace) == [WorkItem(0.0, 9, prompt_tokens=7)]


def test_a_timestamp_keeps_its_offset_and_is_utc_without(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [b"2023-11-16 12:00:00,1,1", b"2023-11-16 14:00:30+02:00,2,1", b"2023-11-16T12:01:00Z,3,1"]
    path.write_bytes(HEAD + b"\n".join(rows))
    assert [(item.arrival, item.prompt_tokens) for item in read_workload(path)] == [(0.0, 1), (30.0, 2), (60.0, 3)]


def test_a_folder_or_a_name_too_long(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path)
    assert "cannot be read" in refusal(tmp_path / ("x" * 300))


def test_scaled_lengths_are_never_nothing() -> None:
    items = [WorkItem(1.0, 5, prompt_tokens=3), WorkItem(2.0, 5, prompt="text")]
    small = scale(items, lengths=1e-9)
    assert [(item.prompt_tokens, item.output_tokens) for item in small] == [(1, 1), (0, 1)]
    assert [item.prompt_tokens for item in scale(items, lengths=0.5)] == [2, 0]
    assert scale(items, limit=1) == items[:1]
    assert [item.arrival for item in scale(items, time=0)] == [0, 0]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"limit": 0}, "requests is 0; it must be at least 1"),
        ({"limit": -1}, "requests is -1"),
        ({"lengths": float("nan")}, "length_scale is nan"),
        ({"lengths": 0}, "length_scale is 0"),
        ({"lengths": 1e300}, "length_scale is 1e+300: 5 tokens would become more than"),
        ({"time": float("nan")}, "time_scale is nan"),
        ({"time": -1}, "time_scale is -1"),
        ({"time": 1e308}, "time_scale is 1e+308"),
    ],
)
def test_scales_that_make_no_workload(options: dict[str, float], wanted: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        scale([WorkItem(9.0, 5, prompt="text")], **options)  # type: ignore[arg-type]
    assert wanted in str(caught.value)


def test_arrivals_are_sorted_and_start_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    path.write_text("\n".join(json.dumps({"arrival": t, "prompt": "x", "output_tokens": 1}) for t in (5, 3.5)))
    assert [item.arrival for item in read_workload(path)] == [0.0, 1.5]
