"""`BlockPool` against a model: who holds what, what is cached in which order, what waits for a copy."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.kv.blocks import BlockPool
from octavo.kv.prefix import Key, KeyChain

CAPACITY = 8


class PoolMachine(RuleBasedStateMachine):
    """`order`: cached blocks, least recently used first; `reading`: copies that still read a block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(CAPACITY, 1)
        self.refs: Counter[int] = Counter()
        self.order: list[int] = []
        self.published: dict[int, Key] = {}
        self.reading: Counter[int] = Counter()
        self.parked: set[int] = set()
        self.made = 0

    @property
    def free(self) -> set[int]:
        return set(range(CAPACITY)) - set(self.refs) - set(self.order) - self.parked

    def pick(self, n: int, among: list[int]) -> int:
        return among[n % len(among)]

    @rule(n=st.integers(1, CAPACITY))
    def take(self, n: int) -> None:
        if n > len(self.free) + len(self.order):
            with pytest.raises(ValueError, match="asked for"):
                self.pool.take(n)
            return
        evict = max(0, n - len(self.free))
        allowed = self.free | set(self.order[:evict])
        blocks, evicted = self.pool.take(n)
        assert evicted == evict
        assert len(set(blocks)) == n
        assert set(blocks) <= allowed
        for block in self.order[:evict]:
            del self.published[block]
        del self.order[:evict]
        self.refs.update(blocks)

    @precondition(lambda self: self.refs or self.published)
    @rule(n=st.integers(0, 99))
    def share(self, n: int) -> None:
        block = self.pick(n, sorted(set(self.refs) | set(self.published)))
        self.pool.share([block])
        self.refs[block] += 1
        self.parked.discard(block)
        if block in self.order:
            self.order.remove(block)

    @precondition(lambda self: self.refs)
    @rule(n=st.integers(0, 99))
    def drop(self, n: int) -> None:
        block = self.pick(n, sorted(self.refs))
        available = self.pool.drop(block)
        self.refs[block] -= 1
        if self.refs[block]:
            assert not available
            return
        del self.refs[block]
        assert available == (not self.reading[block])
        if self.reading[block]:
            self.parked.add(block)
        elif block in self.published:
            self.order.append(block)

    @precondition(lambda self: self.free)
    @rule(n=st.integers(0, 99))
    def drop_what_nobody_holds(self, n: int) -> None:
        with pytest.raises(ValueError, match="more often"):
            self.pool.drop(self.pick(n, sorted(self.free)))

    @precondition(lambda self: self.refs)
    @rule(n=st.integers(0, 99))
    def publish(self, n: int) -> None:
        block = self.pick(n, sorted(self.refs))
        if block in self.published:
            return
        self.made += 1
        key = KeyChain([self.made], 1, b"").upto(1)[0]
        self.pool.tree.publish(None, 0, [key], [[block]])
        self.published[block] = key

    @precondition(lambda self: self.refs)
    @rule(n=st.integers(0, 99))
    def quarantine(self, n: int) -> None:
        block = self.pick(n, sorted(self.refs))
        self.pool.quarantine(block)
        self.reading[block] += 1

    @precondition(lambda self: +self.reading)
    @rule(n=st.integers(0, 99))
    def lift(self, n: int) -> None:
        block = self.pick(n, sorted(+self.reading))
        self.pool.lift(block)
        self.reading[block] -= 1
        if not self.reading[block] and block in self.parked:
            self.parked.remove(block)
            if block in self.published:
                self.order.append(block)

    @rule()
    def forget(self) -> None:
        assert self.pool.forget_cached() == len(self.order)
        for block in self.order:
            del self.published[block]
        self.order.clear()

    @invariant()
    def equals_the_model(self) -> None:
        self.pool.check()
        assert self.pool.free == len(self.free)
        assert self.pool.cached == len(self.order)
        assert self.pool.quarantined == len(self.parked)
        assert self.pool.in_use == len(self.refs)
        assert all(self.pool.refs[block] == self.refs[block] for block in range(CAPACITY))
        assert list(self.pool.evictable()) == self.order
        assert all(self.pool.count_cached([block]) == (block in self.order) for block in self.published)
        for block, key in self.published.items():
            assert self.pool.tree.follow([key]).blocks == [[block]]


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=50, deadline=None, derandomize=True)
