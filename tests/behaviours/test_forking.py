"""N1: the prompt is computed once for n samples, shared as far as it is full, and each sample goes its own way."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.kv.strategies import STRATEGIES
from octavo.types import FinishReason, RequestError, Sequence, Status
from tests.simulation import Bench, placeholder_token

WINDOWS = pytest.mark.parametrize("windows", [(None,), (None, 9)], ids=["full", "windows"])


def sample_token(seq: Sequence) -> int:
    """Samples of one request go different ways from their first token on."""
    return placeholder_token(seq) + 1000 * (seq.request.params.seed or 0) + 5000 * seq.index


def bench(strategy: str = "paged", pages: int = 128, windows: tuple[int | None, ...] = (None,), **config: Any) -> Bench:
    settings = dict(admission="prompt", max_model_len=64, max_num_batched_tokens=16) | config
    return Bench(strategy, pages=pages * len(windows), windows=windows, config=settings, token=sample_token)


@pytest.mark.parametrize("sharing", [True, False], ids=["cache on", "cache off"])
@pytest.mark.parametrize("block", [4, 16])
def test_full_prompt_blocks_are_shared_and_the_tail_is_copied_on_the_first_write(block: int, sharing: bool) -> None:
    b = Bench(
        pages=64,
        block=block,
        sharing=sharing,
        config=dict(max_model_len=256, max_num_batched_tokens=64, admission="prompt"),
        token=sample_token,
    )
    r = b.add(2 * block + 3, 3 * block, n=4, seed=1)
    b.step()
    seqs = b.all[r]
    used = b.kv.capacity - b.kv.free
    assert used == 3, "two full blocks and the tail, held by all four"
    tables = [seq.view.tables[0] for seq in seqs if seq.view]
    assert len({tuple(table) for table in tables}) == 1
    assert b.scheduler.ledger().live == 2 * block + 3, "shared blocks count once"
    b.step()
    tables = [seq.view.tables[0] for seq in seqs if seq.view]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 4
    assert b.kv.capacity - b.kv.free == 2 + 4
    assert sum(copy.n for plan in b.plans for copy in plan.copies) == 3
    while all(seq.status is Status.RUNNING for seq in seqs):
        own = sum(-(-seq.computed // block) - 2 for seq in seqs)
        assert b.kv.capacity - b.kv.free - b.kv.evictable == 2 + own
        b.step()
    b.run()


@WINDOWS
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_n_samples_equal_n_single_requests(strategy: str, windows: tuple[int | None, ...]) -> None:
    prompt = list(range(70, 81))
    together = bench(strategy, windows=windows)
    r = together.add(prompt, 12, n=4, seed=1)
    together.run()
    alone = []
    for index in range(4):
        single = bench(strategy, windows=windows)
        single.token = sample_token
        s = single.add(prompt, 12, seed=1)
        single.all[s][0].index = index
        single.run()
        alone.append(single.tokens(s))
    assert [together.tokens(r, i) for i in range(4)] == alone
    assert len({tuple(tokens) for tokens in alone}) == 4


@WINDOWS
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_prompt_is_computed_once_and_each_sample_ends_once(strategy: str, windows: tuple[int | None, ...]) -> None:
    b = bench(strategy, windows=windows)
    r = b.add(11, 12, n=4, seed=1)
    finished: list[int] = []
    while b.scheduler.busy:
        finished += [p.seq.index for p in b.step()[1] if p.finished]
    assert sorted(finished) == [0, 1, 2, 3]
    assert all(seq.finish_reason is FinishReason.LENGTH for seq in b.all[r])
    assert b.computed()[r] == 11 + 4 * 11  # the last token of each is never computed
    assert b.scheduler.totals.generated == 4 * 12
    assert b.scheduler.totals.query_tokens == 11
    b.quiet()


def test_cached_tokens_are_not_counted_once_per_sample() -> None:
    b = bench()
    prompt = list(range(70, 87))
    b.add(prompt, 1)
    b.run()
    r = b.add(prompt, 4, n=4)
    b.run()
    assert sum(seq.reused for seq in b.all[r]) == 16
    assert b.scheduler.totals.hit_tokens == 16


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_samples_that_find_no_room_compute_the_prompt_themselves(strategy: str) -> None:
    """Three regions of 6 blocks do not fit into 16 blocks: the third sample waits, and its answer is the same."""
    roomy, tight = bench(strategy, pages=64, max_model_len=24), bench(strategy, pages=16, max_model_len=24)
    outputs = []
    for b in (roomy, tight):
        r = b.add(12, 12, n=3, seed=2)
        b.run()
        outputs.append([b.tokens(r, i) for i in range(3)])
    assert outputs[0] == outputs[1]


@WINDOWS
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("after", range(6))
def test_a_preemption_around_the_fork_changes_no_sample(
    strategy: str, after: int, windows: tuple[int | None, ...]
) -> None:
    outputs = []
    for disturb in (False, True):
        b = bench(strategy, windows=windows)
        r = b.add(35, 10, n=3, seed=3)
        b.add(9, 10, n=2, seed=4)
        b.steps(after)
        if disturb:
            b.scheduler.preempt(r, b.clock.now())
            b.look()
        b.run()
        outputs.append([b.tokens(request, i) for request, seqs in b.all.items() for i in range(len(seqs))])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_samples_may_end_in_any_order(strategy: str, order: tuple[int, ...]) -> None:
    b = bench(strategy)
    r = b.add(10, 20, n=3, seed=1)
    other = b.add(10, 20)
    while not all(seq.forked for seq in b.all[r]):
        b.step()
    for index in order:
        b.scheduler.stop(b.all[r][index], FinishReason.STOP, b.clock.now())
        b.look()
        b.step()
    assert r not in b.scheduler.requests
    b.run()
    assert len(b.tokens(other)) == 20


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_n_places_are_all_or_nothing(strategy: str) -> None:
    b = bench(strategy, pages=256, max_num_seqs=4)
    b.add(8, 10)
    four = b.add(8, 4, n=4)
    b.steps(3)
    assert not b.runs(four)
    assert len(b.scheduler.running) == 1
    b.run()
    with pytest.raises(RequestError, match="max_num_seqs"):
        b.add(8, 4, n=5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_shortest_samples(strategy: str, max_tokens: int) -> None:
    b = bench(strategy)
    r = b.add(11, max_tokens, n=3, seed=1)
    ended: list[tuple[int, int | None]] = []
    while b.scheduler.busy:
        ended += [(p.seq.index, p.token) for p in b.step()[1] if p.finished]
    assert [index for index, _ in ended] == [0, 1, 2]
    assert all(len(b.tokens(r, i)) == max_tokens for i in range(3))
    b.quiet()
