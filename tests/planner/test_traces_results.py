"""What benchmark clients write, read as traces; and Qwen-Bailian's JSON lines, of which no file is at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.planner.traces import TraceError, TraceRequest, open_trace


def figures(requests: list[TraceRequest]) -> list[tuple[float, int, int]]:
    return [(round(request.arrival, 7), request.prompt_tokens, request.output_tokens) for request in requests]


def test_vllm_bench_serve_results(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result = {"request_throughput": 1.0, "input_lens": [5, 6, 7], "output_lens": [2, 0, 4]}
    result |= {"start_times": [100.5, 101.0, 99.5], "errors": ["", "Traceback\nOut of memory\n", ""], "ttfts": []}
    path.write_text(json.dumps(result))
    trace = open_trace(path)
    assert figures(list(trace)) == [(0.0, 7, 4), (1.0, 5, 2)]
    assert [(bad.line, bad.reason) for bad in trace.bad_lines] == [(2, "the request failed: Out of memory")]
    path.write_text(json.dumps(result) + "\n" + json.dumps(result))
    with pytest.raises(TraceError, match=r"holds 2 runs; choose one: result.json\?run=1 to run=2"):
        list(open_trace(path))
    assert len(list(open_trace(f"{path}?run=2"))) == 2
    del result["start_times"], result["errors"]
    path.write_text(json.dumps(result))
    assert open_trace(path).timed is False
    del result["input_lens"]
    path.write_text(json.dumps(result | {"mean_ttft_ms": 3.0}))
    with pytest.raises(TraceError, match="run vllm bench serve with --save-detailed"):
        list(open_trace(path))


def test_guidellm_reports(tmp_path: Path) -> None:
    def request(start: float, prompt: int | None) -> dict[str, Any]:
        about = {"request_id": f"at-{start}", "request_start_time": start, "output_tokens": 9, "cached_tokens": 4}
        return about | {"prompt_tokens": prompt}

    requests = {"successful": [request(1001.5, 8), request(1000.0, 7)], "incomplete": [request(1002.0, 8)]}
    report = {"metadata": {"version": 1}, "benchmarks": [{"requests": requests | {"errored": None}}]}
    path = tmp_path / "benchmarks.json"
    path.write_text(json.dumps(report, indent=2))
    trace = open_trace(path)
    assert figures(list(trace)) == [(0.0, 7, 9), (1.5, 8, 9)]
    assert [request.cached_tokens for request in trace] == [4, 4]
    assert [(bad.line, bad.reason) for bad in trace.bad_lines] == [(3, "the request is incomplete.")]


def test_aiperf_records(tmp_path: Path) -> None:
    def record(start: int, phase: str = "profiling", **more: Any) -> str:
        metrics = {"input_sequence_length": {"value": 550, "unit": "tokens"}}
        metrics["output_sequence_length"] = {"value": 60, "unit": "tokens"}
        about = {"session_num": 1, "x_request_id": f"r{start}", "x_correlation_id": "s", "benchmark_phase": phase}
        return json.dumps({"metadata": about | {"request_start_ns": start}, "metrics": metrics, **more}) + "\n"

    zero = 1_764_235_000_000_000_123
    path = tmp_path / "profile_export.jsonl"
    failed = record(zero + 5, error={"code": 503, "message": "busy"})
    path.write_text(record(zero - 9, "warmup") + record(zero + 1_500) + record(zero) + failed)
    trace = open_trace(path)
    requests = list(trace)
    assert [request.arrival for request in requests] == pytest.approx([0.0, 1.5e-6], abs=1e-15)
    assert [request.session for request in requests] == ["s", "s"]
    assert [(bad.line, bad.reason) for bad in trace.bad_lines] == [(4, "the request failed or was cancelled.")]


def test_qwen_bailian_times_are_seconds_and_turns_make_a_session(tmp_path: Path) -> None:
    path = tmp_path / "qwen.jsonl"
    row = {"type": "text", "turn": 1, "output_length": 4, "input_length": 33, "hash_ids": [1, 2, 3]}
    rows = (
        {"chat_id": 0, "parent_chat_id": -1, "timestamp": 61.1},
        {"chat_id": 5, "parent_chat_id": 0, "timestamp": 62.6},
    )
    path.write_text("".join(json.dumps(row | each) + "\n" for each in rows))
    requests = list(open_trace(path))
    assert [request.arrival for request in requests] == pytest.approx([0, 1.5])
    assert [request.session for request in requests] == ["0", "0"]
