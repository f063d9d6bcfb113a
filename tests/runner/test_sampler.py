from __future__ import annotations

import math
from collections import Counter
from statistics import mean

import pytest
import torch
from driver import make_sequence

from octavo.runner.sampler import Draw, Sampler, describe, uniform
from octavo.types import RequestError, SamplingParams, Sequence, check_ids, derive_seed

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -1.5])


def seq(prompt: list[int] | None = None, output: list[int] | None = None, number: int = 0, **params) -> Sequence:
    made = make_sequence(number, prompt or [0], SamplingParams(**params), stop=params.pop("stop_token_ids", ()))
    made.tokens += output or []
    return made


def one(logits: torch.Tensor, s: Sequence) -> int:
    return Sampler().sample(logits[None], [0], [Draw(s)])[0][0]


def frequencies(n: int = 3000, **params) -> dict[int, float]:
    seqs = [Draw(seq(number=i, seed=i, **params)) for i in range(n)]
    tokens, _ = Sampler().sample(LOGITS.expand(n, -1).contiguous(), list(range(n)), seqs)
    return {token: count / n for token, count in Counter(tokens).items()}


def test_uniform_is_uniform_and_pure() -> None:
    values = [uniform(seed, i) for seed in range(40) for i in range(50)]
    assert values[:3] == [uniform(0, i) for i in range(3)]
    assert 0 <= min(values) < 0.005
    assert 0.995 < max(values) < 1
    assert abs(mean(values) - 0.5) < 0.02
    pairs = [(uniform(s, i) - 0.5) * (uniform(s, i + 1) - 0.5) for s in range(40) for i in range(49)]
    assert abs(mean(pairs)) < 0.006


def test_distribution_follows_temperature() -> None:
    for temperature in (0.5, 1.0, 2.0):
        expected = (LOGITS / temperature).softmax(-1)
        found = frequencies(temperature=temperature)
        for token, p in enumerate(expected.tolist()):
            assert abs(found.get(token, 0) - p) < 4 * math.sqrt(p * (1 - p) / 3000) + 1e-3


def test_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    assert one(LOGITS * 1000, seq(temperature=1e-6, seed=1)) == 0


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_k": -1, "top_p": 0.5}, {0}),
        ({"top_p": 0.8}, {0, 1, 2}),
        ({"min_p": 0.3}, {0, 1}),
        ({"top_k": 2, "top_p": 0.9}, {0, 1}),
        ({"top_k": 100}, {0, 1, 2, 3, 4, 5}),
    ],
)
def test_filters_keep_the_right_tokens(params: dict, kept: set[int]) -> None:
    found = frequencies(temperature=1.0, **params)
    assert set(found) == kept
    mass = LOGITS.softmax(-1)[sorted(kept)]
    for token, p in zip(sorted(kept), (mass / mass.sum()).tolist(), strict=True):
        assert abs(found[token] - p) < 4 * math.sqrt(p * (1 - p) / 3000) + 1e-3


def test_top_p_on_a_flat_large_vocabulary_sorts_far_enough() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, 100] = 0.1
    tokens = {Sampler().sample(logits, [0], [Draw(seq(temperature=1.0, top_p=0.9, seed=i))])[0][0] for i in range(200)}
    assert len(tokens) > 150  # ties with the last kept token stay


def test_penalties() -> None:
    greedy = {"temperature": 0.0}
    assert one(LOGITS, seq([0], repetition_penalty=4.0, **greedy)) == 1  # the prompt counts: 2.0 / 4 < 1.0
    assert one(LOGITS, seq([0], presence_penalty=2.0, frequency_penalty=2.0, **greedy)) == 0  # here it does not
    assert one(LOGITS, seq([5], [0], presence_penalty=1.5, **greedy)) == 1
    assert one(LOGITS, seq([5], [0, 0, 0], frequency_penalty=0.4, **greedy)) == 1
    assert one(LOGITS, seq([5], [0], frequency_penalty=0.4, **greedy)) == 0
    assert one(torch.tensor([-1.0, -1.5]), seq([0], repetition_penalty=2.0, **greedy)) == 1  # negative: times


