"""Drafts by prompt lookup: they change how many steps an answer takes, and nothing else for anybody."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest

from octavo import events as ev
from octavo.kv.prefix import KeyChain
from octavo.kv.strategies import STRATEGIES
from octavo.runner.simulated import TokenSource, placeholder_token
from octavo.scheduler.config import SchedulerConfigError
from octavo.scheduler.drafts import Drafter
from octavo.types import FinishReason, Request, SamplingParams, Sequence
from tests.simulation import Bench

EVERY = pytest.mark.parametrize("strategy", STRATEGIES)


def periodic(period: int) -> TokenSource:
    """Says the same `period` tokens over and over."""
    return lambda seq: 5 + len(seq.tokens) % period


def habitual(seq: Sequence) -> int:
    """Repeats what it said four tokens ago, but for one token in five: a function of the history."""
    history = crc32(repr((seq.tokens[-3:], seq.index)).encode())
    return seq.tokens[-4] if len(seq.tokens) > 4 and history % 5 else history % 7


def misleading(seq: Sequence) -> int:
    """Every other token is the same, and what follows it never."""
    return 5 if len(seq.tokens) % 3 else placeholder_token(seq) + 1000 * len(seq.tokens)


def bench(strategy: str = "paged", tokens: int = 4, token: TokenSource = habitual, **more: Any) -> Bench:
    config = dict(speculative_tokens=tokens) | more.pop("config", {})
    return Bench(strategy, token=token, config=config, **more)


def drafts(b: Bench) -> int:
    return sum(len(work.draft) for plan in b.plans for work in plan.work)


@EVERY
def test_text_that_repeats_itself_takes_fewer_steps(strategy: str) -> None:
    with_drafts, without = bench(strategy, token=periodic(6)), bench(strategy, 0, token=periodic(6))
    for b in (with_drafts, without):
        b.add(12, 60)
        b.run()
    assert with_drafts.tokens("r1") == without.tokens("r1")
    assert len(with_drafts.plans) < 0.6 * len(without.plans)
    assert not drafts(without)
    totals, (seq,) = with_drafts.scheduler.totals, with_drafts.all["r1"]
    assert totals.drafted == seq.drafted == drafts(with_drafts)
    assert totals.drafts_accepted == seq.drafts_accepted == 59 - (len(with_drafts.plans) - 1)


@EVERY
@pytest.mark.parametrize("windows", [(None,), (None, 9)], ids=["full", "window"])
def test_nobody_says_anything_else(strategy: str, windows: tuple[int | None, ...]) -> None:
    """Samples, chunks, priorities, preemption for want of memory: the answers are those without drafts."""
    said = []
    for tokens in (0, 1, 4):
        pages = 40 if strategy == "paged" or len(windows) == 1 else 80
        config = dict(admission="prompt", max_model_len=64, max_num_batched_tokens=12)
        b = bench(strategy, tokens, pages=pages, windows=windows, config=config)
        for i in range(12):
            b.add([i % 3, 1, 2] * (2 + i % 4), 10 + i * 7 % 30, n=1 + i % 2, temperature=0.5)
        b.run()
        said.append({(r, s.index): s.output for r, seqs in b.all.items() for s in seqs})
        assert (b.scheduler.totals.drafts_accepted > 20) == bool(tokens)
        assert strategy != "paged" or b.scheduler.totals.preemptions > 0
    assert said[0] == said[1] == said[2]


def test_drafts_that_do_not_come_true_are_given_up_and_tried_again() -> None:
    b = bench(tokens=8, token=misleading, config=dict(max_model_len=2048), pages=1024)
    b.add(6, 1000)
    b.run()
    assert b.scheduler.totals.drafts_accepted < 0.5 * b.scheduler.totals.drafted
    assert 8 < drafts(b) < 100
    late = [i for i, plan in enumerate(b.plans) if plan.work[0].draft]
    assert late[-1] > 500


def test_a_sequence_that_starts_to_repeat_itself_gets_drafts_again() -> None:
    def late(seq: Sequence) -> int:
        return misleading(seq) if len(seq.tokens) < 300 else periodic(7)(seq)

    b = bench(tokens=8, token=late, config=dict(max_model_len=2048), pages=1024)
    b.add(6, 1000)
    b.run()
    assert len(b.plans) < 300 + 700 / 3


def test_drafts_never_go_beyond_the_requests_end() -> None:
    for max_tokens in range(1, 20):
        b = bench(tokens=8, token=periodic(2))
        b.add(10, max_tokens)
        b.run()
        assert b.tokens("r1") == [5 + n % 2 for n in range(10, 10 + max_tokens)]
        assert max(w.start + w.count for plan in b.plans for w in plan.work) <= 10 + max_tokens - 1


def test_a_stop_token_where_a_draft_was_wrong_ends_the_request() -> None:
    b = bench(tokens=8, token=lambda seq: 99 if len(seq.tokens) == 43 else periodic(3)(seq))
    b.add(10, 60, stop_token_ids=frozenset({99}))
    b.run()
    assert b.tokens("r1")[-1] == 99
    assert len(b.tokens("r1")) == 34
    assert b.all["r1"][0].finish_reason is FinishReason.STOP


@EVERY
def test_an_accepted_stop_token_drops_what_follows(strategy: str) -> None:
    """The draft itself holds the stop token: min_tokens had let it pass before."""
    b = bench(strategy, tokens=8, token=periodic(5))
    b.add(10, 60, stop_token_ids=frozenset({7}), min_tokens=23)
    b.run()
    said = b.tokens("r1")
    assert said == [5 + n % 5 for n in range(10, 10 + len(said))]
    assert said[-1] == 7
    assert 23 < len(said) <= 28
    assert any(len(run) > 1 for event in b.of(ev.Settled) for run in event.tokens)


@EVERY
def test_lookahead_is_a_line_of_the_ledger_until_the_step_has_judged_it(strategy: str) -> None:
    b = bench(strategy, token=habitual, config=dict(max_model_len=64))
    for _ in range(3):
        b.add([1, 2, 3, 4] * 3, 40)
    seen = 0
    while b.scheduler.busy:
        plan = b.scheduler.plan(b.clock.now())
        ledger = b.scheduler.ledger()
        assert ledger.lookahead == sum(len(work.draft) for work in plan.work)
        assert ledger.capacity == b.kv.capacity * b.kv.block_size
        assert min(ledger.live, ledger.reserved, ledger.slack, ledger.free) >= 0
        assert ledger.live == sum(seq.computed for seq in b.scheduler.running) or strategy == "paged"
        seen = max(seen, ledger.lookahead)
        b.scheduler.settle(plan, b.runner.run(plan), b.clock.now())
        b.look()
        assert b.scheduler.ledger().lookahead == 0
        if strategy == "paged":
            held = sum(len(seq.view.tables[0]) for seq in b.scheduler.running if seq.view)
            assert held <= sum(-(-(seq.computed + 1) // 4) for seq in b.scheduler.running)
    assert seen > 3
    b.quiet()


def test_drafts_take_no_memory_from_anybody() -> None:
    """Two sequences fill a small pool, cached prefixes the rest: nothing is evicted and nobody preempted for drafts."""
    counts = []
    for tokens in (0, 6):
        b = bench(tokens=tokens, token=periodic(6), pages=28, config=dict(max_model_len=64))
        for _ in range(3):
            b.add(20, 2)
            b.run()
        b.add(12, 34)
        b.add(12, 34)
        b.run()
        counts.append((b.scheduler.totals.preemptions, b.scheduler.totals.evicted))
        assert (b.scheduler.totals.drafts_accepted > 0) == bool(tokens)
    assert counts[0][0] == counts[1][0]
    assert counts[1][1] <= counts[0][1]


def test_without_free_blocks_drafts_use_the_slots_that_are_there() -> None:
    b = bench(tokens=6, token=periodic(6), pages=12, block=4, config=dict(max_model_len=48))
    b.add(12, 36)
    b.run()
    assert drafts(b) > 0
    assert b.scheduler.totals.preemptions == 0


def test_a_step_with_many_decodes_gets_no_drafts() -> None:
    b = bench(token=periodic(4), config=dict(speculative_limit=6, max_num_seqs=8))
    for _ in range(8):
        b.add(8, 30)
    b.run()
    for plan in b.plans:
        decodes = [work for work in plan.work if work.known == 1]
        assert sum(work.count for work in decodes) <= max(6, len(decodes))
    few = bench(token=periodic(4), config=dict(speculative_limit=6, max_num_seqs=8))
    few.add(8, 30)
    few.run()
    assert max(plan.work[0].count for plan in few.plans[3:]) == 5  # the token itself and speculative_tokens


def test_drafts_take_no_tokens_from_prompts() -> None:
    b = bench(token=periodic(4), config=dict(max_num_batched_tokens=16))
    b.add(8, 60)
    b.steps(10)
    b.add(100, 4)
    while not b.tokens("r2"):
        plan, _ = b.step()
        assert not any(work.draft for work in plan.work) or plan.work[-1].samples
    b.run()


@EVERY
def test_an_abort_while_drafts_are_computed_leaves_nothing(strategy: str) -> None:
    b = bench(strategy, token=periodic(4))
    for _ in range(2):
        b.add(9, 50)
    while True:
        plan = b.scheduler.plan(b.clock.now())
        result = b.runner.run(plan)
        if any(work.draft for work in plan.work):
            b.scheduler.abort("r1", b.clock.now())
            b.look()
        b.scheduler.settle(plan, result, b.clock.now())
        b.look()
        if "r1" not in b.scheduler.requests:
            break
    b.run()


def test_a_failed_step_with_drafts_leaves_nothing() -> None:
    b = bench(token=periodic(4))
    b.add(9, 50)
    plan = b.scheduler.plan(b.clock.now())
    while not any(work.draft for work in plan.work):
        b.scheduler.settle(plan, b.runner.run(plan), b.clock.now())
        plan = b.scheduler.plan(b.clock.now())
    b.scheduler.fail(plan, b.clock.now())
    b.quiet()


def proposed(tokens: list[int], most: int = 4, room: int = 100) -> tuple[int, ...]:
    request = Request("r", tuple(tokens), SamplingParams())
    seq = Sequence(1, request, 0, tokens, 10**6, KeyChain(tokens, 16, b""))
    drafter = Drafter(most)
    drafter.propose(seq, room)
    drafter.learn(seq, most, most)  # the first draft is short
    return drafter.propose(seq, room)


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], (3, 4, 5, 6)),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], (4, 9, 1, 2)),  # the latest of equals
        ([8, 1, 2, 3, 9, 7, 1, 2, 4, 9, 8, 1, 2], (3, 9, 7, 1)),  # the longest match before the latest
        ([4, 1, 2, 1, 2], (1, 2, 1, 2)),  # what runs into the end repeats itself
        ([7, 7, 7], (7, 7, 7, 7)),
        ([1, 2, 3, 4, 5], ()),
        ([1, 9, 2, 9], ()),  # one token is no match
        ([3], ()),
    ],
)
def test_what_followed_the_same_words_is_proposed(tokens: list[int], wanted: tuple[int, ...]) -> None:
    assert proposed(tokens) == wanted
    assert proposed(tokens, room=2) == wanted[:2]


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    tokens = [*range(20_000), 17, 18]
    request = Request("r", tuple(tokens), SamplingParams())
    seq = Sequence(1, request, 0, tokens, 10**6, KeyChain(tokens, 16, b""))
    drafter = Drafter(4)
    found = [drafter.propose(seq, 4) for _ in range(6)]
    assert found[0] == ()
    assert found[-1] == (19, 20)


@pytest.mark.parametrize(("name", "value"), [("speculative_tokens", -1), ("speculative_limit", 0)])
def test_settings_out_of_their_limits_are_refused(name: str, value: int) -> None:
    with pytest.raises(SchedulerConfigError, match=f"{name} is {value}; it must be a whole number of at least"):
        bench(config={name: value})
