"""With an ITL target prompts are computed in chunks small enough for the streams that run beside them."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from octavo import events as ev
from octavo.clock import VirtualClock
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.errors import OctavoError
from octavo.kv.strategies import make_manager
from octavo.outputs import RequestOutput
from octavo.pacing import Pacer
from octavo.runner.api import StepPlan
from octavo.runner.simulated import SimulatedRunner, TokenSource, placeholder_token
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler
from octavo.types import SamplingParams
from tests.simulation import Bench

Timing = Callable[[StepPlan], float]


def device(
    step: float = 0.01, prompt: float = 2e-4, decode: float = 5e-4, noise: float = 0.0, hiccup: int = 0
) -> Timing:
    """`noise`: share by which a step may take longer; every `hiccup`-th step takes half a second more."""
    rng = random.Random(1)

    def seconds(plan: StepPlan) -> float:
        decodes = plan.decode_tokens
        time = (step + prompt * (plan.tokens - decodes) + decode * decodes) * (1 + noise * rng.random())
        return time + 0.5 * bool(hiccup and plan.index % hiccup == hiccup - 1)

    return seconds


class House:
    """Four streams, and a long prompt every 20 steps."""

    def __init__(
        self,
        timing: Timing,
        target: float | None,
        budget: int = 512,
        token: TokenSource = placeholder_token,
        **config: int,
    ) -> None:
        self.clock, self.events = VirtualClock(), []
        settings = SchedulerConfig(max_model_len=8192, max_num_seqs=16, max_num_batched_tokens=budget, **config)
        kv = make_manager("paged", 4096, 16, max_model_len=8192, chunk=budget)
        scheduler = Scheduler(settings, kv, self.events.append)
        self.engine = Engine(scheduler, SimulatedRunner(self.clock, timing, token), self.clock, itl_target=target)
        self.done: dict[str, RequestOutput] = {}

    def run(self, long: int = 8, prompt: int = 3000) -> None:
        for i in range(4):
            self.engine.submit([i * 9000 + j for j in range(20)], stream(600), request_id=f"stream {i}")
        step = added = 0
        while self.engine.busy:
            if step % 20 == 10 and added < long:
                added += 1
                tokens = [100_000 + added * 9000 + j for j in range(prompt)]
                self.engine.submit(tokens, stream(4), request_id=f"long {added}")
            for output in self.engine.step():
                if output.finished:
                    self.done[output.request_id] = output
            step += 1

    def gaps(self) -> list[float]:
        """Between the tokens of the streams, from their 20th token on."""
        times = [self.done[f"stream {i}"].metrics.token_times[20:] for i in range(4)]
        return [b - a for own in times for a, b in pairwise(own)]


def stream(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


@pytest.mark.parametrize("target", [0.02, 0.04, 0.08])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_streams_keep_to_the_target_and_prompts_go_on(target: float, noise: float) -> None:
    house = House(device(noise=noise), target)
    house.run()
    assert np.quantile(house.gaps(), 0.99) <= target
    chunks = [p.work for p in house.events if isinstance(p, ev.Planned)]
    beside = [sum(w[2] for w in work if w[2] > 1) for work in chunks if any(w[2] == 1 for w in work)]
    room = (target / (1 + noise) - 0.01 - 4 * 5e-4) / 2e-4
    used = [tokens for tokens in beside if tokens > 1]
    assert np.median(used) > 0.7 * room, "most of what the target allows is used"
    assert all(f"long {i}" in house.done for i in range(1, 9))


def test_without_a_target_streams_wait_for_whole_budgets() -> None:
    house = House(device(), None)
    house.run()
    assert np.quantile(house.gaps(), 0.99) > 0.1
    assert all(event.budget is None for event in house.events if isinstance(event, ev.PlanBegan))


def test_a_target_nobody_can_keep_still_gives_prompts_a_block_a_step() -> None:
    house = House(device(), 1e-4)
    house.run(long=1)
    for event in house.events:
        if isinstance(event, ev.Planned) and any(count == 1 for _, _, count, _ in event.work):
            assert sum(count for _, _, count, _ in event.work if count > 1) <= 16
    assert "long 1" in house.done


def test_a_hiccup_of_the_device_does_not_slow_prompts_down() -> None:
    calm, shaken = House(device(noise=0.1), 0.04), House(device(noise=0.1, hiccup=30), 0.04)
    for house in (calm, shaken):
        house.run()
    steps = [house.engine.scheduler.steps for house in (calm, shaken)]
    assert steps[1] < 1.25 * steps[0]
    assert np.quantile([gap for gap in shaken.gaps() if gap < 0.5], 0.99) <= 0.04


def test_a_device_that_slows_down_is_followed() -> None:
    fast, slow = device(), device(step=0.015, prompt=6e-4)
    house = House(lambda plan: (fast if plan.index < 80 else slow)(plan), 0.05)
    house.run(long=30)
    late = [b - a for a, b in pairwise(house.done["stream 0"].metrics.token_times[120:])]
    assert np.quantile(late, 0.95) <= 0.05


def test_drafts_are_part_of_what_a_step_takes() -> None:
    house = House(device(decode=1e-3), 0.03, token=lambda seq: len(seq.tokens) % 6, speculative_tokens=4)
    house.run()
    assert house.done["stream 1"].metrics.accepted_tokens > 300
    gaps = [gap for gap in house.gaps() if gap > 0]  # tokens of one run arrive together
    assert np.quantile(gaps, 0.99) <= 0.03


def test_nothing_is_known_before_the_first_step() -> None:
    assert Pacer(0.05).budget(1) is None


def test_a_budget_is_for_steps_with_decodes_only() -> None:
    b = Bench(config=dict(max_num_batched_tokens=64))
    b.budget = 10
    b.add(100, 20)
    assert b.step()[0].tokens == 64
    assert b.step()[0].tokens == 36
    b.add(100, 4)
    assert b.step()[0].tokens == 11
    b.budget = 0
    assert b.step()[0].tokens == 1 + 4  # a block, so that nobody is stuck
    b.budget = 10**6
    assert b.step()[0].tokens == 64
    b.run()


@pytest.mark.parametrize("target", [0, -1.0, float("inf"), float("nan"), "fast"])
def test_a_target_that_is_no_time_is_refused(target: object) -> None:
    with pytest.raises(OctavoError, match=r"itl_target is .*; it must be a number of seconds above 0, or None"):
        EngineConfig("demo", itl_target=target)  # type: ignore[arg-type]
