"""JSON-lines formats: our own, Mooncake and its kin, Dynamo's request trace, LLMServingSim's workloads and runs,
AIPerf's records."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from octavo.planner.traces.api import Trace
from octavo.planner.traces.fields import FieldError, Rounding, Since, child, hash_ids, seconds, some, text, tokens
from octavo.planner.traces.file_trace import Format
from octavo.planner.traces.lines import Head, Row, Rows, read_objects

Record = dict[str, Any]


def read_octavo(path: Path) -> Rows:
    """Our own workload: {"arrival": seconds, "prompt_tokens": n, "output_tokens": n} and, where known, "id",
    "hashes" (chained block ids, as in TraceRequest) with "hash_block", "max_tokens", "cached_tokens", "session"."""
    return read_objects(path, octavo_row)


def octavo_row(record: Record, number: int) -> Row:
    if "prompt_tokens" not in record and "prompt" in record:
        raise FieldError("prompt is a text; a replay needs its length: give prompt_tokens.")
    prompt = tokens(record.get("prompt_tokens"), "prompt_tokens")
    output = tokens(record.get("output_tokens"), "output_tokens")
    hashes, block = _octavo_hashes(record, prompt + output)
    return Row(
        seconds(record.get("arrival", 0.0), "arrival"),
        prompt,
        output,
        text(record.get("id", number), "id"),
        hashes,
        block if hashes else 0,
        some(record.get("max_tokens"), "max_tokens"),
        some(record.get("cached_tokens"), "cached_tokens"),
        text(record.get("session"), "session"),
    )


def _octavo_hashes(record: Record, covered: int) -> tuple[tuple[int, ...], int]:
    if "hashes" not in record:
        return (), 0
    block, hashes = tokens(record.get("hash_block"), "hash_block"), record["hashes"]
    count = len(hashes) if isinstance(hashes, list) else 0
    if count > -(-covered // block):
        raise FieldError(f"hashes has {count} ids of {block} tokens; prompt and answer have {covered} tokens.")
    return hash_ids(hashes, "hashes", count * block, block, "floor"), block


def write_octavo(path: Path, trace: Trace) -> int:
    """Writes `trace` in our own format, fields that it does not know left out; gives the number of requests."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for request in trace:
            record: Record = {
                "id": request.id,
                "arrival": request.arrival,
                "prompt_tokens": request.prompt_tokens,
                "output_tokens": request.output_tokens,
            }
            if request.hashes:
                record |= {"hashes": request.hashes, "hash_block": request.hash_block}
            if request.session:
                record["session"] = request.session
            optional = {"max_tokens": request.max_tokens, "cached_tokens": request.cached_tokens}
            record |= {name: value for name, value in optional.items() if value is not None}
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
            count += 1
    return count


def read_mooncake(path: Path, hash_block: int = 512) -> Rows:
    """Mooncake (FAST'25 and arXiv releases; Dynamo's copies): milliseconds after the start, ids of blocks of 512 tokens
    of the prompt, the last of them perhaps part-filled. Arrivals come in batches, so many are equal."""

    def row(record: Record, number: int) -> Row:
        prompt = tokens(record.get("input_length"), "input_length")
        hashes = _optional_ids(record, "hash_ids", prompt, hash_block, "ceil")
        return Row(
            seconds(record.get("timestamp"), "timestamp", per_second=1000),
            prompt,
            tokens(record.get("output_length"), "output_length"),
            str(number),
            hashes,
            hash_block if hashes else 0,
        )

    return read_objects(path, row)


def _optional_ids(record: Record, name: str, covered: int, block: int, rounding: Rounding) -> tuple[int, ...]:
    return hash_ids(record[name], name, covered, block, rounding) if name in record else ()


def read_bailian(path: Path, hash_block: int = 16) -> Rows:
    """Qwen-Bailian's traces: Mooncake's fields in SECONDS, blocks of 16, chat_id, parent_chat_id (-1: first turn).

    A chat's turns are its session; known chats are held in memory. The files are not at hand here: read by their
    published description, with a part-filled block counted or not.
    """
    roots: dict[int, int] = {}

    def row(record: Record, number: int) -> Row:
        prompt = tokens(record.get("input_length"), "input_length")
        chat, parent = record.get("chat_id"), record.get("parent_chat_id")
        if type(chat) is not int or type(parent) is not int:
            raise FieldError("chat_id and parent_chat_id must be whole numbers.")
        roots[chat] = roots.get(parent, chat)
        hashes = _optional_ids(record, "hash_ids", prompt, hash_block, "either")
        return Row(
            seconds(record.get("timestamp"), "timestamp"),
            prompt,
            tokens(record.get("output_length"), "output_length"),
            str(chat),
            hashes,
            hash_block if hashes else 0,
            session=str(roots[chat]),
        )

    return read_objects(path, row)


def read_dynamo(path: Path) -> Rows:
    """NVIDIA Dynamo's request trace (schema dynamo.request.trace.v1): of its events the `request_end` ones.

    They lie in order of their end; arrival is `request_received_ms` (Unix). Ids are unsigned 64-bit and count a
    part-filled block. `cached_tokens` is what the engine measured.
    """
    return read_objects(path, partial(_dynamo_row, Since("request_received_ms", 1000)))


