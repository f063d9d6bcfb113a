"""Stretches of a trace to simulate many times over: the busiest window, redrawn by seed, at any rate."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from octavo.planner.traces import transforms
from octavo.planner.traces.api import Trace, TraceError, TraceRequest

Requests = tuple[TraceRequest, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive requests of a trace, the first at 0 s.

    trace      name of the trace
    first      position of the first of them in the trace; of: requests in the trace
    statement  which part of the trace it is, for reports
    """

    trace: str
    requests: Requests
    first: int
    of: int
    statement: str

    @property
    def rate(self) -> float:
        """Requests a second as recorded."""
        return offered_rate(self.requests)


def busiest_window(trace: Trace, count: int) -> Window:
    """The `count` consecutive requests that arrive in the shortest time (all, if there are fewer).

    Reads the trace twice, keeping `count` requests. Raises TraceError if it has none.
    """
    first, of = _busiest(trace, count)
    if not of:
        raise TraceError(f"{trace.name} has no requests to replay; give a trace with at least one.")
    last = min(of, first + count)
    kept = [request for row, request in enumerate(trace) if first <= row < last]
    start = kept[0].arrival
    requests = tuple(replace(request, arrival=request.arrival - start) for request in kept)
    if len(requests) == of:
        statement = f"all {of:,} requests"
    else:
        rate = offered_rate(requests)
        statement = (
            f"the busiest {len(requests):,} of {of:,} requests in a row, {start:,.0f} to {kept[-1].arrival:,.0f} s "
            f"into the trace ({rate:.3g} a second)"
        )
    return Window(trace.name, requests, first, of, statement)


def _busiest(trace: Trace, count: int) -> tuple[int, int]:
    """Where the busiest `count` requests in a row begin, and how many requests the trace has."""
    recent: deque[float] = deque(maxlen=max(1, count))
    first, shortest, of = 0, float("inf"), 0
    for request in trace:
        recent.append(request.arrival)
        of += 1
        if len(recent) == count and recent[-1] - recent[0] < shortest:
            first, shortest = of - count, recent[-1] - recent[0]
    return first, of


def redrawn(requests: Requests, seed: int) -> Requests:
    """The same traffic on another day: seed 0 as it is, others a bootstrap of it (`transforms.resampled`), brought to
    the same rate, so that seeds differ by the luck of arrivals and lengths and not by the load."""
    if seed == 0 or len(requests) < 2:
        return requests
    drawn = transforms.resampled(transforms.Listed("window", requests), seed)
    if requests[-1].arrival <= requests[0].arrival:
        return tuple(drawn)
    return at_rate(tuple(drawn), offered_rate(requests))


def at_rate(requests: Requests, rate: float) -> Requests:
    """The same requests, time stretched so that `rate` arrive a second. Bursts stay bursts: only the unit changes."""
    return tuple(transforms.at_rate(transforms.Listed("window", requests), rate))


def offered_rate(requests: Requests) -> float:
    """Requests a second between first and last arrival. Raises TraceError when they all arrive at once."""
    return transforms.mean_rate(transforms.Listed("the window", requests))
