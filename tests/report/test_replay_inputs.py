"""What the planner found stands in the report with the same numbers."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from octavo.planner.deployment import Deployment, resolve
from octavo.planner.replay import ReplayOptions
from octavo.planner.search.capacity import Capacity, RateCurve, RatePoint
from octavo.planner.search.estimates import Estimate
from octavo.planner.search.jobs import Workers
from octavo.planner.search.whatif import what_if
from octavo.planner.traces.api import TraceRequest
from octavo.report.replay_data import POOL
from octavo.report.replay_inputs import budget_of, changes_of, curves_of, settings_of
from octavo.report.replay_verdict import helps

DEPLOYMENT = Deployment("Qwen/Qwen3-8B", gpu="RTX 4090", num_blocks=96, max_model_len=512)


@pytest.fixture(scope="module")
def resolved():
    return resolve(DEPLOYMENT)


def test_settings_say_where_they_come_from(resolved):
    found = {setting.name: setting for setting in settings_of(resolved)}
    assert found["max_model_len"].value == "512"
    assert found["max_model_len"].source == "flag"
    assert found["prefix_caching"].value == "on"
    assert "kv_memory" not in found
    for name, source in resolved.sources.items():
        if name in found:
            assert found[name].source == source


def test_the_budget_ends_in_the_pool_that_is_simulated(resolved):
    budget = budget_of(resolved)
    assert budget is not None
    assert budget.lines[-1].name == POOL
    assert budget.lines[-1].low == resolved.pages * resolved.block_bytes
    assert budget.total == resolved.plan.total.low
    assert budget_of(replace(resolved, plan=None)) is None


def point(rate: float) -> RatePoint:
    return RatePoint(rate, True, False, rate, 1.0, 3 * rate, 4, 0.1 * rate, 0.02, None)


@pytest.mark.parametrize(
    ("rate", "knee", "error"),
    [(Estimate(4.0, 0.2, 3), 4.0, 0.05), (Estimate(4.0, inf, 1), 4.0, None), (Estimate(0.0, 0.0, 3), None, None)],
)
def test_a_curve_keeps_its_points_and_its_knee(rate, knee, error):
    found = RateCurve("paged", (point(1.0), point(2.0)), Capacity(DEPLOYMENT, rate))
    empty = RateCurve("growing", (), Capacity(DEPLOYMENT, rate))
    (curve,) = curves_of([found, empty])
    assert (curve.rates, curve.goodput, curve.running, curve.ttft_p99) == ((1, 2), (1, 2), (3, 6), (0.1, 0.2))
    assert curve.knee == knee
    assert curve.error == (None if error is None else pytest.approx(error))


def test_changes_keep_figures_flags_and_verdicts(resolved):
    trace = tuple(
        TraceRequest(0.05 * i, 60 + 37 * i % 200, 10 + 23 * i % 60, str(i), max_tokens=100) for i in range(24)
    )
    found = what_if(resolved, trace, ReplayOptions(), Workers(1), seeds=3)
    made = changes_of(found)
    assert [change.name for change in made] == [change.name for change in found.changes]
    for change, of in zip(made, found.changes, strict=True):
        assert (change.flag_octavo, change.flag_vllm) == (of.octavo, of.vllm)
        assert change.before.e2e == found.before.e2e
        assert change.before.goodput is None
        if of.after is None:
            assert change.after is None
            assert change.note
            continue
        assert change.after is not None
        assert (change.after.concurrency, change.after.ttft_p99) == (of.after.running_mean, of.after.ttft_p99)
        assert change.error == pytest.approx(of.difference["e2e"].error / found.before.e2e)
        better = of.difference["e2e"].mean < 0 and "e2e" in of.better
        assert helps(change) == better or abs(of.difference["e2e"].mean) < 0.02 * found.before.e2e
