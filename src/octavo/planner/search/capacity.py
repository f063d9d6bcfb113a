"""The largest rate that one replica carries under an SLO, and what rising load makes of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log, sqrt

from octavo.planner.deployment import Deployment, Resolved
from octavo.planner.outcome import Outcome
from octavo.planner.replay import ReplayOptions, replay
from octavo.planner.search.estimates import Estimate, estimate
from octavo.planner.search.jobs import Impossible, Workers, worked_out
from octavo.planner.search.samples import Requests, at_rate, offered_rate, redrawn
from octavo.planner.slo import SLO

TOLERANCE = 0.03  # bisection ends when the bracket is this narrow
FURTHEST = 2.0**12  # how far from the recorded rate the search goes, both ways
KEEPS_UP = 0.95  # a queue that takes more than the rest of the arrivals grows without end
SLOW_GAP = 0.25  # seconds between tokens that no run is waited for beyond, where the SLO does not say
SLOW_START = 60.0  # the same for the first token


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One replay at `rate` requests a second. `sustained`: the SLO is met and the queue does not grow."""

    rate: float
    sustained: bool
    saturated: bool
    goodput: float | None
    attained: float | None
    running_mean: float
    running_peak: int
    ttft_p99: float
    itl_p99: float
    binding: str | None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one replica of `deployment` carries, in requests a second, over seeds.

    rate        0.0: the SLO fails at any rate; `at_least`: nothing failed up to the highest rate that was tried
    impossible  why it cannot work at all
    """

    deployment: Deployment
    rate: Estimate
    at_least: bool = False
    impossible: str | None = None


@dataclass(frozen=True, slots=True)
class RateCurve:
    """One strategy over rising rates, means over seeds; the knee is the largest rate carried."""

    strategy: str
    points: tuple[RatePoint, ...]
    knee: Capacity


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a replica: these requests, redrawn by so many seeds, under these options (with their SLO)."""

    requests: Requests
    options: ReplayOptions
    seeds: int = 3
    tolerance: float = TOLERANCE
    highest_rate: float | None = None


@dataclass(frozen=True, slots=True)
class _Search:
    deployment: Deployment
    load: Load
    seed: int


@dataclass(frozen=True, slots=True)
class _Probe:
    deployment: Deployment
    load: Load
    seed: int
    rate: float


def find_capacities(deployments: Sequence[Deployment], load: Load, workers: Workers) -> list[Capacity]:
    """The capacity of each deployment; searches of all seeds go side by side."""
    seeds = range(load.seeds)
    searches = [_Search(deployment, load, seed) for deployment in deployments for seed in seeds]
    found = workers.map(_search, searches)
    return [
        _capacity(deployment, found[at * load.seeds : (at + 1) * load.seeds])
        for at, deployment in enumerate(deployments)
    ]


def find_curves(deployments: Sequence[Deployment], load: Load, workers: Workers, points: int = 8) -> list[RateCurve]:
    """A curve for each deployment (they differ in strategy), over common rates that take in every knee.

    The points are of the traffic as recorded (seed 0); the error bar is the knee's.
    """
    knees = find_capacities(deployments, load, workers)
    rates = spread([knee.rate.mean for knee in knees if knee.rate.mean > 0], offered_rate(load.requests), points)
    probes = [_Probe(deployment, load, 0, rate) for deployment in deployments for rate in rates]
    found = iter(workers.map(_probe, probes))
    curves = []
    for deployment, knee in zip(deployments, knees, strict=True):
        measured = [next(found) for _ in rates]
        curves.append(RateCurve(deployment.strategy, tuple(p for p in measured if isinstance(p, RatePoint)), knee))
    return curves


def spread(knees: Sequence[float], recorded: float, points: int) -> list[float]:
    """Rates in equal ratios from half the smallest knee to twice the largest; around the recorded rate without any."""
    low, high = (min(knees) / 2, max(knees) * 2) if knees else (recorded / 4, recorded * 4)
    return [low * (high / low) ** (step / (points - 1)) for step in range(points)]


