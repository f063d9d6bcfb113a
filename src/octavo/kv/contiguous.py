"""Contiguous regions: the traditional strategies. A region is a run of consecutive blocks, so every strategy feeds the
same attention kernel through the same block tables.

With several layer groups a block stands for one page of each group, side by side: a region knows nothing of windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.kv.api import Ask, Copy, Grant, Ledger, Quote, View, Why, check_committable
from octavo.kv.check import check_disjoint_runs, require
from octavo.kv.extents import Extents
from octavo.kv.prefix import Key, KeyChain, Miss

Sizer = Callable[[Ask], int]  # tokens that the first region of a request must hold

GROWTH = 1.5  # a region that is full grows by half, so that moves stay rare


def reserve_max(max_model_len: int) -> Sizer:
    """Every request gets the longest length the engine allows (FasterTransformer, Orca (Max))."""
    return lambda ask: max_model_len


def reserve_pow2(max_model_len: int) -> Sizer:
    """The next power of two of prompt + max_tokens, at most the longest length (Orca (Pow2))."""
    return lambda ask: min(max_model_len, 1 << max(0, ask.ceiling - 1).bit_length())


def reserve_oracle(ask: Ask) -> int:
    """The true final length, which only a replayed trace knows (Orca (Oracle))."""
    return ask.expected


def as_needed(ask: Ask) -> int:
    """The tokens known now; the region grows later."""
    return ask.known


@dataclass(slots=True)
class _Region:
    start: int
    size: int
    view: View
    computed: int = 0
    lookahead: int = 0  # slots granted to drafts, behind that of the next token


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an ask would be put: grow in place by `add` blocks, or take a new run of `size` at `start`. Refused: `add`
    is what it would have taken."""

    why: Why
    size: int = 0
    add: int = 0
    start: int | None = None
    short: int = 0


@dataclass(slots=True)
class _Quarantine:
    """A run that waits for copies which still read or write it."""

    start: int
    size: int
    waits: set[Copy] = field(default_factory=set)


