"""The pool over time, as a picture: who owns each stretch of blocks at some moments of a replay."""

from __future__ import annotations

from octavo.planner.outcome import PoolMap
from octavo.scheduler.scheduler import Scheduler

MOMENTS, ROWS = 160, 128


class Snapshots:
    """Looks at the pool, thinned to a fixed number of moments and stretches of blocks."""

    def __init__(self) -> None:
        self._columns: list[tuple[float, tuple[int, ...], tuple[bool, ...]]] = []
        self._names: dict[str, int] = {}
        self._every, self._seen = 1, 0

    def look(self, scheduler: Scheduler, at: float) -> None:
        """Who owns what at `at`."""
        self._seen += 1
        if self._seen % self._every:
            return
        kv = scheduler.kv
        pages = kv.capacity * kv.pages_per_block
        rows = min(ROWS, pages)
        cells, written = [-1] * rows, [False] * rows
        for page in kv.cached_pages():
            cells[page * rows // pages] = -2
        for seq in scheduler.running:
            if seq.view is None:
                continue
            owner = self._names.setdefault(seq.request.id, seq.id)
            full = -(-seq.computed // kv.block_size)
            for table in seq.view.tables:
                for i, page in enumerate(table):
                    if page >= 0:
                        row = page * rows // pages
                        cells[row] = owner
                        written[row] = written[row] or i < full
        self._columns.append((at, tuple(cells), tuple(written)))
        if len(self._columns) > MOMENTS:
            self._columns = self._columns[::2]
            self._every *= 2
            shown = {owner for _, cells, _ in self._columns for owner in cells}
            self._names = {name: owner for name, owner in self._names.items() if owner in shown}

    def result(self) -> PoolMap:
        """The snapshots, with names of those requests only that they show."""
        seen = sorted({owner for _, cells, _ in self._columns for owner in cells if owner >= 0})
        place = {owner: i for i, owner in enumerate(seen)} | {-1: -1, -2: -2}
        names = {number: name for name, number in self._names.items()}
        return PoolMap(
            t=tuple(round(at, 6) for at, _, _ in self._columns),
            owner=tuple(tuple(place[owner] for owner in cells) for _, cells, _ in self._columns),
            written=tuple(written for _, _, written in self._columns),
            requests=tuple(names[owner] for owner in seen),
        )
