"""Service level objectives: `ttft<1s@p99,itl<50ms@p95`, read and judged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import OctavoError

if TYPE_CHECKING:
    from octavo.planner.outcome import Distribution, Outcome

#: What can be bounded: time to the first token, gap between tokens, mean gap of a request, whole request, time queued.
METRICS = ("ttft", "itl", "tpot", "e2e", "queue")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
DEFAULT_SHARE = 0.99
_BOUND = re.compile(r"(?P<metric>[a-z0-9]+)(?P<sign><=?)(?P<rest>.*)")
_TIME = re.compile(r"(?P<number>\d+\.?\d*|\.\d+)(?P<unit>[a-z]*)")
_SHARE = re.compile(r"p(?P<digits>\d+(\.\d+)?)|(?P<percent>\d+(\.\d+)?)%")


class SLOError(OctavoError):
    """An objective that cannot be read: which part of it, and how to write it."""


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound: `metric` (ttft, itl, tpot, e2e, queue) below `seconds` for `share` of what is counted."""

    metric: str
    seconds: float
    share: float = DEFAULT_SHARE

    def __str__(self) -> str:
        return f"{self.metric}<{_duration(self.seconds)}@p{self.share * 100:g}"


@dataclass(frozen=True, slots=True)
class SLO:
    """Bounds that hold together.

    Of a run: `met`, every bound's percentile below its seconds; ITL percentiles are over all gaps of all requests.
    Of a request: `request_within`, every bound's seconds kept whatever the share; its ITL is its mean gap (= TPOT), as
    goodput is counted by vLLM's benchmark, since one late token does not spoil an answer that a reader follows.
    """

    bounds: tuple[Bound, ...]

    def __str__(self) -> str:
        return ",".join(str(bound) for bound in self.bounds)

    def request_within(
        self,
        ttft: float | None = None,
        itl: float | None = None,
        tpot: float | None = None,
        e2e: float | None = None,
        queue: float | None = None,
    ) -> bool:
        """Whether one request kept every bound's seconds. None: there is nothing to judge (one token has no gap)."""
        for bound in self.bounds:
            metric = bound.metric
            if metric == "ttft":
                value = ttft
            elif metric == "itl":
                value = itl
            elif metric == "tpot":
                value = tpot
            elif metric == "e2e":
                value = e2e
            else:
                value = queue
            if value is not None and value > bound.seconds:
                return False
        return True

    def met(self, outcome: Outcome) -> bool:
        """Whether the run kept every bound: its percentile within the seconds, and every request that could be served
        was (a run cut short, or that finished nothing, has not shown it)."""
        if outcome.unfinished or not outcome.finished:
            return False
        return all(reached <= bound.seconds for bound, reached in self.reached(outcome).items())

    def reached(self, outcome: Outcome) -> Mapping[Bound, float]:
        """Bound -> seconds that the run reached at its share, or at the next higher share that a replay reports."""
        return {bound: _percentile(getattr(outcome, bound.metric), bound.share) for bound in self.bounds}


def _percentile(distribution: Distribution, share: float) -> float:
    """The percentile at `share`, or the next higher one that is reported: strict rather than interpolated."""
    for name, at in (("p50", 0.50), ("p90", 0.90), ("p95", 0.95), ("p99", 0.99)):
        if share <= at:
            return float(getattr(distribution, name))
    return distribution.highest


def parse_slo(text: str) -> SLO:
    """Read `ttft<1s@p99,itl<50ms@95%`: bounds by commas; units us, ms, s, min; without a share, p99.

    Raises SLOError with the part that cannot be read.
    """
    parts = [part.strip() for part in text.split(",")]
    if not any(parts):
        raise SLOError("slo is empty; write bounds such as 'ttft<1s@p99,itl<50ms@p95'.")
    bounds = tuple(_bound(part) for part in parts)
    for bound in bounds:
        if bounds.count(bound) > 1:
            raise SLOError(f"slo names {str(bound)!r} twice; name each bound once.")
    return SLO(bounds)


def _bound(text: str) -> Bound:
    compact = "".join(text.lower().split())
    match = _BOUND.fullmatch(compact)
    if match is None:
        raise SLOError(f"slo has {text!r}, which is no bound; write metric<time@share, such as 'ttft<1s@p99'.")
    if match["metric"] not in METRICS:
        raise SLOError(f"slo bounds {match['metric']!r}; choose from {', '.join(METRICS)}.")
    time, at, share = match["rest"].partition("@")
    return Bound(match["metric"], _seconds(time, text), _share(share, text) if at else DEFAULT_SHARE)


def _seconds(text: str, bound: str) -> float:
    match = _TIME.fullmatch(text)
    if match is None or match["unit"] not in UNITS:
        raise SLOError(f"slo has {bound!r}, where {text!r} is no time; write a number with us, ms, s or min: '50ms'.")
    seconds = float(match["number"]) * UNITS[match["unit"]]
    if seconds <= 0:
        raise SLOError(f"slo has {bound!r}, a time of {seconds:g} s; it must be above 0.")
    return seconds


def _share(text: str, bound: str) -> float:
    match = _SHARE.fullmatch(text)
    if match is None:
        raise SLOError(f"slo has {bound!r}, where {text!r} is no share; write @p99 or @99%.")
    percent = float(match["digits"] or match["percent"])
    if not 0 < percent <= 100:
        raise SLOError(f"slo has {bound!r}, a share of {percent:g} %; it must be above 0 and at most 100.")
    return percent / 100


def _duration(seconds: float) -> str:
    for unit in ("min", "s", "ms"):
        if seconds >= UNITS[unit]:
            return f"{seconds / UNITS[unit]:g}{unit}"
    return f"{seconds / UNITS['us']:g}us"
