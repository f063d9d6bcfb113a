"""Why a request waits, for people and programs: the scheduler's `Wait` with holders, what unblocks it and when."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from octavo.kv.api import KVManager
from octavo.scheduler.explain import MEMORY_CAUSES, Cause, Holder, Wait
from octavo.types import Sequence

SHOWN = 16  # holders listed for one of many requests; a request asked for alone lists all

#: Which resource a cause is about. `behind`, `next step` and `no step` are about none.
RESOURCE = {
    **dict.fromkeys(MEMORY_CAUSES, "memory"),
    Cause.SLOTS: "slots",
    Cause.BUDGET: "tokens",
    Cause.QUOTA: "quota",
}


class Told(NamedTuple):
    """One wait as it is told. `eta_s`: seconds in which it ends at the latest by an estimate; None where nothing honest
    can be said."""

    cause: str
    sentence: str
    need: int
    have: int
    short: int
    unit: str
    behind: str | None
    holders: tuple[Holder, ...]
    unblocks: str
    eta_s: float | None
    held: int = 0  # blocks kept free for requests that already run, which are not to be had: need + held > have

    def json(self) -> dict[str, Any]:
        holders = [{"request": holder.request, "amount": holder.amount} for holder in self.holders]
        return {**self._asdict(), "holders": holders}


class Ends(NamedTuple):
    """How the running sequences will end: (most tokens still to come, blocks given back) of each, soonest first, and
    the seconds that a token takes of late; None: nobody has generated any, or somebody still computes a prompt.
    `growth`: tokens in which one of them takes another block of each layer group; `groups`: how many of those."""

    running: tuple[tuple[int, int], ...]
    itl: float | None
    growth: int = 1
    groups: int = 1


def ends_of(kv: KVManager, running: Seq[Sequence], own_blocks: dict[int, int], itl: float | None) -> Ends:
    """`own_blocks`: by sequence, what becomes available when it goes."""
    if any(len(seq.tokens) - seq.computed > 1 for seq in running):
        return Ends((), None)
    ends = sorted((seq.ceiling - len(seq.tokens), own_blocks.get(seq.id, 0)) for seq in running)
    return Ends(tuple(ends), itl, kv.block_size, kv.growing_groups)


def tell(wait: Wait, ends: Ends, before: int, most: int = SHOWN) -> Told:
    """`before`: how many stand in the line before it. `most`: holders listed."""
    eta = _eta(wait, ends, before)
    text = _unblocks(wait)
    if eta is not None and ends.itl is not None:
        text += f"; an estimate, at {1000 * ends.itl:.0f} ms a token: in {eta:.1f} s at the latest"
    return Told(
        wait.cause.value,
        wait.sentence(),
        wait.need,
        wait.have,
        wait.short,
        wait.unit,
        wait.behind,
        wait.holders[:most],
        text,
        eta,
        wait.held if wait.cause is Cause.HELD else 0,
    )


def stalled(seconds: float) -> Told:
    """No step was planned for so long, so nothing can change."""
    return tell(Wait(Cause.STALLED, int(seconds), 0, 0, "s"), Ends((), None), 0)


def not_offered() -> Told:
    """It came after the last plan: nothing can be said before the next one."""
    return Told(
        Cause.NEXT_STEP.value,
        "next step: it has come since the last plan and is offered memory in the next one",
        *(0, 0, 0, "", None, (), "the next step", None),
    )


def _unblocks(wait: Wait) -> str:
    """What must happen, as a clause."""
    short = wait.short
    match wait.cause:
        case Cause.SLOTS:
            return f"{short} of the {len(wait.holders) or 'running'} sequences that run must end"
        case Cause.FULL:
            return f"{_blocks(short)} must come free: requests that run must end or shrink"
        case Cause.HELD:
            return f"{_blocks(short)} must come free beside the {wait.held} held back for requests that already run"
        case Cause.FRAGMENTED:
            return (
                f"a run of {_blocks(wait.need)} must come free, or regions must move together; the longest is now "
                + (f"{wait.largest_hole}")
            )
        case Cause.QUOTA:
            return f"requests of its own tenant must give {_blocks(short)} back"
        case Cause.BUDGET:
            return "a step must have tokens to spare beside the decodes and prompts in front of it"
        case Cause.BEHIND if wait.shares_prefix:
            return f"{wait.behind} must have computed the prefix that both share"
        case Cause.BEHIND:
            inner = f" ({_unblocks(wait.behind_wait)})" if wait.behind_wait else ""
            return f"{wait.behind} must be admitted first{inner}"
        case Cause.STALLED:
            return "the engine must make a step again"
        case Cause.NEVER:
            return f"{_blocks(short)} more than the pool has: waiting does not help"
    return "the next step"


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _eta(wait: Wait, ends: Ends, before: int) -> float | None:
    """When enough sequences have ended, if each uses all its tokens and the others grow meanwhile.

    Only where lengths can tell: slots, also those that the ones in front will take, and memory for the first in line.
    Who gets a hole of the right length, or a step's tokens, is not a matter of lengths.
    """
    if ends.itl is None:
        return None
    if wait.cause is Cause.SLOTS:
        at = before + wait.short - 1
        return round(ends.running[at][0] * ends.itl, 3) if at < len(ends.running) else None
    if wait.cause is not Cause.FULL or before:
        return None
    freed, left = 0, len(ends.running)
    for tokens, blocks in ends.running:
        freed, left = freed + blocks, left - 1
        if freed - left * ends.groups * -(-tokens // ends.growth) >= wait.short:
            return round(tokens * ends.itl, 3)
    return None


def limiting(by_cause: dict[str, int], waits: Seq[Wait]) -> tuple[str, str]:
    """(resource, sentence): what keeps most of those who wait. `waits`: of those offered memory last, in order. Who
    stands behind another waits for what that one waits for."""
    waiting = sum(by_cause.values())
    counts: dict[str, int] = {}
    for cause, count in by_cause.items():
        resource = RESOURCE.get(Cause(cause))
        if resource is not None:
            counts[resource] = counts.get(resource, 0) + count
    if not waiting:
        return "none", "Nothing: no request waits."
    if stopped := by_cause.get(Cause.STALLED):
        return "none", f"No resource: {stopped} requests wait because no step is made."
    if not counts:
        return "none", f"No resource: {waiting} waiting, for the next step or for a prefix that another one computes."
    resource = max(counts, key=lambda name: counts[name])
    first = next((wait for wait in waits if RESOURCE.get(wait.cause) == resource), None)
    number = f"{counts[resource]} of {waiting} waiting requests want more of it"
    behind = f", {by_cause[Cause.BEHIND]} stand behind others" if by_cause.get(Cause.BEHIND) else ""
    told = f"; the first: {first.sentence()}" if first is not None else ""
    return resource, f"{_TITLE[resource]}: {number}{behind}{told}."


_TITLE = {
    "memory": "KV memory",
    "slots": "Sequences at once (max_num_seqs)",
    "tokens": "Tokens per step (max_num_batched_tokens, or itl_target where it is set)",
    "quota": "A tenant's quota",
}
