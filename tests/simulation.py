"""A scheduler with a simulated runner and a checker that looks after every event: the tests' workbench."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from zlib import crc32

from octavo import events as ev
from octavo.clock import VirtualClock
from octavo.kv.api import KVManager
from octavo.kv.check import require
from octavo.kv.prefix import encode_identity
from octavo.kv.strategies import make_manager
from octavo.runner.api import SeqWork, StepPlan, StepResult
from octavo.runner.simulated import SimulatedRunner, TokenSource, placeholder_token
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.explain import Wait
from octavo.scheduler.scheduler import Progress, Scheduler
from octavo.types import Request, SamplingParams, Sequence, Status

CONFIG = dict(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64)


class ContentRunner(SimulatedRunner):
    """A simulated runner with memory: it runs the copies in order, writes what each token's KV depends on (its layer
    group, the identity and all tokens up to it) through the view, and then reads back all that attention would see."""

    def __init__(
        self,
        clock: VirtualClock,
        pages: int,
        block: int,
        windows: tuple[int | None, ...],
        token: TokenSource = placeholder_token,
    ) -> None:
        super().__init__(clock, token=token)
        self.memory: list[list[object]] = [[None] * block for _ in range(pages)]
        self.block, self.windows = block, windows
        self._histories: dict[int, list[int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for copy in plan.copies:
            read = [list(page) for page in self.memory[copy.src : copy.src + copy.n]]
            self.memory[copy.dst : copy.dst + copy.n] = read
        for work in plan.work:
            self._write(work)
        for work in plan.work:
            self._read_back(work)
        return super().run(plan)

    def _history(self, seq: Sequence) -> list[int]:
        """history[p + 1] stands for the KV of position p: equal only for equal tokens under the same identity."""
        history = self._histories.setdefault(seq.id, [crc32(encode_identity(seq.request.identity))])
        return _extend(history, seq.tokens[len(history) - 1 :])

    def _of(self, work: SeqWork) -> list[int]:
        """The history with the drafted tokens behind it."""
        history = self._history(work.seq)
        return _extend(history.copy(), work.draft) if work.draft else history

    def _write(self, work: SeqWork) -> None:
        seq, history = work.seq, self._of(work)
        assert seq.view is not None
        for group, table in enumerate(seq.view.tables):
            for at in range(work.start, work.start + work.count):
                page = table[at // self.block]
                assert page >= 0, f"sequence {seq.id} writes position {at} of group {group} into nothing"
                self.memory[page][at % self.block] = (group, history[at + 1])

    def _read_back(self, work: SeqWork) -> None:
        seq, history = work.seq, self._of(work)
        assert seq.view is not None
        for group, (window, table) in enumerate(zip(self.windows, seq.view.tables, strict=True)):
            first = 0 if window is None else max(0, work.start - window + 1)
            for at in range(first, work.start + work.count):
                found = self.memory[table[at // self.block]][at % self.block]
                assert table[at // self.block] >= 0, f"sequence {seq.id} lost position {at} of group {group}"
                assert found == (group, history[at + 1]), f"sequence {seq.id} reads a stranger's KV at {at} of {group}"


def _extend(history: list[int], tokens: list[int] | tuple[int, ...]) -> list[int]:
    for token in tokens:
        history.append(hash((history[-1], token)))
    return history


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
    token: TokenSource = placeholder_token
    watched: bool = True  # check() and ledger() before and after each step
    budget: int | None = None  # most prompt tokens of a step with decodes

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
        self.runner = ContentRunner(self.clock, self.pages, self.block, self.windows, self.token)
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
        plan = self.scheduler.plan(self.clock.now(), self.budget)
        if self.watched:
            self.look()
        result = self.runner.run(plan)
        out = self.scheduler.settle(plan, result, self.clock.now())
        if self.watched:
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

    def steps(self, n: int) -> None:
        for _ in range(n):
            self.step()

    def why(self, request: str) -> Wait:
        """The wait of a request that does not run."""
        wait = self.scheduler.explain(request, self.clock.now())
        assert wait is not None, f"{request} does not wait"
        return wait

    def runs(self, request: str) -> bool:
        return any(seq.status is Status.RUNNING for seq in self.all[request])

    def of_preempted(self) -> list[str]:
        """Requests that wait because they were preempted."""
        return [
            r
            for r, seqs in self.scheduler.requests.items()
            if any(seq.status is Status.WAITING and seq.preemptions for seq in seqs)
        ]

    def reused(self, request: str) -> int:
        return self.all[request][0].reused

    def computed(self) -> Counter[str]:
        """Tokens computed for each request, by the step log."""
        counts: Counter[str] = Counter()
        for plan in self.plans:
            for work in plan.work:
                counts[work.seq.request.id] += work.count
        return counts

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
