"""Fair share: tenants get tokens, slots and memory by their weights; a flood of one does not keep another waiting."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from itertools import count
from typing import Any

import pytest

from octavo import events as ev
from octavo.kv.strategies import STRATEGIES
from octavo.runner.api import StepPlan
from octavo.scheduler.config import SchedulerConfig, SchedulerConfigError
from octavo.scheduler.explain import Cause
from octavo.types import FinishReason, RequestError, Sequence, Status
from tests.simulation import Bench

ON_DEMAND = ("growing", "paged")
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def bench(strategy: str = "paged", pages: int = 400, windows: tuple[int | None, ...] = (None,), **config: Any) -> Bench:
    settings = dict(admission="prompt", order="fair", max_model_len=128, max_num_batched_tokens=32) | config
    return Bench(strategy, pages=pages, windows=windows, config=settings)


def served(plans: list[StepPlan]) -> Counter[str]:
    """What each tenant got: a computed prompt token counts 1, a generated one 2."""
    got: Counter[str] = Counter()
    for plan in plans:
        for work in plan.work:
            decodes = work.count == 1 and work.start >= work.seq.prompt_length
            got[work.seq.request.tenant] += 2 * len(work.samples) + (0 if decodes else work.count)
    return got


def slots(b: Bench, tenant: str) -> int:
    return sum(seq.request.tenant == tenant for seq in b.scheduler.running)


def seq_of(b: Bench, seq_id: int) -> Sequence:
    return next(seq for seqs in b.all.values() for seq in seqs if seq.id == seq_id)


def tenants_of(b: Bench, event: ev.Preempted) -> tuple[str, str]:
    """Who lost memory, and for whom."""
    return seq_of(b, event.seq).request.tenant, seq_of(b, event.by).request.tenant


def steps_to_first_token(b: Bench, request: str) -> int:
    for n in count(1):
        if any(p.seq.request.id == request and p.token is not None for p in b.step()[1]):
            return n
    raise AssertionError


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shapes",
    [((24, 8), (24, 8)), ((100, 1), (10, 10)), ((60, 4), (8, 40))],
    ids=["alike", "long against short", "prompts against answers"],
)
@each_strategy
def test_two_tenants_with_a_backlog_get_the_same_at_all_times(strategy: str, shapes: Any) -> None:
    b = bench(strategy, pages=2000, max_num_seqs=16)
    for _ in range(40):
        for tenant, (prompt, answer) in zip("ab", shapes, strict=True):
            b.add(prompt, answer, tenant=tenant)
    got: Counter[str] = Counter()
    for _ in range(60):
        plan, _ = b.step()
        got += served([plan])
        assert abs(got["a"] - got["b"]) <= 2 * (32 + 2 * 16), got  # two steps of one tenant alone
    b.run()


@each_strategy
def test_weights_decide_how_much_each_gets(strategy: str) -> None:
    b = bench(strategy, pages=2000, max_num_seqs=16, tenant_weights={"a": 3, "b": 1.0})
    for _ in range(120):
        for tenant in "ab":
            b.add(30, 2, tenant=tenant)
    b.steps(100)
    got = served(b.plans)
    assert abs(got["a"] - 3 * got["b"]) <= 4 * (32 + 2 * 16)
    b.run()


def test_weights_may_be_any_decimal_fraction() -> None:
    b = bench(pages=2000, max_num_seqs=16, tenant_weights={"a": 0.1, "b": 0.3, "c": 0.7})
    for _ in range(60):
        for tenant in "abc":
            b.add(30, 2, tenant=tenant)
    b.steps(60)
    got = served(b.plans)
    assert got["b"] / got["a"] == pytest.approx(3, rel=0.25)
    assert got["c"] / got["a"] == pytest.approx(7, rel=0.25)
    b.run()


@each_strategy
def test_who_was_idle_has_no_credit(strategy: str) -> None:
    b = bench(strategy, pages=2000, max_num_seqs=16)
    b.add(20, 2, tenant="b")
    for _ in range(100):
        b.add(30, 2, tenant="a")
    b.steps(60)
    began = len(b.plans)
    for _ in range(60):
        b.add(30, 2, tenant="b")
    for _ in range(40):
        b.step()
        got = served(b.plans[began:])
        assert abs(got["a"] - got["b"]) <= 2 * (32 + 2 * 16)
    b.run()


def test_a_slow_stream_is_no_credit_either() -> None:
    """One that decodes a token a step asks for nothing more: what others computed meanwhile is not owed to it."""
    b = bench(pages=2000, max_num_seqs=16)
    b.add(4, 120, tenant="b")
    for _ in range(100):
        b.add(30, 2, tenant="a")
    b.steps(60)
    began = len(b.plans)
    for _ in range(60):
        b.add(30, 2, tenant="b")
    b.steps(40)
    got = served(b.plans[began:])
    assert abs(got["a"] - got["b"]) <= 2 * (32 + 2 * 16)
    b.run()


def test_tokens_from_the_cache_cost_nothing() -> None:
    b = bench(pages=2000, max_num_seqs=16, max_num_batched_tokens=16)
    prefix = list(range(7000, 7080))
    b.add([*prefix, 1], 1, tenant="b")
    b.run()
    began = len(b.plans)
    for i in range(40):
        b.add(84, 1, tenant="a")
        b.add([*prefix, 2, i], 1, tenant="b")
    b.steps(60)
    a, other = (
        sum(b.all[r][0].status is Status.FINISHED for r in b.all if b.all[r][0].request.tenant == t) for t in "ab"
    )
    assert other == 41  # 4 to 6 tokens each: done after a few of the other tenant's prompts
    assert 0 < a < 40
    assert served(b.plans[began:])["a"] > 0
    b.run()


@pytest.mark.parametrize("strategy", ["paged"])
def test_a_newcomer_goes_before_the_prompts_that_others_have_half_done(strategy: str) -> None:
    b = bench(strategy, max_num_batched_tokens=16)
    for _ in range(4):
        b.add(120, 4, tenant="flood")
    b.steps(3)
    newcomer = b.add(14, 4, tenant="guest")
    assert steps_to_first_token(b, newcomer) == 1
    b.run()


def test_within_a_tenant_it_is_first_come_first_served() -> None:
    b = bench(max_num_seqs=4)
    ids = {t: [b.add(20, 3, tenant=t) for _ in range(10)] for t in "ab"}
    b.run()
    order = [seq_of(b, e.seq).request.id for e in b.of(ev.Admitted) if not e.again]
    for own in ids.values():
        assert [r for r in order if r in own] == own


# -- slots ------------------------------------------------------------------------------------------------------------


@each_strategy
def test_a_tenant_alone_uses_everything(strategy: str) -> None:
    b = bench(strategy, pages=400, max_num_seqs=8)
    for _ in range(12):
        b.add(8, 40, tenant="only")
    b.steps(6)
    assert slots(b, "only") == 8
    assert not b.of(ev.Preempted)
    b.run()


@each_strategy
def test_a_newcomer_gets_a_slot_in_the_next_step_although_all_are_taken(strategy: str) -> None:
    b = bench(strategy, pages=400, max_num_seqs=8)
    for _ in range(20):
        b.add(8, 60, tenant="flood")
    b.steps(10)
    assert slots(b, "flood") == 8
    newcomer = b.add(8, 4, tenant="guest")
    assert b.why(newcomer).cause is Cause.NEXT_STEP
    b.step()
    assert b.runs(newcomer)
    assert [tenants_of(b, e) for e in b.of(ev.Preempted)] == [("flood", "guest")]
    assert slots(b, "flood") == 7
    b.run()


@each_strategy
def test_a_newcomer_takes_its_share_of_the_slots_and_no_more(strategy: str) -> None:
    b = bench(strategy, pages=400, max_num_seqs=8, tenant_weights={"flood": 3})
    for _ in range(20):
        b.add(8, 100, tenant="flood")
    b.steps(10)
    guests = [b.add(8, 30, tenant="guest") for _ in range(4)]
    b.steps(4)
    assert (slots(b, "flood"), slots(b, "guest")) == (6, 2)
    wait = b.why(guests[3])
    assert wait.part is not None
    assert (wait.cause, wait.need, wait.have, wait.part.holds, wait.part.share) == (Cause.SLOTS, 1, 0, 2, 2)
    assert "tenant 'guest' holds 2 of 8 slots, its share is 2" in wait.sentence()
    assert sum(holder.amount for holder in wait.holders) == 8
    b.run()


@each_strategy
def test_samples_of_a_newcomer_get_their_slots_together(strategy: str) -> None:
    b = bench(strategy, pages=400, max_num_seqs=8)
    for _ in range(12):
        b.add(8, 60, tenant="flood")
    b.steps(10)
    newcomer = b.add(8, 4, n=3, tenant="guest")
    b.step()
    assert b.runs(newcomer)
    assert slots(b, "flood") == 5
    b.run()


@each_strategy
def test_two_floods_come_to_rest_at_their_shares(strategy: str) -> None:
    """Whoever was displaced does not displace in turn."""
    b = bench(strategy, pages=400, max_num_seqs=8)
    for _ in range(8):
        b.add(8, 100, tenant="a")
    b.steps(8)
    for _ in range(8):
        b.add(8, 100, tenant="b")
    b.steps(40)
    assert (slots(b, "a"), slots(b, "b")) == (4, 4)
    assert [tenants_of(b, e) for e in b.of(ev.Preempted)] == [("a", "b")] * 4
    b.run()


@each_strategy
def test_nobody_is_displaced_for_a_tenant_when_there_are_more_tenants_than_slots(strategy: str) -> None:
    b = bench(strategy, pages=400, max_num_seqs=2)
    ids = [b.add(8, 12, tenant=f"t{i}") for i in range(6)]
    b.run()
    assert not b.of(ev.Preempted)
    assert all(len(b.tokens(r)) == 12 for r in ids)


def test_who_was_displaced_often_enough_keeps_its_slot() -> None:
    b = bench(max_num_seqs=2, max_preemptions=2)
    flood = [b.add(8, 100, tenant="flood") for _ in range(2)]
    b.steps(3)
    for _ in range(8):
        b.add(8, 2, tenant="guest")
        b.steps(6)
    b.run()
    assert all(b.all[r][0].preemptions <= 2 for r in flood)
    assert len(b.of(ev.Preempted)) == 4
    assert all(len(b.tokens(r)) == 100 for r in flood)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(None,), (None, 9, 9)], ids=["full", "windows"])
@pytest.mark.parametrize("admission", ["prompt", "peak", "ceiling"])
@each_strategy
def test_a_newcomer_gets_memory_although_all_is_taken(
    strategy: str, admission: str, windows: tuple[int | None, ...]
) -> None:
    pages = 64 if strategy == "paged" else 64 * len(windows)
    b = bench(
        strategy, pages, windows, max_num_seqs=32, max_model_len=64, max_num_batched_tokens=64, admission=admission
    )
    for _ in range(20):
        b.add(30, 30, tenant="flood")
    b.steps(20)
    before = slots(b, "flood")
    newcomer = b.add(20, 10, tenant="guest")
    b.steps(3 if strategy == "growing" else 1)  # to move others takes a step, and another
    assert b.runs(newcomer)
    assert slots(b, "flood") <= before
    b.run()


@pytest.mark.parametrize("strategy", ON_DEMAND)
def test_a_flood_that_grows_takes_from_itself(strategy: str) -> None:
    b = bench(strategy, pages=60, max_num_seqs=32, max_num_batched_tokens=64)
    for _ in range(12):
        b.add(16, 60, tenant="flood")
    b.steps(10)
    guests = [b.add(16, 20, tenant="guest") for _ in range(2)]
    b.run()
    lost = [tenants_of(b, e) for e in b.of(ev.Preempted)]
    assert ("flood", "flood") in lost
    assert all(victim == "flood" for victim, _ in lost)
    assert all(b.all[r][0].preemptions == 0 for r in guests)


@pytest.mark.parametrize("strategy", ON_DEMAND)
def test_who_has_its_share_of_memory_waits_and_is_told_so(strategy: str) -> None:
    b = bench(strategy, pages=40, max_num_seqs=32, max_model_len=96, max_num_batched_tokens=96)
    b.add(78, 18, tenant="a")
    b.step()
    b.add(72, 18, tenant="b")
    b.step()
    waiter = b.add(40, 8, tenant="b")
    b.step()
    wait = b.why(waiter)
    assert wait.cause is Cause.FULL
    assert wait.part is not None
    assert (wait.need, wait.have, wait.short) == (10, b.kv.free, 10 - b.kv.free)
    assert (wait.part.whole, wait.part.share) == (40, 20)
    assert wait.part.holds == sum(b.kv.blocks_of(s.id) for s in b.scheduler.running if s.request.tenant == "b")
    assert wait.part.holds + wait.need > 20
    assert f"tenant 'b' holds {wait.part.holds} of 40 blocks, its share is 20" in wait.sentence()
    assert not b.of(ev.Preempted)
    b.run()


@each_strategy
def test_a_request_larger_than_its_tenants_share_still_gets_its_turn(strategy: str) -> None:
    b = bench(strategy, pages=48, max_num_seqs=32, max_model_len=96, max_num_batched_tokens=96)
    for _ in range(4):
        b.add(12, 8, tenant="b")
    b.step()
    big = b.add(90, 6, tenant="a")
    for n in range(300):
        if b.runs(big):
            break
        assert n < 299
        b.add(12, 8, tenant="b")
        b.step()
    b.run()


def test_who_may_not_pass_a_big_request_any_more_is_told_so() -> None:
    b = bench(pages=26, max_num_seqs=32, max_model_len=96, max_num_batched_tokens=96, max_skips=1)
    b.add(40, 20, tenant="b")
    b.step()
    big = b.add(91, 4, tenant="a")
    b.step()
    small = b.add(12, 8, tenant="c")
    b.step()
    assert b.runs(small)
    late = b.add(12, 8, tenant="d")
    for _ in range(3):
        b.step()
        wait = b.why(late)
        assert (wait.cause, wait.behind) == (Cause.BEHIND, big)
        assert wait.behind_wait is not None
        assert wait.behind_wait.need == 23
    b.run()


# -- who is told what -------------------------------------------------------------------------------------------------


def test_behind_another_tenants_turn_is_told_with_what_both_have_had() -> None:
    b = bench(pages=40, max_num_seqs=32, max_model_len=96, max_num_batched_tokens=96, max_skips=0)
    b.add(60, 12, tenant="a")
    b.add(60, 12, tenant="b")
    b.steps(3)
    first, second = b.add(60, 4, tenant="a"), b.add(60, 4, tenant="b")
    b.step()
    waits = {r: b.why(r) for r in (first, second)}
    behind = next(w for w in waits.values() if w.cause is Cause.BEHIND)
    assert behind.turn is not None
    assert behind.turn.had <= behind.turn.own_had
    assert behind.behind_wait is not None
    assert behind.behind_wait.cause is Cause.FULL
    text = behind.sentence()
    assert f"of tenant {behind.turn.tenant!r}, whose turn it is: it has had {behind.turn.had} tokens" in text
    assert f"needs {behind.behind_wait.need} blocks" in text
    b.run()


def test_no_reason_is_without_numbers_in_a_life_under_pressure() -> None:
    b = busy_life("paged", 3)
    assert b.scheduler.totals.preemptions > 20


def busy_life(strategy: str, seed: int, steps: int = 400, **config: Any) -> Bench:
    """Four tenants, one of which floods; every reason is looked at in every step."""
    rng = random.Random(seed)
    settings = dict(max_num_seqs=6, max_model_len=96, max_num_batched_tokens=24, tenant_weights={"a": 2.5, "b": 0.4})
    b = bench(strategy, 48, **(settings | config))
    for _ in range(steps):
        if rng.random() < 0.4 and b.scheduler.waiting < 20:
            prompt = [rng.randint(0, 5) for _ in range(rng.randint(1, 50))]
            b.add(prompt, rng.choice((1, 8, 30)), n=rng.choice((1, 1, 2)), tenant=rng.choice("abcdddd"))
        b.step()
        for sentence in b.waits().values():
            assert sentence.startswith("next step") or any(char.isdigit() for char in sentence)
    b.run()
    return b


@pytest.mark.parametrize("admission", ["prompt", "peak", "ceiling"])
@each_strategy
def test_everybody_ends_whatever_the_mix(strategy: str, admission: str) -> None:
    b = busy_life(strategy, 11, 200, admission=admission, max_preemptions=2)
    assert all(seq.status is Status.FINISHED for seqs in b.all.values() for seq in seqs)
    assert all(seq.preemptions <= 2 for seqs in b.all.values() for seq in seqs)


# -- the bar: a flood does not double the wait of others --------------------------------------------------------------


def guest_waits(flooded: bool, strategy: str, guest: tuple[int, int], flood: tuple[int, int]) -> list[int]:
    """Steps to the first token of a guest that comes every few steps, with and without a flood of another tenant."""
    b = bench(strategy, pages=320, max_num_seqs=8, max_model_len=256, max_num_batched_tokens=64, max_preemptions=3)
    b.watched = False
    rng = random.Random(1)
    came: dict[str, int] = {}
    waits: list[int] = []
    for step in range(1200):
        while flooded and b.scheduler.waiting < 30:
            b.add(rng.randint(1, 2 * flood[0]), flood[1], tenant="flood")
        if step % 12 == 0 and len(came) < 90:
            came[b.add(guest[0], guest[1], tenant="guest")] = step
        for p in b.step()[1]:
            request = p.seq.request.id
            if request in came and p.token is not None:
                waits.append(step + 1 - came.pop(request))
        b.events.clear()
        b.plans.clear()
    assert len(waits) >= 90
    return sorted(waits)


@pytest.mark.parametrize("flood", [(40, 16), (100, 4), (10, 60)], ids=["mixed", "prompts", "answers"])
@pytest.mark.parametrize("guest", [(150, 8), (60, 16), (125, 1)])
@pytest.mark.parametrize("strategy", ["reserve-max", "paged"])
def test_a_flood_at_most_doubles_the_wait_of_others(
    strategy: str, guest: tuple[int, int], flood: tuple[int, int]
) -> None:
    alone, flooded = (guest_waits(on, strategy, guest, flood) for on in (False, True))
    p99 = -(len(alone) // 100) - 1
    assert flooded[p99] <= 2 * alone[p99]


# -- determinism ------------------------------------------------------------------------------------------------------


def test_the_same_life_twice_makes_the_same_decisions() -> None:
    one, other = busy_life("paged", 5), busy_life("paged", 5)
    assert one.events == other.events


def test_with_one_tenant_it_decides_as_fcfs() -> None:
    benches = [bench(pages=40, max_num_seqs=6, max_model_len=96, order=order) for order in ("fcfs", "fair")]
    for b in benches:
        rng = random.Random(2)
        for _ in range(30):
            b.add(rng.randint(1, 50), rng.randint(1, 30))
        b.run()
    assert [b.of(ev.Planned) for b in benches[:1]] == [b.of(ev.Planned) for b in benches[1:]]


class Talker:
    """Foresight of a model that never ends an answer."""

    token, windows = 1, ()

    def plain(self, seq: Sequence) -> int:
        return 1000


def test_nobody_coasts_in_a_simulation_with_fair_shares() -> None:
    """Whose turn it is changes with every token: each plan lists everybody who runs."""
    config = dict(admission="prompt", order="fair", max_num_seqs=4)
    foreseeing = Bench(pages=400, config=config, extra={"foresight": Talker()})
    for tenant in "ab":
        foreseeing.add(8, 60, tenant=tenant)
    foreseeing.steps(10)
    assert foreseeing.scheduler.undisturbed == 0
    assert len(foreseeing.plans[-1].work) == 2
    foreseeing.run()


@pytest.mark.parametrize("strategy", ON_DEMAND)
def test_a_failed_step_leaves_the_turns_of_others_as_they_are(strategy: str) -> None:
    b = bench(strategy, max_num_seqs=4)
    lost = b.add(40, 4, tenant="a")
    kept = b.add(20, 4, tenant="b")
    plan = b.scheduler.plan(b.clock.now())
    b.scheduler.fail(plan, b.clock.now())
    assert b.all[lost][0].finish_reason is FinishReason.ERROR
    b.run()
    assert len(b.tokens(kept)) == 4


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0, -1, "2", True, float("nan"), float("inf"), 1e-9])
def test_a_weight_out_of_bounds_is_named(weight: object) -> None:
    with pytest.raises(SchedulerConfigError, match=r"tenant_weights of 'a' is .* from 0\.001 to 1000"):
        SchedulerConfig(64, max_num_seqs=4, order="fair", tenant_weights={"a": weight})  # type: ignore[dict-item]


def test_weights_without_fair_order_are_refused() -> None:
    with pytest.raises(SchedulerConfigError, match="set order to 'fair'"):
        SchedulerConfig(64, max_num_seqs=4, tenant_weights={"a": 2})


# -- a bounded queue --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["fcfs", "priority", "fair"])
@each_strategy
def test_a_queue_full_of_tokens_refuses_with_the_numbers(strategy: str, order: str) -> None:
    b = bench(strategy, order=order, max_num_seqs=1, max_queued_tokens=50)
    b.add(30, 8)
    with pytest.raises(RequestError) as refused:
        b.add(21, 8)
    assert (refused.value.code, refused.value.field) == ("queue_tokens_full", None)
    whose = " of tenant ''" if order == "fair" else ""
    told = f"30 of at most 50 prompt tokens{whose} wait already (max_queued_tokens) and this request has 21"
    assert told in str(refused.value)
    b.add(20, 8, n=1)
    b.step()  # the first has been admitted
    third = b.add(30, 8)
    with pytest.raises(RequestError, match="50 of at most 50"):
        b.add(1, 1)
    b.scheduler.abort(third, b.clock.now())
    b.add(30, 8)
    b.run()
    totals = b.scheduler.totals
    assert (totals.accepted, totals.refused, totals.finished) == (4, 2, 4)
    b.add(50, 1)
    b.run()


def test_samples_share_their_prompt_in_the_queue() -> None:
    b = bench(max_queued_tokens=50)
    b.add(50, 4, n=4)
    with pytest.raises(RequestError, match="50 of at most 50"):
        b.add(1, 1)
    b.run()


def test_a_prompt_that_no_queue_could_take_is_not_told_to_try_again() -> None:
    b = bench(max_queued_tokens=50)
    with pytest.raises(RequestError, match="prompt has 51 tokens; at most 50 may wait") as refused:
        b.add(51, 1)
    assert (refused.value.code, refused.value.field) == ("invalid_request", "prompt")
    assert "try again" not in str(refused.value)


@pytest.mark.parametrize("strategy", ON_DEMAND)
def test_preempted_ones_do_not_fill_the_queue(strategy: str) -> None:
    b = bench(strategy, max_queued_tokens=40, max_num_seqs=4)
    first = b.add(40, 8)
    b.steps(3)
    b.scheduler.preempt(first, b.clock.now())
    b.add(40, 8)
    b.run()


@pytest.mark.parametrize("order", ["fcfs", "fair"])
def test_who_gave_up_waiting_makes_room_and_every_request_is_counted_once(order: str) -> None:
    b = bench(order=order, max_num_seqs=1, max_queued_tokens=60, max_queue=3)
    b.add(8, 100, tenant="x")
    b.step()
    for i in range(40):
        with contextlib.suppress(RequestError):
            b.add(30, 4, tenant="xy"[i % 2], deadline=b.clock.now() + 0.05)
        b.step()
    b.run()
    totals = b.scheduler.totals
    assert {event.code for event in b.of(ev.Refused)} <= {"queue_full", "queue_tokens_full", "invalid_request"}
    assert totals.accepted + totals.refused == 41
    assert totals.expired > 0
    assert totals.finished == totals.accepted


@each_strategy
def test_a_flood_fills_its_own_places_in_the_line_and_nobody_elses(strategy: str) -> None:
    b = bench(strategy, order="fair", max_num_seqs=1, max_queue=3, max_queued_tokens=60)
    for _ in range(3):
        b.add(16, 8, tenant="flood")
    for tokens, code in ((4, "queue_full"), (16, "queue_full")):
        with pytest.raises(RequestError, match="3 of at most 3 sequences of tenant 'flood'") as refused:
            b.add(tokens, 8, tenant="flood")
        assert refused.value.code == code
    guest = b.add(16, 8, tenant="guest")
    b.run()
    assert len(b.tokens(guest)) == 8
