"""M1: every slot is in one line, the lines equal the allocator's own numbers, and looking changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import events as ev
from octavo.kv.strategies import STRATEGIES
from octavo.scheduler.explain import Cause
from octavo.types import Status
from tests.simulation import Bench

EVERY = pytest.mark.parametrize("strategy", STRATEGIES)
WINDOWS = pytest.mark.parametrize("windows", [(None,), (None, 10, 7)], ids=["full", "windows"])


def bench(strategy: str = "paged", pages: int = 64, windows: tuple[int | None, ...] = (None,), **config: Any) -> Bench:
    settings = dict(admission="prompt", max_model_len=64, max_num_batched_tokens=64) | config
    return Bench(strategy, pages=pages, windows=windows, config=settings)


@EVERY
def test_an_idle_empty_engine_is_all_free(strategy: str) -> None:
    ledger = bench(strategy).scheduler.ledger()
    assert (ledger.free, ledger.capacity) == (256, 256)


def test_an_idle_engine_with_a_full_cache_is_not_in_use() -> None:
    b = bench(pages=16)
    for _ in range(6):
        b.add(17, 4)
    b.run()
    ledger = b.scheduler.ledger()
    assert ledger.cached == b.kv.evictable * 4 > 0
    assert ledger.free == b.kv.free * 4
    assert (ledger.live, ledger.reserved, ledger.slack, ledger.quarantined) == (0, 0, 0, 0)


@EVERY
def test_one_request_of_three_blocks(strategy: str) -> None:
    b = bench(strategy)
    b.add(10, 6)
    b.step()
    ledger = b.scheduler.ledger()
    region = {"reserve-max": 16, "reserve-pow2": 4, "reserve-oracle": 4}.get(strategy, 3)
    assert ledger.live == 10
    assert ledger.slack == 2
    assert ledger.reserved == (region - 3) * 4
    assert ledger.free == 256 - region * 4
    b.run()


@WINDOWS
@EVERY
def test_the_lines_sum_to_the_capacity_and_equal_the_allocators_numbers(
    strategy: str, windows: tuple[int | None, ...]
) -> None:
    b = bench(strategy, pages=96, windows=windows, max_num_batched_tokens=16)
    for i in range(24):
        b.add(3 + 7 * i % 31, 3 + 11 * i % 30, n=1 + i % 3)
    while b.scheduler.busy:
        b.step()
        ledger, size = b.scheduler.ledger(), b.kv.block_size
        assert ledger.capacity == b.kv.capacity * size
        assert ledger.cached == b.kv.evictable * size
        assert ledger.free + ledger.fragmented + ledger.held == b.kv.free * size
        assert min(ledger.live, ledger.reserved, ledger.slack, ledger.quarantined, ledger.held) >= 0
        waiting = [s for s in live(b) if s.status is Status.WAITING and (s.forked or not s.index)]
        assert b.scheduler.waiting == len(waiting)
        assert len(b.scheduler.running) == sum(s.status is Status.RUNNING for s in live(b))


def live(b: Bench) -> list[Any]:
    return [seq for seqs in b.scheduler.requests.values() for seq in seqs]


@EVERY
def test_live_slots_are_the_computed_tokens(strategy: str) -> None:
    b = bench(strategy, pages=256, max_num_batched_tokens=16)
    for i in range(6):
        b.add(5 + 7 * i, 20)
    while b.scheduler.busy:
        b.step()
        assert b.scheduler.ledger().live == sum(seq.computed for seq in b.scheduler.running)


@pytest.mark.parametrize("strategy", ["growing", "reserve-oracle"])
def test_what_is_free_and_useless_to_the_head_is_called_fragmented(strategy: str) -> None:
    b = bench(strategy, pages=16, max_num_seqs=4)
    ids = [b.add(15, 1) for _ in range(4)]
    plan = b.scheduler.plan(0.0)
    for r in ids[::2]:
        b.scheduler.abort(r, 0.0)
    if strategy == "growing":  # it would compact: look before it can
        assert b.kv.ledger(head_need=8).fragmented == 8 * 4
        return
    b.add(30, 2)
    b.scheduler.plan(0.0)
    assert b.scheduler.ledger().fragmented == 8 * 4
    assert plan.work


@EVERY
def test_the_limiting_resource_is_named_rightly(strategy: str) -> None:
    tokens = bench(strategy, pages=640, max_num_batched_tokens=8, max_num_seqs=8)
    for _ in range(8):
        tokens.add(40, 1)
    slots = bench(strategy, pages=640, max_num_seqs=2)
    for _ in range(8):
        slots.add(10, 30)
    memory = bench(strategy, pages=20, max_num_seqs=8)
    for _ in range(8):
        memory.add(20, 30)
    wanted = ((tokens, Cause.BUDGET), (slots, Cause.SLOTS), (memory, Cause.FULL))
    for b, cause in wanted:
        b.steps(4)
        causes = b.scheduler.waiting_by_cause()
        assert causes.most_common(1)[0][0] == cause.value, causes
        assert causes.total() == b.scheduler.waiting
        b.run()


@WINDOWS
@EVERY
def test_looking_changes_no_decision(strategy: str, windows: tuple[int | None, ...]) -> None:
    """The same load with and without reading ledger, waits and causes in every step: the same plans."""
    logs = []
    for watched in (False, True):
        b = bench(strategy, pages=60, windows=windows, max_num_batched_tokens=16, max_num_seqs=6)
        b.watched = watched
        for i in range(40):
            b.add(3 + 7 * i % 31, 3 + 11 * i % 30)
        for _ in range(2000):
            if not b.scheduler.busy:
                break
            b.step()
            if watched:
                b.waits()
                b.scheduler.waiting_by_cause()
        b.quiet()
        logs.append([e for e in b.events if isinstance(e, ev.Planned | ev.Admitted | ev.Preempted | ev.Granted)])
    assert logs[0] == logs[1]


@WINDOWS
@EVERY
def test_counters_fit_the_events(strategy: str, windows: tuple[int | None, ...]) -> None:
    b = bench(strategy, pages=96, windows=windows, max_num_batched_tokens=16)
    for i in range(30):
        b.add([i % 3] * (3 + 7 * i % 31), 3 + 11 * i % 30, n=1 + i % 2)
    b.run()
    totals = b.scheduler.totals
    assert totals.evicted == sum(e.evicted for e in b.of(ev.Granted))
    assert totals.compactions == len(b.of(ev.Compacted))
    assert totals.preemptions == len(b.of(ev.Preempted))
    assert totals.accepted == 30
    assert totals.finished == sum(len(seqs) for seqs in b.all.values())
    assert totals.generated == sum(len(seq.output) for seqs in b.all.values() for seq in seqs)


def test_the_same_load_makes_the_same_decisions() -> None:
    logs = []
    for _ in range(2):
        b = bench(pages=30)
        for i in range(20):
            b.add(3 + 7 * i % 31, 3 + 11 * i % 30, n=1 + i % 2)
        b.run()
        logs.append(b.events)
    assert logs[0] == logs[1]
