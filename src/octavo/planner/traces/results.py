"""Benchmark results as traces: JSON documents of vLLM's `bench serve` and of guidellm. Each is read whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octavo.planner.traces.api import BadLine, TraceError
from octavo.planner.traces.fields import FieldError, seconds, some, text, tokens
from octavo.planner.traces.file_trace import Format
from octavo.planner.traces.lines import Head, Row, Rows, opened, read_document

Record = dict[str, Any]


def chosen(path: Path, runs: list[Record], run: int) -> Record:
    """Run number `run` (from 1) of a file; 0: the only one. Raises TraceError."""
    if run == 0 and len(runs) != 1:
        raise TraceError(f"{path} holds {len(runs)} runs; choose one: {path.name}?run=1 to run={len(runs)}.")
    if not 0 <= run <= len(runs):
        raise TraceError(f"run is {run}; {path} holds runs 1 to {len(runs)}.")
    return runs[run - 1]


def read_vllm_bench(path: Path, run: int = 0) -> Rows:
    """The JSON of `vllm bench serve --save-result --save-detailed` (0.19 and its like): arrays input_lens, output_lens,
    start_times (s on a monotonic clock, when each request was sent) and errors.

    Older versions have no start_times: the lengths alone are read. `--append-result` writes one document a line.
    A failed request has an error or output length 0. The record's number stands for the line's.
    """
    result = chosen(path, _documents(path), run)
    columns: list[Any] = [result.get(name) for name in ("input_lens", "output_lens")]
    if not all(isinstance(column, list) for column in columns):
        raise TraceError(f"{path} has no input_lens and output_lens; run vllm bench serve with --save-detailed.")
    count = len(columns[0])
    for name, absent in (("start_times", 0.0), ("errors", "")):
        columns.append(result.get(name, [absent] * count))
    if any(not isinstance(column, list) or len(column) != count for column in columns):
        raise TraceError(f"{path}: input_lens, output_lens, start_times and errors differ in length; it was altered.")
    for number, (prompt, output, start, error) in enumerate(zip(*columns, strict=True), 1):
        try:
            if error:
                raise FieldError(f"the request failed: {str(error).strip().splitlines()[-1][:80]}")
            lengths = tokens(prompt, "input_lens"), tokens(output, "output_lens")
            yield Row(seconds(start, "start_times"), *lengths, str(number))
        except FieldError as error_:
            yield BadLine(number, str(error_))


def _documents(path: Path) -> list[Record]:
    with opened(path) as file:
        content = file.read()
    decoder, found, place = json.JSONDecoder(), [], 0
    while (place := len(content) - len(content[place:].lstrip())) < len(content):
        try:
            document, place = decoder.raw_decode(content, place)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path} is not JSON ({error}); it may be cut off.") from error
        if isinstance(document, dict):
            found.append(document)
    return found


def read_guidellm(path: Path, run: int = 0) -> Rows:
    """guidellm's benchmarks.json (0.3 to 0.8): benchmarks[run].requests.{successful, incomplete, errored}, each with
    request_start_time (start_time before 0.4; Unix s), prompt_tokens, output_tokens and, from 0.7 on, cached_tokens.

    A sweep holds one run for each rate: choose by `run`. Requests that did not succeed are bad lines; the record's
    number, those that failed last, stands for the line's.
    """
    runs = read_document(path).get("benchmarks")
    if not isinstance(runs, list) or not all(isinstance(one, dict) for one in runs):
        raise TraceError(f"{path} has no list of benchmarks; it is no report of guidellm.")
    requests = chosen(path, runs, run).get("requests")
    if not isinstance(requests, dict):
        raise TraceError(f"{path} has no requests; let guidellm write its JSON report with all of them.")
    number = 0
    for status in ("successful", "incomplete", "errored"):
        for record in _each(requests.get(status)):
            number += 1
            try:
                yield _guidellm_row(record, number, status)
            except FieldError as error:
                yield BadLine(number, str(error))


def _each(records: Any) -> Iterable[Any]:
    return records if isinstance(records, list) else ()


def _guidellm_row(record: Any, number: int, status: str) -> Row:
    if not isinstance(record, dict):
        raise FieldError("a request must be a JSON object.")
    if status != "successful":
        raise FieldError(f"the request is {status}.")
    start = "request_start_time" if "request_start_time" in record else "start_time"
    return Row(
        seconds(record.get(start), start),
        tokens(record.get("prompt_tokens"), "prompt_tokens"),
        tokens(record.get("output_tokens"), "output_tokens"),
        text(record.get("request_id", number), "request_id"),
        cached_tokens=some(record.get("cached_tokens"), "cached_tokens"),
    )


def _is_vllm(head: Head) -> bool:
    return head.record is not None and {"input_lens", "output_lens"} <= set(head.record)


def _is_vllm_without_times(head: Head) -> bool:
    record = head.record or {}
    return "start_times" not in record and (_is_vllm(head) or {"request_throughput", "mean_ttft_ms"} <= set(record))


def _is_guidellm(head: Head) -> bool:
    return isinstance((head.record or {}).get("benchmarks"), list)


_RUN = {"run": int}
FORMATS = (
    Format(
        "vllm-bench-lengths",
        "vllm bench serve JSON without start_times",
        _is_vllm_without_times,
        read_vllm_bench,
        False,
        _RUN,
    ),
    Format("vllm-bench", "vllm bench serve JSON", _is_vllm, read_vllm_bench, options=_RUN),
    Format("guidellm", "guidellm benchmarks.json", _is_guidellm, read_guidellm, options=_RUN),
)
