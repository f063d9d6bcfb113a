"""S1-S6: what can never run is refused, nobody is starved, the token budget and the slots are shared as documented."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import events as ev
from octavo.kv.strategies import STRATEGIES
from octavo.runner.api import StepPlan
from octavo.scheduler.explain import Cause
from octavo.types import FinishReason, RequestError, Sequence, Status
from tests.simulation import Bench

ON_DEMAND = ("growing", "paged")
SIZED = ("reserve-oracle", "growing", "paged")  # region sizes that a test can choose to the block


def bench(strategy: str = "paged", pages: int = 64, **config: Any) -> Bench:
    return Bench(strategy, pages=pages, config=dict(admission="prompt", **config))


def order_of_admission(b: Bench) -> list[str]:
    names = {seq.id: r for r, seqs in b.all.items() for seq in seqs}
    return [names[e.seq] for e in b.of(ev.Admitted) if not e.again]


# -- S1 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "reserve-max"])
def test_a_request_larger_than_the_pool_is_refused_at_once_with_the_numbers(strategy: str) -> None:
    b = bench(strategy, pages=32, max_model_len=1024, max_num_batched_tokens=512)
    assert b.scheduler.longest == 128
    for prompt, max_tokens, need in ((200, 1, 201), (100, 100, 200)):
        with pytest.raises(RequestError) as refused:
            b.add(prompt, max_tokens)
        assert refused.value.code == "never_fits"
        assert f"{need} tokens" in str(refused.value)
        assert "128 tokens" in str(refused.value)
    short = b.add(8, 3)
    b.step()
    assert b.runs(short)
    b.run()
    assert len(b.tokens(short)) == 3
    assert (b.scheduler.totals.accepted, b.scheduler.totals.refused) == (1, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_bound_itself_fits_and_one_token_more_does_not(strategy: str) -> None:
    limit = 128
    b = bench(strategy, pages=32, max_model_len=limit if strategy == "reserve-max" else 1024)
    with pytest.raises(RequestError):
        b.add(limit + 1, 0)
    exact = b.add(120, 8)
    b.run()
    assert len(b.tokens(exact)) == 8
    assert b.all[exact][0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("pages", [32, 33])
def test_one_more_block_moves_the_bound_by_one_block(pages: int) -> None:
    b = bench(pages=pages, max_model_len=1024)
    b.add(pages * 4 - 1, 1)
    with pytest.raises(RequestError):
        b.add(pages * 4, 1)
    b.run()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_max_tokens_the_answer_ends_at_the_longest_length(strategy: str) -> None:
    b = bench(strategy, pages=32, max_model_len=64)
    r = b.add(20, None)
    b.run()
    assert len(b.tokens(r)) == 44
    assert b.all[r][0].finish_reason is FinishReason.LENGTH


def test_a_pool_that_never_serves_its_strategy_is_not_blamed_on_the_prompt() -> None:
    """reserve-max with a model length beyond the pool can run nothing: that is the engine's setting."""
    with pytest.raises(Exception, match="max_model_len"):
        bench("reserve-max", pages=32, max_model_len=1024).add(8, 1)


# -- S2 ---------------------------------------------------------------------------------------------------------------


def crowded(strategy: str, max_skips: int) -> Bench:
    """100 blocks, of which one resident holds 50 or more for another 50 steps."""
    config = dict(max_model_len=400, max_num_seqs=32, max_num_batched_tokens=512, max_skips=max_skips)
    b = bench(strategy, pages=100, **config)
    b.add(190, 60, output_length=60)
    while b.kv.free > 50:
        b.step()
    return b


@pytest.mark.parametrize("strategy", SIZED)
def test_small_requests_pass_a_big_one_in_the_same_step(strategy: str) -> None:
    b = crowded(strategy, max_skips=8)
    big = b.add(239, 1, output_length=1)
    small = [b.add(39, 1, output_length=1) for _ in range(2)]
    b.steps(2)
    assert all(seq.status is not Status.WAITING for r in small for seq in b.all[r])
    assert not b.runs(big)
    b.run()
    assert len(b.tokens(big)) == 1