def largest_rate(
    holds: Callable[[float], bool], start: float, tolerance: float = TOLERANCE, highest: float | None = None
) -> tuple[float, bool]:
    """The largest rate at which `holds` is true, and whether it held all the way up (so the rate is a lower bound).

    Doubles or halves from `start` until the answer changes, then bisects the logarithm of the rate until the bracket is
    narrower than `tolerance`. 0.0 if it holds nowhere down to start / 4096. `highest`: rates beyond are not asked for.
    """
    top = min(start * FURTHEST, highest or float("inf"))
    low = min(start, top)
    if holds(low):
        while low < top and holds(min(2 * low, top)):
            low = min(2 * low, top)
        if low >= top:
            return low, True
        high = min(2 * low, top)
    else:
        high, low = low, low / 2
        while not holds(low):
            high, low = low, low / 2
            if low < start / FURTHEST:
                return 0.0, False
    while log(high / low) > tolerance:
        middle = sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, False


def measure(resolved: Resolved, load: Load, seed: int, rate: float) -> RatePoint:
    """Replay the load at `rate`, given up as soon as it is hopeless."""
    requests, slo = at_rate(redrawn(load.requests, seed), rate), load.options.slo
    limit = patience(requests, slo)
    outcome = replay(requests, resolved, replace(load.options, time_limit=limit, lives=0, map=False))
    stuck = outcome.requests < len(requests) or saturated(outcome, requests[-1].arrival)
    return RatePoint(
        rate=rate,
        sustained=not stuck and (slo is None or slo.met(outcome)),
        saturated=stuck,
        goodput=outcome.goodput,
        attained=outcome.attained,
        running_mean=outcome.running_mean,
        running_peak=outcome.running_peak,
        ttft_p99=outcome.ttft.p99,
        itl_p99=outcome.itl.p99,
        binding=outcome.binding,
    )


def patience(requests: Requests, slo: SLO | None) -> float:
    """Seconds after which a run is given up: twice as long as the last arrival's longest answer may take, when each
    token comes as late as the SLO allows."""
    bounds = {bound.metric: bound.seconds for bound in slo.bounds} if slo else {}
    gap = min(bounds.get("itl", SLOW_GAP), bounds.get("tpot", SLOW_GAP))
    longest = max(request.output_tokens for request in requests)
    whole = bounds.get("e2e", bounds.get("ttft", SLOW_START) + longest * gap)
    return requests[-1].arrival + 2 * whole


def saturated(outcome: Outcome, arrivals_end: float) -> bool:
    """Whether the queue grows through the run, or work was left when it was given up.

    Compares who waits in the last quarter of the arrivals with the second quarter (the first one fills the batch): more
    than 5 % of what arrived in between must not have piled up.
    """
    if outcome.unfinished:
        return True
    timeline = outcome.timeline
    if timeline is None or not timeline.t:
        return False
    waiting = [sum(column[at] for column in timeline.waiting.values()) for at in range(len(timeline.t))]
    early = _between(timeline.t, waiting, arrivals_end / 4, arrivals_end / 2)
    late = _between(timeline.t, waiting, arrivals_end * 3 / 4, arrivals_end)
    return late - early > (1 - KEEPS_UP) * outcome.requests / 2 and late > 1


def _between(ends: Sequence[float], values: Sequence[float], start: float, stop: float) -> float:
    """Mean of a step function over start..stop; `ends`: where each of its stretches ends."""
    if stop <= start:
        return 0.0
    total, at = 0.0, start
    for index in range(bisect_right(ends, start), len(ends)):
        until = min(ends[index], stop)
        total += values[index] * (until - at)
        at = until
        if at >= stop:
            break
    return total / (stop - start)


def _search(search: _Search) -> tuple[float, bool] | Impossible:
    """The largest rate of one seed. A top-level function: workers import it."""
    resolved, load = worked_out(search.deployment, search.seed), search.load
    if isinstance(resolved, Impossible):
        return resolved

    def holds(rate: float) -> bool:
        return measure(resolved, load, search.seed, rate).sustained

    return largest_rate(holds, offered_rate(load.requests), load.tolerance, load.highest_rate)


def _probe(probe: _Probe) -> RatePoint | Impossible:
    resolved = worked_out(probe.deployment, probe.seed)
    return resolved if isinstance(resolved, Impossible) else measure(resolved, probe.load, probe.seed, probe.rate)


def _capacity(deployment: Deployment, found: Sequence[tuple[float, bool] | Impossible]) -> Capacity:
    rates: list[tuple[float, bool]] = []
    for each in found:
        if isinstance(each, Impossible):
            return Capacity(deployment, Estimate(0.0, 0.0, 0), impossible=each.reason)
        rates.append(each)
    return Capacity(deployment, estimate([rate for rate, _ in rates]), all(open_ended for _, open_ended in rates))
