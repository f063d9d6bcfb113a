"""The engine at one moment between two steps, immutable: its ledger, and every request with the reason why it waits.

`take` runs on the engine's thread. `take_outside` is for when that thread does not come back soon: it reads from
another one, changes nothing, and tells what the last plan left, or that the missing step is why everybody waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from octavo.build import BuiltEngine
from octavo.kv.api import KVManager, Ledger
from octavo.scheduler.explain import Cause, Wait
from octavo.scheduler.scheduler import Scheduler
from octavo.server.ledger import ByteLedger, ledger_bytes
from octavo.server.waits import SHOWN, Ends, Told, ends_of, limiting, not_offered, stalled, tell
from octavo.types import Sequence, Status, phase_of

PATIENCE = 1.0  # seconds without a step after which the missing step is the reason
EXPLAINED = 8  # waiting requests whose numbers are those of this moment; of others, those of the last plan


class Past(Protocol):
    """What a snapshot needs to know of before (`Inspector`)."""

    @property
    def itl(self) -> float | None:
        """Seconds between tokens of late; None: nobody generated."""

    def waited(self, request_id: str, now: float) -> float:
        """Seconds that a live request has spent in the line, before and between admissions."""


class Row(NamedTuple):
    """One request. `slack_tokens`: unwritten slots of its partly written last block; `reserved_tokens`: those of its
    empty blocks; both per layer group, summed over samples. `blocks` and `shared_blocks` count different blocks."""

    id: str
    label: str | None
    tenant: str
    priority: int
    state: str
    phase: str
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    max_tokens: int
    blocks: int
    shared_blocks: int
    slack_tokens: int
    reserved_tokens: int
    cached_tokens: int
    preemptions: int
    age_s: float
    waited_s: float
    wait: Told | None

    def json(self) -> dict[str, Any]:
        return {**self._asdict(), "wait": None if self.wait is None else self.wait.json()}


@dataclass(frozen=True, slots=True)
class Head:
    """The ledger's side of a snapshot: everything of `GET /kv/ledger`. `at`: seconds on the engine's clock."""

    at: float
    step: int
    strategy: str
    block_size: int
    ledger: ByteLedger
    pool: Mapping[str, int]
    running: int
    waiting: int
    waiting_by_cause: Mapping[str, int]
    limiting: tuple[str, str]
    longest: int
    max_num_seqs: int
    max_num_batched_tokens: int
    unmeasured: tuple[str, ...] = ()  # lines that stand at 0 because `kv_memory` was given and nothing was measured

    def json(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "step": self.step,
            "strategy": self.strategy,
            "block_size": self.block_size,
            "budget": self.ledger.budget,
            "lines": dict(self.ledger.lines),
            "pool": dict(self.pool),
            "running": self.running,
            "waiting": self.waiting,
            "waiting_by_cause": dict(self.waiting_by_cause),
            "limiting": {"resource": self.limiting[0], "sentence": self.limiting[1]},
            "longest": self.longest,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "unmeasured": list(self.unmeasured),
        }


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`rows`: running requests first, then the waiting ones in queue order."""

    head: Head
    rows: tuple[Row, ...]

    def json(self) -> dict[str, Any]:
        return {"at": self.head.at, "step": self.head.step, "requests": [row.json() for row in self.rows]}


def take_head(built: BuiltEngine) -> Head:
    """The ledger of this moment, with who runs and what others wait for. On the engine's thread."""
    scheduler, now = built.engine.scheduler, built.engine.clock.now()
    causes = dict(scheduler.waiting_by_cause())
    if scheduler.waiting and (stopped := _idle(scheduler, now)) > PATIENCE and _all_older(scheduler, now):
        return _head(built, scheduler.ledger(), {Cause.STALLED.value: scheduler.waiting}, stopped)
    return _head(built, scheduler.ledger(), causes)


def take(built: BuiltEngine, labels: Mapping[str, str], past: Past) -> Snapshot:
    """Everything of this moment. On the engine's thread."""
    head = take_head(built)
    return Snapshot(head, _rows(built, labels, past, head.at))


def take_row(built: BuiltEngine, labels: Mapping[str, str], past: Past, request_id: str) -> Row | None:
    """One live request, with all who hold what it waits for. On the engine's thread."""
    scheduler, now = built.engine.scheduler, built.engine.clock.now()
    seqs = scheduler.requests.get(request_id)
    if not seqs:
        return None
    own = {seq.id: scheduler.kv.blocks_of(seq.id) for seq in scheduler.running}
    wait = scheduler.explain(request_id, now)
    ends = ends_of(scheduler.kv, scheduler.running, own, past.itl)
    told = None if wait is None else tell(wait, ends, _before(scheduler, seqs), most=len(scheduler.running))
    return row_of(seqs, scheduler.kv, own, told, labels, past, now)


class Absence(NamedTuple):
    """The engine's thread is inside a step for so many seconds; `stalled`: longer than a step may take."""

    seconds: float
    stalled: bool


