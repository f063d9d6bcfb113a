"""One reading of the engine: every gauge and counter as of the same moment between two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass

from octavo.build import BuiltEngine
from octavo.scheduler.explain import Cause
from octavo.scheduler.residents import Totals
from octavo.scheduler.scheduler import Scheduler
from octavo.server.metrics_counts import Counts, Tallies
from octavo.server.snapshot import Head, take_head
from octavo.types import Status


@dataclass(frozen=True, slots=True)
class Reading:
    """Requests are counted, not samples: one runs if any of its samples does, otherwise it waits.

    waiting   requests by cause
    deferred  those of them that wait for a prefix that another request is computing
    samples   samples that run, and samples that stand in the line
    head      what /kv/ledger says: the ledger, the pool's blocks by state, and what limits
    """

    totals: Totals
    tallies: Tallies
    head: Head
    running: int
    waiting: Mapping[str, int]
    deferred: int
    samples: tuple[int, int]

    @property
    def usage(self) -> float:
        """Share of the blocks that live requests refer to."""
        return self.head.pool["pinned"] / self.head.pool["blocks"]


def take_reading(built: BuiltEngine, counts: Counts) -> Reading:
    """To be called between two steps, on the engine's thread."""
    counts.add_ended()
    scheduler = built.engine.scheduler
    waiting = _waiting(scheduler)
    return Reading(
        totals=copy(scheduler.totals),
        tallies=counts.tallies.copy(),
        head=take_head(built),
        running=len(scheduler.requests) - waiting.total(),
        waiting=Counter(cause.value for cause, _ in waiting.elements()),
        deferred=sum(count for (_, shares), count in waiting.items() if shares),
        samples=(len(scheduler.running), scheduler.waiting),
    )


def _waiting(scheduler: Scheduler) -> Counter[tuple[Cause, bool]]:
    """Requests none of whose samples runs, by cause and whether they wait for a shared prefix."""
    waits, others = scheduler.standing()
    found = Counter[tuple[Cause, bool]]()
    for seqs in scheduler.requests.values():
        if not any(seq.status is Status.RUNNING for seq in seqs):
            first = next(seq for seq in seqs if seq.status is Status.WAITING)
            wait = waits.get(first.id)
            found[(others, False) if wait is None else (wait.cause, wait.shares_prefix)] += 1
    return found
