"""Why a request waits: one cause by precedence, with need, have, short, the holders and what would unblock it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import NamedTuple

from octavo.kv.api import Quote, Why


class Cause(StrEnum):
    """In order of precedence."""

    NEVER = "never"
    QUOTA = "quota"
    SLOTS = "slots"
    BEHIND = "behind"
    FULL = "memory: full"
    FRAGMENTED = "memory: fragmented"
    HELD = "memory: held"
    BUDGET = "step budget"
    NEXT_STEP = "next step"  # there is room: it is offered memory in the next step
    STALLED = "no step"


MEMORY_CAUSES = frozenset({Cause.NEVER, Cause.FULL, Cause.FRAGMENTED, Cause.HELD})


MEMORY = {
    Why.NEVER: Cause.NEVER,
    Why.QUOTA: Cause.QUOTA,
    Why.FULL: Cause.FULL,
    Why.FRAGMENTED: Cause.FRAGMENTED,
    Why.HELD: Cause.HELD,
}


@dataclass(frozen=True, slots=True)
class Holder:
    """Who sits on what the waiting request needs."""

    request: str
    amount: int


class Turn(NamedTuple):
    """Whose turn it is: `tenant`, which has `had` so many tokens for its weight (generated ones count twice) since
    tenants began to wait for each other; `own` is the one who waits."""

    tenant: str
    had: int
    own: str
    own_had: int

    def sentence(self) -> str:
        return (
            f" of tenant {self.tenant!r}, whose turn it is: it has had {self.had} tokens and {self.own!r} "
            f"{self.own_had}"
        )


class Part(NamedTuple):
    """What a tenant holds of `whole` slots or blocks, and what its share of them is."""

    tenant: str
    holds: int
    whole: int
    share: Fraction

    def sentence(self, unit: str) -> str:
        share = f"{float(self.share):.1f}".removesuffix(".0")
        return f"; tenant {self.tenant!r} holds {self.holds} of {self.whole} {unit}, its share is {share}"


class Wait(NamedTuple):
    """Why one sequence waits. `need`, `have` and `short` count `unit` (blocks, slots or tokens of a step)."""

    cause: Cause
    need: int
    have: int
    short: int
    unit: str
    largest_hole: int = 0
    held: int = 0
    behind: str | None = None
    behind_wait: Wait | None = None
    shares_prefix: bool = False  # `behind` computes the very prefix that this one needs
    holders: tuple[Holder, ...] = ()
    turn: Turn | None = None  # fair share: `behind` is another tenant's
    part: Part | None = None  # fair share: what its tenant has of what it lacks

    def key(self) -> tuple[Cause, str | None]:
        """A wait is told again only when this changes."""
        return (self.cause, self.behind)

    def sentence(self) -> str:
        """For a person: the cause with its numbers, and what would unblock it."""
        if self.cause is Cause.BEHIND:
            inner = f" ({self.behind_wait.sentence()})" if self.behind_wait else ""
            if self.shares_prefix:
                inner = ", which is computing the prefix both share"
            return f"behind {self.behind}{self.turn.sentence() if self.turn else ''}{inner}"
        if self.cause is Cause.NEXT_STEP:
            return "next step: there is room, it is offered memory in the next step"
        text = f"{self.cause.value}: needs {_count(self.need, self.unit)}, {self.have} available, {self.short} short"
        if self.cause is Cause.FRAGMENTED:
            text = f"fragmented: largest run {self.largest_hole}, free {self.have}, need {_count(self.need, self.unit)}"
        elif self.cause is Cause.HELD:
            text += f" of the {self.held} held back for requests that already run"
        elif self.cause is Cause.STALLED:
            return f"no step for {self.need} s: the engine stands still"
        return text + self._unblocks() + (self.part.sentence(self.unit) if self.part else "")

    def _unblocks(self) -> str:
        if not self.holders:
            return ""
        named = ", ".join(f"{holder.request} ({holder.amount})" for holder in self.holders[:3])
        more = f" and {len(self.holders) - 3} more" if len(self.holders) > 3 else ""
        return f"; held by {named}{more}: it starts when they end or shrink by {_count(self.short, self.unit)}"


def _count(amount: int, unit: str) -> str:
    return f"{amount} {unit.removesuffix('s') if amount == 1 and unit in ('slots', 'blocks') else unit}"


def from_quote(quote: Quote, holders: tuple[Holder, ...] = ()) -> Wait:
    """A refused quote is the explanation. Cached blocks that it would share count against a quota like any others."""
    quota = quote.ask.quota if quote.why is Why.QUOTA else None
    have = quote.available if quota is None else quota
    return Wait(
        cause=MEMORY[quote.why],
        need=quote.take if quota is None else quote.short + have,
        have=have,
        short=quote.short,
        unit="blocks",
        largest_hole=quote.largest_hole,
        held=quote.held,
        holders=holders,
    )
