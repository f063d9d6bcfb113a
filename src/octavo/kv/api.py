"""The KV manager protocol: ask, quote, commit. Read this file first.

Memory is counted in **blocks** (the allocation unit: `block_size` token slots of one layer group) and lengths in
**tokens**. Every question is a pure `quote`; `commit` is the only way to take memory; a refusal is a value with
numbers. Nothing here knows about tensors, time or threads. What is made for every sequence in every step is a
NamedTuple: a frozen dataclass takes several times as long to make.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from octavo.kv.prefix import Key, KeyChain, Miss


class Why(Enum):
    """The answer to an ask."""

    OK = "ok"
    NEVER = "never"  # larger than the whole pool
    FULL = "full"  # not enough blocks, even after evicting every cached one
    FRAGMENTED = "fragmented"  # enough blocks in total, no run long enough
    HELD = "held"  # fits, but would break the hold-back set by admission
    QUOTA = "quota"  # fits, but the tenant's quota does not allow it


class Ask(NamedTuple):
    """What one sequence wants for one step.

    upto       tokens that need a slot after this step
    known      tokens that are certain to be written (prompt, and what was generated before a preemption)
    ceiling    most tokens it may ever hold (prompt + max_tokens, clipped to the model length)
    expected   predicted or oracle final length; = ceiling when unknown
    keys       hash chain of its full blocks that may be served from the cache; () means: do not share
    hold_back  blocks that must stay available after this ask, set by admission (never by the manager)
    quota      blocks that the tenant may still take; None: no limit
    lookahead  how many of `upto` are drafts that may be rejected: they get what is free anyway, evict nothing and
               move nothing; what they took and did not need is given back by `seal`
    """

    seq: int
    upto: int
    known: int
    ceiling: int
    expected: int
    keys: Seq[Key] = ()
    hold_back: int = 0
    quota: int | None = None
    lookahead: int = 0


class Quote(NamedTuple):
    """What granting an ask would take; pure, and the explanation when it is refused.

    reuse         tokens served by shared blocks
    take          blocks to take (free ones first, then evicted cached ones)
    evict         how many of them must be evicted from the cache
    move          the region must move to a new run (contiguous strategies); its old one is given back
    short         blocks missing (0 when granted)
    largest_hole  longest run of blocks available (for paging: all of them)
    free          blocks free now; evictable: cached blocks that nobody uses; held: the hold-back asked for
    version       the manager's state that this quote belongs to
    shared        per group, the blocks that `reuse` stands for
    collisions    1 if a cached block had the digest of the next one and other content
    """

    ask: Ask
    why: Why
    reuse: int
    take: int
    evict: int
    move: bool
    short: int
    largest_hole: int
    free: int
    evictable: int
    held: int
    version: int
    shared: tuple[tuple[int, ...], ...] = ()
    collisions: int = 0

    @property
    def ok(self) -> bool:
        return self.why is Why.OK

    @property
    def available(self) -> int:
        return self.free + self.evictable


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy `n` consecutive blocks. The copies of one plan run in order; each reads all of its source before it
    writes, so source and destination may overlap."""

    src: int
    dst: int
    n: int = 1


class Grant(NamedTuple):
    """What a commit gave: the sequence can now hold `slots` tokens, of which `reused` are already computed."""

    seq: int
    slots: int
    reused: int = 0
    taken: int = 0
    evicted: int = 0
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """Block tables of one sequence, one per layer group. The lists are the manager's own and live: they follow
    growth and moves; readers must not change them. -1 stands for a block that slid out of its window."""

    tables: tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where every slot of the pool is: exclusive lines in token slots; they sum to the capacity, always.

    A slot is one token in one layer group. live: written tokens, shared blocks once. reserved: whole blocks
    allocated and not yet written. slack: unwritten slots of blocks that hold at least one token. lookahead: slots
    of drafted tokens that nobody has verified yet. quarantined: source blocks of copies that have not run. cached:
    evictable prefixes. fragmented: free, but in no run long enough for the head of the queue. held: kept free by
    admission. free: the rest.
    """

    live: int
    reserved: int
    slack: int
    quarantined: int
    cached: int
    free: int
    fragmented: int
    held: int
    lookahead: int = 0

    @property
    def capacity(self) -> int:
        return (
            self.live
            + self.reserved
            + self.slack
            + self.lookahead
            + self.quarantined
            + self.cached
            + self.free
            + self.fragmented
            + self.held
        )


class StaleQuote(Exception):
    """The pool changed between quote and commit: quote again."""


def check_committable(quote: Quote, version: int) -> None:
    """Raises StaleQuote if the pool is not at the quote's version, ValueError if the quote is a refusal."""
    if quote.version != version:
        raise StaleQuote(f"quote of version {quote.version}, the pool is at {version}")
    if quote.why is not Why.OK:
        raise ValueError(f"sequence {quote.ask.seq}: a quote refused as {quote.why.value} cannot be committed")


