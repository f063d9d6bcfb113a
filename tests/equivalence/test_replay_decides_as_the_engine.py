"""The planner's replay, fed the durations that the real engine's steps took, plans the same steps to the last one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from octavo.build import BuiltEngine, build_engine
from octavo.clock import VirtualClock
from octavo.comparing import drive
from octavo.kv.spec import spec_from_config
from octavo.kv.strategies import STRATEGIES
from octavo.planner.deployment import Deployment, Fidelity, Level, Resolved
from octavo.planner.replay import ReplayOptions, replay
from octavo.planner.traces.api import TraceRequest
from octavo.planner.workload import WorkItem
from octavo.report.recorder import Recorder
from octavo.runner.api import Runner, StepPlan, StepResult
from octavo.runner.timing import StepShape, shape_of
from octavo.types import Sequence
from tests.equivalence.harness import Subject, engine_for, random_prompts, tiny_subject
from tests.runner.tiny import tiny_module

BLOCK, REQUESTS = 4, 40


class WallTimed:
    """The real runner on a virtual clock that moves by what each step really took; remembers shapes and durations."""

    def __init__(self, inner: Runner, clock: VirtualClock) -> None:
        self._inner, self._clock = inner, clock
        self.steps: list[tuple[StepShape, float]] = []

    def run(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter()
        result = self._inner.run(plan)
        seconds = time.perf_counter() - begin
        self._clock.advance(seconds)
        self.steps.append((shape_of(plan), seconds))
        return result

    def forget(self, seq: Sequence) -> None:
        self._inner.forget(seq)


@dataclass
class Recorded:
    """A timing model that knows what comes: it gives the recorded durations and notes the shapes it is asked for."""

    steps: Iterator[tuple[StepShape, float]]
    asked: list[StepShape] = field(default_factory=list)
    windows: tuple[int, ...] = ()

    def seconds(self, shape: StepShape) -> float:
        if not shape.tokens and not shape.copied:
            return 0.0  # the engine does not call its runner for nothing
        self.asked.append(shape)
        return next(self.steps)[1]


def traffic() -> tuple[list[list[int]], list[TraceRequest]]:
    """Prompts, of which some begin alike, and the same as a trace: ids of equal prefixes for every block of prompt."""
    stems = random_prompts(199, (24, 12, 17), seed=3)
    tails = random_prompts(199, tuple(1 + 7 * i % 31 for i in range(REQUESTS)), seed=4)
    prompts = [stems[i % 5] + tails[i] if i % 5 < 3 else tails[i] for i in range(REQUESTS)]
    ids: dict[tuple[int, ...], int] = {}
    requests = []
    for i, prompt in enumerate(prompts):
        blocks = range(BLOCK, len(prompt) + 1, BLOCK)
        hashes = tuple(ids.setdefault(tuple(prompt[:end]), len(ids)) for end in blocks)
        arrival = 2e-3 * (i // 4)  # four at once, a step or two apart
        requests.append(TraceRequest(arrival, len(prompt), 3 + 5 * i % 29, f"r{i}", hashes, BLOCK if hashes else 0))
    return prompts, requests


def on_paper(built: BuiltEngine, strategy: str, timer: Recorded) -> Resolved:
    return Resolved(
        deployment=Deployment(model="tiny", strategy=strategy, block_size=BLOCK),
        spec=spec_from_config(tiny_module("llama").config.to_dict()),
        scheduler=built.engine.scheduler.config,
        pages=built.pages,
        windows=built.layout.windows,
        block_bytes=built.layout.page_bytes,
        timer=timer,
        plan=None,
        fidelity=Fidelity(Level.CALIBRATED, 0.0, "recorded durations"),
    )


def really(subject: Subject, strategy: str) -> tuple[BuiltEngine, Recorder, list[tuple[StepShape, float]]]:
    prompts, requests = traffic()
    sizes = dict(block=BLOCK, chunk=16, pool_tokens=200, max_model_len=96)
    template = engine_for(subject, strategy=strategy, admission="prompt", **sizes)
    clock, recorder = VirtualClock(), Recorder()
    built = build_engine(
        replace(template.config, check=False),
        loaded=subject.model,
        clock=clock,
        sink=recorder.on_event,
        watchers=(recorder,),
    )
    runner = WallTimed(built.engine.runner, clock)
    built.engine.runner = runner
    items = [WorkItem(request.arrival, request.output_tokens) for request in requests]
    drive(built.engine, prompts, items, lambda: None)
    return built, recorder, runner.steps


@pytest.mark.parametrize("stepping", [True, False], ids=["stepping", "coasting"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_same_durations_same_steps(strategy: str, stepping: bool) -> None:
    built, recorder, steps = really(tiny_subject("llama"), strategy)
    timer = Recorded(iter(steps))
    options = ReplayOptions(known_lengths=True, stepping=stepping)
    outcome = replay(traffic()[1], on_paper(built, strategy, timer), options)
    assert timer.asked == [shape for shape, _ in steps]
    assert outcome.finished == REQUESTS
    totals = built.engine.scheduler.totals
    assert outcome.preemptions == totals.preemptions
    assert outcome.hit_tokens == totals.hit_tokens
    assert (outcome.hit_tokens > 0) == (strategy == "paged")
    assert (outcome.preemptions > 0) == (strategy in ("growing", "paged"))
    assert outcome.recomputed == totals.recomputed
    records = recorder.requests.values()
    assert outcome.ttft.mean == pytest.approx(sum(record.ttft or 0.0 for record in records) / REQUESTS)
    ends = [(record.finished or 0.0) - record.arrival for record in records]
    assert outcome.e2e.mean == pytest.approx(sum(ends) / REQUESTS)
    assert outcome.running_peak == max(sample.running for sample in recorder.steps)
    assert any(sample.waiting for sample in recorder.steps), "some had to wait"
