"""Traces made from traces: arrivals scaled, drawn or resampled, windows, limits, lengths scaled.

Each gives a Trace that can be read again and again, that keeps no more than the one it is made from (`resampled` and
`timed_by` keep numbers per request, as they say), and that reports that one's bad lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo.planner.traces.api import BadLine, Trace, TraceError, TraceRequest
from octavo.planner.traces.fields import MOST_TOKENS

Process = Literal["poisson", "gamma", "constant"]
DRAWN_AT_ONCE = 4096
Requests = Iterable[TraceRequest]


@dataclass(frozen=True, slots=True)
class Derived:
    """`trace` with one step applied; `told` says what it does, for reports."""

    trace: Trace
    told: str
    step: Callable[[Requests], Iterator[TraceRequest]]
    draws_arrivals: bool = False

    @property
    def name(self) -> str:
        return f"{self.trace.name}, {self.told}"

    @property
    def timed(self) -> bool:
        return self.draws_arrivals or self.trace.timed

    @property
    def bad_lines(self) -> tuple[BadLine, ...]:
        return self.trace.bad_lines

    @property
    def bad_count(self) -> int:
        return self.trace.bad_count

    def __iter__(self) -> Iterator[TraceRequest]:
        return self.step(self.trace)


@dataclass(frozen=True, slots=True)
class Listed:
    """Requests that are in memory, as a Trace; in order of arrival."""

    name: str
    requests: tuple[TraceRequest, ...]
    timed: bool = True
    bad_lines: tuple[BadLine, ...] = ()
    bad_count: int = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)


def _require(ok: bool, sentence: str) -> None:
    if not ok:
        raise TraceError(sentence)


# -- arrivals ---------------------------------------------------------------------------------------------------------


def scaled(trace: Trace, rate: float) -> Derived:
    """`rate` times as many requests per second: every gap between arrivals divided by it."""
    _require(
        0 < rate < math.inf, f"the factor on the rate (scale, speed) is {rate}; it must be above 0 (1 changes nothing)."
    )
    return Derived(trace, f"{rate:.4g} x its rate", partial(_scale, factor=1 / rate))


def _scale(requests: Requests, factor: float) -> Iterator[TraceRequest]:
    for request in requests:
        yield replace(request, arrival=request.arrival * factor)


def mean_rate(trace: Trace) -> float:
    """Requests per second over the gaps between arrivals; reads the trace once. Raises TraceError for one instant."""
    count, last = 0, 0.0
    for request in trace:
        count, last = count + 1, request.arrival
    _require(
        last > 0,
        f"{trace.name} has {count} requests at one time, so no rate; draw arrivals for it: TRACE?rate=2&seed=1.",
    )
    return (count - 1) / last


def at_rate(trace: Trace, requests_per_second: float) -> Derived:
    """The same trace scaled to a mean rate; reads it once to know its own."""
    rate = requests_per_second
    _require(0 < rate < math.inf, f"rate is {rate}; it must be requests per second, above 0.")
    own = mean_rate(trace)
    return Derived(trace, f"at {rate:.4g} requests/s", partial(_scale, factor=own / rate))


def with_arrivals(trace: Trace, rate: float, seed: int = 0, process: Process = "poisson", cv: float = 1.0) -> Derived:
    """Arrivals drawn anew, the first at 0: for tables of lengths, which have none. `cv` is that of gamma's gaps."""
    _require(0 < rate < math.inf, f"rate is {rate}; it must be requests per second, above 0.")
    _require(process in ("poisson", "gamma", "constant"), f"process is {process}; choose poisson, gamma or constant.")
    _require(0 < cv < 100, f"cv is {cv}; it must be above 0 and below 100 (1: as Poisson).")
    how = f"gamma (CV {cv:g})" if process == "gamma" else process
    step = partial(_draw_arrivals, rate=rate, seed=seed, process=process, cv=cv)
    return Derived(trace, f"{how} arrivals at {rate:.4g}/s (seed {seed})", step, draws_arrivals=True)


