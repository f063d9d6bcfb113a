"""The JSON of `octavo plan`, with a stable schema."""

from __future__ import annotations

from math import isinf
from typing import Any

from octavo.planner.search.capacity import Capacity, RateCurve
from octavo.planner.search.changes import Change
from octavo.planner.search.estimates import Estimate
from octavo.planner.search.fleet import Fleet, FleetAnswer
from octavo.planner.search.planning import Plan, Question
from octavo.planner.search.whatif import WhatIf
from octavo.report.replay_json import to_plain

SCHEMA = "octavo.plan/1"


def plan_json(question: Question, plan: Plan) -> dict[str, Any]:
    """A JSON-ready dict; keys are only ever added under this schema.

    window      trace, statement, requests, rate (a second, as recorded)
    curves[]    strategy, capacity, points[]: rate, sustained, saturated, goodput, attained, running_mean ...
    capacity    rate: mean, error (half the 95 % interval, null for one seed), count; at_least; impossible
    what_if     bottleneck, statement, judged_by, before, changes[]: name, octavo, vllm, verdict, after, difference
    fleet       rate, searched (so many finely), fleets[]: gpu, tp, kv_dtype, replicas, devices, cost, capacity; unfit[]
    Times are seconds; what was not asked for is null.
    """
    window, slo = plan.window, question.options.slo
    first = question.chosen if question.resolved else None
    return {
        "schema": SCHEMA,
        "window": {
            "trace": window.trace,
            "statement": window.statement,
            "requests": len(window.requests),
            "rate": window.rate,
        },
        "slo": None if slo is None else str(slo),
        "seeds": plan.seeds,
        "deployment": to_plain(question.base if first is None else first.deployment),
        "fidelity": None if first is None else to_plain(first.fidelity),
        "notes": [] if first is None else list(first.notes),
        "curves": [_curve(curve) for curve in plan.curves],
        "what_if": None if plan.what_if is None else _what_if(plan.what_if),
        "fleet": None if plan.fleet is None else _fleet(plan.fleet),
    }


def _curve(curve: RateCurve) -> dict[str, Any]:
    points = [to_plain(point) for point in curve.points]
    return {"strategy": curve.strategy, "capacity": _capacity(curve.knee), "points": points}


def _capacity(capacity: Capacity) -> dict[str, Any]:
    return {
        "rate": _estimate(capacity.rate),
        "at_least": capacity.at_least,
        "impossible": capacity.impossible,
    }


def _what_if(found: WhatIf) -> dict[str, Any]:
    return {
        "bottleneck": found.bottleneck.value,
        "statement": found.statement,
        "judged_by": found.judged_by,
        "before": to_plain(found.before),
        "probe": _change(found.probe),
        "changes": [_change(change) for change in found.changes],
    }


def _change(change: Change) -> dict[str, Any]:
    return {
        "name": change.name,
        "octavo": change.octavo,
        "vllm": change.vllm,
        "verdict": change.verdict.value,
        "better": list(change.better),
        "worse": list(change.worse),
        "reason": change.reason,
        "after": None if change.after is None else to_plain(change.after),
        "difference": {name: _estimate(moved) for name, moved in change.difference.items()},
    }


def _fleet(answer: FleetAnswer) -> dict[str, Any]:
    return {
        "rate": answer.rate,
        "searched": answer.searched,
        "fleets": [_kind(fleet) for fleet in answer.fleets],
        "unfit": [to_plain(unfit) for unfit in answer.unfit],
    }


def _kind(fleet: Fleet) -> dict[str, Any]:
    return {
        "gpu": fleet.gpu,
        "tp": fleet.tp,
        "kv_dtype": fleet.kv_dtype,
        "replicas": fleet.replicas,
        "most_replicas": fleet.most_replicas,
        "devices": fleet.devices,
        "cost": fleet.cost,
        "capacity": _capacity(fleet.capacity),
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    error = None if isinf(estimate.error) else estimate.error
    return {"mean": estimate.mean, "error": error, "count": estimate.count}
