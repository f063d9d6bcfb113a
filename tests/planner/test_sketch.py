"""The histogram of durations: exact sums, percentiles within half a per cent, in flat memory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.planner.outcome import Distribution
from octavo.planner.sketch import Sketch

durations = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=300)


def nearest_rank(values: list[float], q: int) -> float:
    return sorted(values)[max(1, math.ceil(q * len(values) / 100)) - 1]


@given(durations)
def test_count_mean_and_highest_are_exact_and_percentiles_near(values: list[float]) -> None:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    seen = sketch.distribution()
    assert seen.count == len(values)
    assert seen.highest == max(values)
    assert seen.mean == pytest.approx(sum(values) / len(values))
    for q, found in ((50, seen.p50), (90, seen.p90), (95, seen.p95), (99, seen.p99)):
        assert found == pytest.approx(nearest_rank(values, q), rel=0.005)


@given(st.floats(1e-6, 1e6), st.integers(1, 1000))
def test_many_equal_durations_count_as_often(value: float, times: int) -> None:
    one, other = Sketch(), Sketch()
    one.add(value, times)
    for _ in range(times):
        other.add(value)
    assert one.distribution().p99 == other.distribution().p99
    assert one.distribution().count == times


def test_nothing_counted_is_nothing() -> None:
    assert Sketch().distribution() == Distribution()
