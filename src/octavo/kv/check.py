"""The invariants of the KV managers, in one place: used by tests, and in production by `EngineConfig(check=True)`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence


class InvariantError(AssertionError):
    """The pool's bookkeeping is wrong: a bug in Octavo, never in the input."""


def require(ok: bool, invariant: str, *, block: int | None = None, seq: int | None = None) -> None:
    """Raise InvariantError naming the invariant, the block and the sequence unless `ok`."""
    if not ok:
        where = "".join(
            f", {name} {value}" for name, value in (("block", block), ("sequence", seq)) if value is not None
        )
        raise InvariantError(f"broken invariant: {invariant}{where}")


def check_partition(capacity: int, parts: Mapping[str, Iterable[int]]) -> None:
    """Every block id in 0..capacity-1 is in exactly one of the named parts."""
    owner: dict[int, str] = {}
    for name, blocks in parts.items():
        for block in blocks:
            require(0 <= block < capacity, f"{name} block id within the pool of {capacity}", block=block)
            require(block not in owner, f"block is in {owner.get(block)} and in {name}", block=block)
            owner[block] = name
    require(len(owner) == capacity, f"all {capacity} blocks are accounted for, found {len(owner)}")


def check_references(refs: Sequence[int], tables: Mapping[int, Sequence[Sequence[int]]]) -> None:
    """Reference counts equal the number of table entries that point at a block."""
    counted: Counter[int] = Counter()
    for groups in tables.values():
        for table in groups:
            counted.update(block for block in table if block >= 0)
    for block, count in enumerate(refs):
        require(count >= 0, f"reference count {count} is not negative", block=block)
        require(count == counted[block], f"reference count {count} equals {counted[block]} holders", block=block)


def check_disjoint_runs(capacity: int, runs: Iterable[tuple[int, int, str]]) -> None:
    """Runs (start, length, name) cover 0..capacity-1 without gap or overlap."""
    at = 0
    for start, length, name in sorted(runs):
        require(length > 0, f"{name} is not empty", block=start)
        require(start >= at, f"{name} does not overlap the run before it", block=start)
        require(start == at, f"no block is lost before {name}", block=at)
        at = start + length
    require(at == capacity, f"runs end at the capacity {capacity}, not at {at}")
