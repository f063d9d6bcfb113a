"""Sampled answers are the request's own: whatever runs beside it, whatever is preempted, cached or shared (G1, P2,
N1), and stop strings cut the same text under all of it (T1)."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch

from octavo.kv.strategies import STRATEGIES
from octavo.models.loader import loaded
from octavo.outputs import RequestOutput
from octavo.types import FinishReason, SamplingParams, Status
from tests.equivalence.harness import Subject, engine_for, random_prompts
from tests.runner.tiny import tiny_module


@dataclass(frozen=True)
class Letters:
    """A tokenizer of letters: token 3 + i is the i-th letter, over and over."""

    eos_token_id: int | None = None
    has_chat_template: bool = False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [3 + ord(letter) - ord("a") for letter in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + (token - 3) % 26) for token in ids)


@pytest.fixture(scope="module")
def subject() -> Subject:
    model = loaded("llama", tiny_module("llama"), Letters(), torch.device("cpu"))
    return Subject(model, random_prompts(199, (5, 9, 16, 17, 12, 31, 8, 20)), [], 24)


def answers(
    subject: Subject, params: list[SamplingParams], *, order=None, preempt_every=0, **settings
) -> dict[int, RequestOutput]:
    """All prompts, each with its own parameters, in the given order of submission."""
    engine = engine_for(subject, **settings).engine
    order = list(range(len(subject.prompts))) if order is None else order
    for i in order:
        engine.submit(subject.prompts[i], params[i], request_id=str(i))
    done: dict[int, RequestOutput] = {}
    streamed: dict[tuple[int, int], str] = {}
    for step in itertools.count(1):
        for output in engine.step():
            for sample in output.outputs:
                key = (int(output.request_id), sample.index)
                streamed[key] = streamed.get(key, "") + sample.delta
            if output.finished:
                done[int(output.request_id)] = output
        if not engine.busy:
            break
        if preempt_every and step % preempt_every == 0:
            for request_id, seqs in list(engine.scheduler.requests.items()):
                if any(s.status is Status.RUNNING and s.preemptions < 2 for s in seqs):
                    engine.scheduler.preempt(request_id, engine.clock.now())
    for number, output in done.items():
        for sample in output.outputs:
            assert streamed[number, sample.index] == sample.text, "the stream's pieces are the text"
    kv = engine.scheduler.kv
    assert kv.free + kv.evictable == kv.capacity
    return done


def essence(output: RequestOutput) -> list[tuple[object, ...]]:
    return [(s.token_ids, s.text, s.finish_reason, s.stop_reason) for s in output.outputs]


def logprobs(output: RequestOutput) -> list[float]:
    return [lp.logprob for sample in output.outputs for lp in sample.logprobs or ()]


SAMPLED = [SamplingParams(temperature=0.9, seed=seed, max_tokens=20, ignore_eos=True) for seed in range(1, 9)]


def test_same_seed_other_neighbours(subject: Subject) -> None:
    alone = {i: essence(answers(replace_prompts(subject, [i]), [SAMPLED[i]])[0]) for i in range(8)}
    rng = random.Random(3)
    for trial in range(10):
        order = rng.sample(range(8), 8)
        settings = dict(
            strategy=STRATEGIES[trial % 5],
            batch=(1, 3, 8)[trial % 3],
            chunk=(8, 64)[trial % 2],
            block=(4, 16)[trial % 2],
        )
        together = answers(subject, SAMPLED, order=order, **settings)
        assert {i: essence(output) for i, output in together.items()} == alone, settings


def replace_prompts(subject: Subject, which: list[int]) -> Subject:
    return replace(subject, prompts=[subject.prompts[i] for i in which])


def test_without_a_seed_two_answers_differ(subject: Subject) -> None:
    free = [replace(params, seed=None) for params in SAMPLED]
    first, second = (answers(subject, free) for _ in range(2))
    assert any(essence(first[i]) != essence(second[i]) for i in range(8))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_preemption_does_not_change_the_answer(subject: Subject, strategy: str) -> None:
    hard = [
        replace(params, temperature=0.8, frequency_penalty=0.5, repetition_penalty=1.1, stop=("qz", "xyz"), logprobs=2)
        for params in SAMPLED
    ]
    roomy = answers(subject, hard, strategy=strategy, block=4)
    shaken = answers(subject, hard, strategy=strategy, block=4, chunk=8, preempt_every=3)
    assert {i: essence(o) for i, o in roomy.items()} == {i: essence(o) for i, o in shaken.items()}
    for i, output in roomy.items():  # another batch, another order of additions: equal but for the last bits
        assert logprobs(shaken[i]) == pytest.approx(logprobs(output), abs=1e-4)
        assert len(logprobs(output)) == 20 or output.outputs[0].finish_reason is FinishReason.STOP
    assert {i: o.usage for i, o in roomy.items()} == {
        i: o.usage | {"cached_tokens": roomy[i].usage["cached_tokens"]} for i, o in shaken.items()
    }
    assert all(output.metrics.preemptions >= 1 for output in shaken.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_n_samples_equal_single_runs_with_the_derived_seeds(subject: Subject, strategy: str) -> None:
    """N1: a prompt of 2 blocks and 3 tokens, four samples."""
    one = replace(subject, prompts=[random_prompts(199, (11,))[0]])
    params = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    (together,) = answers(one, [params], strategy=strategy, block=4).values()
    assert [sample.index for sample in together.outputs] == [0, 1, 2, 3]
    for sample in together.outputs:
        (single,) = answers(one, [params.for_sample(sample.index)], strategy=strategy, block=4).values()
        assert single.outputs[0].token_ids == sample.token_ids
        assert single.outputs[0].text == sample.text
    assert together.usage["prompt_tokens"] == 11
    assert together.usage["completion_tokens"] == 4 * 12


def test_stop_strings_cut_the_same_text_whatever_runs_beside(subject: Subject) -> None:
    greedy = [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)] * 8
    full = answers(subject, greedy)
    texts = {i: output.outputs[0].text for i, output in full.items()}
    stops = [texts[i][10:13] for i in range(8)]
    cut = answers(subject, [replace(greedy[0], stop=(stop,)) for stop in stops], chunk=8, preempt_every=4)
    for i, output in cut.items():
        sample = output.outputs[0]
        at = texts[i].find(stops[i])
        assert sample.text == texts[i][:at]
        assert sample.finish_reason is FinishReason.STOP
        assert sample.stop_reason == stops[i]
        assert len(sample.token_ids) == at + 3
    shown = answers(subject, [replace(greedy[0], stop=(stop,), include_stop_str_in_output=True) for stop in stops])
    assert all(output.outputs[0].text.endswith(stops[i]) for i, output in shown.items())


def test_min_tokens_wins_over_every_stop(subject: Subject) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    full = answers(subject, [greedy] * 8)
    for i, output in full.items():
        ids = output.outputs[0].token_ids
        (stopped,) = answers(replace_prompts(subject, [i]), [replace(greedy, stop_token_ids=(ids[3],))]).values()
        assert stopped.outputs[0].token_ids == ids[: ids.index(ids[3]) + 1]
        assert stopped.outputs[0].stop_reason == ids[3]
        later = replace(greedy, stop_token_ids=(ids[3],), min_tokens=10)
        (kept,) = answers(replace_prompts(subject, [i]), [later]).values()
        assert len(kept.outputs[0].token_ids) >= 10


def test_max_tokens_zero_and_one_beside_a_normal_request(subject: Subject) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (0, 1, 24, 24, 24, 24, 24, 24)]
    params[0] = replace(params[0], prompt_logprobs=0)
    done = answers(subject, params)
    plain = answers(subject, [params[2]] * 8)
    assert done[0].outputs[0].token_ids == ()
    assert done[0].outputs[0].finish_reason is FinishReason.LENGTH
    assert done[0].prompt_logprobs is not None
    assert [lp is None for lp in done[0].prompt_logprobs] == [True, *[False] * (len(subject.prompts[0]) - 1)]
    assert len(done[1].outputs[0].token_ids) == 1
    for i in range(2, 8):
        assert essence(done[i]) == essence(plain[i])
