"""A replay as a Chrome trace for ui.perfetto.dev: a slice for each request and phase, and counters over time.

The format is Google's "Trace Event Format": an object with `traceEvents`, times in microseconds.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from octavo.planner.outcome import Life, Outcome, Timeline
from octavo.report.replay_data import ReplayReport
from octavo.report.replay_phases import Phase, end_of, phases

Event = dict[str, Any]
HOLDING = ("live", "cached")  # the KV lines that are counters of their own; slack, reserved and so on are "empty"
NOBODY = ("free", "held", "fragmented", "quarantined")


def write_trace(path: Path, report: ReplayReport) -> None:
    """Write the trace as one JSON file."""
    path.write_text(json.dumps(trace(report), allow_nan=False, separators=(",", ":")) + "\n", encoding="utf-8")


def trace(report: ReplayReport) -> dict[str, Any]:
    """The trace: a process for each strategy; in it counters, and lanes in which requests do not overlap."""
    events: list[Event] = []
    for i, outcome in enumerate(report.outcomes):
        events += _process(i + 1, outcome)
    about = {"title": report.title, "trace": report.trace, "command": report.command}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def _process(pid: int, o: Outcome) -> Iterator[Event]:
    yield _name("process_name", o.strategy, pid, 0)
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    if o.timeline is not None:
        yield from _counters(pid, o.timeline)
    lanes = _lanes(o.lives, o.seconds)
    for tid in sorted(set(lanes)):
        yield _name("thread_name", f"requests, lane {tid}", pid, tid)
    for life, tid in zip(o.lives, lanes, strict=True):
        yield from _request(pid, tid, life, o.seconds)


def _name(what: str, name: str, pid: int, tid: int) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _lanes(lives: Sequence[Life], end: float) -> list[int]:
    """Lane of each request, numbered from 1: the lowest that is free when it arrives."""
    lanes, busy, free, used = [0] * len(lives), [], [], 0  # type: ignore[var-annotated]
    for i in sorted(range(len(lives)), key=lambda i: lives[i].arrival):
        while busy and busy[0][0] <= lives[i].arrival:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            used += 1
            free.append(used)
        lanes[i] = heapq.heappop(free)
        heapq.heappush(busy, (end_of(lives[i], end), lanes[i]))
    return lanes


def _request(pid: int, tid: int, life: Life, end: float) -> Iterator[Event]:
    """The whole life, and its phases nested in it."""
    args = {
        "prompt_tokens": life.prompt_tokens,
        "output_tokens": life.output_tokens,
        "cached_tokens": life.cached_tokens,
        "recomputed_tokens": life.recomputed,
        "preemptions": len(life.preempted),
        "reason": life.reason or "unfinished",
        "waited_s": dict(life.waited or {}),
    }
    yield _slice(pid, tid, life.id, "request", life.arrival, end_of(life, end), args)
    for phase in phases(life, end):
        yield _slice(pid, tid, _words(phase, life), phase.name, phase.start, phase.end, {})


def _words(phase: Phase, life: Life) -> str:
    """Queued with the cause that it waited for most; the order of several causes was not kept."""
    if phase.name == "queued" and life.waited:
        return f"queued: {max(life.waited, key=lambda cause: life.waited[cause])}"
    return phase.name


def _slice(pid: int, tid: int, name: str, kind: str, start: float, end: float, args: Event) -> Event:
    begin = _micros(start)
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "ts": begin,
        "dur": max(0, _micros(end) - begin),
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def _counters(pid: int, line: Timeline) -> Iterator[Event]:
    """Each value holds from the beginning of its stretch on."""
    begins = (0.0, *line.t[:-1])
    for i, begin in enumerate(begins):
        shares = {name: values[i] for name, values in line.kv.items()}
        kv = {name: round(100 * shares.get(name, 0.0), 3) for name in HOLDING}
        kv["empty but taken"] = round(100 * sum(v for k, v in shares.items() if k not in (*HOLDING, *NOBODY)), 3)
        counters: dict[str, Event] = {
            "running": {"requests": round(line.running[i], 3)},
            "waiting": {cause: round(values[i], 3) for cause, values in line.waiting.items()},
            "KV pool, %": kv,
            "step, ms": {"ms": round(1000 * line.step[i], 4)},
            "preemptions": {"count": line.preemptions[i]},
        }
        for name, args in counters.items():
            if args:
                yield {"name": name, "ph": "C", "ts": _micros(begin), "pid": pid, "tid": 0, "args": args}


def _micros(seconds: float) -> int:
    return round(seconds * 1_000_000)
