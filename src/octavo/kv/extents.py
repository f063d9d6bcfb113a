"""Free holes of a linear pool: best fit, split, coalesce."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator


class Extents:
    """Disjoint free runs of a pool of `capacity` blocks, kept sorted by start and never adjacent."""

    __slots__ = ("_holes", "total")

    def __init__(self, capacity: int) -> None:
        self._holes: list[tuple[int, int]] = [(0, capacity)] if capacity else []
        self.total = capacity

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(start, length) in order of start."""
        return iter(self._holes)

    @property
    def largest(self) -> int:
        return max((length for _, length in self._holes), default=0)

    def shorter_than(self, need: int) -> int:
        """Blocks in holes that are too short for `need`."""
        return sum(length for _, length in self._holes if length < need)

    def fit(self, need: int) -> int | None:
        """Start of the shortest hole that holds `need` blocks (lowest address among equals), or None."""
        best: tuple[int, int] | None = None
        for start, length in self._holes:
            if length >= need and (best is None or length < best[0]):
                best = (length, start)
        return None if best is None else best[1]

    def run_at(self, start: int) -> int:
        """Length of the hole that begins exactly at `start`, or 0."""
        i = bisect_left(self._holes, (start, 0))
        if i < len(self._holes) and self._holes[i][0] == start:
            return self._holes[i][1]
        return 0

    def take(self, start: int, length: int) -> None:
        """Remove a run that lies within one hole. Raises ValueError otherwise."""
        i = bisect_right(self._holes, (start, 1 << 62)) - 1
        if i < 0 or start + length > sum(self._holes[i]):
            raise ValueError(f"run {start}+{length} is not free")
        hole_start, hole_length = self._holes.pop(i)
        if start + length < hole_start + hole_length:
            self._holes.insert(i, (start + length, hole_start + hole_length - start - length))
        if hole_start < start:
            self._holes.insert(i, (hole_start, start - hole_start))
        self.total -= length

    def give(self, start: int, length: int) -> None:
        """Return a run, joining it with its neighbours. Raises ValueError if any of it is already free."""
        if length == 0:
            return
        i = bisect_left(self._holes, (start, 0))
        before = self._holes[i - 1] if i else None
        after = self._holes[i] if i < len(self._holes) else None
        if (before and sum(before) > start) or (after and after[0] < start + length):
            raise ValueError(f"run {start}+{length} is already free")
        self.total += length
        if after and after[0] == start + length:
            length += after[1]
            del self._holes[i]
        if before and sum(before) == start:
            start, length = before[0], before[1] + length
            del self._holes[i - 1]
        insort(self._holes, (start, length))
