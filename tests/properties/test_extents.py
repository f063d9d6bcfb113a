"""`Extents` against a bitmap: takes and gives in any order, and the answers a bitmap would give."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from octavo.kv.extents import Extents

CAPACITY = 24


class ExtentsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(CAPACITY)
        self.free = [True] * CAPACITY

    def runs(self) -> list[tuple[int, int]]:
        found, at = [], 0
        for is_free, cells in groupby(self.free):
            length = len(list(cells))
            if is_free:
                found.append((at, length))
            at += length
        return found

    @rule(start=st.integers(0, CAPACITY - 1), length=st.integers(1, CAPACITY))
    def take(self, start: int, length: int) -> None:
        inside = start + length <= CAPACITY and all(self.free[start : start + length])
        if inside:
            self.extents.take(start, length)
            self.free[start : start + length] = [False] * length
        else:
            with pytest.raises(ValueError, match="not free"):
                self.extents.take(start, length)

    @rule(start=st.integers(0, CAPACITY - 1), length=st.integers(0, CAPACITY))
    def give(self, start: int, length: int) -> None:
        length = min(length, CAPACITY - start)
        if any(self.free[start : start + length]):
            with pytest.raises(ValueError, match="already free"):
                self.extents.give(start, length)
        else:
            self.extents.give(start, length)
            self.free[start : start + length] = [True] * length

    @rule(need=st.integers(1, CAPACITY))
    def fit(self, need: int) -> None:
        fitting = [(length, start) for start, length in self.runs() if length >= need]
        assert self.extents.fit(need) == (min(fitting)[1] if fitting else None)
        assert self.extents.shorter_than(need) == sum(length for _, length in self.runs() if length < need)

    @rule(start=st.integers(0, CAPACITY))
    def run_at(self, start: int) -> None:
        assert self.extents.run_at(start) == dict(self.runs()).get(start, 0)

    @invariant()
    def equals_the_bitmap(self) -> None:
        assert list(self.extents) == self.runs()
        assert self.extents.total == sum(self.free)
        assert self.extents.largest == max((length for _, length in self.runs()), default=0)


TestExtents = ExtentsMachine.TestCase
TestExtents.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


def test_an_empty_pool_has_no_hole() -> None:
    extents = Extents(0)
    assert (list(extents), extents.total, extents.largest, extents.fit(1)) == ([], 0, 0, None)
