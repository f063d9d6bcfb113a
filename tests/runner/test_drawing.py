"""From a plan to flat arrays and from logits to the tokens of the plan, drafts included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from driver import Driver, make_sequence
from tiny import tiny_module

from octavo.models.loader import LoadedModel, loaded
from octavo.runner.api import SeqWork, StepPlan
from octavo.runner.drawing import draw, flat_positions, flat_tokens, rows_to_sample
from octavo.runner.sampler import Sampler
from octavo.types import SamplingParams, Sequence

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


def seq(number: int, length: int, params: SamplingParams = GREEDY) -> Sequence:
    return make_sequence(number, [100 * number + i for i in range(length)], params)


@pytest.fixture
def work() -> tuple[SeqWork, ...]:
    """A decode with a draft, a chunk without samples, the end of a prompt with three samples, a plain decode."""
    one, two, three, four = (seq(i, 10) for i in (1, 2, 3, 4))
    return (
        SeqWork(one, 9, 3, (one,), (7, 8)),
        SeqWork(two, 2, 4, ()),
        SeqWork(three, 8, 2, (three, seq(5, 10), seq(6, 10))),
        SeqWork(four, 9, 1, (four,)),
    )


def logits_of(rows: list[int], size: int = 12) -> torch.Tensor:
    """The row's number is the most likely token."""
    return torch.eye(size)[rows]


def test_flat_arrays_in_batch_order(work: tuple[SeqWork, ...]) -> None:
    assert flat_tokens(work).tolist() == [109, 7, 8, 202, 203, 204, 205, 308, 309, 409]
    assert flat_positions(work).tolist() == [9, 10, 11, 2, 3, 4, 5, 8, 9, 9]
    assert rows_to_sample(work).tolist() == [0, 1, 2, 8, 9]
    assert flat_tokens(work).dtype == np.int32
    assert flat_tokens(()).tolist() == flat_positions(()).tolist() == rows_to_sample(()).tolist() == []


@pytest.mark.parametrize(
    ("best", "run"), [([7, 8, 3], (7, 8, 3)), ([7, 1, 3], (7, 1)), ([2, 8, 3], (2,)), ([8, 7, 3], (8,))]
)
def test_a_run_ends_with_the_first_token_that_differs(work: tuple[SeqWork, ...], best: list[int], run: tuple) -> None:
    logits = logits_of([*best, 4, 5])
    tokens, logprobs = draw(work, logits, Sampler())
    assert tokens == (run, (), (4, 4, 4), (5,))
    assert not logprobs
    assert draw(work, logits, Sampler(), np.array([*best, 4, 5]))[0] == tokens


def test_plain_greedy_rows_need_no_logits_when_the_best_token_is_known(work: tuple[SeqWork, ...]) -> None:
    asked: list[list[int]] = []

    def logits(rows: np.ndarray) -> torch.Tensor:
        asked.append(rows.tolist())
        return logits_of([11] * len(rows))

    assert draw(work, logits, Sampler(), np.array([7, 8, 1, 2, 3]))[0] == ((7, 8, 1), (), (2, 2, 2), (3,))
    assert not asked
    biased = seq(4, 10, SamplingParams(temperature=0.0, logprobs=0, max_tokens=None))
    mixed = (*work[:3], SeqWork(biased, 9, 1, (biased,)))
    tokens, logprobs = draw(mixed, logits, Sampler(), np.array([7, 8, 1, 2, 3]))
    assert tokens == ((7, 8, 1), (), (2, 2, 2), (11,))
    assert asked == [[4]]
    assert [entry.token for entry in logprobs[4]] == [11]
    assert draw(mixed, logits, Sampler())[0] == ((11,), (), (11, 11, 11), (11,))
    assert asked[1:] == [[0, 1, 2, 3, 4]]


def test_penalties_and_limits_see_the_tokens_accepted_before() -> None:
    """Each row likes token 3 best, and less each time it has been said."""
    params = SamplingParams(temperature=0.0, frequency_penalty=0.3, min_tokens=2, max_tokens=9)
    one = make_sequence(1, [5], params, stop=(9,))
    rows = torch.zeros(5, 12)
    rows[:, 3], rows[:, 4], rows[:, 9] = 1.0, 0.5, 5.0
    tokens, _ = draw((SeqWork(one, 0, 5, (one,), (3, 3, 3, 3)),), rows, Sampler())
    assert tokens == ((3, 3, 9),)
    rows[:, 9] = 0.0
    tokens, _ = draw((SeqWork(one, 0, 5, (one,), (3, 3, 4, 3)),), rows, Sampler())
    assert tokens == ((3, 3, 4, 3, 4),)


def test_draws_behind_a_draft_are_those_of_the_next_steps() -> None:
    params = SamplingParams(temperature=1.0, seed=3, logprobs=1, max_tokens=None)
    torch.manual_seed(0)
    rows = torch.randn(6, 50)
    slow = make_sequence(1, [5], params)
    entries = []
    for row in rows:
        ((token,),), found = draw((SeqWork(slow, 0, 1, (slow,)),), row[None], Sampler())
        slow.tokens.append(token)
        entries += found[1]
    fast = make_sequence(1, [5], params)
    for wrong in range(6):
        draft = (*slow.output[:wrong], 49, *slow.output[wrong + 1 : 5])[:5]
        tokens, found = draw((SeqWork(fast, 0, 6, (fast,), draft),), rows, Sampler())
        assert tokens == (tuple(slow.output[: wrong + 1]),)
        assert [(e.token, e.rank) for e in found[1]] == [(e.token, e.rank) for e in entries[: wrong + 1]]


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return loaded("llama", tiny_module("llama"), None, torch.device("cpu"))


@pytest.mark.parametrize("right", [0, 1, 3, 5])
def test_the_model_verifies_a_draft_in_one_step(llama: LoadedModel, right: int) -> None:
    """And goes on as if nothing had been drafted, over the slots of what was rejected."""
    prompt = [5, 9, 17, 33, 65, 100, 7, 8]
    plain = Driver(llama, 4, 64)
    wanted = plain.generate([plain.new(1, prompt, GREEDY)], 12)[0]
    driver = Driver(llama, 4, 64)
    one = driver.new(1, prompt, GREEDY)
    driver.step([one], 64)
    driver.grow(one, len(prompt) + 6)
    draft = (*wanted[1 : right + 1], *[(token + 1) % 199 for token in wanted[right + 1 : 6]])
    result = driver.runner.run(StepPlan(1, (), (SeqWork(one, 8, 6, (one,), draft),)))
    assert result.tokens == (tuple(wanted[1 : right + 2]),)
    one.tokens += result.tokens[0]
    one.computed = len(one.tokens) - 1
    while one.generated < 12:
        driver.step([one], 64)
    assert one.output == wanted
