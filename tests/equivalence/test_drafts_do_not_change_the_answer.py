"""With speculation an answer is what it would have been without, token for token: greedy and sampled, with penalties,
stops and logprobs, under every strategy, chunk size, preemption and number of samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.clock import VirtualClock
from octavo.engine import Engine
from octavo.kv.strategies import STRATEGIES, make_manager
from octavo.models.loader import loaded
from octavo.outputs import RequestOutput
from octavo.runner.simulated import SimulatedRunner
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler
from octavo.types import FinishReason, SamplingParams
from tests.equivalence.harness import Subject, engine_for, generate, random_prompts, tiny_subject
from tests.equivalence.test_answers_do_not_depend_on_neighbours import Letters, answers, essence, logprobs
from tests.runner.tiny import tiny_module

FEW = dict.fromkeys((5, 6, 7, 9), 100.0)  # an answer of few words repeats itself
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
PARAMS = [
    GREEDY,
    replace(GREEDY, logit_bias=FEW, frequency_penalty=0.4, logprobs=2),
    replace(GREEDY, logit_bias=FEW, stop=("cdc", "gec", "eee"), min_tokens=9, logprobs=0),
    replace(GREEDY, temperature=0.7, seed=1, logit_bias=FEW, logprobs=1),
    replace(GREEDY, temperature=1.0, seed=2, logit_bias=FEW, top_p=0.8, presence_penalty=0.3, stop_token_ids=(9,)),
    replace(GREEDY, temperature=0.9, seed=3, logit_bias=FEW, n=3, max_tokens=50, logprobs=0),
    replace(GREEDY, temperature=1.2, seed=4, logit_bias=FEW, stop=("dd",), include_stop_str_in_output=True),
    replace(
        GREEDY, temperature=0.9, seed=5, logit_bias=FEW, stop_token_ids=(5,), min_tokens=30, repetition_penalty=1.2
    ),
]


@pytest.fixture(scope="module")
def subject() -> Subject:
    model = loaded("llama", tiny_module("llama"), Letters(), torch.device("cpu"))
    return Subject(model, random_prompts(199, (5, 9, 16, 17, 12, 31, 8, 20)), [], 60)


@pytest.fixture(scope="module")
def plain(subject: Subject) -> dict[int, RequestOutput]:
    return answers(subject, PARAMS, block=4)


def same(drafted: dict[int, RequestOutput], plain: dict[int, RequestOutput]) -> None:
    for i, output in plain.items():
        assert essence(drafted[i]) == essence(output), i
        assert logprobs(drafted[i]) == pytest.approx(logprobs(output), abs=1e-4)
        assert drafted[i].usage["completion_tokens"] == output.usage["completion_tokens"]
        for sample in drafted[i].outputs:
            assert sample.logprobs is None or [lp.token for lp in sample.logprobs] == list(sample.token_ids)
    assert sum(output.metrics.accepted_tokens for output in drafted.values()) > 5


@pytest.mark.parametrize(
    "settings",
    [dict(), dict(chunk=10), dict(chunk=10, preempt_every=7), dict(batch=3), dict(pool_tokens=200, batch=8, chunk=16)],
    ids=["together", "chunks", "preempted", "few at once", "little memory"],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_drafts_do_not_change_the_answer(
    subject: Subject, plain: dict[int, RequestOutput], strategy: str, settings: dict
) -> None:
    for tokens in (1, 6):
        more = dict(speculative_tokens=tokens, speculative_limit=30) | settings
        same(answers(subject, PARAMS, strategy=strategy, block=4, **more), plain)
    reasons = [sample.finish_reason for output in plain.values() for sample in output.outputs]
    assert {FinishReason.STOP, FinishReason.LENGTH} <= set(reasons)


def test_drafts_do_not_change_a_sample_without_a_seed_of_its_own(subject: Subject) -> None:
    params = [replace(p, seed=None) for p in PARAMS]
    without = answers(subject, params, seed=8)
    same(answers(subject, params, seed=8, speculative_tokens=5, speculative_limit=30), without)


def said_until_stop(drafts: int, period: int, **stop: object) -> tuple[RequestOutput, int]:
    """The first letters over and over, up to the stop; and how many steps that took."""
    clock = VirtualClock()
    config = SchedulerConfig(max_model_len=128, max_num_seqs=2, speculative_tokens=drafts)
    scheduler = Scheduler(config, make_manager("paged", 64, 4, max_model_len=128))
    runner = SimulatedRunner(clock, token=lambda seq: 3 + len(seq.tokens) % period)
    engine = Engine(scheduler, runner, clock, codec=Letters(), check=True)
    engine.submit([3] * 10, replace(GREEDY, **stop))
    (output,) = engine.drain()
    assert scheduler.totals.generated == output.usage["completion_tokens"]
    assert scheduler.kv.free + scheduler.kv.evictable == scheduler.kv.capacity
    return output, scheduler.steps


@pytest.mark.parametrize("period", [3, 5])
@pytest.mark.parametrize("min_tokens", range(20, 30))
@pytest.mark.parametrize("stop", [{"stop": ("bc",)}, {"stop_token_ids": (4,)}], ids=["string", "token"])
def test_what_a_run_holds_behind_a_stop_is_dropped(stop: dict, min_tokens: int, period: int) -> None:
    drafted, steps = said_until_stop(8, period, min_tokens=min_tokens, **stop)
    plain, more_steps = said_until_stop(0, period, min_tokens=min_tokens, **stop)
    assert essence(drafted) == essence(plain)
    assert drafted.outputs[0].stop_reason in ("bc", 4)
    assert steps <= more_steps / 2


@pytest.mark.parametrize("name", ["gemma3", "gemma2", "gpt-oss", "gpt2", "deepseek"])
def test_greedy_text_with_drafts_is_that_of_generate(name: str) -> None:
    subject = tiny_subject(name, 40)
    built = engine_for(subject, block=4, chunk=16, speculative_tokens=6, speculative_limit=30)
    assert generate(built, subject, rounds=2) == [subject.wanted] * 2
    assert built.engine.scheduler.totals.drafts_accepted > 0
