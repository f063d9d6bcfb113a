"""A plan: what a deployment carries, which fleet carries a rate, and what to change; from one window of a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from octavo.planner.catalogue import find_device
from octavo.planner.deployment import Deployment, Resolved
from octavo.planner.replay import ReplayOptions
from octavo.planner.search.capacity import Load, RateCurve, find_curves
from octavo.planner.search.fleet import DEVICES, FleetAnswer, find_fleets
from octavo.planner.search.jobs import Workers
from octavo.planner.search.samples import Window
from octavo.planner.search.whatif import WhatIf, what_if

OFFERED = 2  # so many other devices are tried as a change when none were named


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked.

    base       the deployment to change, and that a fleet's kinds are made from
    resolved   the deployment, once for each strategy to compare; () when only a fleet is asked for
    capacity, changes   whether to search the largest rate, and to turn every knob at the window's own rate
    rate       requests a second that a fleet must carry; None: no fleet
    devices    what may be had; () for the catalogue's well-documented ones
    """

    window: Window
    base: Deployment
    resolved: tuple[Resolved, ...]
    options: ReplayOptions
    seeds: int = 4
    capacity: bool = True
    changes: bool = True
    rate: float | None = None
    devices: tuple[str, ...] = ()
    prices: Mapping[str, float] = field(default_factory=dict)

    @property
    def chosen(self) -> Resolved:
        """The deployment to change, worked out."""
        return next(
            (each for each in self.resolved if each.deployment.strategy == self.base.strategy), self.resolved[0]
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The answers to what was asked, in the order of the question."""

    window: Window
    seeds: int
    curves: tuple[RateCurve, ...] = ()
    what_if: WhatIf | None = None
    fleet: FleetAnswer | None = None


def make_plan(question: Question, workers: Workers) -> Plan:
    """Answer. The same question has the same answer, whatever the number of workers."""
    plain = replace(question.options, lives=0, map=False)
    load = Load(question.window.requests, plain, question.seeds)
    curves: Sequence[RateCurve] = ()
    changes = fleet = None
    if question.resolved and question.capacity:
        curves = find_curves([each.deployment for each in question.resolved], load, workers)
    if question.resolved and question.changes:
        first = question.chosen
        devices = question.devices or better_devices(first.deployment.gpu)
        requests = question.window.requests
        changes = what_if(first, requests, plain, workers, seeds=question.seeds, devices=devices)
    if question.rate is not None:
        devices = question.devices or DEVICES
        fleet = find_fleets(question.base, load, question.rate, workers, devices=devices, prices=question.prices)
    return Plan(question.window, question.seeds, tuple(curves), changes, fleet)


def better_devices(gpu: str | None) -> tuple[str, ...]:
    """The next well-documented devices with more memory and more bandwidth."""
    if gpu is None:
        return ()
    have = find_device(gpu)
    width = "memory_bandwidth_bytes_per_s"
    others = [find_device(name) for name in DEVICES]
    more = [d for d in others if d.memory_bytes > have.memory_bytes and d.facts[width] > have.facts.get(width, 0)]
    return tuple(device.name for device in sorted(more, key=lambda d: d.facts[width]))[:OFFERED]
