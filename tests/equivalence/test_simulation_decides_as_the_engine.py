"""A simulated run fed a real run's tokens and durations makes the same decisions, event by event."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest

from octavo import events as ev
from octavo.build import build_engine
from octavo.clock import VirtualClock
from octavo.engine import Engine
from octavo.kv.strategies import STRATEGIES
from octavo.runner.simulated import SimulatedRunner
from octavo.types import SamplingParams
from tests.equivalence.harness import engine_for, tiny_subject


@pytest.mark.parametrize("drafts", [0, 4], ids=["plain", "drafts"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_same_durations_same_decisions(strategy: str, drafts: int) -> None:
    subject = tiny_subject("llama")
    settings = dict(block=4, chunk=16, pool_tokens=160, max_model_len=96, speculative_tokens=drafts)
    template = engine_for(subject, strategy=strategy, **settings)
    few = {5: 100.0, 6: 100.0, 7: 100.0}  # answers of few words, so that drafts come true
    params = [SamplingParams(temperature=0.0, max_tokens=10 + i, ignore_eos=True, logit_bias=few) for i in range(8)]

    real: list[ev.Event] = []
    clock = VirtualClock()
    built = build_engine(template.config, loaded=subject.model, clock=clock, sink=real.append)
    drive(built.engine, subject.prompts, params, clock, lambda step: 0.001 * (1 + step % 7))

    drawn: dict[int, deque[int]] = defaultdict(deque)
    works: dict[int, list[int]] = {}
    for event in real:
        if isinstance(event, ev.Planned):
            works[event.step] = [seq for seq, _, _, samples in event.work if samples]
        if isinstance(event, ev.Settled):
            for seq, tokens in zip(works[event.step], [t for t in event.tokens if t], strict=True):
                drawn[seq].extend(tokens)
    simulated: list[ev.Event] = []
    clock = VirtualClock()
    other = build_engine(template.config, loaded=subject.model, clock=clock, sink=simulated.append)
    runner = SimulatedRunner(clock, timing=lambda plan: 0.0, token=lambda seq: drawn[seq.id].popleft())
    engine = Engine(other.engine.scheduler, runner, clock)
    drive(engine, subject.prompts, params, clock, lambda step: 0.001 * (1 + step % 7))
    assert [type(event) for event in simulated] == [type(event) for event in real]
    assert simulated == real
    assert (built.engine.scheduler.totals.drafts_accepted > 0) == bool(drafts)
    kinds = {type(event) for event in real}
    assert {ev.Planned, ev.Admitted, ev.Blocked, ev.Finished} <= kinds


def drive(engine: Engine, prompts, params, clock: VirtualClock, seconds) -> None:
    """Two requests a step arrive while others run; every step takes `seconds(step)`."""
    step = 0
    queue = list(zip(prompts, params, strict=True))
    while queue or engine.busy:
        for prompt, own in queue[:2]:
            engine.submit(prompt, own)
        del queue[:2]
        engine.step()
        clock.advance(seconds(step))
        step += 1