def take_outside(built: BuiltEngine, labels: Mapping[str, str], past: Past, absent: Absence) -> Snapshot:
    """Everything as the last plan left it. From any thread, while the engine's own is inside a step: nothing is asked
    of the scheduler that could change what it remembers."""
    scheduler = built.engine.scheduler
    requests = _in_order(list(scheduler.requests.values()), scheduler)
    waits = _Standing(scheduler, absent)
    told = [waits.of(seqs) if _waits(seqs) else None for seqs in requests]
    causes = Counter(one.cause for one in told if one is not None)
    head = _head(built, scheduler.kv.ledger(), dict(causes), absent.seconds if absent.stalled else 0.0)
    own = {seq.id: scheduler.kv.blocks_of(seq.id) for seq in list(scheduler.running)}
    rows = (
        row_of(seqs, scheduler.kv, own, one, labels, past, head.at) for seqs, one in zip(requests, told, strict=True)
    )
    return Snapshot(head, tuple(rows))


class _Standing:
    """What those who wait were told in the last plan, while its step runs."""

    def __init__(self, scheduler: Scheduler, absent: Absence) -> None:
        waits, self._unseen = scheduler.standing()
        self._waits = dict(waits)
        self._absent = absent
        self._scheduler = scheduler

    def of(self, seqs: Seq[Sequence]) -> Told:
        if self._absent.stalled:
            return stalled(self._absent.seconds)
        seq = next((seq for seq in seqs if _in_line(seq)), seqs[0])
        wait = self._waits.get(seq.id) or self._of_unseen()
        told = not_offered() if wait is None else tell(wait, Ends((), None), _FAR)
        return told._replace(sentence=f"{told.sentence}; the step now running began {self._absent.seconds:.0f} s ago")

    def _of_unseen(self) -> Wait | None:
        """Of all who were not offered anything: the reason of the one at which the plan stopped, or to be behind it."""
        if not self._waits or self._unseen is Cause.NEXT_STEP:
            return None
        last, wait = next(reversed(self._waits.items()))
        if self._unseen is not Cause.BEHIND:
            return wait
        behind = next(
            (r for r, seqs in list(self._scheduler.requests.items()) if any(s.id == last for s in seqs)), None
        )
        return Wait(Cause.BEHIND, 0, 0, 0, "requests", behind=behind, behind_wait=wait)


# -- the ledger's side ------------------------------------------------------------------------------------------------


def _head(built: BuiltEngine, pool: Ledger, causes: dict[str, int], stopped: float = 0.0) -> Head:
    scheduler, kv, config = built.engine.scheduler, built.engine.scheduler.kv, built.engine.scheduler.config
    groups = list(scheduler.requests.values())
    running = sum(any(seq.status is Status.RUNNING for seq in seqs) for seqs in groups)
    limit = limiting(causes, () if stopped else tuple(scheduler.standing()[0].values()))
    if stopped and causes:
        limit = (
            "none",
            f"No resource: {sum(causes.values())} requests wait because no step was made for {stopped:.0f} s.",
        )
    return Head(
        at=round(built.engine.clock.now(), 6),
        step=scheduler.steps,
        strategy=built.config.kv_strategy,
        block_size=kv.block_size,
        ledger=ledger_bytes(built, pool),
        pool={
            "blocks": kv.capacity,
            "pinned": kv.capacity - kv.free - kv.evictable,
            "cached": kv.evictable,
            "free": kv.free,
        },
        running=running,
        waiting=len(groups) - running,
        waiting_by_cause=causes,
        limiting=limit,
        longest=scheduler.longest,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        unmeasured=("activations", "workspace") if built.budget is None else (),
    )


def _idle(scheduler: Scheduler, now: float) -> float:
    """Seconds since the last plan."""
    return now - scheduler.last_step if scheduler.last_step is not None else now


def _all_older(scheduler: Scheduler, now: float) -> bool:
    """Whether everybody who waits does so for longer than the patience: nobody has come just now."""
    return all(now - seqs[0].submitted_at > PATIENCE for seqs in scheduler.requests.values() if _waits(seqs))


# -- the requests' side -----------------------------------------------------------------------------------------------


def _rows(built: BuiltEngine, labels: Mapping[str, str], past: Past, now: float) -> tuple[Row, ...]:
    scheduler = built.engine.scheduler
    own = {seq.id: scheduler.kv.blocks_of(seq.id) for seq in scheduler.running}
    waits = _Waits(scheduler, ends_of(scheduler.kv, scheduler.running, own, past.itl), now)
    ordered = _in_order(list(scheduler.requests.values()), scheduler)
    return tuple(row_of(seqs, scheduler.kv, own, waits.of(seqs), labels, past, now) for seqs in ordered)


