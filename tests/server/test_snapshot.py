"""M1, M2: what a snapshot says of memory and of waiting is what the allocator says at the same moment."""

from __future__ import annotations

import pytest

from octavo.kv.strategies import STRATEGIES
from octavo.server.block_map import take_map
from octavo.server.snapshot import EXPLAINED, Absence, take_outside, take_row
from octavo.types import RequestError
from tests.server.looking import Looked

PROMPT = {"admission": "prompt", "max_num_batched_tokens": 256}


def sums(one: Looked) -> None:
    """The ledger sums to the budget, the pool's blocks to its capacity, and the map says the same."""
    head, kv = one.head(), one.engine.scheduler.kv
    assert sum(head.ledger.lines.values()) == head.ledger.budget
    assert min(head.ledger.lines.values()) >= 0
    pool = head.pool
    assert pool["pinned"] + pool["cached"] + pool["free"] == pool["blocks"] == kv.capacity
    assert (pool["cached"], pool["free"]) == (kv.evictable, kv.free)
    runs = take_map(one.built).json()
    assert sum(length for length, *_ in runs["runs"]) == runs["pages"] == one.built.pages
    by_state = dict.fromkeys(("live", "slack", "reserved", "cached", "free"), 0)
    for length, state, owner in runs["runs"]:
        by_state[state] += length
        assert (owner >= 0) == (state in ("live", "slack", "reserved"))
    assert by_state["cached"] == kv.evictable * kv.pages_per_block
    assert by_state["live"] + by_state["slack"] + by_state["reserved"] == pool["pinned"] * kv.pages_per_block
    assert head.running + head.waiting == len(one.engine.scheduler.requests) == len(one.snapshot().rows)
    assert sum(head.waiting_by_cause.values()) == one.engine.scheduler.waiting


# -- M1: gauges tell the truth ----------------------------------------------------------------------------------------


def test_an_idle_engine_is_all_free() -> None:
    one = Looked()
    sums(one)
    head = one.head()
    assert head.pool == {"blocks": 64, "pinned": 0, "cached": 0, "free": 64}
    assert head.limiting == ("none", "Nothing: no request waits.")


def test_a_cache_that_nobody_uses_is_not_usage() -> None:
    one = Looked()
    one.add(40, 4)
    one.run()
    sums(one)
    head = one.head()
    assert head.pool["pinned"] == 0
    assert head.pool["cached"] == 10
    assert head.ledger.lines["live"] == 0
    assert head.ledger.lines["cached"] > 0


def test_one_request_holds_its_three_blocks() -> None:
    one = Looked()
    name = one.add(9, 8)
    one.step()
    sums(one)
    row = one.row(name)
    assert (row.blocks, row.shared_blocks, row.slack_tokens, row.reserved_tokens) == (3, 0, 3, 0)
    assert (row.computed_tokens, row.generated_tokens, row.phase, row.state) == (9, 1, "decode", "running")
    assert one.head().pool["pinned"] == 3