def _draw_arrivals(requests: Requests, rate: float, seed: int, process: Process, cv: float) -> Iterator[TraceRequest]:
    times = arrivals(rate, seed, process, cv)
    for request in requests:
        yield replace(request, arrival=next(times))


def arrivals(rate: float, seed: int, process: Process = "poisson", cv: float = 1.0) -> Iterator[float]:
    """Endless arrival times, the first at 0: gaps exponential, gamma with coefficient of variation `cv`, or equal."""
    rng = np.random.default_rng([seed, 1])
    time = 0.0
    while True:
        if process == "constant":
            gaps = np.full(DRAWN_AT_ONCE, 1 / rate)
        elif process == "gamma":
            gaps = rng.gamma(cv**-2, cv**2 / rate, DRAWN_AT_ONCE)
        else:
            gaps = rng.exponential(1 / rate, DRAWN_AT_ONCE)
        for gap in gaps.tolist():
            yield time
            time += gap


def spread(trace: Trace) -> Derived:
    """Requests that arrive at one instant spread evenly up to the next arrival: for times recorded in coarse steps, as
    Mooncake's. The last batch stays as it is. Requests of one instant are in memory at a time."""
    return Derived(trace, "equal arrivals spread", _spread)


def _spread(requests: Requests) -> Iterator[TraceRequest]:
    batch: list[TraceRequest] = []
    for request in requests:
        if batch and request.arrival > batch[0].arrival:
            step = (request.arrival - batch[0].arrival) / len(batch)
            for place, one in enumerate(batch):
                yield replace(one, arrival=one.arrival + place * step)
            batch.clear()
        batch.append(request)
    yield from batch


def timed_by(trace: Trace, times: Trace) -> Derived:
    """`trace` with the arrivals that `times` has for the same ids, in that order; the ids must be the same ones.

    For lengths and prefixes in one file and measured arrivals in another. `times`' arrivals and the requests are in
    memory."""
    return Derived(trace, f"arrivals of {times.name}", partial(_join, times=times), draws_arrivals=times.timed)


def _join(requests: Requests, times: Trace) -> Iterator[TraceRequest]:
    by_id = {request.id: request for request in requests}
    for timing in times:
        request = by_id.pop(timing.id, None)
        if request is None:
            raise TraceError(f"request {timing.id} of {times.name} is not in the trace that it should time.")
        yield replace(request, arrival=timing.arrival)
    if by_id:
        raise TraceError(f"{times.name} has no arrival for request {next(iter(by_id))} and {len(by_id) - 1} others.")


# -- parts and lengths ------------------------------------------------------------------------------------------------


def window(trace: Trace, start: float = 0.0, end: float = math.inf) -> Derived:
    """Requests that arrive from `start` to before `end` seconds; the first of them arrives at 0."""
    _require(0 <= start < end, f"the window from {start} to {end} s holds nothing; give 0 <= start < end.")
    return Derived(trace, f"from {start:g} to {end:g} s", partial(_window, start=start, end=end))


def _window(requests: Requests, start: float, end: float) -> Iterator[TraceRequest]:
    first: float | None = None
    for request in requests:
        if request.arrival >= end:
            return
        if request.arrival >= start:
            first = request.arrival if first is None else first
            yield replace(request, arrival=request.arrival - first)


def limited(trace: Trace, requests: int) -> Derived:
    """The first `requests` requests."""
    _require(requests >= 1, f"requests is {requests}; it must be at least 1, or left out to use them all.")
    return Derived(trace, f"first {requests:,}", partial(_limit, count=requests))


def _limit(requests: Requests, count: int) -> Iterator[TraceRequest]:
    return islice(requests, count)


