"""M2: whoever waits is told why, in the allocator's own numbers, within one step of the situation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from octavo.kv.strategies import STRATEGIES
from octavo.scheduler.explain import Cause, Wait
from octavo.types import RequestError
from tests.simulation import Bench

PROMPT = dict(admission="prompt", max_num_batched_tokens=256)
MEMORY = (Cause.FULL, Cause.FRAGMENTED, Cause.HELD)


def bench(strategy: str = "paged", pages: int = 64, extra: dict[str, Any] | None = None, **config: Any) -> Bench:
    return Bench(strategy, pages=pages, config={**PROMPT, **config}, extra=extra or {})


def numbers_fit(b: Bench, wait: Wait) -> bool:
    """Whether a memory wait follows from the pool as it is now. Cached blocks that the waiting one would itself use
    are not available to it."""
    available = b.kv.free + b.kv.evictable
    if wait.have != available and not (b.kv.evictable and b.kv.free <= wait.have < available):
        return False
    if wait.cause is Cause.FULL:
        return wait.need > wait.have and wait.short == wait.need - wait.have
    if wait.cause is Cause.HELD:
        return wait.need <= wait.have and wait.short == wait.need - wait.have + wait.held
    return wait.largest_hole < wait.need <= wait.have


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_blocks_is_told_with_need_have_short_and_holders(strategy: str) -> None:
    b = bench(strategy, pages=20, max_model_len=64)
    holder = b.add(30, 34)  # 16 of the 20 blocks sooner or later; reserve strategies take them at once
    b.step()
    while strategy in ("growing", "paged") and b.kv.free > 9:
        b.step()
    waiter = b.add(40, 24)
    for _ in range(2):
        b.step()
        wait = b.why(waiter)
        assert wait.cause is Cause.FULL
        assert wait.need == (10 if strategy in ("growing", "paged") else 16)
        assert wait.have == b.kv.free
        assert wait.short == wait.need - wait.have > 0
        assert [h.request for h in wait.holders] == [holder]
        assert wait.holders[0].amount == 20 - b.kv.free
        assert f"needs {wait.need} blocks" in wait.sentence()
        assert holder in wait.sentence()
    b.run()


@pytest.mark.parametrize("strategy", ["growing", "reserve-oracle", "reserve-pow2"])
def test_no_run_long_enough_is_told_as_fragmented(strategy: str) -> None:
    b = bench(strategy, pages=16, max_num_seqs=4)
    ids = [b.add(15, 1) if strategy != "growing" else b.add(15, 20) for _ in range(4)]
    if strategy != "growing":
        for r in ids:
            b.scheduler.abort(r, 0.0)
        ids = [b.add(9, 7) for _ in range(4)]
    b.step()
    for r in ids[::2]:
        b.scheduler.abort(r, b.clock.now())
    assert b.kv.free == 8
    waiter = b.add(30, 2)
    wait = b.why(waiter)
    assert wait.cause is Cause.FRAGMENTED
    assert (wait.need, wait.have, wait.largest_hole) == (8, 8, 4)
    assert wait.sentence().startswith("fragmented: largest run 4, free 8, need 8 blocks")
    b.run()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_slot_is_told_as_slots_and_not_as_memory(strategy: str) -> None:
    b = bench(strategy, pages=256, max_model_len=64, max_num_seqs=2)
    holders = [b.add(8, 20) for _ in range(2)]
    waiters = [b.add(8, 4) for _ in range(2)]
    b.step()
    for waiter in waiters:
        wait = b.why(waiter)
        assert (wait.cause, wait.need, wait.have, wait.unit) == (Cause.SLOTS, 1, 0, "slots")
        assert {h.request for h in wait.holders} == set(holders)
    b.run()


def test_whoever_has_a_slot_but_stands_behind_one_that_has_not_is_behind_it() -> None:
    b = bench(pages=256, max_num_seqs=4)
    b.add(8, 20)
    four = b.add(8, 4, n=4)
    one = b.add(8, 4)
    b.step()
    wait = b.why(four)
    assert (wait.cause, wait.need, wait.have) == (Cause.SLOTS, 4, 3)
    wait = b.why(one)  # three slots are free and it needs one: its own reason cannot be slots
    assert wait.cause is Cause.BEHIND
    assert wait.behind == four
    assert wait.behind_wait is not None
    assert wait.behind_wait.cause is Cause.SLOTS


def test_a_used_up_token_budget_is_told_as_step_budget() -> None:
    b = bench(pages=256, max_num_batched_tokens=16)
    b.add(60, 4)
    waiters = [b.add(20, 4) for _ in range(2)]
    b.step()
    assert [b.why(w).cause for w in waiters] == [Cause.BUDGET] * 2
    assert "16 tokens a step" in b.why(waiters[0]).sentence()
    b.run()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strict_order_is_told_as_behind_with_that_ones_own_reason(strategy: str) -> None:
    b = bench(strategy, pages=20, max_model_len=64, max_skips=0)
    b.add(40, 20)
    b.step()
    big = b.add(44, 4, output_length=4)
    small = b.add(2, 2, output_length=2)
    b.step()
    wait = b.why(small)
    assert (wait.cause, wait.behind) == (Cause.BEHIND, big)
    assert wait.behind_wait == b.why(big)
    assert b.why(big).cause in MEMORY
    assert f"behind {big} (" in wait.sentence()
    b.run()


def test_one_that_needs_what_another_computes_is_behind_it() -> None:
    b = bench(pages=256, max_num_batched_tokens=16)
    prompt = list(range(5, 45))
    first, second = b.add(prompt, 4), b.add(prompt, 4)
    b.scheduler.plan(0.0)  # budget is used up, so ask what holds when there is budget
    wait = b.why(second)
    assert wait.cause in (Cause.BEHIND, Cause.BUDGET)
    short = bench(pages=256)
    first, second = short.add(prompt, 4), short.add(prompt, 4)
    short.scheduler.plan(0.0)
    wait = short.why(second)
    assert (wait.cause, wait.behind, wait.shares_prefix) == (Cause.BEHIND, first, True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_used_up_tenant_quota_is_told_with_its_numbers_and_the_tenants_own_holders(strategy: str) -> None:
    b = bench(strategy, pages=80, max_model_len=64, quotas={"t": 20})
    own = b.add(33, 30, tenant="t")
    b.add(40, 20, tenant="other")
    b.step()
    waiter = b.add(50, 14, tenant="t")
    b.step()
    wait = b.why(waiter)
    need = 13 if strategy in ("growing", "paged") else 16
    have = 20 - b.kv.blocks_of(b.all[own][0].id)
    assert (wait.cause, wait.need, wait.have, wait.short) == (Cause.QUOTA, need, have, need - have)
    assert [h.request for h in wait.holders] == [own]
    b.run()


def test_cached_blocks_that_the_waiting_one_would_share_count_against_its_quota_in_the_numbers() -> None:
    b = bench(pages=80, max_model_len=64, quotas={"t": 20})
    prompt = list(range(48))
    b.add(prompt, 8, tenant="other")
    b.run()  # its blocks are cached now
    b.add(33, 30, tenant="t")
    b.step()
    waiter = b.add([*prompt, 7], 8, tenant="t")
    b.step()
    wait = b.why(waiter)
    assert (wait.cause, wait.need, wait.short) == (Cause.QUOTA, 13, 13 - wait.have)
    b.run()


def test_a_preempted_one_is_told_what_it_waits_for() -> None:
    b = bench(pages=16)
    ids = [b.add(16, 40) for _ in range(3)]
    while not b.of_preempted():
        b.step()
    for victim in b.of_preempted():
        wait = b.why(victim)
        assert wait.cause in MEMORY
        assert numbers_fit(b, wait)
        assert set(ids) > {h.request for h in wait.holders}
    b.run()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_that_can_never_fit_is_told_so_at_once(strategy: str) -> None:
    b = bench(strategy, pages=16, max_model_len=64)
    with pytest.raises(RequestError) as refused:
        b.add(100, 2)
    assert refused.value.code in ("never_fits", "context_length_exceeded")
    assert b.scheduler.waiting == 0


def test_a_scheduler_that_is_not_called_is_the_reason() -> None:
    b = bench(pages=16, max_num_seqs=1)
    b.add(8, 20)
    waiter = b.add(8, 20)
    b.step()
    wait = b.scheduler.explain(waiter, b.clock.now() + 7)
    assert wait is not None
    assert (wait.cause, wait.need) == (Cause.STALLED, 7)
    assert wait.sentence().startswith("no step for 7 s")


def test_a_scheduler_that_was_never_called_is_the_reason() -> None:
    b = bench(pages=16)
    waiter = b.add(8, 20)
    wait = b.scheduler.explain(waiter, b.clock.now() + 7)
    assert wait is not None
    assert wait.cause is Cause.STALLED


def test_one_that_has_just_come_to_an_idle_engine_is_not_told_of_a_stalled_scheduler() -> None:
    b = bench(pages=16)
    b.add(8, 2)
    b.run()
    b.clock.advance(3600)  # nobody steps an engine that has nothing to do
    waiter = b.add(8, 2)
    assert b.why(waiter).cause is Cause.NEXT_STEP


def test_the_first_in_line_is_not_behind_anyone() -> None:
    b = bench(pages=20, order="priority", max_skips=0)
    b.add(60, 16)
    b.step()
    low = b.add(60, 4, priority=5)
    b.step()
    assert b.why(low).cause is Cause.FULL
    high = b.add(60, 4, priority=0)
    assert b.why(high).cause is Cause.FULL
    later = b.add(60, 4, priority=9)
    b.step()
    assert (b.why(later).cause, b.why(later).behind) == (Cause.BEHIND, high)


def test_the_cause_follows_the_situation_within_one_step() -> None:
    b = bench(pages=20, max_num_seqs=2)
    first, second = b.add(60, 2), b.add(8, 40)
    waiter = b.add(40, 4)
    b.step()
    assert b.why(waiter).cause is Cause.SLOTS
    b.scheduler.abort(second, b.clock.now())
    b.step()
    assert not b.runs(first)
    b.step()
    assert b.runs(waiter)


@pytest.mark.parametrize("windows", [(None,), (None, 9)], ids=["full", "windows"])
@pytest.mark.parametrize("admission", ["prompt", "ceiling", "peak"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_is_never_the_reason_while_enough_is_available(
    strategy: str, admission: str, windows: tuple[int | None, ...]
) -> None:
    """In the step in which memory was offered, each reason's numbers are those of the pool and justify the wait."""
    b = Bench(
        strategy,
        pages=24 * len(windows),
        windows=windows,
        config=dict(max_model_len=64, admission=admission, max_num_batched_tokens=32, max_num_seqs=6),
    )
    ids = [b.add(5 + 7 * i % 31, 3 + 11 * i % 30) for i in range(24)]
    told: Counter[Cause] = Counter()
    while b.scheduler.busy:
        b.step()
        for r in ids:
            wait = b.scheduler.explain(r, b.clock.now())
            if wait and wait.cause in MEMORY:
                told[wait.cause] += 1
                assert numbers_fit(b, wait), (b.scheduler.steps, r, wait)
    assert told.total() > 0


