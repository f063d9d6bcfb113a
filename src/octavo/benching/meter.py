"""Notes every step of an engine from outside: how long it took, which part of it, and what it could not do without."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from octavo.benching.costs import ModelCost, Need
from octavo.engine import Engine
from octavo.outputs import RequestOutput
from octavo.runner.api import StepPlan
from octavo.scheduler.scheduler import Progress, Scheduler
from octavo.types import FinishReason, Sequence

RUNNER, SCHEDULER, REST = "runner", "scheduler", "rest of Python"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step that computed something.

    seconds  around the whole of `engine.step()`
    parts    of those seconds; they sum to them: the runner's, the scheduler (plan and settle), the rest of Python
    needs    what a part cannot do without
    decodes  sequences that computed one certain token
    context  KV tokens that the queries see
    kv_used  share of the KV blocks held by running requests when the step's KV had been written
    """

    seconds: float
    parts: Mapping[str, float]
    needs: Mapping[str, Need]
    sequences: int
    tokens: int
    decodes: int
    context: int
    kv_used: float
    profiled: bool


class Stopwatch:
    """Stands before an object and adds up the seconds that the named methods take; all else is passed on."""

    def __init__(self, inner: Any, *methods: str) -> None:
        self.inner = inner
        self.seconds = 0.0
        for name in methods:
            setattr(self, name, self._timed(getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _timed(self, method: Any) -> Any:
        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


class StepMeter:
    """A watcher of an engine that also takes its steps, so that it sees the time around them."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self._plan: StepPlan | None = None
        self._kv_used = 0.0

    def attach(self, engine: Engine, cost: ModelCost) -> None:
        """Measure this engine, which must have been built with this watcher, from now on."""
        self._engine, self._cost = engine, cost
        self._runner = Stopwatch(engine.runner, "run")
        self._scheduler = Stopwatch(engine.scheduler, "plan", "settle")
        engine.runner = self._runner
        engine.scheduler = self._scheduler  # type: ignore[assignment]

    def step(self) -> list[RequestOutput]:
        """One step of the engine."""
        self._plan = None
        self._runner.take(), self._scheduler.take()
        begin = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - begin
        if self._plan is not None and self._plan.work:
            self.steps.append(self._record(self._plan, seconds))
        return outputs

    def take(self) -> list[StepRecord]:
        """The steps since the last call."""
        steps, self.steps = self.steps, []
        return steps

    def on_written(self, scheduler: Scheduler) -> None:
        kv = scheduler.kv
        self._kv_used = 1 - (kv.free + kv.evictable) / kv.capacity

    def on_step(self, scheduler: Scheduler, plan: StepPlan, progress: Seq[Progress], start: float, end: float) -> None:
        self._plan = plan

    def on_finish(self, seq: Sequence, reason: FinishReason, now: float) -> None:
        pass

    def _record(self, plan: StepPlan, seconds: float) -> StepRecord:
        ran, scheduled = self._runner.take(), self._scheduler.take()
        profile = getattr(self._runner.inner, "profile", None)
        parts = {RUNNER: ran} if profile is None else dict(profile.seconds)
        parts[SCHEDULER] = scheduled
        parts[REST] = seconds - sum(parts.values())
        spans = [(work.start, work.count) for work in plan.work]
        needs = self._cost.needs(spans, None if profile is None else profile.logit_rows)
        return StepRecord(
            seconds=seconds,
            parts=parts,
            needs=needs,
            sequences=len(plan.work),
            tokens=plan.tokens,
            decodes=sum(work.known == 1 for work in plan.work),
            context=sum(start + count for start, count in spans),
            kv_used=self._kv_used,
            profiled=profile is not None,
        )