def lengths_scaled(trace: Trace, prompt: float = 1.0, output: float = 1.0) -> Derived:
    """Prompts and answers `prompt` and `output` times as long (rounded up, at least 1).

    Prefix blocks grow with the prompts, so that hit rates stay; `hash_block * prompt` must be whole. Ids of the answer
    are dropped. Raises TraceError where the blocks cannot grow so.
    """
    for name, factor in (("prompt", prompt), ("output", output)):
        _require(0 < factor < 1e6, f"length factor {name} is {factor}; it must be above 0 (1 changes nothing).")
    return Derived(
        trace, f"prompts x {prompt:g}, outputs x {output:g}", partial(_scale_lengths, prompt=prompt, output=output)
    )


def _scale_lengths(requests: Requests, prompt: float, output: float) -> Iterator[TraceRequest]:
    for request in requests:
        block = request.hash_block * prompt
        if block != int(block):
            raise TraceError(
                f"request {request.id} has prefix blocks of {request.hash_block} tokens; times {prompt:g} they are not "
                "whole; choose another factor."
            )
        in_prompt = -(-request.prompt_tokens // request.hash_block) if request.hashes else 0
        yield replace(
            request,
            prompt_tokens=_times(request.prompt_tokens, prompt),
            output_tokens=_times(request.output_tokens, output),
            hashes=request.hashes[:in_prompt],
            hash_block=int(block),
            max_tokens=request.max_tokens and _times(request.max_tokens, output),
            cached_tokens=request.cached_tokens and _times(request.cached_tokens, prompt),
        )


def _times(tokens: int, factor: float) -> int:
    grown = max(1, math.ceil(round(tokens * factor, 6)))
    _require(grown <= MOST_TOKENS, f"{tokens} tokens times {factor:g} are more than {MOST_TOKENS}; choose less.")
    return grown


# -- another draw of the same traffic ---------------------------------------------------------------------------------


def resampled(trace: Trace, seed: int) -> Derived:
    """A moving-block bootstrap: another trace that could as well have been recorded, for confidence from several seeds.

    Stretches of n^(1/3) consecutive requests of the n are drawn with replacement, gaps and lengths together, so that
    bursts and their lengths stay what they are. Where requests have prefixes or sessions their order means something,
    so only the gaps are drawn. Keeps 24 bytes per request while it is read.
    """
    return Derived(trace, f"resampled (seed {seed})", partial(_resample, seed=seed))


def _resample(requests: Requests, seed: int) -> Iterator[TraceRequest]:
    gaps, lengths, linked = _gathered(requests)
    rng = np.random.default_rng([seed, 2])
    count = len(gaps)
    stretch = max(1, round(count ** (1 / 3)))
    starts = rng.integers(0, count, -(-count // stretch))
    picks = ((starts[:, None] + np.arange(stretch)) % count).ravel()[:count]
    drawn = gaps[picks]
    times = (np.cumsum(drawn) - drawn[:1]).tolist()
    if linked:
        for request, time in zip(requests, times, strict=True):
            yield replace(request, arrival=time)
        return
    for number, (time, (prompt, output)) in enumerate(zip(times, lengths[picks].tolist(), strict=True)):
        yield TraceRequest(time, prompt, output, str(number))


def _gathered(requests: Requests) -> tuple[NDArray[np.float64], NDArray[np.int64], bool]:
    """Gaps before each request (the first's is the mean of the others), lengths, and whether any are linked."""
    linked = False

    def numbers() -> Iterator[float]:
        nonlocal linked
        for request in requests:
            linked = linked or bool(request.hashes or request.session)
            yield from (request.arrival, request.prompt_tokens, request.output_tokens)

    table = np.fromiter(numbers(), np.float64).reshape(-1, 3)
    if not len(table):
        raise TraceError("there are no requests to resample; give a trace with at least one.")
    gaps = np.diff(table[:, 0])
    return np.concatenate([[gaps.mean() if len(gaps) else 0.0], gaps]), table[:, 1:].astype(np.int64), linked