@pytest.mark.parametrize("strategy", SIZED)
@pytest.mark.parametrize("max_skips", [1, 3, 8])
@pytest.mark.parametrize("at_once", [True, False], ids=["burst", "one a step"])
def test_a_big_request_is_passed_at_most_max_skips_times(strategy: str, max_skips: int, at_once: bool) -> None:
    b = crowded(strategy, max_skips)
    big = b.add(239, 1, output_length=1)
    if at_once:
        for _ in range(12):
            b.add(2, 2, output_length=2)
    for _ in range(200):
        if not b.scheduler.requests.get(big):
            break
        if not at_once:
            b.add(2, 2, output_length=2)
        b.step()
    started = order_of_admission(b)
    assert started.index(big) - 1 <= max_skips
    b.run()


@pytest.mark.parametrize("strategy", SIZED)
def test_strict_order_lets_nobody_pass_and_says_so(strategy: str) -> None:
    b = crowded(strategy, max_skips=0)
    big = b.add(239, 1, output_length=1)
    small = [b.add(39, 1, output_length=1) for _ in range(2)]
    b.step()
    for r in small:
        wait = b.why(r)
        assert (wait.cause, wait.behind) == (Cause.BEHIND, big)
        assert wait.behind_wait is not None
        assert (wait.behind_wait.need, wait.behind_wait.have) == (60, b.kv.free)
    b.run()
    assert order_of_admission(b)[1:] == [big, *small]


def test_a_cold_prompt_among_cache_hits_is_passed_at_most_max_skips_times() -> None:
    b = bench(pages=40, max_model_len=160, max_skips=4, max_num_seqs=8)
    prefix = list(range(2000, 2032))
    b.add(prefix, 1)
    b.run()
    b.add([*prefix, 1], 60)
    b.step()
    cold = b.add(120, 1)
    for i in range(60):
        if not b.scheduler.requests.get(cold):
            break
        b.add([*prefix, 2, i], 2)
        b.step()
    assert order_of_admission(b).index(cold) - 2 <= 4
    b.run()


# -- S4 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stream_gets_a_token_in_every_step_while_prompts_are_ingested(strategy: str, k: int) -> None:
    chunk = 8
    b = Bench(
        strategy,
        pages=400,
        config=dict(max_model_len=200, max_num_batched_tokens=chunk, max_num_seqs=8, admission="prompt"),
    )
    stream = b.add(4, 100)
    b.steps(8)
    prompts = [b.add(20 * chunk, 1) for _ in range(k)]
    idle = dict.fromkeys(prompts, 0)
    while any(r in b.scheduler.requests for r in prompts):
        before = len(b.tokens(stream))
        plan, _ = b.step()
        assert stream not in b.scheduler.requests or len(b.tokens(stream)) == before + 1
        assert plan.tokens <= chunk
        assert prefilled(plan, stream) <= chunk
        note_advance(b, plan, idle)
        assert max(idle.values()) <= k
    b.run()


def prefilled(plan: StepPlan, stream: str) -> int:
    return sum(w.count for w in plan.work if w.seq.request.id != stream)


def note_advance(b: Bench, plan: StepPlan, idle: dict[str, int]) -> None:
    """Count for each admitted prompt the steps since it last advanced."""
    advanced = {w.seq.request.id for w in plan.work}
    for r in idle:
        idle[r] = 0 if r in advanced or not b.runs(r) else idle[r] + 1


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "growing"])  # its moves take a step
def test_the_token_budget_is_used_up_to_the_last_token(strategy: str) -> None:
    """Three prompts of 800 under a budget of 1024: the shares of each step, to the token."""
    b = Bench(
        strategy,
        pages=900,
        config=dict(max_model_len=1000, max_num_batched_tokens=1024, max_num_seqs=4, admission="prompt"),
    )
    for _ in range(3):
        b.add(800, 20)
    shares = [[w.count for w in b.step()[0].work] for _ in range(4)]
    assert shares == [[800, 224], [1, 576, 447], [1, 1, 353], [1, 1, 1]]
    b.run()


