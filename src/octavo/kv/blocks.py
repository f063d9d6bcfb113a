"""The block pool of the paged manager: reference counts, free list, LRU list of cached blocks, quarantine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from octavo.kv.check import check_partition, require
from octavo.kv.prefix_tree import PrefixTree


class BlockPool:
    """Every block is in exactly one state: free, in use (refs > 0), cached (refs 0, published) or quarantined
    (refs 0, but the source of a copy that has not run). All operations are O(1) a block.

    Cached blocks lie in batches, as they were given back. A block that is used again stays in its batch, out of date,
    until the batch is evicted or all are tidied up.
    """

    def __init__(self, capacity: int, groups: int) -> None:
        self.capacity = capacity
        self.refs = [0] * capacity
        self.tree = PrefixTree(capacity, groups)
        self._free = list(range(capacity - 1, -1, -1))  # a stack: low ids first, recently freed next
        self._batches: deque[list[int]] = deque()  # least recently used first; of each, the last block goes first
        self._batch_of: list[list[int] | None] = [None] * capacity  # where a block lies, if it is cached, or lay last
        self._cached = 0
        self._lying = 0  # blocks in batches, cached or out of date
        self._reading: dict[int, int] = {}  # block -> copies that still have to read it
        self._parked: set[int] = set()  # quarantined: nobody's, waiting for those copies

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return self._cached

    @property
    def quarantined(self) -> int:
        return len(self._parked)

    @property
    def in_use(self) -> int:
        return self.capacity - len(self._free) - self._cached - len(self._parked)

    def evictable(self) -> Iterator[int]:
        """The cached blocks, least recently used first."""
        for batch in self._batches:
            for block in reversed(batch):
                if self._batch_of[block] is batch:
                    yield block

    def count_cached(self, blocks: Iterable[int]) -> int:
        """How many of these published blocks are evictable: used by nobody."""
        refs, parked = self.refs, self._parked
        cached = [block for block in blocks if not refs[block]]
        return len(cached) - (sum([block in parked for block in cached]) if parked else 0)

    def take(self, n: int) -> tuple[list[int], int]:
        """`n` blocks with one reference each, and how many had to be evicted from the cache (least recently used
        first). Raises ValueError, changing nothing, if there are not enough."""
        free, refs = self._free, self.refs
        short = n - len(free)
        if short > self._cached:
            raise ValueError(f"{n} blocks asked for, {len(free)} free, {self._cached} cached")
        if short > 0:
            free += self._evict(short)
        if n == 1:
            block = free.pop()
            refs[block] = 1
            return [block], max(short, 0)
        cut = len(free) - n
        blocks = free[cut:][::-1]
        del free[cut:]
        for block in blocks:
            refs[block] = 1
        return blocks, max(short, 0)

    def _evict(self, n: int) -> list[int]:
        """The `n` least recently used of the cached blocks, which hold nothing any longer."""
        oldest: list[int] = []
        batch_of, batches = self._batch_of, self._batches
        while (lacking := n - len(oldest)) > 0:
            batch = batches[0]
            last = batch[: -lacking - 1 : -1]
            del batch[-lacking:]
            self._lying -= len(last)
            oldest += [block for block in last if batch_of[block] is batch]
            if not batch:
                batches.popleft()
        self._cached -= n
        self.tree.remove(oldest)
        return oldest

    def _rest(self, batch: list[int]) -> None:
        """These published blocks, in this order, are used by nobody any longer."""
        for block in batch:
            self._batch_of[block] = batch
        self._batches.append(batch)
        self._cached += len(batch)
        self._lying += len(batch)
        if self._lying > 2 * self.capacity:
            self._tidy_up()

    def _tidy_up(self) -> None:
        for batch in self._batches:
            batch[:] = [block for block in batch if self._batch_of[block] is batch]
        self._batches = deque(filter(None, self._batches))
        self._lying = self._cached

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder of each of these blocks, which somebody uses or which are published."""
        refs, batch_of = self.refs, self._batch_of
        for block in blocks:
            if not refs[block]:
                if block in self._parked:
                    self._parked.remove(block)
                else:
                    batch_of[block] = None
                    self._cached -= 1
            refs[block] += 1

    def drop(self, block: int) -> bool:
        """One holder less; True if the block became available by it."""
        self.drop_all((block,))
        return self.refs[block] == 0 and block not in self._parked

    def drop_all(self, blocks: Seq[int]) -> None:
        """One holder less of each. Of those that are cached, the last one is evicted first."""
        refs = self.refs
        holders = list(map(refs.__getitem__, blocks))
        if holders.count(1) == len(holders):
            left = list(blocks)
            for block in left:
                refs[block] = 0
        else:
            left = []  # by their last holder
            for block, held in zip(blocks, holders, strict=True):
                if held < 1:
                    raise ValueError(f"block {block} is released more often than it was taken")
                refs[block] = held - 1
                if held == 1:
                    left.append(block)
        if self._reading:
            self._parked.update(block for block in left if block in self._reading)
            left = [block for block in left if block not in self._parked]
        self._put_back(left)

    def _put_back(self, blocks: list[int]) -> None:
        """Nobody uses these blocks any longer: published ones are cached, others free, the last ones first."""
        run_of = self.tree.run_of
        unknown: list[int] = []
        while blocks and run_of[blocks[-1]] is None:  # as a rule only the last ones
            unknown.append(blocks.pop())
        if None in map(run_of.__getitem__, blocks):
            unknown += [block for block in blocks if run_of[block] is None]
            blocks = [block for block in blocks if run_of[block] is not None]
        if blocks:
            self._rest(blocks)
        if unknown:
            self._free += unknown
            self._refresh(self.tree.part(unknown))

    def _refresh(self, blocks: list[int]) -> None:
        """Their content was in use until now, though in other blocks: those that are cached are the latest again. The
        first one is evicted first."""
        cached = [block for block in blocks if not self.refs[block] and block not in self._parked]
        if cached:
            self._cached -= len(cached)
            self._rest(cached[::-1])

    def quarantine(self, block: int) -> None:
        """A copy will read `block`: it is not handed out before `lift`."""
        self._reading[block] = self._reading.get(block, 0) + 1

    def lift(self, block: int) -> None:
        """One copy has read `block`."""
        left = self._reading[block] - 1
        if left:
            self._reading[block] = left
            return
        del self._reading[block]
        if block in self._parked:
            self._parked.discard(block)
            self._put_back([block])

    def forget_cached(self) -> int:
        """Free every cached block that nobody uses."""
        n = self._cached
        self._free += self._evict(n)
        return n

    def check(self) -> None:
        in_use: Iterable[int] = (b for b, refs in enumerate(self.refs) if refs)
        cached = list(self.evictable())
        check_partition(
            self.capacity,
            {"free": self._free, "cached": cached, "quarantined": self._parked, "in use": in_use},
        )
        require(len(cached) == self._cached, f"{len(cached)} cached blocks lie in batches, {self._cached} were counted")
        lying = sum(map(len, self._batches))
        require(lying == self._lying <= 2 * self.capacity, f"{lying} blocks lie in batches, {self._lying} were counted")
        run_of = self.tree.run_of
        for block in self._free:
            require(run_of[block] is None, "a free block has no identity", block=block)
        for block in cached:
            require(run_of[block] is not None, "a cached block has an identity", block=block)
        for block in self._parked:
            require(block in self._reading, "a quarantined block waits for a copy", block=block)
        self.tree.check()
