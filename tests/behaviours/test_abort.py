"""D1, D2: an abort in any phase gives every block back, caches only what was computed, and hits nobody else."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo import events as ev
from octavo.kv.strategies import STRATEGIES
from octavo.types import FinishReason, RequestError, Status
from tests.simulation import Bench

EVERY = pytest.mark.parametrize("strategy", STRATEGIES)
WINDOWS = pytest.mark.parametrize("windows", [(None,), (None, 9)], ids=["full", "windows"])
PHASES = ("queued", "first chunk", "last chunk", "decoding", "preempted", "ended")


def bench(strategy: str = "paged", pages: int = 64, windows: tuple[int | None, ...] = (None,), **config: Any) -> Bench:
    settings = dict(admission="prompt", max_model_len=64, max_num_batched_tokens=8) | config
    return Bench(strategy, pages=pages * len(windows), windows=windows, config=settings)


def bring(b: Bench, r: str, phase: str) -> None:
    """Step until the request stands in the phase."""
    seq = b.all[r][0]
    if phase == "first chunk":
        while not 0 < seq.computed < seq.prompt_length:
            b.step()
    elif phase == "last chunk":
        while seq.computed <= seq.prompt_length - 8:
            b.step()
    elif phase in ("decoding", "preempted"):
        while seq.generated < 3:
            b.step()
        if phase == "preempted":
            b.scheduler.preempt(r, b.clock.now())
    elif phase == "ended":
        while seq.status is not Status.FINISHED:
            b.step()


@WINDOWS
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("phase", PHASES)
@EVERY
def test_an_abort_gives_everything_back_at_once(
    strategy: str, phase: str, n: int, windows: tuple[int | None, ...]
) -> None:
    b = bench(strategy, windows=windows)
    other = b.add(9, 30)
    b.steps(3)
    r = b.add(21, 10, n=n, seed=1)
    bring(b, r, phase)
    b.events.clear()
    ended = b.scheduler.abort(r, b.clock.now())
    b.look()
    assert r not in b.scheduler.requests
    assert all(seq.status is Status.FINISHED for seq in b.all[r])
    assert b.scheduler.waiting == 0
    assert [seq.request.id for seq in b.scheduler.running] == ([other] if other in b.scheduler.requests else [])
    assert len(ended) == (0 if phase == "ended" and n == 1 else len(ended))
    assert len(b.of(ev.Stopped)) == len(b.of(ev.Finished)) == len(ended), "one line for each sample that still lived"
    assert all(seq.finish_reason is FinishReason.ABORT for seq in ended)
    b.steps(2)
    assert pinned(b) == blocks_in_use(b), "all that is still in use belongs to those who still run"
    assert not any(w.seq.request.id == r for plan in b.plans[-2:] for w in plan.work)
    assert b.scheduler.abort(r, b.clock.now()) == []
    b.run()
    assert len(b.tokens(other)) == 30


def pinned(b: Bench) -> int:
    return b.kv.capacity - b.kv.free - b.kv.evictable


def blocks_in_use(b: Bench) -> int:
    held = [table for seq in b.scheduler.running if seq.view for table in seq.view.tables]
    return len({page // b.kv.pages_per_block for table in held for page in table if page >= 0})


@WINDOWS
@pytest.mark.parametrize("phase", PHASES)
def test_only_computed_blocks_are_hits_afterwards(phase: str, windows: tuple[int | None, ...]) -> None:
    b = bench(windows=windows)
    prompt = list(range(30, 51))
    r = b.add(prompt, 10)
    bring(b, r, phase)
    computed = b.all[r][0].high_water
    b.scheduler.abort(r, b.clock.now())
    again = b.add(prompt, 10)
    b.run()  # reads every position back
    assert b.reused(again) == min(computed, 20) // 4 * 4
    fresh = bench(windows=windows)
    f = fresh.add(prompt, 10)
    fresh.run()
    assert b.tokens(again) == fresh.tokens(f)


@EVERY
def test_an_abort_while_the_step_runs_caches_nothing_of_that_step(strategy: str) -> None:
    b = bench(strategy, max_num_batched_tokens=64)
    prompt = list(range(30, 51))
    r = b.add(prompt, 10)
    plan = b.scheduler.plan(0.0)
    result = b.runner.run(plan)
    b.scheduler.abort(r, 0.0)
    b.look()
    out = b.scheduler.settle(plan, result, 0.0)
    assert out == []
    again = b.add(prompt, 10)
    b.run()
    assert b.reused(again) == 0
    assert len(b.tokens(again)) == 10
    assert b.tokens(r) == []


@WINDOWS
@EVERY
def test_two_hundred_aborts_at_random_moments(strategy: str, windows: tuple[int | None, ...]) -> None:
    rng = random.Random(1589)
    b = bench(strategy, pages=40, windows=windows, max_num_seqs=4)
    expected: dict[str, int] = {}
    aborted = 0
    while aborted < 200:
        if b.scheduler.waiting < 4:
            length, out = rng.randint(1, 30), rng.randint(0, 30)
            expected[b.add([rng.randint(0, 2) for _ in range(length)], out, n=rng.choice((1, 1, 2)))] = out
        plan = b.scheduler.plan(b.clock.now())
        result = b.runner.run(plan)
        aborted += maybe_abort(b, rng, expected)
        b.scheduler.settle(plan, result, b.clock.now())
        b.look()
        aborted += maybe_abort(b, rng, expected)
    b.run()
    for r, out in expected.items():
        assert all(len(seq.output) == out for seq in b.all[r]), "the others are unharmed"


def maybe_abort(b: Bench, rng: random.Random, expected: dict[str, int]) -> int:
    if rng.random() > 0.2 or not b.scheduler.requests:
        return 0
    r = rng.choice(list(b.scheduler.requests))
    expected.pop(r, None)
    b.scheduler.abort(r, b.clock.now())
    b.look()
    return 1


# -- D2 ---------------------------------------------------------------------------------------------------------------


@EVERY
def test_two_live_requests_cannot_share_an_id(strategy: str) -> None:
    b = bench(strategy)
    first = b.add(8, 4, id="x")
    with pytest.raises(RequestError) as refused:
        b.add(8, 4, id="x")
    assert refused.value.field == "id"
    assert b.scheduler.waiting == 1
    b.run()
    assert len(b.tokens(first)) == 4


@EVERY
def test_an_id_can_be_used_again_in_the_same_tick(strategy: str) -> None:
    """500 times: abort and send again, while a step runs and after it; the last one runs to its end."""
    b = bench(strategy, max_num_batched_tokens=64)
    b.add(9, 6, id="x")
    for i in range(500):
        plan = b.scheduler.plan(b.clock.now())
        result = b.runner.run(plan)
        if i % 3 != 1:
            resend(b)
        b.scheduler.settle(plan, result, b.clock.now())
        if i % 3 != 0:
            resend(b)
        b.look()
        ledger = b.scheduler.ledger()
        assert min(ledger.live, ledger.reserved, ledger.slack, ledger.free) >= 0
        assert len(b.scheduler.running) + b.scheduler.waiting == len(b.scheduler.requests) == 1
    b.run()
    assert len(b.tokens("x")) == 6


def resend(b: Bench) -> None:
    b.scheduler.abort("x", b.clock.now())
    b.add(9, 6, id="x")


def test_aborting_an_unknown_id_is_no_error() -> None:
    b = bench()
    assert b.scheduler.abort("nobody", 0.0) == []
    b.add(8, 2)
    b.run()