# -- S5 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_four_slots_fill_up(strategy: str) -> None:
    chunk = 8
    b = Bench(strategy, pages=400, config=dict(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=chunk))
    ids = [b.add(5 * chunk, 60) for _ in range(4)]
    b.steps(30)
    assert all(b.runs(r) for r in ids)
    assert len(b.plans[-1].work) == 4
    b.run()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_better_priority_waits_for_a_slot_and_is_told_slots(strategy: str) -> None:
    b = bench(strategy, pages=400, max_model_len=64, max_num_seqs=2, order="priority")
    low = [b.add(8, 20, priority=5) for _ in range(2)]
    b.step()
    later = b.add(8, 4, priority=5)
    high = b.add(8, 4, priority=0)
    b.step()
    assert b.why(high).cause is Cause.SLOTS
    assert {h.request for h in b.why(high).holders} == set(low)
    b.run()
    assert order_of_admission(b)[2:] == [high, later]
    assert not b.of(ev.Preempted)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equals_do_not_preempt_each_other_for_a_slot(strategy: str) -> None:
    b = bench(strategy, pages=400, max_model_len=64, max_num_seqs=2, order="priority")
    for _ in range(3):
        b.add(8, 20)
    b.run()
    assert not b.of(ev.Preempted)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_slots_are_reused_within_one_step_after_aborts(strategy: str) -> None:
    b = bench(strategy, pages=400, max_model_len=64, max_num_seqs=2)
    holders = [b.add(8, 40) for _ in range(2)]
    deferred = [b.add(8, 4) for _ in range(3)]
    b.steps(2)
    for r in deferred:
        b.scheduler.abort(r, b.clock.now())
    last = b.add(8, 4)
    b.step()
    assert b.why(last).cause is Cause.SLOTS
    b.scheduler.abort(holders[0], b.clock.now())
    b.step()
    assert b.runs(last)
    b.run()


# -- S6 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_full_queue_refuses_whole_requests_and_names_its_cap(strategy: str) -> None:
    b = bench(strategy, pages=400, max_model_len=64, max_queue=4)
    kept = [b.add(8, 4), b.add(8, 4)]
    for n in (4, 1, 1, 1, 1, 1, 1, 1):
        if n > 4 - b.scheduler.waiting:
            with pytest.raises(RequestError, match="at most 4") as refused:
                b.add(8, 4, n=n)
            assert refused.value.code == "queue_full"
        else:
            kept.append(b.add(8, 4, n=n))
    totals = b.scheduler.totals
    assert (totals.accepted, totals.refused) == (4, 6)
    b.run()
    assert all(len(b.tokens(r)) == 4 for r in kept)


def test_more_samples_than_the_queue_holds_is_not_told_to_try_again() -> None:
    b = bench(pages=400, max_queue=4)
    with pytest.raises(RequestError) as refused:
        b.add(8, 4, n=5)
    assert refused.value.code != "queue_full" or "try again" not in str(refused.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_deadline_in_the_queue_ends_the_request_without_blocks(strategy: str) -> None:
    b = bench(strategy, pages=64, max_model_len=256, max_num_seqs=1)
    b.add(8, 240)
    late = b.add(8, 4, deadline=0.05)
    in_time = b.add(8, 4, deadline=100.0)
    ended: list[tuple[float, Sequence]] = []
    while b.scheduler.busy:
        for progress in b.step()[1]:
            if progress.seq.request.id == late:
                assert progress.token is None
                assert progress.finished is FinishReason.ERROR
                ended.append((b.clock.now(), progress.seq))
    assert len(ended) == 1
    assert 0.05 <= ended[0][0] < 0.07
    assert ended[0][1].admitted_at is None
    assert b.tokens(late) == []
    assert len(b.tokens(in_time)) == 4
    totals = b.scheduler.totals
    assert (totals.accepted, totals.expired, totals.refused) == (3, 1, 0)
    b.quiet()


def test_every_sample_of_an_overdue_request_is_told() -> None:
    b = bench(max_num_seqs=3, pages=100)
    b.add(8, 200)
    late = b.add(8, 4, n=3, deadline=0.02)
    told = []
    while b.scheduler.busy:
        told += [p.seq.index for p in b.step()[1] if p.seq.request.id == late]
    assert told == [0, 1, 2]


# -- admission charges ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(None,), (None, 9)], ids=["full", "windows"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_charged_to_the_ceiling_nobody_is_ever_preempted(
    strategy: str, n: int, windows: tuple[int | None, ...]
) -> None:
    b = Bench(
        strategy,
        pages=48 * len(windows),
        windows=windows,
        config=dict(admission="ceiling", max_model_len=64, max_num_batched_tokens=16, max_num_seqs=6),
    )
    for i in range(40):
        b.add(5 + 7 * i % 31, 3 + 11 * i % 30, n=n)
    b.run()
    assert b.scheduler.totals.preemptions == 0


