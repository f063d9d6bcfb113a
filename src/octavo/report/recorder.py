"""Watches a run: one sample per step, one record per request, and a block map thinned to a fixed size."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo import events as ev
from octavo.kv.api import Ledger
from octavo.runner.api import StepPlan
from octavo.scheduler.scheduler import Progress, Scheduler
from octavo.types import FinishReason, Sequence

MAP_COLUMNS = 160  # snapshots kept of the block map
MAP_ROWS = 128  # cells a snapshot is thinned to


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step. The ledger, in token slots, is that of the moment when the step's KV was written and nothing had been
    given back yet; the rest is the state after it."""

    step: int
    start: float
    end: float
    running: int
    waiting: int
    waiting_by_cause: dict[str, int]
    prefill_tokens: int
    decode_tokens: int
    preemptions: int
    ledger: Ledger


@dataclass(slots=True)
class RequestRecord:
    """The life of one request. Times in seconds on the engine's clock; None: it did not come to that."""

    id: str
    arrival: float
    prompt_tokens: int
    admitted: float | None = None
    token_times: list[float] = field(default_factory=list)
    finished: float | None = None
    reason: str | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    waited: bool = False  # it was not admitted in the first step after its arrival

    @property
    def ttft(self) -> float | None:
        return self.token_times[0] - self.arrival if self.token_times else None


@dataclass(frozen=True, slots=True)
class MapColumn:
    """One snapshot of the pool. cells[i] = ordinal of the request that owns the i-th stretch of blocks, -1 nobody;
    written[i]: whether token states are there (False: reserved and empty)."""

    at: float
    cells: tuple[int, ...]
    written: tuple[bool, ...]


class Recorder:
    """Collects what a report needs. Give `on_event` to the scheduler as a sink and `on_written` to each settle, and
    call `on_step` after it."""

    def __init__(self) -> None:
        self.steps: list[StepSample] = []
        self.requests: dict[str, RequestRecord] = {}
        self.map: list[MapColumn] = []
        self.refused: list[tuple[str, str]] = []
        self._ordinal: dict[str, int] = {}
        self._fresh: list[RequestRecord] = []
        self._regions: dict[int, list[tuple[int, int]]] = {}  # sequence -> (step, slots) at each grant
        self._never: dict[int, int] = {}  # step -> change of the slots that will never be used
        self._map_every = 1
        self._preempted = 0
        self._ledger: Ledger | None = None
        self._owners: tuple[list[int], list[bool]] | None = None

    def on_event(self, event: ev.Event) -> None:
        if isinstance(event, ev.Submitted):
            request = event.request
            self._ordinal[request.id] = len(self._ordinal)
            record = self.requests[request.id] = RequestRecord(request.id, request.arrival, len(request.prompt))
            self._fresh.append(record)
        elif isinstance(event, ev.Refused):
            self.refused.append((event.request.id, event.message))
        elif isinstance(event, ev.Granted):
            self._regions.setdefault(event.seq, []).append((event.step, event.slots))
        elif isinstance(event, ev.Preempted):
            self._preempted += 1

    def on_written(self, scheduler: Scheduler) -> None:
        self._ledger = scheduler.ledger()
        self._owners = self._snapshot(scheduler) if scheduler.steps % self._map_every == 0 else None

    def on_step(self, scheduler: Scheduler, plan: StepPlan, progress: Seq[Progress], start: float, end: float) -> None:
        causes = dict(scheduler.waiting_by_cause())
        decode = sum(work.count for work in plan.work if work.known == 1 and work.seq.generated > 1)
        self.steps.append(
            StepSample(
                step=plan.index,
                start=start,
                end=end,
                running=len(plan.work),
                waiting=scheduler.waiting,
                waiting_by_cause=causes,
                prefill_tokens=plan.tokens - decode,
                decode_tokens=decode,
                preemptions=self._preempted,
                ledger=self._ledger or scheduler.ledger(),
            )
        )
        self._preempted = 0
        for work in plan.work:
            record = self.requests[work.seq.request.id]
            if record.admitted is None:
                record.admitted = start
                record.cached_tokens = work.seq.reused
        for record in self._fresh:
            record.waited = record.admitted is None
        self._fresh.clear()
        for item in progress:
            self._on_progress(item, end)
        if self._owners is not None:
            cells, written = self._owners
            self.map.append(MapColumn(end, tuple(cells), tuple(written)))
            if len(self.map) > MAP_COLUMNS:  # keep every second one and go on at half the rate
                self.map = self.map[::2]
                self._map_every *= 2

    def _on_progress(self, item: Progress, now: float) -> None:
        seq = item.seq
        record = self.requests[seq.request.id]
        if item.token is not None:
            record.token_times.append(now)
            record.output_tokens += 1
        if item.finished is not None:
            self.on_finish(seq, item.finished, now)

    def on_finish(self, seq: Sequence, reason: FinishReason, now: float) -> None:
        """A sequence has ended; also to be called for those ended from outside (stop strings, aborts)."""
        record = self.requests[seq.request.id]
        record.finished, record.reason = now, reason.value
        record.preemptions += seq.preemptions
        grants = self._regions.pop(seq.id, [])
        for (since, slots), (until, _) in zip(grants, [*grants[1:], (len(self.steps), 0)], strict=True):
            unused = max(0, slots - len(seq.tokens))
            self._never[since] = self._never.get(since, 0) + unused
            self._never[until] = self._never.get(until, 0) - unused

    def never_used(self) -> list[int]:
        """Per step: slots reserved then that no token ever came to use, known after the fact."""
        out, now = [], 0
        for sample in self.steps:
            now += self._never.get(sample.step, 0)
            out.append(min(now, sample.ledger.reserved))
        return out

    def _snapshot(self, scheduler: Scheduler) -> tuple[list[int], list[bool]]:
        """Who owns each stretch of blocks, and whether token states are there."""
        pages = scheduler.kv.capacity * scheduler.kv.pages_per_block
        rows = min(MAP_ROWS, pages)
        cells, written = [-1] * rows, [False] * rows
        size = scheduler.kv.block_size
        for seq in scheduler.running:
            if seq.view is None:
                continue
            ordinal, full = self._ordinal[seq.request.id], -(-seq.computed // size)
            for table in seq.view.tables:
                for i, page in enumerate(table):
                    if page >= 0:
                        row = page * rows // pages
                        cells[row] = ordinal
                        written[row] = written[row] or i < full
        return cells, written
