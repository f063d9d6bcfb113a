"""One frozen dataclass per input and per decision, and the sink they go to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.kv.api import Copy
from octavo.types import Request


@dataclass(frozen=True, slots=True)
class Event:
    """`step` is the number of plans made before; it orders events without a clock."""

    step: int


# -- inputs: what a replay has to be told ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted(Event):
    now: float
    request: Request
    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused(Event):
    """The request was refused at submit; nothing of it is kept."""

    now: float
    request: Request
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Stopped(Event):
    """Somebody outside the scheduler ended a sequence: a stop string, an abort."""

    now: float
    seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class PreemptAsked(Event):
    """Somebody outside wants the memory of a request back; it resumes when there is room."""

    now: float
    request: str


@dataclass(frozen=True, slots=True)
class PlanBegan(Event):
    """A plan was asked for at `now`; what it decided follows. `budget`: most prompt tokens beside running decodes."""

    now: float
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """The runner could not run these sequences' part of the step: their requests end with an error."""

    now: float
    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheReset(Event):
    """Cached prefixes were dropped on request."""

    freed: int


@dataclass(frozen=True, slots=True)
class Settled(Event):
    """The step ended at `now` with these tokens: tokens[i][j] for samples[j] of work[i], or the run that drafted work
    gained."""

    now: float
    tokens: tuple[tuple[int, ...], ...]


# -- decisions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """The step's work as (sequence, start, count, samples), in batch order; the last tokens of a count may be drafts,
    given as (sequence, tokens)."""

    now: float
    work: tuple[tuple[int, int, int, int], ...]
    copies: tuple[Copy, ...]
    drafts: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """A sequence got its first memory, or got it again after a preemption."""

    seq: int
    known: int
    reused: int
    again: bool


@dataclass(frozen=True, slots=True)
class Granted(Event):
    """Blocks changed hands: `slots` tokens fit now."""

    seq: int
    slots: int
    taken: int
    evicted: int


@dataclass(frozen=True, slots=True)
class Blocked(Event):
    """Why a waiting sequence does not run; sent when the cause changes."""

    seq: int
    cause: str
    need: int
    have: int
    short: int
    behind: str | None


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """Memory taken back for `by`: blocks that became available, tokens whose KV is thrown away."""

    seq: int
    by: int
    released: int
    discarded: int
    times: int


@dataclass(frozen=True, slots=True)
class Forked(Event):
    parent: int
    child: int
    shared: bool


@dataclass(frozen=True, slots=True)
class Compacted(Event):
    copies: tuple[Copy, ...]
    after: int | None


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """A sequence has ended, for a reason the scheduler knows. (A stop string that the very last allowed token completes
    is seen by the engine afterwards: the log says `length`, the output `stop`.)"""

    seq: int
    reason: str
    tokens: int
    released: int


Sink = Callable[[Event], None]


def discard(event: Event) -> None:
    """The sink for those who do not want to know."""


def fan_out(*sinks: Sink) -> Sink:
    """A sink that hands every event to all of `sinks`, in order."""

    def emit(event: Event) -> None:
        for sink in sinks:
            sink(event)

    return emit
