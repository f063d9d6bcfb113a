"""Both KV managers alone, against a model of who owns what and a memory that copies and writes go through."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.kv.api import Ask, Copy, Grant, Quote, StaleQuote, Why
from octavo.kv.prefix import KeyChain
from octavo.kv.strategies import STRATEGIES, make_manager

BLOCK, LONGEST, CHUNK, PAGES = 4, 24, 8, 12
KEPT = st.integers(0, 1 << 16)


@dataclass
class Owned:
    """A sequence as the model knows it. `slots`: tokens it was granted; the first `computed` are in memory."""

    tokens: list[int]
    ceiling: int
    chain: KeyChain = field(init=False)
    computed: int = 0
    slots: int = 0

    def __post_init__(self) -> None:
        self.chain = KeyChain(self.tokens, BLOCK, b"")


class ManagerMachine(RuleBasedStateMachine):
    """Copies are handed out and run later; whoever writes first runs what is pending, in order."""

    strategy = "paged"
    windows: tuple[int | None, ...] = (None,)

    def __init__(self) -> None:
        super().__init__()
        groups = len(self.windows)
        self.pages = PAGES * groups
        self.kv = make_manager(
            self.strategy, self.pages, BLOCK, max_model_len=LONGEST, windows=self.windows, chunk=CHUNK
        )
        self.memory: list[list[object]] = [[None] * BLOCK for _ in range(self.pages)]
        self.seqs: dict[int, Owned] = {}
        self.pending: list[Copy] = []
        self.stale: Quote | None = None
        self.next_id = 0

    # -- helpers

    def pick(self, n: int) -> int:
        return sorted(self.seqs)[n % len(self.seqs)]

    def state(self) -> Any:
        return (self.kv.free, self.kv.evictable, self.kv.ledger(), {s: self.kv.blocks_of(s) for s in self.seqs})

    def take(self, ask: Ask) -> Grant | None:
        """Quote twice, commit if allowed, and compare what was promised with what happened."""
        before = self.state()
        quote = self.kv.quote(ask)
        assert quote == self.kv.quote(ask)
        assert before == self.state()
        if not quote.ok:
            assert quote.short > 0
            with pytest.raises(ValueError, match="refused"):
                self.kv.commit(quote)
            assert before == self.state()
            return None
        assert quote.take <= quote.available - ask.hold_back or not quote.take
        leaves = self.kv.blocks_of(ask.seq) if quote.move else 0  # a move gives the old run back
        assert ask.quota is None or quote.take - leaves <= ask.quota
        grant = self.kv.commit(quote)
        assert (grant.taken, grant.reused) == (quote.take, quote.reuse)
        assert grant.evicted == quote.evict
        assert grant.slots >= ask.upto
        assert quote.move == (bool(grant.copies) and self.strategy != "paged") or not quote.move or not grant.copies
        if not quote.move:
            assert self.kv.free + self.kv.evictable == quote.available - quote.take
        self.pending += grant.copies
        self.stale = quote
        return grant

    def flush(self) -> None:
        for copy in self.pending:
            read = [list(page) for page in self.memory[copy.src : copy.src + copy.n]]
            self.memory[copy.dst : copy.dst + copy.n] = read
        self.kv.done(self.pending)
        self.pending = []

    def write(self, seq: int, upto: int) -> None:
        owned = self.seqs[seq]
        for group, table in enumerate(self.kv.view(seq).tables):
            for at in range(owned.computed, upto):
                self.memory[table[at // BLOCK]][at % BLOCK] = (group, tuple(owned.tokens[: at + 1]))
        owned.computed = upto
        self.kv.seal(seq, upto, owned.chain.upto(upto) if self.kv.shares else ())

    def found_in_memory(self, tokens: list[int]) -> int:
        """How many leading tokens lie in whole blocks that somebody has computed and nobody has taken since."""
        blocks = set(self.kv.cached_pages())
        for seq, owned in self.seqs.items():
            blocks.update(b for table in self.kv.view(seq).tables for b in table[: owned.computed // BLOCK])
        ends = {self.memory[block][-1] for block in blocks}
        found = 0
        while found + BLOCK <= len(tokens):
            end = tuple(tokens[: found + BLOCK])
            if any((group, end) not in ends for group in range(len(self.windows))):
                break
            found += BLOCK
        return found

    # -- rules

    @rule(head=st.integers(0, 2), length=st.integers(1, 20), extra=st.integers(0, 12), hold=st.integers(0, 4))
    def admit(self, head: int, length: int, extra: int, hold: int) -> None:
        self.next_id += 1
        tokens = [head] * length
        owned = Owned(tokens, min(LONGEST, length + extra))
        keys = tuple(owned.chain.upto(length - 1)) if self.kv.shares else ()
        reuse = self.kv.quote(Ask(self.next_id, 1, length, owned.ceiling, owned.ceiling, keys)).reuse
        if self.kv.shares and not self.kv.windowed:
            assert reuse == self.found_in_memory(tokens[: length - 1])
        upto = min(length, reuse + CHUNK)
        ask = Ask(self.next_id, upto, length, owned.ceiling, owned.ceiling, keys, hold)
        grant = self.take(ask)
        if grant is None:
            return
        self.seqs[self.next_id] = owned
        owned.computed, owned.slots = grant.reused, grant.slots
        self.read_back(self.next_id, first=True)

    @precondition(lambda self: self.seqs)
    @rule(n=KEPT, more=st.integers(1, CHUNK), token=st.integers(0, 2), quota=st.none() | st.integers(0, 3))
    def extend(self, n: int, more: int, token: int, quota: int | None) -> None:
        seq = self.pick(n)
        owned = self.seqs[seq]
        upto = min(owned.ceiling, owned.computed + more)
        if upto == owned.computed:
            return
        ask = Ask(seq, upto, max(upto, len(owned.tokens)), owned.ceiling, owned.ceiling, (), 0, quota)
        grant = self.take(ask)
        if grant is None:
            return
        owned.tokens.extend([token] * (upto - len(owned.tokens)))
        self.flush()
        self.write(seq, upto)

    @precondition(lambda self: self.seqs)
    @rule(n=KEPT, drafts=st.integers(1, CHUNK - 1), accepted=st.integers(0, CHUNK), token=st.integers(0, 2))
    def look_ahead(self, n: int, drafts: int, accepted: int, token: int) -> None:
        """One certain token and drafts, of which some turn out right: the others leave nothing behind."""
        seq = self.pick(n)
        owned = self.seqs[seq]
        certain = owned.computed + 1
        upto = min(owned.ceiling, certain + drafts)
        if upto <= certain or (len(owned.tokens) > certain):
            return
        before = [list(table) for table in self.kv.view(seq).tables]
        if self.take(Ask(seq, certain, certain, owned.ceiling, owned.ceiling)) is None:
            return
        firm = len(self.kv.view(seq).tables[0])
        evictable, ledger = self.kv.evictable, self.kv.ledger()
        grant = self.take(Ask(seq, upto, certain, owned.ceiling, owned.ceiling, lookahead=upto - certain))
        assert self.kv.evictable == evictable, "drafts evict nobody"
        per_slot = len(self.windows) if self.strategy == "paged" else 1
        if grant is None:
            assert self.kv.ledger() == ledger
            upto = certain
        else:
            assert not grant.copies
            assert self.kv.ledger().lookahead == (upto - certain) * per_slot
            self.kv.check()
        right = min(certain + accepted, upto)
        owned.tokens.extend([token] * (right - len(owned.tokens)))
        self.flush()
        for group, table in enumerate(self.kv.view(seq).tables):
            for at in range(right, upto):
                self.memory[table[at // BLOCK]][at % BLOCK] = (group, "rejected")
        self.write(seq, right)
        assert self.kv.ledger().lookahead == 0
        if self.strategy == "paged":
            assert len(self.kv.view(seq).tables[0]) == max(firm, -(-right // BLOCK))
        assert all(len(now) >= len(then) for now, then in zip(self.kv.view(seq).tables, before, strict=True))

    @precondition(lambda self: self.seqs)
    @rule(n=KEPT)
    def fork(self, n: int) -> None:
        parent = self.pick(n)
        owned = self.seqs[parent]
        before = self.state()
        self.next_id += 1
        got = self.kv.fork(parent, self.next_id)
        if isinstance(got, Quote):
            assert got.why in (Why.FULL, Why.FRAGMENTED)
            assert got.short > 0
            assert before == self.state()
            return
        child = Owned(owned.tokens[: owned.computed], owned.ceiling)
        child.computed, child.slots = owned.computed, got.slots
        assert got.reused == owned.computed
        self.seqs[self.next_id] = child
        self.pending += got.copies

    @precondition(lambda self: self.seqs)
    @rule(n=KEPT)
    def release(self, n: int) -> None:
        seq = self.pick(n)
        before = self.kv.free + self.kv.evictable
        gained = self.kv.release(seq)
        assert self.kv.free + self.kv.evictable == before + gained
        del self.seqs[seq]
        with pytest.raises(KeyError):
            self.kv.release(seq)

    @precondition(lambda self: self.seqs and self.strategy in ("growing", "paged"))
    @rule(n=KEPT, last=st.integers(1, 3))
    def release_tail(self, n: int, last: int) -> None:
        seq = self.pick(n)
        owned = self.seqs[seq]
        length = len(self.kv.view(seq).tables[0])
        if last >= length:
            return
        before = self.state()
        try:
            self.kv.release(seq, last=last)
        except ValueError:
            assert any(self.windows), "only what slid out of a window cannot be gone back to"
            assert before == self.state()
            return
        owned.computed = min(owned.computed, (length - last) * BLOCK)

    @precondition(lambda self: self.seqs)
    @rule(n=KEPT, budget=st.integers(1, PAGES), anywhere=st.booleans())
    def compact(self, n: int, budget: int, anywhere: bool) -> None:
        copies = self.kv.compact(budget, None if anywhere else self.pick(n))
        assert self.strategy == "growing" or not copies
        self.pending += copies

    @rule()
    def run_the_copies(self) -> None:
        self.flush()

    @rule()
    def reset_cache(self) -> None:
        before = (self.kv.free, self.kv.evictable)
        assert self.kv.reset_cache() == before[1]
        assert (self.kv.free, self.kv.evictable) == (sum(before), 0)

    @precondition(lambda self: self.stale)
    @rule()
    def commit_twice(self) -> None:
        assert self.stale is not None
        before = self.state()
        with pytest.raises(StaleQuote):
            self.kv.commit(self.stale)
        assert before == self.state()

    # -- what must hold

    def read_back(self, seq: int, first: bool = False) -> None:
        """Whatever the next token would see is the sequence's own; not asked while copies have not run."""
        owned = self.seqs[seq]
        if self.pending and not first:
            return
        for group, (window, table) in enumerate(zip(self.windows, self.kv.view(seq).tables, strict=True)):
            start = 0 if window is None or self.strategy != "paged" else max(0, owned.computed - window + 1)
            for at in range(start, owned.computed):
                found = self.memory[table[at // BLOCK]][at % BLOCK]
                assert found == (group, tuple(owned.tokens[: at + 1])), (seq, group, at)

    @invariant()
    def everyone_reads_its_own_tokens(self) -> None:
        for seq in self.seqs:
            self.read_back(seq)

    @invariant()
    def the_books_are_right(self) -> None:
        self.kv.check()
        ledger = self.kv.ledger()
        assert ledger.capacity == self.kv.capacity * BLOCK
        assert ledger.cached == self.kv.evictable * BLOCK
        assert ledger.free + ledger.fragmented + ledger.held == self.kv.free * BLOCK
        if self.strategy != "paged":
            assert ledger.live == sum(owned.computed for owned in self.seqs.values())
            assert sum(self.kv.blocks_of(seq) for seq in self.seqs) * BLOCK == ledger.live + ledger.slack + (
                ledger.reserved
            )
        held = {page for seq in self.seqs for table in self.kv.view(seq).tables for page in table if page >= 0}
        in_use = self.kv.capacity - self.kv.free - self.kv.evictable - ledger.quarantined // BLOCK
        assert len(held) == in_use * self.kv.pages_per_block

    def teardown(self) -> None:
        for seq in list(self.seqs):
            self.kv.release(seq)
        self.flush()
        assert self.kv.free + self.kv.evictable == self.kv.capacity
        self.kv.check()


def machine(name: str, windows: tuple[int | None, ...]) -> type:
    made = type("Machine", (ManagerMachine,), {"strategy": name, "windows": windows}).TestCase
    made.settings = settings(max_examples=50, stateful_step_count=50, deadline=None, derandomize=True)
    return made


@pytest.mark.parametrize("windows", [(None,), (None, 6), (5, None, 9)], ids=["full", "window", "windows"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_manager_keeps_its_books_and_everyones_content(strategy: str, windows: tuple[int | None, ...]) -> None:
    machine(strategy, windows)("runTest").runTest()