def test_bias_and_min_tokens() -> None:
    assert one(LOGITS, seq(temperature=0.0, logit_bias={4: 10.0})) == 4
    params = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=5)
    early = make_sequence(0, [5], params, stop=(0, 1))
    assert one(LOGITS, early) == 2
    early.tokens += [2, 2]
    assert one(LOGITS, early) == 0


def test_draw_depends_on_seed_and_index_only() -> None:
    torch.manual_seed(0)
    rows = torch.randn(8, 500)
    seqs = [seq(number=i, output=[3] * i, temperature=0.9, seed=i, top_p=0.95) for i in range(8)]
    alone = [Sampler().sample(rows[i : i + 1], [0], [Draw(s)])[0][0] for i, s in enumerate(seqs)]
    for order in ([0, 1, 2, 3, 4, 5, 6, 7], [5, 2, 7, 0, 1, 6, 4, 3], [3, 1]):
        extra = seq(number=99, temperature=0.0)
        got, _ = Sampler().sample(rows, [*order, 0], [*(Draw(seqs[i]) for i in order), Draw(extra)])
        assert got[:-1] == [alone[i] for i in order]


def test_samples_of_one_request_equal_requests_with_derived_seeds() -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=11)
    rows = torch.zeros(1, 1000)
    samples = [make_sequence(i, [0], params, index=i) for i in range(4)]
    together, _ = Sampler().sample(rows, [0, 0, 0, 0], list(map(Draw, samples)))
    single = [make_sequence(9, [0], params.for_sample(i)) for i in range(4)]
    assert together == [one(rows[0], s) for s in single]
    assert len(set(together)) == 4
    assert Sampler().seed_for(samples[2]) == derive_seed(11, 2)


def test_without_a_seed_results_differ_and_the_seed_is_kept_until_forgotten() -> None:
    rows = torch.zeros(1, 100_000)
    sampler = Sampler()
    a, b = seq(number=1, temperature=1.0), seq(number=2, temperature=1.0)
    first = sampler.sample(rows, [0], [Draw(a)])[0]
    assert sampler.sample(rows, [0], [Draw(a)])[0] == first  # a recomputed step repeats its draw
    assert sampler.sample(rows, [0], [Draw(b)])[0] != first
    sampler.forget(a)
    assert sampler.sample(rows, [0], [Draw(a)])[0] != first
    assert Sampler(5).sample(rows, [0], [Draw(a)])[0] == Sampler(5).sample(rows, [0], [Draw(a)])[0]


def test_logprobs_are_of_the_raw_logits() -> None:
    s = seq(temperature=0.0, logit_bias={4: 10.0}, logprobs=2)
    tokens, (entry,) = Sampler().sample(LOGITS[None], [0], [Draw(s)])
    raw = LOGITS.log_softmax(-1)
    assert entry is not None
    assert (tokens, entry.token, entry.rank) == ([4], 4, 5)
    assert entry.logprob == pytest.approx(float(raw[4]))
    assert entry.top == ((0, pytest.approx(float(raw[0]))), (1, pytest.approx(float(raw[1]))))
    assert describe(LOGITS[None], [0], [0])[0].top == ()


def test_ids_outside_the_vocabulary_are_refused_by_name() -> None:
    for bad in (
        make_sequence(0, [3, 6], SamplingParams()),
        make_sequence(0, [-1], SamplingParams()),
        make_sequence(0, [0], SamplingParams(logit_bias={9: 1.0})),
        make_sequence(0, [0], SamplingParams(), stop=(77,)),
    ):
        with pytest.raises(RequestError, match="vocabulary has ids 0 to 5"):
            check_ids(bad.request, 6)
    check_ids(make_sequence(0, [0, 5], SamplingParams()).request, 6)