class Contiguous:
    """KV manager with one region a sequence. `grow`: regions may grow in place or move, and may be compacted."""

    shares = False
    evictable = 0
    growing_groups = 1
    windowed = False

    def __init__(self, capacity: int, block_size: int, sizer: Sizer, *, grow: bool, groups: int = 1) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self.pages_per_block = groups
        self.final = not grow  # a region is all its sequence will ever hold
        self._sizer = sizer
        self._grow = grow
        self._holes = Extents(capacity)
        self._regions: dict[int, _Region] = {}
        self._quarantine: list[_Quarantine] = []
        self._pending: dict[Copy, int] = {}  # copies handed out and not done, with how often
        self._version = 0

    @property
    def free(self) -> int:
        return self._holes.total

    # -- quote and commit ------------------------------------------------------------------------------------------

    def quote(self, ask: Ask) -> Quote:
        place = self._place(ask)
        return Quote(
            ask=ask,
            why=place.why,
            reuse=0,
            take=place.add if place.start is None else place.size,
            evict=0,
            move=place.start is not None and ask.seq in self._regions,
            short=place.short,
            largest_hole=self._holes.largest,
            free=self.free,
            evictable=0,
            held=ask.hold_back,
            version=self._version,
        )

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _place(self, ask: Ask) -> _Place:
        region = self._regions.get(ask.seq)
        need = self._blocks(max(ask.upto, self._sizer(ask)) if region is None else ask.upto)
        most = max(need, self._blocks(ask.ceiling)) if self._grow else need
        if most > self.capacity:
            return _Place(Why.NEVER, add=need, short=most - self.capacity)
        if region is not None and need <= region.size:
            return _Place(Why.OK)
        if ask.lookahead:  # drafts use the room a region has; it grows when a token is certain
            return _Place(Why.FULL, add=need, short=need - (region.size if region else 0))
        if region is not None and not self._grow:  # its region is final, and was too small
            return _Place(Why.NEVER, add=need - region.size, short=need - region.size)
        have = 0 if region is None else region.size
        delta = need - have
        if ask.quota is not None and delta > ask.quota:
            return _Place(Why.QUOTA, add=delta, short=delta - ask.quota)
        if delta > self.free:
            return _Place(Why.FULL, add=delta, short=delta - self.free)
        if delta > self.free - ask.hold_back:
            return _Place(Why.HELD, add=delta, short=delta - self.free + ask.hold_back)
        return self._find(ask, region, need)

    def _find(self, ask: Ask, region: _Region | None, need: int) -> _Place:
        if region is None:
            start = self._holes.fit(need)
        else:
            generous = min(max(need, int(region.size * GROWTH)), self._blocks(ask.ceiling))
            spare = min(self.free - ask.hold_back, self.free if ask.quota is None else ask.quota)
            generous = min(generous, region.size + spare)
            behind = self._holes.run_at(region.start + region.size)
            if region.size + behind >= need:
                return _Place(Why.OK, add=min(generous - region.size, behind))
            room = self.free - ask.hold_back  # a move holds the old run and the new one at once
            if generous <= room and (start := self._holes.fit(generous)) is not None:
                return _Place(Why.OK, size=generous, start=start)
            start = self._holes.fit(need) if need <= room else None
        if start is None:
            return _Place(Why.FRAGMENTED, add=need, short=max(1, need - self._holes.largest))
        return _Place(Why.OK, size=need, start=start)

    def commit(self, quote: Quote) -> Grant:
        check_committable(quote, self._version)
        ask = quote.ask
        place = self._place(ask)
        self._version += 1
        region = self._regions.get(ask.seq)
        copies: tuple[Copy, ...] = ()
        if place.start is not None:
            self._holes.take(place.start, place.size)
            if region is None:
                region = self._enter(ask.seq, place.start, place.size)
            else:
                copies = self._move(region, place.start, place.size)
        elif region is not None and place.add:
            self._holes.take(region.start + region.size, place.add)
            region.size += place.add
            self._fill(region)
        assert region is not None
        region.lookahead = ask.lookahead
        return Grant(ask.seq, region.size * self.block_size, taken=quote.take, copies=copies)

    def _enter(self, seq: int, start: int, size: int) -> _Region:
        tables: tuple[list[int], ...] = tuple([] for _ in range(self.pages_per_block))
        region = self._regions[seq] = _Region(start, size, View(tables))
        self._fill(region)
        return region

    def _fill(self, region: _Region) -> None:
        groups = self.pages_per_block
        first, last = region.start * groups, (region.start + region.size) * groups
        for group, table in enumerate(region.view.tables):
            table[:] = range(first + group, last, groups)

    # -- moving ------------------------------------------------------------------------------------------------------

    def _copy(self, src: int, dst: int, blocks: int) -> tuple[Copy, ...]:
        if not blocks:
            return ()
        groups = self.pages_per_block
        copy = Copy(src * groups, dst * groups, blocks * groups)
        self._pending[copy] = self._pending.get(copy, 0) + 1
        return (copy,)

    def _move(self, region: _Region, start: int, size: int) -> tuple[Copy, ...]:
        copies = self._copy(region.start, start, self._blocks(region.computed))
        old = (region.start, region.size)
        region.start, region.size = start, size
        self._fill(region)
        self._give(*old, set(copies))
        return copies

    def _give(self, start: int, size: int, waits: set[Copy]) -> None:
        """Free a run, now or when the copies that touch it have run."""
        groups = self.pages_per_block
        first, last = start * groups, (start + size) * groups
        waits = waits | {
            copy
            for copy in self._pending
            if (copy.src < last and first < copy.src + copy.n) or (copy.dst < last and first < copy.dst + copy.n)
        }
        if waits:
            self._quarantine.append(_Quarantine(start, size, waits))
        else:
            self._holes.give(start, size)

    def compact(self, budget: int, after: int | None = None) -> tuple[Copy, ...]:
        """Slide regions down over holes (those behind `after` slide up), lowest cost first come: in address order,
        until `budget` blocks have been copied. Vacated runs are quarantined until `done`."""
        if not self._grow or self._quarantine:
            return ()
        order = sorted((r for r in self._regions.values() if r.size), key=lambda region: region.start)
        last = None if after is None else self._regions[after]
        cut = order.index(last) + 1 if last in order else len(order)
        copies: list[Copy] = []
        at = 0
        for region in order[:cut]:
            if budget <= 0:
                break
            budget -= self._slide(region, at, copies)
            at = region.start + region.size
        at = self.capacity
        for region in reversed(order[cut:]):
            if budget <= 0:
                break
            budget -= self._slide(region, at - region.size, copies)
            at = region.start
        if copies:
            self._version += 1
        return tuple(copies)

    def _slide(self, region: _Region, start: int, copies: list[Copy]) -> int:
        """Move a region by less than a gap; returns the blocks copied. The vacated part is quarantined."""
        if start == region.start:
            return 0
        old, size = region.start, region.size
        blocks = self._blocks(region.computed)
        moved = self._copy(old, start, blocks)
        copies.extend(moved)
        distance = abs(old - start)
        vacated = (max(old, start + size), min(distance, size)) if start < old else (old, min(distance, size))
        entered = (start, min(distance, size)) if start < old else (max(start, old + size), min(distance, size))
        self._holes_enter(entered)
        region.start = start
        self._fill(region)
        self._quarantine.append(_Quarantine(*vacated, set(moved)))
        if not moved:
            self._version += 1
            self._settle_quarantine()
        return blocks

    def _holes_enter(self, run: tuple[int, int]) -> None:
        """Take a run for a sliding region. It is free, or was vacated by the slide before it: that part's content
        has been read by then, since copies run in order."""
        start, size = run
        for waiting in list(self._quarantine):
            lo, hi = max(start, waiting.start), min(start + size, waiting.start + waiting.size)
            if lo < hi:
                self._quarantine.remove(waiting)
                self._holes.give(lo, hi - lo)
                for left, right in ((waiting.start, lo), (hi, waiting.start + waiting.size)):
                    if left < right:
                        self._quarantine.append(_Quarantine(left, right - left, set(waiting.waits)))
        self._holes.take(start, size)

    def done(self, copies: Seq[Copy]) -> None:
        for copy in copies:
            left = self._pending[copy] - 1
            if left:
                self._pending[copy] = left
            else:
                del self._pending[copy]
                for waiting in self._quarantine:
                    waiting.waits.discard(copy)
        if copies:
            self._version += 1
            self._settle_quarantine()

    def _settle_quarantine(self) -> None:
        for waiting in [w for w in self._quarantine if not w.waits]:
            self._quarantine.remove(waiting)
            self._holes.give(waiting.start, waiting.size)

    # -- sequences ---------------------------------------------------------------------------------------------------

    def extend(self, filled: Seq[tuple[int, int, Seq[Key]]], spare: int) -> int | None:
        return None  # a region has one successor: whether that is free must be asked for each

    def seal(self, seq: int, computed: int, keys: Seq[Key]) -> None:
        region = self._regions[seq]
        region.computed, region.lookahead = computed, 0
        self._version += 1

    def fork(self, parent: int, child: int) -> Grant | Quote:
        """The child gets a region like its parent's and a copy of the parent's tokens."""
        region = self._regions[parent]
        ask = Ask(child, region.computed, region.computed, region.computed, region.computed)
        start = self._holes.fit(region.size)
        if start is None:
            full = region.size > self.free
            return Quote(
                ask=ask,
                why=Why.FULL if full else Why.FRAGMENTED,
                reuse=0,
                take=region.size,
                evict=0,
                move=False,
                short=region.size - (self.free if full else self._holes.largest),
                largest_hole=self._holes.largest,
                free=self.free,
                evictable=0,
                held=0,
                version=self._version,
            )
        self._version += 1
        self._holes.take(start, region.size)
        own = self._enter(child, start, region.size)
        own.computed = region.computed
        copies = self._copy(region.start, start, self._blocks(region.computed))
        return Grant(child, own.size * self.block_size, region.computed, own.size, copies=copies)

    def release(self, seq: int, last: int | None = None) -> int:
        region = self._regions[seq]
        self._version += 1
        before = self.free
        keep = 0 if last is None else max(0, region.size - last)
        if last is not None:
            start, size = region.start + keep, region.size - keep
            region.size = keep
            region.computed = min(region.computed, keep * self.block_size)
            region.lookahead = 0
            self._fill(region)
            if size:
                self._give(start, size, set())
        else:
            del self._regions[seq]
            self._give(region.start, region.size, set())
        return self.free - before

    # -- looking -----------------------------------------------------------------------------------------------------

    def view(self, seq: int) -> View:
        return self._regions[seq].view

    def cached_pages(self) -> Iterable[int]:
        """Regions are not shared: nothing is cached."""
        return ()

    def blocks_of(self, seq: int) -> int:
        return self._regions[seq].size

    def ceiling_blocks(self, tokens: int, expected: int) -> int:
        if self._grow:
            return self._blocks(tokens)
        return self._blocks(max(min(tokens, expected), self._sizer(Ask(-1, 0, tokens, tokens, expected))))

    def outstanding(self, seq: int, ceiling: int) -> int:
        return max(0, self._blocks(ceiling) - self._regions[seq].size) if self._grow else 0

    def held_by(self, seqs: Iterable[int]) -> int:
        return sum(self._regions[seq].size for seq in seqs)

    def miss(self, chain: KeyChain, reused: int | None = None, holder: int | None = None) -> Miss:
        """Regions share nothing: every prompt misses from its first token."""
        return Miss(0)

    def reset_cache(self) -> int:
        return 0

    @property
    def fragmentation(self) -> float:
        """1 - largest hole / free blocks: 0 when all free memory is one run."""
        return 1 - self._holes.largest / self.free if self.free else 0.0

    def ledger(self, hold_back: int = 0, head_need: int = 0) -> Ledger:
        size = self.block_size
        live = sum(region.computed for region in self._regions.values())
        slack = sum(-region.computed % size for region in self._regions.values())
        owned = sum(region.size for region in self._regions.values()) * size
        ahead = sum(region.lookahead for region in self._regions.values())
        in_tails = sum(min(r.lookahead, max(0, -r.computed % size - 1)) for r in self._regions.values())
        fragmented = self._holes.shorter_than(head_need) * size
        free = self.free * size - fragmented
        held = min(free, hold_back * size)
        return Ledger(
            live=live,
            reserved=owned - live - slack - (ahead - in_tails),
            slack=slack - in_tails,
            lookahead=ahead,
            quarantined=sum(waiting.size for waiting in self._quarantine) * size,
            cached=0,
            free=free - held,
            fragmented=fragmented,
            held=held,
        )

    def check(self) -> None:
        runs = [(start, size, "hole") for start, size in self._holes]
        runs += [(waiting.start, waiting.size, "quarantine") for waiting in self._quarantine]
        regions = {seq: region for seq, region in self._regions.items() if region.size}
        runs += [(region.start, region.size, f"region of {seq}") for seq, region in regions.items()]
        check_disjoint_runs(self.capacity, runs)
        require(self._holes.total == sum(size for _, size in self._holes), "the free total is the sum of holes")
        for seq, region in self._regions.items():
            ahead = region.computed + region.lookahead + bool(region.lookahead)
            require(ahead <= region.size * self.block_size, "computed and drafted tokens have slots", seq=seq)
            for table in region.view.tables:
                require(len(table) == region.size, "the table covers the region", seq=seq)
        for waiting in self._quarantine:
            require(bool(waiting.waits), "a quarantined run waits for a copy", block=waiting.start)
            require(waiting.waits <= self._pending.keys(), "it waits for pending copies", block=waiting.start)
        require(self.ledger().capacity == self.capacity * self.block_size, "the ledger sums to the capacity")
