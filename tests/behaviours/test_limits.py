"""L2-L4: the shortest and the longest requests end exactly where they should, and nothing is cut silently."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.kv.strategies import STRATEGIES
from octavo.types import FinishReason, RequestError
from tests.simulation import Bench

EVERY = pytest.mark.parametrize("strategy", STRATEGIES)


def bench(strategy: str, pages: int = 64, **config: Any) -> Bench:
    return Bench(strategy, pages=pages, config=dict(max_model_len=64, admission="prompt") | config)


# -- L2 ---------------------------------------------------------------------------------------------------------------


@EVERY
def test_an_empty_prompt_is_refused_and_harms_nobody(strategy: str) -> None:
    b = bench(strategy)
    stream = b.add(8, 10)
    b.steps(2)
    with pytest.raises(RequestError, match="prompt is empty") as refused:
        b.add([], 4)
    assert refused.value.field == "prompt"
    b.run()
    assert len(b.tokens(stream)) == 10


@EVERY
@pytest.mark.parametrize("length", [1, 3, 4, 5, 64])
def test_max_tokens_zero_computes_the_prompt_and_generates_nothing(strategy: str, length: int) -> None:
    b = bench(strategy)
    stream = b.add(8, 10)
    b.steps(2)
    r = b.add(length, 0)
    progress = []
    while b.scheduler.busy:
        progress += [p for p in b.step()[1] if p.seq.request.id == r]
    assert [(p.token, p.finished) for p in progress] == [(None, FinishReason.LENGTH)]
    assert b.tokens(r) == []
    assert b.computed()[r] == length
    assert len(b.tokens(stream)) == 10
    b.quiet()


@EVERY
@pytest.mark.parametrize("length", [1, 3, 4, 5, 63])
def test_max_tokens_one_gives_exactly_one_token(strategy: str, length: int) -> None:
    b = bench(strategy)
    r = b.add(length, 1)
    b.run()
    assert len(b.tokens(r)) == 1
    assert b.all[r][0].finish_reason is FinishReason.LENGTH


@EVERY
def test_a_single_token_prompt_runs(strategy: str) -> None:
    b = bench(strategy)
    ids = [b.add(1, 5) for _ in range(3)]
    b.run()
    assert [len(b.tokens(r)) for r in ids] == [5, 5, 5]


@EVERY
def test_a_stop_token_ends_after_min_tokens_only(strategy: str) -> None:
    def token(seq: Any) -> int:
        return 7 if seq.generated % 3 == 2 else 1000

    b = Bench(strategy, pages=64, config=dict(max_model_len=64), token=token)
    stop = frozenset({7})
    plain = b.add(8, 20, stop_token_ids=stop)
    later = b.add(8, 20, stop_token_ids=stop, min_tokens=4)
    b.run()
    assert (len(b.tokens(plain)), b.all[plain][0].finish_reason) == (3, FinishReason.STOP)
    assert (len(b.tokens(later)), b.all[later][0].stop_match) == (6, 7)


# -- L3 ---------------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("length", [65, 5 * 64])
@pytest.mark.parametrize("max_tokens", [0, 1, None])
def test_a_prompt_beyond_the_model_length_is_refused_with_both_numbers(
    strategy: str, length: int, max_tokens: int | None
) -> None:
    b = bench(strategy, pages=256)
    with pytest.raises(RequestError) as refused:
        b.add(length, max_tokens)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.field == "prompt"
    assert f"{length} tokens" in str(refused.value)
    assert "64 tokens" in str(refused.value)
    b.quiet()


@EVERY
def test_a_prompt_of_exactly_the_model_length_leaves_no_room_for_a_token(strategy: str) -> None:
    b = bench(strategy, pages=256)
    with pytest.raises(RequestError) as refused:
        b.add(64, 1)
    assert "at most 63 tokens" in str(refused.value)
    r = b.add(63, 1)
    b.run()
    assert len(b.tokens(r)) == 1


@EVERY
def test_the_whole_prompt_is_computed(strategy: str) -> None:
    b = bench(strategy, pages=256, max_num_batched_tokens=8)
    r = b.add(61, 2)
    b.run()
    positions = [p for plan in b.plans for w in plan.work for p in range(w.start, w.start + w.count)]
    assert positions == list(range(62))
    assert b.all[r][0].tokens[:61] == list(b.all[r][0].request.prompt)


# -- L4 ---------------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("admission", ["prompt", "ceiling", "peak"])
def test_one_that_reaches_the_model_length_ends_there_and_harms_nobody(strategy: str, admission: str) -> None:
    """Four slots of 64 tokens: the limits are per request, and the pool is not a total to be divided again."""
    b = bench(strategy, pages=64, max_num_seqs=4, admission=admission)
    ids = [b.add(40, None), *(b.add(10 + i, 20) for i in range(3))]
    b.run()
    assert [len(b.tokens(r)) for r in ids] == [24, 20, 20, 20]
    assert all(b.all[r][0].finish_reason is FinishReason.LENGTH for r in ids)
    for r in ids[1:]:
        solo = bench(strategy, pages=64)
        s = solo.add(list(b.all[r][0].request.prompt), 20)
        solo.run()
        assert solo.tokens(s) == b.tokens(r)


@EVERY
@pytest.mark.parametrize("admission", ["prompt", "ceiling", "peak"])
def test_as_many_full_length_requests_run_together_as_the_pool_holds(strategy: str, admission: str) -> None:
    b = bench(strategy, pages=64, max_num_seqs=8, admission=admission, max_num_batched_tokens=64)
    ids = [b.add(40, 24) for _ in range(6)]
    most = 0
    while b.scheduler.busy:
        b.step()
        most = max(most, len(b.scheduler.running))
    if strategy.startswith("reserve"):
        assert most == 4
    else:
        assert most >= 4 or admission == "peak"
    assert [len(b.tokens(r)) for r in ids] == [24] * 6
    b.quiet()


@EVERY
def test_max_tokens_counts_whatever_the_model_length_leaves(strategy: str) -> None:
    b = bench(strategy, pages=256)
    assert b.scheduler.longest == 64
    r = b.add(50, 1000)
    b.run()
    assert len(b.tokens(r)) == 14
