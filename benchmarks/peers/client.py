"""The client side of a measurement: it keeps some requests in flight and stamps every token that comes back.

An engine that is stepped from Python (OpenVINO, vLLM, Octavo) implements `Stepped` and is driven by `drive`. One that
runs by itself (llama.cpp's server, the transformers manager) fills a `Trace` in its own driver.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from workload import Ask


class Stepped(Protocol):
    """What `drive` needs of an engine. Ids are whole numbers that the engine has not seen before."""

    def submit(self, ask: Ask) -> None: ...

    def step(self) -> Iterable[tuple[int, int]]:
        """One engine step: (id, number of new tokens) of every request that moved."""
        ...

    def running(self) -> int | None:
        """How many requests took part in the latest step, by the engine's own count; None if it keeps none."""
        ...


@dataclass(slots=True)
class Trace:
    """What happened to one list of requests. All times are `perf_counter` seconds, all ids those of the list."""

    asks: list[Ask]
    start: float = field(default_factory=perf_counter)
    end: float = 0.0
    submitted: dict[int, float] = field(default_factory=dict)
    stamps: dict[int, list[float]] = field(default_factory=dict)  # one time for each output token
    steps: list[tuple[float, int]] = field(default_factory=list)  # end of a step, requests that took part in it
    spans: list[tuple[float, float]] = field(default_factory=list)  # when the engine began and ended a request

    def running(self) -> tuple[int, float, str]:
        """Peak and time-weighted mean of running requests, and whose count it is: the engine's, by step or by the
        spans it reports, or else ours, which sees a request only between its first and its last token."""
        if self.steps:
            return *_over_steps(self.start, self.steps), "engine"
        if self.spans:
            return *_over_spans(self.start, self.end, self.spans), "engine"
        seen = [(times[0], times[-1]) for times in self.stamps.values() if times]
        return *_over_spans(self.start, self.end, seen), "stamps"


def _over_steps(start: float, steps: list[tuple[float, int]]) -> tuple[int, float]:
    area, last = 0.0, start
    for end, count in steps:
        area += (end - last) * count
        last = end
    return max(count for _, count in steps), area / (last - start)


def _over_spans(start: float, end: float, spans: list[tuple[float, float]]) -> tuple[int, float]:
    """A request that ends at the moment another begins does not count as running beside it."""
    changes = sorted([(begin, 1) for begin, _ in spans] + [(finish, -1) for _, finish in spans])
    count = peak = 0
    for _, change in changes:
        count += change
        peak = max(peak, count)
    return peak, sum(finish - begin for begin, finish in spans) / (end - start)


_fresh_ids = iter(range(1, 10**9))


def drive(engine: Stepped, asks: list[Ask], concurrency: int) -> Trace:
    """Keep at most `concurrency` requests in flight, in list order, until every token that was asked for has come."""
    waiting = asks[::-1]
    live: dict[int, Ask] = {}
    trace = Trace(asks, stamps={ask.id: [] for ask in asks})
    while waiting or live:
        while waiting and len(live) < concurrency:
            ask = waiting.pop()
            fresh = Ask(next(_fresh_ids), ask.prompt, ask.max_tokens)
            live[fresh.id] = ask
            trace.submitted[ask.id] = perf_counter()
            engine.submit(fresh)
        moved = list(engine.step())
        now = perf_counter()
        for fresh_id, count in moved:
            ask = live[fresh_id]
            trace.stamps[ask.id] += [now] * count
            if len(trace.stamps[ask.id]) >= ask.max_tokens:
                del live[fresh_id]
        running = engine.running()
        if running is not None:
            trace.steps.append((now, running))
    trace.end = perf_counter()
    return trace
