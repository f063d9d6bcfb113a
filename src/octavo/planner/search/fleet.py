"""How many of which device carry a rate: every device x tensor-parallel degree x KV dtype, ranked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from octavo.errors import OctavoError
from octavo.planner.catalogue import device_names, find_device
from octavo.planner.deployment import Deployment
from octavo.planner.search.capacity import Capacity, Load, find_capacities
from octavo.planner.search.jobs import Impossible, Workers, worked_out

#: Data-centre devices whose memory, bandwidth, peak and link speed have a primary source.
DEVICES = ("L4", "L40S", "A100 SXM 80GB", "H100 SXM 80GB", "H200 SXM 141GB", "B200 SXM 180GB")
DEGREES = (1, 2, 4, 8)
KV_DTYPES = ("bf16", "fp8")
COARSE = 0.2  # tolerance of the first search, over one seed and this many requests; the best are searched again
COARSE_REQUESTS = 200
REFINED = 3


@dataclass(frozen=True, slots=True)
class Fleet:
    """So many replicas of one kind. most_replicas: by the low end of the capacity's interval; cost: $ an hour."""

    gpu: str
    tp: int
    kv_dtype: str
    capacity: Capacity
    replicas: int
    most_replicas: int
    cost: float | None

    @property
    def devices(self) -> int:
        return self.replicas * self.tp


@dataclass(frozen=True, slots=True)
class Unfit:
    """A kind that cannot carry anything, and why: the shortfall in bytes, or the SLO that fails at any rate."""

    gpu: str
    tp: int
    kv_dtype: str
    reason: str


@dataclass(frozen=True, slots=True)
class FleetAnswer:
    """Fleets for `rate` requests a second: by cost where all prices are known, else by number of devices.

    The first `searched` come of the fine search, over all seeds; the others' capacities are coarse.
    """

    rate: float
    fleets: tuple[Fleet, ...]
    searched: int
    unfit: tuple[Unfit, ...]


def find_fleets(
    base: Deployment,
    load: Load,
    rate: float,
    workers: Workers,
    *,
    devices: Sequence[str] = DEVICES,
    prices: Mapping[str, float] | None = None,
) -> FleetAnswer:
    """Search all kinds coarsely, then the best again with all seeds and the load's own tolerance.

    A replica is not asked for more than `rate`. Traffic is split over replicas so that each sees the trace's bursts
    slowed down; a balancer that smooths them does better.
    """
    if rate <= 0:
        raise OctavoError(f"rate is {rate:g}; it must be above 0 requests a second.")
    kinds, unfit = _kinds(base, devices)
    given = prices or {}
    coarse = replace(load, requests=load.requests[:COARSE_REQUESTS], seeds=1, tolerance=COARSE, highest_rate=rate)
    found = find_capacities(kinds, coarse, workers)
    unfit += [_unfit(each.deployment, _failure(each)) for each in found if each.rate.mean == 0]
    able = _ranked([_fleet(each, rate, given) for each in found if each.rate.mean > 0])
    finalists = able[:REFINED]
    again = find_capacities(
        [fleet.capacity.deployment for fleet in finalists], replace(load, highest_rate=rate), workers
    )
    refined = [_fleet(each, rate, given) for each in again if each.rate.mean > 0]
    unfit += [_unfit(each.deployment, _failure(each)) for each in again if each.rate.mean == 0]
    return FleetAnswer(rate, tuple(_ranked(refined) + able[REFINED:]), len(refined), tuple(unfit))


def parse_prices(text: str) -> dict[str, float]:
    """Read `h100=2.5,l40s=0.9`: $ an hour by device, whose name may stop at a word's end. Raises OctavoError."""
    prices: dict[str, float] = {}
    for part in text.split(","):
        name, _, price = part.partition("=")
        try:
            value = float(price)
        except ValueError:
            value = inf
        if not name.strip() or not 0 <= value < inf:
            raise OctavoError(f"price has {part.strip()!r}; write device=dollars an hour, such as h100=2.5,l40s=0.9.")
        if not any(_begins(name, gpu) for gpu in device_names()):
            raise OctavoError(f"price names {name.strip()!r}, which is no device; known: {', '.join(device_names())}.")
        prices[name.strip()] = value
    return prices


def price_of(gpu: str, prices: Mapping[str, float]) -> float | None:
    """The price whose name begins this device's: the longest that does; no number is cut, so `a10` is not `A100`."""
    fitting = [name for name in prices if _begins(name, gpu)]
    return prices[max(fitting, key=len)] if fitting else None


def _begins(name: str, gpu: str) -> bool:
    return re.match(re.escape(_plain(name)) + r"(?!(?<=\d)\d)", _plain(gpu)) is not None


def _kinds(base: Deployment, devices: Sequence[str]) -> tuple[list[Deployment], list[Unfit]]:
    """The deployments that can start, and those that cannot. A measured pool is of one device, so it is dropped."""
    kinds: list[Deployment] = []
    unfit: list[Unfit] = []
    planned = replace(base, memory=None, kv_memory=None, num_blocks=None, calibration=None)
    for name in devices:
        gpu = find_device(name).name
        for tp in DEGREES:
            for kv_dtype in KV_DTYPES:
                kind = replace(planned, gpu=gpu, tp=tp, kv_dtype=kv_dtype)
                resolved = worked_out(kind)
                if isinstance(resolved, Impossible):
                    unfit.append(_unfit(kind, resolved.reason))
                else:
                    kinds.append(kind)
    return kinds, unfit


def _fleet(capacity: Capacity, rate: float, prices: Mapping[str, float]) -> Fleet:
    kind = capacity.deployment
    assert kind.gpu is not None
    replicas = ceil(rate / capacity.rate.mean)
    most = ceil(rate / capacity.rate.low) if 0 < capacity.rate.low < inf else replicas
    price = price_of(kind.gpu, prices)
    cost = None if price is None else price * replicas * kind.tp
    return Fleet(kind.gpu, kind.tp, kind.kv_dtype, capacity, replicas, most, cost)


def _ranked(fleets: Sequence[Fleet]) -> list[Fleet]:
    """By cost where every price is known, else by devices; then by what one replica carries."""
    priced = all(fleet.cost is not None for fleet in fleets)

    def key(fleet: Fleet) -> tuple[float, int, float]:
        return (fleet.cost or 0.0 if priced else 0.0, fleet.devices, -fleet.capacity.rate.mean)

    return sorted(fleets, key=key)


def _failure(capacity: Capacity) -> str:
    return capacity.impossible or "the SLO fails at any rate, even for a request that is alone"


def _unfit(deployment: Deployment, reason: str) -> Unfit:
    return Unfit(deployment.gpu or "", deployment.tp, deployment.kv_dtype, reason)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