class KVManager(Protocol):
    """Who owns which slot. Implemented by `Paged` and `Contiguous`."""

    @property
    def capacity(self) -> int:
        """Blocks in the pool."""

    @property
    def block_size(self) -> int:
        """Token slots in a block."""

    @property
    def free(self) -> int:
        """Blocks that are free now."""

    @property
    def evictable(self) -> int:
        """Cached blocks that nobody uses."""

    @property
    def pages_per_block(self) -> int:
        """Pages of the pool that stand behind one block: 1 for paging, one per layer group for regions."""

    @property
    def growing_groups(self) -> int:
        """Layer groups whose blocks grow with every token (those without a window)."""

    @property
    def windowed(self) -> bool:
        """Whether `seal` gives blocks back that left a window: then it matters that it is called in every step."""

    @property
    def final(self) -> bool:
        """Whether a sequence gets all it will ever hold when it is admitted."""

    @property
    def shares(self) -> bool:
        """Whether sequences can share blocks (prefix cache, fork without a copy)."""

    def quote(self, ask: Ask) -> Quote:
        """What it would take to grant `ask`. Pure: no state changes, not even LRU order."""

    def commit(self, quote: Quote) -> Grant:
        """Take what `quote` says. Raises StaleQuote if anything changed since, ValueError if it was refused."""

    def extend(self, filled: Seq[tuple[int, int, Seq[Key]]], spare: int) -> int | None:
        """One more block of each group for sequences that have filled all of theirs: (sequence, its tokens, the keys of
        the blocks not yet sealed). The same as to seal, quote and commit one after another, and much quicker. Returns
        the cached blocks evicted for it; None, with nothing changed, unless `spare` blocks stay available behind it,
        or if this is not how the manager grows."""

    def seal(self, seq: int, computed: int, keys: Seq[Key]) -> None:
        """KV of the first `computed` tokens is real: publish full blocks under `keys`, give back blocks that
        left their window, and those of rejected lookahead."""

    def fork(self, parent: int, child: int) -> Grant | Quote:
        """Give `child` the computed tokens of `parent`, shared or copied; a Quote says why it cannot."""

    def release(self, seq: int, last: int | None = None) -> int:
        """Give blocks back, published ones to the cache, and return how many became available. `last` gives back
        only that many blocks of each group's tail; the sequence keeps the rest."""

    def compact(self, budget: int, after: int | None = None) -> tuple[Copy, ...]:
        """Move at most `budget` blocks to join free holes; `after`: leave the hole behind that sequence."""

    def done(self, copies: Seq[Copy]) -> None:
        """The copies have run: lift the quarantine of their sources."""

    def view(self, seq: int) -> View:
        """Block tables for the runner."""

    def cached_pages(self) -> Iterable[int]:
        """Pages of evictable blocks, for maps of the pool."""

    def blocks_of(self, seq: int) -> int:
        """Blocks that would become available if `seq` went away (shared ones count for nobody)."""

    def ceiling_blocks(self, tokens: int, expected: int) -> int:
        """Blocks that a sequence of at most `tokens` tokens can come to hold at once."""

    def outstanding(self, seq: int, ceiling: int) -> int:
        """Blocks that `seq` may still take on its way to `ceiling` tokens."""

    def held_by(self, seqs: Iterable[int]) -> int:
        """Different blocks that these sequences hold together."""

    def miss(self, chain: KeyChain, reused: int | None = None, holder: int | None = None) -> Miss:
        """Why the prefix cache does not serve more of the chain's tokens than it does; for a sequence that runs
        (`holder`), why it did not serve more than the `reused` ones."""

    def reset_cache(self) -> int:
        """Forget every cached prefix that nobody uses; returns how many blocks became free."""

    def ledger(self, hold_back: int = 0, head_need: int = 0) -> Ledger:
        """Where every slot is. `head_need`: blocks the head of the queue needs, for `fragmented`."""

    def check(self) -> None:
        """Raise `InvariantError` naming the invariant, the block and the sequence."""


def longest_length(kv: KVManager) -> int:
    """The longest sequence, in tokens, that the whole pool can hold."""
    low, high = 0, 1
    while high < 1 << 40 and kv.ceiling_blocks(high, high) <= kv.capacity:
        low, high = high, high * 2
    while low + 1 < high:
        middle = (low + high) // 2
        if kv.ceiling_blocks(middle, middle) <= kv.capacity:
            low = middle
        else:
            high = middle
    return low