@pytest.mark.parametrize("admission", ["prompt", "ceiling", "peak"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_promised_for_the_next_step_happens_in_the_next_step(strategy: str, admission: str) -> None:
    """The first in line that is told 'next step' runs after it."""
    b = Bench(
        strategy,
        pages=24,
        config=dict(max_model_len=64, admission=admission, max_num_batched_tokens=64, max_num_seqs=4, max_skips=0),
    )
    ids = [b.add(5 + 7 * i % 31, 3 + 11 * i % 30) for i in range(24)]
    promised: Counter[str] = Counter()
    while b.scheduler.busy:
        b.step()
        first = next((r for r in ids if b.scheduler.explain(r, b.clock.now())), None)
        if first is None or b.why(first).cause is not Cause.NEXT_STEP or b.of_preempted():
            promised.clear()  # whoever runs may take the room first, by a preemption even
            continue
        promised[first] += 1
        assert promised[first] <= 2, f"step {b.scheduler.steps}: {first} is promised the next step again and again"


def test_a_request_starts_as_soon_as_the_future_peak_fits() -> None:
    """The waiting one outlasts the running one: with every token that the running one gets, the peak sinks."""
    b = Bench(pages=15, block=4, config=dict(max_model_len=64, admission="peak"))
    running = b.add(8, 24)
    b.step()
    waiter = b.add(8, 48)
    b.step()
    assert b.why(waiter).cause is Cause.HELD
    while not b.runs(waiter):
        promised = b.why(waiter).cause is Cause.NEXT_STEP
        b.step()
        assert b.runs(waiter) or not promised, "there is room, and yet it is not offered any"
    assert b.runs(running), "it had to wait until the other one ended"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_everyone_who_waits_is_counted_under_one_cause(strategy: str) -> None:
    b = bench(strategy, pages=40, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, max_skips=2)
    for i in range(20):
        b.add(3 + 7 * i % 31, 3 + 11 * i % 30, n=1 + i % 2)
    while b.scheduler.busy:
        b.step()
        causes = b.scheduler.waiting_by_cause()
        assert causes.total() == b.scheduler.waiting
        assert min(causes.values(), default=1) > 0


def test_nobody_is_counted_as_behind_before_anything_was_offered() -> None:
    b = bench(pages=40)
    b.add(8, 4)
    assert b.scheduler.waiting_by_cause() == {Cause.NEXT_STEP.value: 1}


def test_a_preempted_one_is_counted_under_its_own_cause() -> None:
    b = bench(pages=16)
    for _ in range(3):
        b.add(16, 40)
    while not b.of_preempted():
        b.step()
    told = Counter(b.why(r).cause.value for r in b.of_preempted())
    assert b.scheduler.waiting_by_cause() == told


def test_one_who_takes_the_place_of_one_who_gave_up_is_offered_memory_at_once() -> None:
    """As many wait as before, and nothing was given back: the one who came has not been asked for yet."""
    b = Bench(pages=12, block=4, config=dict(max_model_len=64, admission="prompt"))
    b.add(24, 20)
    b.step()
    large = b.add(40, 4)
    b.step()
    assert b.why(large).cause is Cause.FULL
    b.scheduler.abort(large, b.clock.now())
    small = b.add(4, 2)
    b.step()
    assert b.runs(small)
