"""A scheduler with a simulated runner and a checker that looks after every event: the tests' workbench."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo import events as ev
from octavo.clock import VirtualClock
from octavo.kv.api import KVManager
from octavo.kv.check import require
from octavo.kv.strategies import make_manager
from octavo.runner.api import StepPlan
from octavo.runner.simulated import SimulatedRunner
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Progress, Scheduler
from octavo.types import Request, SamplingParams, Sequence

CONFIG = dict(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64)


@dataclass
class Bench:
    """Drives a scheduler step by step; `check` after every step."""

    strategy: str = "paged"
    pages: int = 64
    block: int = 4
    windows: tuple[int | None, ...] = (None,)
    sharing: bool = True
    config: dict = field(default_factory=dict)
    extra: dict = field(default_factory=dict)
    step_seconds: float | None = None

    def __post_init__(self) -> None:
        settings = SchedulerConfig(**{**CONFIG, **self.config})
        self.clock = VirtualClock()
        self.events: list[ev.Event] = []
        self.kv: KVManager = make_manager(
            self.strategy,
            self.pages,
            self.block,
            max_model_len=settings.max_model_len,
            windows=self.windows,
            chunk=settings.max_num_batched_tokens,
            sharing=self.sharing,
        )
        self.scheduler = Scheduler(settings, self.kv, self.events.append, **self.extra)
        self.runner = SimulatedRunner(self.clock)
        self.done: dict[int, Sequence] = {}
        self.all: dict[str, list[Sequence]] = {}
        self.plans: list[StepPlan] = []
        self._count = 0

    def add(self, prompt: int | list[int], max_tokens: int | None = 8, **kwargs) -> str:
        """Submit a request; an int prompt means that many tokens unlike any other request's."""
        self._count += 1
        tokens = [self._count * 1000 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        fields = ("id", "priority", "tenant", "identity", "output_length", "deadline", "stop_token_ids")
        request_fields = {name: kwargs.pop(name) for name in fields if name in kwargs}
        request_fields.setdefault("id", f"r{self._count}")
        kwargs.setdefault("ignore_eos", True)
        params = SamplingParams(max_tokens=max_tokens, **kwargs)
        request = Request(prompt=tuple(tokens), params=params, arrival=self.clock.now(), **request_fields)
        self.all[request.id] = self.scheduler.submit(request, self.clock.now())
        return request.id

    def step(self) -> tuple[StepPlan, list[Progress]]:
        plan = self.scheduler.plan(self.clock.now())
        self.look()
        result = self.runner.run(plan)
        out = self.scheduler.settle(plan, result, self.clock.now())
        self.look()
        self.plans.append(plan)
        return plan, out

    def look(self) -> None:
        self.scheduler.check()
        ledger = self.scheduler.ledger()
        require(ledger.capacity == self.kv.capacity * self.kv.block_size, "the ledger sums to the capacity")

    def run(self, limit: int = 10_000) -> int:
        """Until nothing is left; returns the number of steps. Fails if a step makes no progress for long."""
        idle = 0
        for n in range(limit):
            if not self.scheduler.busy:
                self.quiet()
                return n
            plan, _ = self.step()
            idle = idle + 1 if not plan.work else 0
            assert idle <= 3, f"no work for {idle} steps: {self.waits()}"
        raise AssertionError(f"not finished after {limit} steps: {self.waits()}")

    def waits(self) -> dict[str, str]:
        now = self.clock.now()
        found = {r: self.scheduler.explain(r, now) for r in self.scheduler.requests}
        return {r: wait.sentence() for r, wait in found.items() if wait}

    def quiet(self) -> None:
        """After all requests have ended nothing is left behind."""
        assert not self.scheduler.requests
        assert self.scheduler.waiting == 0
        assert not self.scheduler.running
        assert self.kv.free + self.kv.evictable == self.kv.capacity
        self.look()

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def tokens(self, request: str, index: int = 0) -> list[int]:
        return self.all[request][index].output