@pytest.mark.parametrize("admission", ["prompt", "ceiling", "peak"])
@pytest.mark.parametrize("strategy", ["reserve-max", "reserve-pow2", "reserve-oracle"])
def test_a_region_that_never_grows_is_charged_once(strategy: str, admission: str) -> None:
    """Four regions of 16 blocks in a pool of 64: all four requests run together, whatever the charge."""
    b = Bench(strategy, pages=64, config=dict(admission=admission, max_model_len=64, max_num_batched_tokens=64))
    ids = [b.add(16, 48) for _ in range(4)]
    b.steps(8)
    assert [b.runs(r) for r in ids] == [True] * 4
    b.run()


@pytest.mark.parametrize("admission", ["prompt", "ceiling", "peak"])
def test_an_oracle_region_is_charged_its_true_length(admission: str) -> None:
    """Outputs end after 8 of at most 48 tokens and the trace knows it: 4 regions of 6 blocks fill 24 blocks."""
    ends = 7

    def token(seq: Sequence) -> int:
        return ends if seq.generated == 7 else 1000 + seq.generated

    b = Bench(
        "reserve-oracle",
        pages=24,
        config=dict(admission=admission, max_model_len=96, max_num_batched_tokens=64),
        token=token,
    )
    ids = [b.add(16, 48, output_length=8, stop_token_ids=frozenset({ends})) for _ in range(4)]
    b.steps(3)
    assert [b.runs(r) for r in ids] == [True] * 4
    b.run()
    assert [len(b.tokens(r)) for r in ids] == [8] * 4


def test_an_output_that_outgrows_its_oracle_region_does_not_stop_the_engine() -> None:
    b = Bench("reserve-oracle", pages=64, config=dict(max_model_len=96))
    wrong = b.add(16, 30, output_length=4)
    other = b.add(16, 30)
    b.run()
    assert len(b.tokens(other)) == 30
    assert b.all[wrong][0].finish_reason is not None


@pytest.mark.parametrize("admission", ["prompt", "ceiling", "peak"])
def test_shared_blocks_are_not_held_back_again(admission: str) -> None:
    """Eight requests share 8 full blocks and have two each of their own: 8 + 8 x 2 blocks run them all."""
    margin = 4 if admission == "peak" else 0  # it adds half a block a sequence
    b = Bench(pages=24 + margin, config=dict(admission=admission, max_model_len=64, max_num_batched_tokens=128))
    prefix = list(range(500, 532))
    b.add([*prefix, 1], 7)
    b.step()
    ids = [b.add([*prefix, i], 7) for i in range(2, 9)]
    b.steps(3)
    assert [b.runs(r) for r in ids] == [True] * 7
    b.run()
    assert b.scheduler.totals.preemptions == 0


# -- quotas -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tenant_never_holds_more_than_its_quota(strategy: str, n: int) -> None:
    b = bench(strategy, pages=128, max_model_len=64, quotas={"t": 20}, max_num_seqs=8)
    for i in range(6):
        b.add(9 + 5 * i, 20, tenant="t", n=n)
        b.add(9, 20, tenant="other")
    while b.scheduler.busy:
        b.step()
        held = {
            page // b.kv.pages_per_block
            for seq in b.scheduler.running
            if seq.request.tenant == "t" and seq.view is not None
            for table in seq.view.tables
            for page in table
        }
        assert len(held) <= 20
    b.quiet()


@pytest.mark.parametrize("strategy", ON_DEMAND)
def test_two_protected_requests_of_one_tenant_both_end(strategy: str) -> None:
    """Both were preempted as often as allowed, and together they need more than their tenant's quota."""
    b = bench(strategy, pages=40, max_model_len=160, quotas={"t": 24}, max_preemptions=1, max_num_batched_tokens=160)
    ids = [b.add(8, 60, tenant="t") for _ in range(2)]
    b.steps(2)
    for r in ids:
        b.scheduler.preempt(r, b.clock.now())
    b.run()
    assert [len(b.tokens(r)) for r in ids] == [60, 60]


def test_a_tenant_at_its_quota_does_not_hold_up_the_others() -> None:
    b = bench(pages=128, quotas={"t": 12}, max_skips=0)
    b.add(40, 8, tenant="t")
    b.step()
    blocked = b.add(40, 8, tenant="t")
    free = b.add(8, 4, tenant="other")
    b.step()
    assert b.why(blocked).cause is Cause.QUOTA
    assert b.runs(free)
    b.run()
