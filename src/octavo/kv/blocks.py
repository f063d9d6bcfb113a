"""The block pool of the paged manager: reference counts, free list, LRU list of cached blocks, quarantine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from octavo.kv.check import check_partition, require
from octavo.kv.prefix import BlockKey, PrefixIndex


class BlockPool:
    """Every block is in exactly one state: free, in use (refs > 0), cached (refs 0, published) or quarantined
    (refs 0, but the source of a copy that has not run). All operations are O(1) a block."""

    def __init__(self, capacity: int, groups: int) -> None:
        self.capacity = capacity
        self.refs = [0] * capacity
        self.index = PrefixIndex(groups)
        self._free = list(range(capacity - 1, -1, -1))  # a stack: low ids first, recently freed next
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._reading: dict[int, int] = {}  # block -> copies that still have to read it
        self._parked: set[int] = set()  # quarantined: nobody's, waiting for those copies

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def quarantined(self) -> int:
        return len(self._parked)

    @property
    def in_use(self) -> int:
        return self.capacity - len(self._free) - len(self._cached) - len(self._parked)

    def evictable(self) -> Iterable[int]:
        """The cached blocks, least recently used first."""
        return self._cached.keys()

    def count_cached(self, blocks: Iterable[int]) -> int:
        """How many of the blocks are evictable: published, and used by nobody."""
        cached = self._cached
        return sum([block in cached for block in blocks])

    def take(self, n: int) -> tuple[list[int], int]:
        """`n` blocks with one reference each, and how many had to be evicted from the cache (least recently used
        first). Raises ValueError, changing nothing, if there are not enough."""
        free, refs = self._free, self.refs
        short = n - len(free)
        if short > len(self._cached):
            raise ValueError(f"{n} blocks asked for, {len(free)} free, {len(self._cached)} cached")
        if short > 0:
            pop = self._cached.popitem
            oldest = [pop(last=False)[0] for _ in range(short)]
            self.index.remove(oldest)
            free += oldest
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

    def share(self, block: int) -> None:
        """One more holder of a published block."""
        if self.refs[block] == 0:
            if block in self._parked:
                self._parked.discard(block)
            else:
                del self._cached[block]
        self.refs[block] += 1

    def drop(self, block: int) -> bool:
        """One holder less; True if the block became available by it."""
        refs = self.refs[block] - 1
        if refs < 0:
            raise ValueError(f"block {block} is released more often than it was taken")
        self.refs[block] = refs
        if refs:
            return False
        if block in self._reading:
            self._parked.add(block)
            return False
        self._rest(block)
        return True

    def drop_all(self, blocks: Iterable[int]) -> None:
        """One holder less of each, in this order."""
        refs, free, cached, known = self.refs, self._free, self._cached, self.index.holds
        for block in blocks:
            if refs[block] == 1 and block not in self._reading:
                refs[block] = 0
                if known(block):
                    cached[block] = None
                else:
                    free.append(block)
            else:
                self.drop(block)

    def _rest(self, block: int) -> None:
        if self.index.key(block) is None:
            self._free.append(block)
        else:
            self._cached[block] = None

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
            self._rest(block)

    def publish(self, group: int, keys: Seq[BlockKey], blocks: Seq[int]) -> None:
        """Make written full blocks findable; one that is findable already keeps its identity, and those that slid out
        of a window (below 0) have none."""
        self.index.add(group, keys, blocks)

    def forget_cached(self) -> int:
        """Free every cached block that nobody uses."""
        n = len(self._cached)
        self.index.remove(list(self._cached))
        self._free += self._cached
        self._cached.clear()
        return n

    def check(self) -> None:
        in_use: Iterable[int] = (b for b, refs in enumerate(self.refs) if refs)
        check_partition(
            self.capacity,
            {"free": self._free, "cached": self._cached, "quarantined": self._parked, "in use": in_use},
        )
        for block in self._free:
            require(self.index.key(block) is None, "a free block has no identity", block=block)
        for block in self._cached:
            require(self.index.key(block) is not None, "a cached block has an identity", block=block)
        for block in self._parked:
            require(block in self._reading, "a quarantined block waits for a copy", block=block)
        self.index.check()