@pytest.mark.parametrize("windows", [(None,), (None, 9)], ids=["full", "windows"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_slot_is_in_one_line_at_every_step(strategy: str, windows: tuple[int | None, ...]) -> None:
    one = Looked(
        strategy=strategy, windows=windows, pages=30 * len(windows), max_model_len=64, admission="prompt", spare=7
    )
    for i in range(14):
        one.add(3 + 7 * i % 31, 3 + 11 * i % 30)
    while one.engine.busy:
        one.step()
        sums(one)
    sums(one)


def test_blocks_that_two_requests_share_are_told_as_shared() -> None:
    one = Looked()
    prompt = list(range(16))
    first = one.add(prompt, 30)
    one.step(2)
    second = one.add([*prompt, 99], 4)
    one.step()
    assert one.row(second).shared_blocks == 4
    assert one.row(second).cached_tokens == 16
    assert one.row(first).shared_blocks == 4
    assert one.row(first).blocks == 5


@pytest.mark.parametrize(
    ("settings", "requests", "resource"),
    [
        ({"max_num_batched_tokens": 16, "max_num_seqs": 8}, [(60, 1)] * 4, "tokens"),
        ({"max_num_seqs": 2}, [(8, 40)] * 5, "slots"),
        ({"pages": 16, "max_num_batched_tokens": 256}, [(30, 20)] * 5, "memory"),
        ({"quotas": {"t": 14}, **PROMPT}, [(30, 20)] * 3, "quota"),
    ],
)
def test_the_limiting_resource_is_named_with_numbers(
    settings: dict[str, object], requests: list[tuple[int, int]], resource: str
) -> None:
    one = Looked(**settings)
    for prompt, answer in requests:
        one.add(prompt, answer, tenant="t")
    one.step()
    found, sentence = one.head().limiting
    assert found == resource
    assert any(letter.isdigit() for letter in sentence)


def test_nothing_limits_when_nobody_waits() -> None:
    one = Looked()
    one.add(8, 20)
    one.step()
    assert one.head().limiting[0] == "none"


# -- M2: why does this request wait? ----------------------------------------------------------------------------------


def test_no_blocks() -> None:
    one = Looked(pages=20, max_model_len=64, **PROMPT)
    holder = one.add(30, 34)
    one.step(13)
    waiter = one.add(40, 24)
    one.step()
    row, kv = one.row(waiter), one.engine.scheduler.kv
    assert (row.state, row.phase) == ("waiting", "queued")
    wait = row.wait
    assert wait is not None
    assert (wait.cause, wait.need, wait.have, wait.short) == ("memory: full", 10, kv.free, 10 - kv.free)
    assert [(held.request, held.amount) for held in wait.holders] == [(holder, 20 - kv.free)]
    assert wait.unblocks.startswith(f"{wait.short} block")
    assert wait.eta_s is not None
    assert "an estimate" in wait.unblocks


def test_those_behind_are_not_promised_what_the_first_in_line_gets() -> None:
    one = Looked(pages=256, max_num_seqs=2)
    one.add(8, 30)
    one.add(8, 60)
    waiters = [one.add(8, 4) for _ in range(4)]
    one.step(5)
    etas = [one.row(waiter).wait.eta_s for waiter in waiters]  # type: ignore[union-attr]
    assert etas[0] is not None
    assert etas[1] is not None
    assert etas[0] < etas[1]
    assert etas[2:] == [None, None]
    assert take_row(one.built, {}, one.inspector, waiters[1]).wait.eta_s == etas[1]  # type: ignore[union-attr]


def test_what_is_estimated_for_a_wait_is_kept_by_the_engine() -> None:
    one = Looked(pages=256, max_num_seqs=1)
    one.add(8, 60)
    waiter = one.add(8, 4)
    one.step(5)
    wait = one.row(waiter).wait
    assert wait is not None
    assert wait.eta_s is not None
    end = one.engine.clock.now() + wait.eta_s
    while one.row(waiter).state == "waiting":
        one.step()
    assert one.engine.clock.now() == pytest.approx(end, rel=0.1)


def test_no_contiguous_run() -> None:
    one = Looked(strategy="reserve-oracle", pages=16, max_num_seqs=4, **PROMPT)
    ids = [one.add(9, 7) for _ in range(4)]
    one.step()
    for name in ids[::2]:
        one.engine.abort(name)
    waiter = one.add(30, 2)
    one.step()
    wait = one.row(waiter).wait
    assert wait is not None
    assert (wait.cause, wait.need, wait.have, wait.eta_s) == ("memory: fragmented", 8, 8, None)
    assert "a run of 8 blocks must come free" in wait.unblocks
    assert one.head().ledger.lines["fragmented"] > 0


def test_slots() -> None:
    one = Looked(pages=256, max_num_seqs=2)
    holders = [one.add(8, 20) for _ in range(2)]
    waiter = one.add(8, 4)
    one.step()
    wait = one.row(waiter).wait
    assert wait is not None
    assert (wait.cause, wait.need, wait.have, wait.unit) == ("slots", 1, 0, "slots")
    assert [holder.request for holder in wait.holders] == holders
    assert wait.unblocks.startswith("1 of the 2 sequences that run must end")


def test_token_budget() -> None:
    one = Looked(pages=256, max_num_batched_tokens=16)
    one.add(60, 4)
    waiter = one.add(20, 4)
    one.step()
    wait = one.row(waiter).wait
    assert wait is not None
    assert wait.cause == "step budget"
    assert "16 tokens a step" in wait.sentence


def test_behind_another_with_that_ones_reason() -> None:
    one = Looked(pages=20, max_model_len=64, max_skips=0, **PROMPT)
    one.add(40, 20)
    one.step()
    big, small = one.add(44, 4), one.add(2, 2)
    one.step()
    wait = one.row(small).wait
    assert wait is not None
    assert (wait.cause, wait.behind) == ("behind", big)
    assert "memory: full" in wait.sentence
    assert wait.unblocks.startswith(f"{big} must be admitted first")


def test_behind_one_that_computes_the_same_prefix() -> None:
    one = Looked(pages=256, max_num_batched_tokens=32)
    prompt = list(range(60))
    first = one.add(prompt, 4)
    one.step()
    second = one.add(prompt, 4)
    one.engine.scheduler.plan(one.engine.clock.now())
    wait = one.row(second).wait
    assert wait is not None
    assert (wait.cause, wait.behind) == ("behind", first)
    assert wait.unblocks == f"{first} must have computed the prefix that both share"


def test_tenant_quota() -> None:
    one = Looked(pages=80, max_model_len=64, quotas={"t": 20}, **PROMPT)
    own = one.add(33, 30, tenant="t")
    one.add(40, 20, tenant="other")
    one.step()
    waiter = one.add(50, 14, tenant="t")
    one.step()
    wait = one.row(waiter).wait
    assert wait is not None
    assert (wait.cause, wait.need, wait.have, wait.short) == ("quota", 13, 11, 2)
    assert [holder.request for holder in wait.holders] == [own]
    assert wait.unblocks.startswith("requests of its own tenant must give 2 blocks back")


def test_preempted() -> None:
    one = Looked(pages=16, **PROMPT)
    for _ in range(3):
        one.add(16, 40)
    while not (lost := [row for row in one.snapshot().rows if row.phase == "preempted"]):
        one.step()
    row = lost[0]
    assert (row.state, row.preemptions, row.blocks, row.computed_tokens) == ("waiting", 1, 0, 0)
    assert row.generated_tokens > 0
    assert row.wait is not None
    assert row.wait.cause.startswith("memory")


def test_one_that_can_never_fit_is_refused_and_in_no_row() -> None:
    one = Looked(pages=16, max_model_len=64)
    with pytest.raises(RequestError, match="64"):
        one.add(100, 2)
    assert one.snapshot().rows == ()


def test_a_stopped_scheduler() -> None:
    one = Looked(pages=256, max_num_seqs=1)
    one.add(8, 20)
    waiter = one.add(8, 20)
    one.step()
    one.built.engine.clock.advance(7)  # type: ignore[attr-defined]
    wait = one.row(waiter).wait
    assert wait is not None
    assert wait.cause == "no step"
    assert wait.sentence.startswith("no step for 7 s")
    head = one.head()
    assert head.waiting_by_cause == {"no step": 1}
    assert "no step was made for 7 s" in head.limiting[1]
    one.step()
    assert one.row(waiter).wait.cause == "slots"  # type: ignore[union-attr]


def test_who_has_just_come_to_an_idle_engine_does_not_wait_for_a_stopped_one() -> None:
    one = Looked()
    one.add(8, 2)
    one.run()
    one.built.engine.clock.advance(3600)  # type: ignore[attr-defined]
    waiter = one.add(8, 2)
    assert one.row(waiter).wait.cause == "next step"  # type: ignore[union-attr]
    assert one.head().waiting_by_cause == {"next step": 1}


def test_an_engine_that_does_not_come_back_is_read_from_outside() -> None:
    one = Looked(pages=256, max_num_seqs=1)
    running, waiter = one.add(9, 20), one.add(8, 20)
    one.step()
    found = take_outside(one.built, {waiter: "mine"}, one.inspector, Absence(12.4, True))
    assert [row.id for row in found.rows] == [running, waiter]
    assert found.rows[0].wait is None
    assert found.rows[1].wait is not None
    assert found.rows[1].wait.sentence.startswith("no step for 12 s")
    assert found.rows[1].label == "mine"
    assert sum(found.head.ledger.lines.values()) == found.head.ledger.budget
    assert found.rows[0].blocks == 3


# -- many at once -----------------------------------------------------------------------------------------------------


def test_of_a_thousand_who_wait_everybody_has_a_reason_with_numbers() -> None:
    one = Looked(pages=600, max_num_seqs=8, admission="prompt")
    ids = [one.add(8, 40) for _ in range(1008)]
    one.step(2)
    rows = one.snapshot().rows
    assert [row.id for row in rows] == ids
    assert [row.state for row in rows] == ["running"] * 8 + ["waiting"] * 1000
    for row in rows[8:]:
        assert row.wait is not None
        assert (row.wait.cause, row.wait.need, row.wait.have) == ("slots", 1, 0)


def test_those_who_came_after_the_last_plan_are_told_so_and_not_that_there_is_room() -> None:
    one = Looked(pages=600, max_num_seqs=8)
    one.add(8, 40)
    one.step()
    late = [one.add(8, 4) for _ in range(EXPLAINED + 4)]
    wait = one.row(late[-1]).wait
    assert wait is not None
    assert wait.cause == "next step"
    assert "since the last plan" in wait.sentence


def test_a_request_asked_for_alone_lists_all_holders() -> None:
    one = Looked(pages=600, max_num_seqs=24)
    for _ in range(24):
        one.add(2, 40)
    waiter = one.add(8, 4)
    one.step()
    assert len(one.row(waiter).wait.holders) == 16  # type: ignore[union-attr]
    row = take_row(one.built, {}, one.inspector, waiter)
    assert row is not None
    assert len(row.wait.holders) == 24  # type: ignore[union-attr]


def test_under_fair_share_each_tenant_is_told_its_own_reason_and_nobody_is_promised_a_time() -> None:
    one = Looked(pages=600, max_num_seqs=4, order="fair")
    for tenant in ("a", "b"):
        for _ in range(30):
            one.add(8, 40, tenant=tenant)
    one.step(3)
    waiting = [row for row in one.snapshot().rows if row.state == "waiting"]
    assert len(waiting) == 56
    for row in waiting:
        assert row.wait is not None
        assert row.wait.eta_s is None
        assert row.wait.cause in ("slots", "behind")
        assert row.wait.behind is None or row.wait.behind != row.id


def test_priority_decides_the_order_of_the_rows() -> None:
    one = Looked(max_num_seqs=1, order="priority")
    first = one.add(8, 20)
    one.step()
    low, high = one.add(8, 2, priority=5), one.add(8, 2, priority=1)
    assert [row.id for row in one.snapshot().rows] == [first, high, low]


def test_samples_of_one_request_are_one_row() -> None:
    one = Looked(pages=256)
    name = one.add(9, 20, n=3)
    one.step(3)
    row = one.row(name)
    assert (row.state, row.generated_tokens) == ("running", 9)
    assert row.blocks == one.head().pool["pinned"]
    assert row.shared_blocks == 2


def test_a_snapshot_is_the_same_after_the_engine_went_on() -> None:
    one = Looked()
    one.add(9, 8)
    one.step()
    snapshot = one.snapshot()
    before = snapshot.json()
    one.run()
    assert snapshot.json() == before
