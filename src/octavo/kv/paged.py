"""Paging: blocks on demand, equal prefixes shared, forks copied on write, blocks behind a window given back."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.kv.api import Ask, Copy, Grant, Ledger, Quote, View, Why, check_committable
from octavo.kv.blocks import BlockPool
from octavo.kv.check import check_references, require
from octavo.kv.prefix import Key, KeyChain, Miss


@dataclass(frozen=True, slots=True)
class _Match:
    """The cached prefix that every group can serve: how many blocks, those of each group that are still needed, and
    collisions seen."""

    length: int = 0
    shared: tuple[tuple[int, ...], ...] = ()
    collisions: int = 0


@dataclass(slots=True)
class _Held:
    """What one sequence holds. `trimmed[g]`: leading table entries of group g that slid out of its window."""

    view: View
    trimmed: list[int]
    computed: int = 0
    sealed: int = 0  # full blocks that have been published
    lookahead: int = 0  # slots granted to drafts, behind that of the next token
    firm: int = 0  # table entries that are not there for drafts alone


class Paged:
    """KV manager with block tables. `windows[g]` is the window of layer group g in tokens, None for full attention;
    `chunk` is the most tokens one sequence computes in one step, which bounds what a window group holds."""

    pages_per_block = 1
    final = False

    def __init__(
        self,
        capacity: int,
        block_size: int,
        *,
        windows: tuple[int | None, ...] = (None,),
        chunk: int = 1 << 60,
        sharing: bool = True,
    ) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self.shares = sharing
        self.collisions = 0
        self.growing_groups = windows.count(None)
        self.windowed = any(window is not None for window in windows)
        self._windows = windows
        self._chunk = chunk
        self._pool = BlockPool(capacity, len(windows))
        self._seqs: dict[int, _Held] = {}
        self._version = 0
        self._matched: tuple[int, int, Key, _Match] | None = None  # after which change, of how many keys, the last

    @property
    def free(self) -> int:
        return self._pool.free

    @property
    def evictable(self) -> int:
        return self._pool.cached

    # -- quote and commit ---------------------------------------------------------------------------------------

    def quote(self, ask: Ask) -> Quote:
        held = self._seqs.get(ask.seq)
        pool = self._pool
        free, cached = pool.free, pool.cached
        if held is not None:
            take = self._lacking(held, ask.upto)
            why, short = self._verdict(ask, take, free + cached, 0)
            evict = take - free if take > free else 0
            # By position: this is asked for every block of every answer.
            return Quote(
                ask, why, 0, take, evict, False, short, free + cached, free, cached, ask.hold_back, self._version
            )
        match = self._match(ask.keys)
        shared = match.shared
        cached -= sum(pool.count_cached(blocks) for blocks in shared)
        take = sum(
            self._wanted(ask.upto, window, match.length, len(blocks))
            for window, blocks in zip(self._windows, shared or ((),) * len(self._windows), strict=True)
        )
        why, short = self._verdict(ask, take, free + cached, sum(map(len, shared)))
        return Quote(
            ask=ask,
            why=why,
            reuse=match.length * self.block_size,
            take=take,
            evict=max(0, take - free),
            move=False,
            short=short,
            largest_hole=free + cached,
            free=free,
            evictable=cached,
            held=ask.hold_back,
            version=self._version,
            shared=shared,
            collisions=match.collisions,
        )

    def _lacking(self, held: _Held, upto: int) -> int:
        """Blocks that a sequence which holds some must take to hold `upto` tokens."""
        tables = held.view.tables
        take = len(self._to_copy(held, upto))
        if not self.windowed:
            return take + max(0, -(-upto // self.block_size) - len(tables[0])) * len(tables)
        for window, table, trimmed in zip(self._windows, tables, held.trimmed, strict=True):
            take += self._wanted(upto, window, len(table), len(table) - trimmed)
        return take

    def _verdict(self, ask: Ask, take: int, available: int, reused: int) -> tuple[Why, int]:
        """`reused`: cached blocks that the ask would hold without taking any."""
        never = self.ceiling_blocks(max(ask.upto, ask.ceiling), ask.expected) - self.capacity
        if never > 0:
            return Why.NEVER, never
        if ask.quota is not None and take and take + reused > ask.quota:
            return Why.QUOTA, take + reused - ask.quota
        within = self._pool.free if ask.lookahead else available  # drafts evict nobody
        if take > within:
            return Why.FULL, take - within
        if (take or reused) and take > available - ask.hold_back:
            return Why.HELD, take - available + ask.hold_back
        return Why.OK, 0

    def _wanted(self, upto: int, window: int | None, entries: int, holding: int) -> int:
        """Blocks one group lacks to hold `upto` tokens. A window group never holds more than its peak: what an
        admission asks beyond that will have been given back by then."""
        lacking = max(0, -(-upto // self.block_size) - entries)
        if window is None:
            return lacking
        return min(lacking, max(0, self._peak(upto, window) - holding))

    def _peak(self, tokens: int, window: int | None) -> int:
        blocks = -(-tokens // self.block_size)
        if window is None:
            return blocks
        span = window - 1 + min(self._chunk, tokens)
        return min(blocks, -(-span // self.block_size) + 1)

    def _to_copy(self, held: _Held, upto: int) -> list[tuple[int, int]]:
        """(group, index) of blocks that the next token would be written into although others hold them too."""
        at = held.computed // self.block_size
        if upto <= held.computed or at >= len(held.view.tables[0]):
            return []
        refs = self._pool.refs
        return [(g, at) for g, table in enumerate(held.view.tables) if refs[table[at]] > 1]

    def commit(self, quote: Quote) -> Grant:
        check_committable(quote, self._version)
        ask = quote.ask
        held = self._seqs.get(ask.seq)
        start = quote.reuse if held is None else held.computed
        if ask.upto > start + self._chunk:
            raise ValueError(
                f"sequence {ask.seq}: {ask.upto - start} tokens in a step, at most {self._chunk}; "
                "such a quote only answers whether there is room"
            )
        if held is None:
            held = self._enter(quote)
            self.collisions += quote.collisions
        self._version += 1
        if ask.lookahead:
            held.lookahead = ask.lookahead
            held.firm = max(len(held.view.tables[0]), -(-(ask.upto - ask.lookahead) // self.block_size))
        copies, evicted = self._copy_on_write(held, ask.upto)
        end = -(-ask.upto // self.block_size)
        taken = 0
        for table in held.view.tables:
            lacking = end - len(table)
            if lacking > 0:
                blocks, pushed = self._pool.take(lacking)
                table.extend(blocks)
                taken += lacking
                evicted += pushed
        slots = len(held.view.tables[0]) * self.block_size
        return Grant(ask.seq, slots, quote.reuse, taken + len(copies), evicted, copies)

    def extend(self, filled: Seq[tuple[int, int, Seq[Key]]], spare: int) -> int | None:
        groups = len(self._windows)
        wanted = len(filled) * groups
        if self.windowed or self._pool.free + self._pool.cached < wanted + spare:
            return None
        self._version += 1
        extend = self._pool.tree.extend
        for seq, computed, new in filled:
            held = self._seqs[seq]
            held.computed = computed
            at, tables = held.sealed, held.view.tables
            if len(new) == 1 and at and extend(tables[0][at - 1], new[0], [table[at] for table in tables]):
                held.sealed = at + 1
            elif new:
                self._publish(held, new, at)
        blocks, evicted = self._pool.take(wanted)
        for at, (seq, _, _) in enumerate(filled):
            for group, table in enumerate(self._seqs[seq].view.tables):
                table.append(blocks[at * groups + group])
        return evicted

    def _enter(self, quote: Quote) -> _Held:
        groups = len(self._windows)
        reused = quote.reuse // self.block_size
        tables: list[list[int]] = []
        for blocks in quote.shared or ((),) * groups:
            self._pool.share(blocks)
            tables.append([-1] * (reused - len(blocks)) + list(blocks))
        trimmed = [reused - len(blocks) for blocks in quote.shared] or [0] * groups
        held = _Held(View(tuple(tables)), trimmed, quote.reuse, reused)
        self._seqs[quote.ask.seq] = held
        return held

    def _copy_on_write(self, held: _Held, upto: int) -> tuple[tuple[Copy, ...], int]:
        """Own copies of shared blocks about to be written, and how many cached blocks had to go for them."""
        copies: list[Copy] = []
        evicted = 0
        for group, at in self._to_copy(held, upto):
            table = held.view.tables[group]
            old = table[at]
            (new,), pushed = self._pool.take(1)
            evicted += pushed
            self._pool.quarantine(old)
            self._pool.drop(old)
            table[at] = new
            copies.append(Copy(old, new))
        return tuple(copies), evicted

    # -- prefix cache ----------------------------------------------------------------------------------------------

    def _match(self, keys: Seq[Key]) -> _Match:
        """The longest prefix that every group can serve. An admission asks up to three times in a row."""
        if not self.shares or not keys:
            return _Match()
        last = self._matched
        if last is not None and last[:2] == (self._version, len(keys)) and last[2] is keys[-1]:
            return last[3]
        found = self._search(keys)
        self._matched = (self._version, len(keys), keys[-1], found)
        return found

    def _search(self, keys: Seq[Key]) -> _Match:
        """All of the prefix's blocks in full groups, those inside the window in window groups."""
        path = self._pool.tree.follow(keys)
        length = served = path.length
        while served:
            for blocks, window in zip(path.blocks, self._windows, strict=True):
                needed = blocks[self._first_needed(served, window) : served]
                if -1 in needed:  # any prefix that ends behind this block needs it
                    served -= len(needed) - needed.index(-1)
            if served == length:
                break
            length = served
        shared = tuple(
            tuple(blocks[self._first_needed(length, window) : length])
            for blocks, window in zip(path.blocks, self._windows, strict=True)
        )
        return _Match(length, shared if length else (), path.collisions)

    def _first_needed(self, blocks: int, window: int | None) -> int:
        """Index of the first block that the query behind so many blocks still sees."""
        return 0 if window is None else self._first_seen(blocks * self.block_size, window)

    def _first_seen(self, computed: int, window: int) -> int:
        """Index of the first block that the query at position `computed` still sees."""
        return max(0, computed - window + 1) // self.block_size

    def seal(self, seq: int, computed: int, keys: Seq[Key]) -> None:
        held = self._seqs[seq]
        self._version += 1
        held.computed = computed
        if held.lookahead:
            self._drop_lookahead(held)
        full = min(computed // self.block_size, len(keys)) if self.shares else 0
        if full > held.sealed:
            self._publish(held, keys[:full], 0)
        for group, window in enumerate(self._windows):
            if window is not None:
                self._trim(held, group, self._first_seen(computed, window))

    def _publish(self, held: _Held, keys: Seq[Key], start: int) -> None:
        """Make the next full blocks of a sequence findable. `keys`: of its blocks from `start` on, which is 0 or behind
        what has been published."""
        tables, first, end = held.view.tables, held.sealed, start + len(keys)
        held.sealed = end
        run = self._pool.tree.run_of_any(table[first - 1] for table in tables) if first else None
        if run is None:
            first = 0  # none of what is still held is in the tree
        while end > first and all(table[end - 1] < 0 for table in tables):
            end -= 1  # it slid out of every window before it could be published
        if start <= first < end:
            keys = keys[first - start : end - start]
            self._pool.tree.publish(run, first, keys, [table[first:end] for table in tables])

    def _drop_lookahead(self, held: _Held) -> None:
        """The drafts are judged: give back blocks that only rejected ones had asked for."""
        keep = max(held.firm, -(-held.computed // self.block_size))
        for table in held.view.tables:
            while len(table) > keep:
                self._pool.drop(table.pop())
        held.lookahead = held.firm = 0

    def _trim(self, held: _Held, group: int, first: int) -> None:
        table, trimmed = held.view.tables[group], held.trimmed[group]
        if first > trimmed:
            self._pool.drop_all(table[trimmed:first][::-1])  # heads first: nothing that is still seen needs them
            table[trimmed:first] = [-1] * (first - trimmed)
            held.trimmed[group] = first

    def miss(self, chain: KeyChain, reused: int | None = None, holder: int | None = None) -> Miss:
        served = self._match(chain.upto(chain.length - 1)).length if reused is None else reused // self.block_size
        held = self._seqs.get(holder) if holder is not None else None
        own = {block for table in held.view.tables for block in table} if held else set()
        return self._pool.tree.explain(chain, served, own)

    def reset_cache(self) -> int:
        self._version += 1
        return self._pool.forget_cached()

    # -- sharing, giving back ----------------------------------------------------------------------------------------

    def fork(self, parent: int, child: int) -> Grant:
        held = self._seqs[parent]
        self._version += 1
        blocks = -(-held.computed // self.block_size)
        tables = tuple(list(table[:blocks]) for table in held.view.tables)
        for table, trimmed in zip(tables, held.trimmed, strict=True):
            self._pool.share(table[trimmed:])
        self._seqs[child] = _Held(View(tables), list(held.trimmed), held.computed, held.sealed)
        # Slots stop at `computed`, so that the first write asks again and copies the shared tail.
        return Grant(seq=child, slots=held.computed, reused=held.computed)

    def release(self, seq: int, last: int | None = None) -> int:
        held = self._seqs[seq]
        length = len(held.view.tables[0])
        keep = 0 if last is None else max(0, length - last)
        if last is not None and self._slid_out(held, min(held.computed, keep * self.block_size)):
            raise ValueError(f"sequence {seq}: going back {last} blocks needs tokens that slid out of a window")
        self._version += 1
        before = self.free + self.evictable
        groups = [table[keep:] for table in held.view.tables]
        for table in held.view.tables:
            del table[keep:]
        # Blocks of one position side by side, heads first: tails are evicted before the heads they need.
        blocks = groups[0] if len(groups) == 1 else [block for row in zip(*groups[::-1], strict=True) for block in row]
        self._pool.drop_all([block for block in blocks if block >= 0] if self.windowed else blocks)
        if last is None:
            del self._seqs[seq]
        else:
            held.computed = min(held.computed, keep * self.block_size)
            held.sealed = min(held.sealed, keep)
            held.lookahead = held.firm = 0
            held.trimmed = [min(n, keep) for n in held.trimmed]
        return self.free + self.evictable - before

    def _slid_out(self, held: _Held, computed: int) -> bool:
        return any(
            window is not None and trimmed > self._first_seen(computed, window)
            for window, trimmed in zip(self._windows, held.trimmed, strict=True)
        )

    def compact(self, budget: int, after: int | None = None) -> tuple[Copy, ...]:
        """Any block serves anyone: there is nothing to join."""
        return ()

    def done(self, copies: Seq[Copy]) -> None:
        if copies:
            self._version += 1
        for copy in copies:
            self._pool.lift(copy.src)

    # -- looking -------------------------------------------------------------------------------------------------------

    def view(self, seq: int) -> View:
        return self._seqs[seq].view

    def cached_pages(self) -> Iterable[int]:
        return self._pool.evictable()

    def blocks_of(self, seq: int) -> int:
        refs = self._pool.refs
        return sum(block >= 0 and refs[block] == 1 for t in self._seqs[seq].view.tables for block in t)

    def ceiling_blocks(self, tokens: int, expected: int) -> int:
        if not self.windowed:
            return -(-tokens // self.block_size) * len(self._windows)
        return sum(self._peak(tokens, window) for window in self._windows)

    def outstanding(self, seq: int, ceiling: int) -> int:
        held = self._seqs[seq]
        lacking = len(self._to_copy(held, held.computed + 1))
        for window, table, trimmed in zip(self._windows, held.view.tables, held.trimmed, strict=True):
            lacking += max(0, self._peak(ceiling, window) - len(table) + trimmed)
        return lacking

    def held_by(self, seqs: Iterable[int]) -> int:
        return len({b for seq in seqs for table in self._seqs[seq].view.tables for b in table if b >= 0})

    def ledger(self, hold_back: int = 0, head_need: int = 0) -> Ledger:
        size = self.block_size
        written: dict[int, int] = {}  # blocks at or behind each sequence's write position
        ahead_slack = ahead_reserved = 0  # drafted slots: in tail blocks that hold tokens, and in empty ones
        for held in self._seqs.values():
            at, used = divmod(held.computed, size)
            if held.lookahead:
                in_tail = min(held.lookahead, size - used - 1) if used else 0
                ahead_slack += in_tail * len(self._windows)
                ahead_reserved += (held.lookahead - in_tail) * len(self._windows)
            for table in held.view.tables:
                for i in range(at, len(table)):
                    tokens = used if i == at else 0
                    written[table[i]] = max(written.get(table[i], 0), tokens)
        reserved = sum(tokens == 0 for tokens in written.values()) * size
        slack = sum(size - tokens for tokens in written.values() if tokens)
        free = self._pool.free * size
        held_free = min(free, max(0, hold_back * size - self._pool.cached * size))
        return Ledger(
            live=self._pool.in_use * size - reserved - slack,
            reserved=reserved - ahead_reserved,
            slack=slack - ahead_slack,
            lookahead=ahead_slack + ahead_reserved,
            quarantined=self._pool.quarantined * size,
            cached=self._pool.cached * size,
            free=free - held_free,
            fragmented=0,
            held=held_free,
        )

    def check(self) -> None:
        self._pool.check()
        check_references(self._pool.refs, {seq: held.view.tables for seq, held in self._seqs.items()})
        for seq, held in self._seqs.items():
            length = len(held.view.tables[0])
            require(held.computed <= length * self.block_size, "computed tokens have slots", seq=seq)
            ahead = held.computed + held.lookahead + bool(held.lookahead)
            require(ahead <= length * self.block_size, "drafted tokens have slots", seq=seq)
            for table, trimmed in zip(held.view.tables, held.trimmed, strict=True):
                require(len(table) == length, "all groups cover the same tokens", seq=seq)
                require(
                    all((block < 0) == (i < trimmed) for i, block in enumerate(table)),
                    "exactly the blocks behind the window are given back",
                    seq=seq,
                )
        ledger = self.ledger()
        require(ledger.capacity == self.capacity * self.block_size, "the ledger sums to the capacity")
        require(min(ledger.live, ledger.reserved, ledger.slack, ledger.free) >= 0, "no ledger line is negative")
