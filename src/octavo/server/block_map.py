"""The block map: who owns each page of the pool and what is in it, as runs of equal pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.build import BuiltEngine

FREE, LIVE, SLACK, RESERVED, CACHED = range(5)
STATES = ("free", "live", "slack", "reserved", "cached")


@dataclass(frozen=True, slots=True)
class BlockMap:
    """`state` and `owner` have one entry a page: index into `STATES`, index into `owners` or -1. "slack" is a partly
    written last block. A shared block belongs to the request that runs longest of those that hold it."""

    at: float
    step: int
    block_size: int
    owners: tuple[str, ...]
    state: NDArray[np.int8]
    owner: NDArray[np.int32]

    def json(self) -> dict[str, Any]:
        """Compact: [length, state, owner] of each stretch. Costs time with the number of stretches: not on the engine's
        thread."""
        pages = len(self.state)
        changes = np.flatnonzero((np.diff(self.state) != 0) | (np.diff(self.owner) != 0)) + 1
        starts = np.concatenate(([0], changes)).astype(int) if pages else np.zeros(0, int)
        lengths = np.diff(np.append(starts, pages)).tolist()
        states, owners = self.state[starts].tolist(), self.owner[starts].tolist()
        runs = [[n, STATES[s], o] for n, s, o in zip(lengths, states, owners, strict=True)]
        return {
            "at": self.at,
            "step": self.step,
            "pages": pages,
            "block_size": self.block_size,
            "owners": list(self.owners),
            "runs": runs,
        }


def take_map(built: BuiltEngine) -> BlockMap:
    """The map of this moment. On the engine's thread, or while that one stands still."""
    scheduler = built.engine.scheduler
    kv, size = scheduler.kv, scheduler.kv.block_size
    state = np.zeros(built.pages, np.int8)
    owner = np.full(built.pages, -1, np.int32)
    cached = np.fromiter(list(kv.cached_pages()), np.int64)
    state[cached] = CACHED
    running = list(scheduler.running)
    owners = {name: i for i, name in enumerate(dict.fromkeys(seq.request.id for seq in running))}
    for seq in reversed(running):  # the one that came in first writes last
        if seq.view is None:
            continue
        full, used = divmod(seq.computed, size)
        for table in seq.view.tables:
            pages = np.array(table, np.int64)
            kinds = np.full(len(pages), RESERVED, np.int8)
            kinds[:full] = LIVE
            if used:
                kinds[full : full + 1] = SLACK
            there = pages >= 0
            state[pages[there]] = kinds[there]
            owner[pages[there]] = owners[seq.request.id]
    at = round(built.engine.clock.now(), 6)
    return BlockMap(at, scheduler.steps, size, tuple(owners), state, owner)