def _dynamo_row(clock: Since, record: Record, number: int) -> Row | None:
    event = child(record, "event")
    if event.get("event_type") != "request_end":
        return None
    request = child(event, "request")
    prompt = tokens(request.get("input_tokens"), "input_tokens")
    hashes: tuple[int, ...] = ()
    block = 0
    if request.get("replay") is not None:
        replay = child(request, "replay")
        block = tokens(replay.get("trace_block_size"), "trace_block_size")
        hashes = hash_ids(replay.get("input_sequence_hashes"), "input_sequence_hashes", prompt, block, "ceil")
    context = event.get("agent_context") or {}
    return Row(
        clock(request.get("request_received_ms")),
        prompt,
        tokens(request.get("output_tokens"), "output_tokens"),
        text(request.get("request_id", number), "request_id"),
        hashes,
        block,
        cached_tokens=some(request.get("cached_tokens"), "cached_tokens"),
        session=text(context.get("session_id"), "session_id") if isinstance(context, dict) else "",
    )


def read_simulated_workload(path: Path) -> Rows:
    """LLMServingSim's workloads, derived: `arrival_time_ns` and `hash_ids`, or `arrival_ms` and `hash_ids_16`.

    Ids are of full blocks of 16 tokens; hash_ids cover the prompt, hash_ids_16 prompt and answer. Row k is `bench-k`,
    as in the measured runs; arrivals there differ by up to 0.16 s (`timed_by` takes them over).
    """
    count = iter(range(10**12))

    def row(record: Record, number: int) -> Row:
        name = f"bench-{next(count)}"
        both = "hash_ids_16" in record
        names = ("input_length", "output_length") if both else ("input_toks", "output_toks")
        prompt, output = (tokens(record.get(each), each) for each in names)
        ids, covered = ("hash_ids_16", prompt + output) if both else ("hash_ids", prompt)
        when, unit = ("arrival_ms", 1e3) if both else ("arrival_time_ns", 1e9)
        hashes = _optional_ids(record, ids, covered, 16, "floor")
        return Row(seconds(record.get(when), when, per_second=unit), prompt, output, name, hashes, 16 if hashes else 0)

    return read_objects(path, row)


def read_measured_run(path: Path) -> Rows:
    """requests.jsonl of a measured vLLM run (LLMServingSim): arrival is `queued_ts`, when the engine queued it,
    on the monotonic clock of the run's other times (`arrival_time` is on another)."""

    def row(record: Record, number: int) -> Row:
        return Row(
            seconds(record.get("queued_ts"), "queued_ts"),
            tokens(record.get("input_toks"), "input_toks"),
            tokens(record.get("output_toks"), "output_toks"),
            text(record.get("request_id", number), "request_id"),
        )

    return read_objects(path, row)


def read_aiperf(path: Path) -> Rows:
    """AIPerf's profile_export.jsonl (0.13): metadata.request_start_ns (Unix) as arrival, and the metrics
    input_sequence_length, output_sequence_length and usage_prompt_cache_read_tokens, each {"value", "unit"}.

    Records of the warm-up are left aside; failed and cancelled ones are bad lines.
    """
    return read_objects(path, partial(_aiperf_row, Since("request_start_ns", 10**9)))


def _aiperf_row(clock: Since, record: Record, number: int) -> Row | None:
    about, metrics = child(record, "metadata"), child(record, "metrics")
    if about.get("benchmark_phase") == "warmup":
        return None
    if record.get("error") or about.get("was_cancelled"):
        raise FieldError("the request failed or was cancelled.")

    def metric(name: str) -> Any:
        return child(metrics, name).get("value") if name in metrics else None

    cached = metric("usage_prompt_cache_read_tokens")
    return Row(
        clock(about.get("request_start_ns")),
        tokens(metric("input_sequence_length"), "input_sequence_length"),
        tokens(metric("output_sequence_length"), "output_sequence_length"),
        text(about.get("x_request_id") or number, "x_request_id"),
        cached_tokens=some(cached, "usage_prompt_cache_read_tokens"),
        session=text(about.get("x_correlation_id"), "x_correlation_id"),
    )


def _has_keys(keys: tuple[str, ...], head: Head) -> bool:
    return head.record is not None and set(keys) <= set(head.record)


def _has(*keys: str) -> Callable[[Head], bool]:
    return partial(_has_keys, keys)  # no closure: traces travel to worker processes


def _is_dynamo(head: Head) -> bool:
    event = (head.record or {}).get("event")
    return isinstance(event, dict) and "dynamo" in str(event.get("schema"))


def _is_simulated(head: Head) -> bool:
    return _has("arrival_ms", "input_length")(head) or _has("arrival_time_ns", "input_toks")(head)


def _is_octavo(head: Head) -> bool:
    return _has("output_tokens", "prompt_tokens")(head) or _has("output_tokens", "prompt")(head)


_BLOCK = {"hash_block": int}
FORMATS = (
    Format("dynamo", "NVIDIA Dynamo request trace, JSON lines", _is_dynamo, read_dynamo),
    Format(
        "qwen-bailian",
        "Qwen-Bailian JSON lines",
        _has("chat_id", "parent_chat_id", "input_length"),
        read_bailian,
        options=_BLOCK,
    ),
    Format(
        "mooncake",
        "Mooncake JSON lines",
        _has("timestamp", "input_length", "output_length"),
        read_mooncake,
        options=_BLOCK,
    ),
    Format("llmservingsim", "LLMServingSim workload", _is_simulated, read_simulated_workload),
    Format("vllm-requests", "requests.jsonl of a vLLM run", _has("queued_ts", "input_toks"), read_measured_run),
    Format("aiperf", "AIPerf profile_export.jsonl", _has("metadata", "metrics"), read_aiperf),
    Format("octavo", "Octavo workload, JSON lines", _is_octavo, read_octavo),
)