class _Waits:
    """The waits of one snapshot. To ask the scheduler for each of a thousand would take longer than a step: the first
    are explained with the numbers of this moment, others as the last plan left them."""

    def __init__(self, scheduler: Scheduler, ends: Ends, now: float) -> None:
        self._scheduler, self._ends, self._now = scheduler, ends, now
        self._standing, self._unseen = scheduler.standing()
        self._told = 0  # who was asked about; they are in queue order
        self._fair = scheduler.config.order == "fair"
        self._shared: dict[str, Told] = {}  # by tenant, of all who were not offered anything in the last plan

    def of(self, seqs: Seq[Sequence]) -> Told | None:
        seq = next((seq for seq in seqs if _in_line(seq)), None)
        if seq is None:
            return None
        before, self._told = _FAR if self._fair else self._told, self._told + 1
        since = max(seq.submitted_at, self._scheduler.last_step or seq.submitted_at)
        if self._now - since > PATIENCE:
            return stalled(self._now - since)
        if self._told <= EXPLAINED:
            return self._explained(seq, before) or not_offered()
        if seq.id in self._standing:
            return tell(self._standing[seq.id], self._ends, before)
        if self._unseen is Cause.NEXT_STEP:
            return not_offered()
        tenant = seq.request.tenant
        if tenant not in self._shared:
            found = self._explained(seq, _FAR)  # told of all of them: nothing about when
            same = found is not None and found.cause == self._unseen.value
            self._shared[tenant] = found if found is not None and same else not_offered()
        return self._shared[tenant]

    def _explained(self, seq: Sequence, before: int) -> Told | None:
        wait = self._scheduler.explain(seq.request.id, self._now)
        return None if wait is None else tell(wait, self._ends, before, SHOWN)


def _in_line(seq: Sequence) -> bool:
    """Samples that were never forked stand in no line."""
    return seq.status is Status.WAITING and (seq.forked or not seq.index)


def _waits(seqs: Seq[Sequence]) -> bool:
    for seq in seqs:  # noqa: SIM110 - a generator takes three times as long, and there may be a thousand requests
        if seq.status is Status.RUNNING:
            return False
    return True


_FAR = 1 << 30  # so far back in the line that nothing can be said about when


def _before(scheduler: Scheduler, seqs: list[Sequence]) -> int:
    """How many requests stand in the line before this one. Where tenants take turns there is no such line."""
    if scheduler.config.order == "fair":
        return _FAR
    line = [one for one in _in_order(list(scheduler.requests.values()), scheduler) if _waits(one)]
    return line.index(seqs) if seqs in line else 0


def _in_order(requests: list[list[Sequence]], scheduler: Scheduler) -> list[list[Sequence]]:
    """Running requests in the order in which they came in, then the waiting ones in that of the line."""
    by_priority = scheduler.config.order == "priority"

    def place(seqs: list[Sequence]) -> tuple[int, int, int]:
        if not _waits(seqs):
            return (0, 0, min(seq.entered for seq in seqs if seq.status is Status.RUNNING))
        return (1, seqs[0].request.priority if by_priority else 0, seqs[0].id)

    return sorted(requests, key=place)


def _blocks(running: Seq[Sequence], kv: KVManager) -> int:
    """Different blocks that the samples of one request hold."""
    if len(running) != 1 or kv.windowed or kv.pages_per_block > 1:
        return kv.held_by(seq.id for seq in running)
    view = running[0].view
    return 0 if view is None else sum(map(len, view.tables))


def row_of(
    seqs: Seq[Sequence],
    kv: KVManager,
    own: Mapping[int, int],
    told: Told | None,
    labels: Mapping[str, str],
    past: Past,
    now: float,
) -> Row:
    first, request = seqs[0], seqs[0].request
    limit = request.params.max_tokens
    held = _NOTHING
    if len(seqs) > 1 or first.view is not None:
        held = _held([seq for seq in seqs if seq.view is not None], kv, own)
    waiting = _waits(seqs)
    return Row(
        request.id,
        labels.get(request.id),
        request.tenant,
        request.priority,
        "waiting" if waiting else "running",
        phase_of(seqs),
        len(request.prompt),
        max(seq.computed for seq in seqs) if len(seqs) > 1 else first.computed,
        sum(seq.generated for seq in seqs) if len(seqs) > 1 else first.generated,
        first.ceiling - len(request.prompt) if limit is None else limit,
        *held,
        first.reused,
        sum(seq.preemptions for seq in seqs) if len(seqs) > 1 else first.preemptions,
        round(now - request.arrival, 6),
        round(past.waited(request.id, now), 6),
        told,
    )


_NOTHING = (0, 0, 0, 0)


def _held(running: Seq[Sequence], kv: KVManager, own: Mapping[int, int]) -> tuple[int, int, int, int]:
    """Blocks, shared blocks, slack and reserved tokens of a request's samples."""
    slack = reserved = 0
    for seq in running:
        if seq.view is not None:
            empty = len(seq.view.tables[0]) * kv.block_size - seq.computed
            tail = min(empty, -seq.computed % kv.block_size)
            slack += tail
            reserved += empty - tail
    blocks = _blocks(running, kv)
    return blocks, max(0, blocks - sum(own.get(seq.id, 0) for seq in running)), slack, reserved
