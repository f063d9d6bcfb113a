"""A request's life as phases that follow each other: queued, prefill, decode, preempted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.planner.outcome import Life


@dataclass(frozen=True, slots=True)
class Phase:
    """queued, prefill, decode or preempted, from `start` to `end` in seconds after the trace's start."""

    name: str
    start: float
    end: float


def end_of(life: Life, end: float) -> float:
    """When it ended; `end` of the replay for one that did not, its arrival for one that was refused."""
    if life.finished is not None:
        return life.finished
    refused = life.admitted is None and life.reason is not None
    return life.arrival if refused else max(end, life.arrival)


def phases(life: Life, end: float) -> tuple[Phase, ...]:
    """Its phases without gaps, from arrival to `end_of`; time without memory between admissions is preempted."""
    last = end_of(life, end)
    admitted = min(last, life.admitted) if life.admitted is not None else last
    first = min(last, life.first_token) if life.first_token is not None else last
    out = [Phase("queued", life.arrival, admitted)]
    out += _around("prefill", admitted, first, life.preempted, last)
    out += _around("decode", first, last, life.preempted, last)
    return tuple(phase for phase in out if phase.end > phase.start)


def _around(
    name: str, start: float, end: float, gaps: tuple[tuple[float, float | None], ...], last: float
) -> Iterator[Phase]:
    """The stretch from start to end, its gaps named preempted."""
    for begin, until in gaps:
        low, high = max(start, begin), min(end, last if until is None else until)
        if low < high:
            yield Phase(name, start, low)
            yield Phase("preempted", low, high)
            start = high
    yield Phase(name, start, end)
