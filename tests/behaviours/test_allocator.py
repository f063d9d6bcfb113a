"""A1, A4 and what a quote promises: blocks at the edges of lengths, regions among holes, refusals without a trace."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.kv.api import Ask, Grant, KVManager, Quote, StaleQuote, Why, longest_length
from octavo.kv.contiguous import Contiguous
from octavo.kv.paged import Paged
from octavo.kv.prefix import KeyChain
from octavo.kv.strategies import STRATEGIES, make_manager
from octavo.scheduler.explain import Cause
from octavo.types import FinishReason
from tests.simulation import Bench

EVERY = pytest.mark.parametrize("strategy", STRATEGIES)
ON_DEMAND = ("growing", "paged")
EDGES = [(b, n) for b in (1, 4, 16) for n in sorted({1, b - 1, b, b + 1, 2 * b - 1, 2 * b, 2 * b + 1}) if n]


def manager(strategy: str, pages: int = 16, block: int = 4, **kwargs: Any) -> KVManager:
    kwargs.setdefault("max_model_len", 32)
    return make_manager(strategy, pages, block, **kwargs)


def ask(seq: int, upto: int, ceiling: int | None = None, **kwargs: Any) -> Ask:
    ceiling = upto if ceiling is None else ceiling
    return Ask(seq, upto, kwargs.pop("known", upto), ceiling, kwargs.pop("expected", ceiling), **kwargs)


def place(kv: KVManager, seq: int, upto: int, ceiling: int | None = None, **kwargs: Any) -> Grant:
    grant = kv.commit(kv.quote(ask(seq, upto, ceiling, **kwargs)))
    kv.seal(seq, upto, ())
    return grant


# -- A1 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block", "length"), EDGES)
@pytest.mark.parametrize("child_first", [True, False])
def test_blocks_held_are_tokens_rounded_up_at_each_step(block: int, length: int, child_first: bool) -> None:
    kv = Paged(64, block)
    tokens = list(range(length + 1))
    chain = KeyChain(tokens, block, b"")

    def held() -> int:
        return kv.capacity - kv.free - kv.evictable

    for upto in (length, length + 1):
        kv.commit(kv.quote(ask(1, upto)))
        kv.seal(1, upto, chain.upto(upto))
        assert held() == kv.blocks_of(1) == -(-upto // block)
    kv.fork(1, 2)
    assert held() == -(-(length + 1) // block)
    assert (kv.blocks_of(1), kv.blocks_of(2)) == (0, 0)
    grant = kv.commit(kv.quote(ask(2, length + 2)))
    kv.done(grant.copies)
    assert len(grant.copies) == ((length + 1) % block != 0)
    for seq in (2, 1) if child_first else (1, 2):
        kv.release(seq)
        kv.check()
    assert held() == 0
    with pytest.raises(KeyError):
        kv.release(1)


@pytest.mark.parametrize(("block", "length"), EDGES)
def test_old_content_is_a_miss_once_every_block_is_recycled(block: int, length: int) -> None:
    kv = Paged(8, block)
    tokens = list(range(length))
    chain = KeyChain(tokens, block, b"")
    kv.commit(kv.quote(ask(1, length)))
    kv.seal(1, length, chain.upto(length))
    kv.release(1)
    found = kv.quote(ask(2, length, keys=tuple(chain.upto(length)))).reuse
    assert found == length // block * block
    new = list(range(1000, 1000 + 8 * block))
    kv.commit(kv.quote(ask(3, len(new))))
    kv.seal(3, len(new), KeyChain(new, block, b"").upto(len(new)))
    assert kv.quote(ask(2, length, keys=tuple(chain.upto(length)))).reuse == 0
    kv.release(3)
    assert kv.quote(ask(2, length, keys=tuple(chain.upto(length)))).reuse == 0
    kv.check()


@EVERY
@pytest.mark.parametrize(("block", "length"), EDGES)
def test_every_length_at_a_block_edge_runs_and_leaves_nothing(strategy: str, block: int, length: int) -> None:
    b = Bench(strategy, pages=512 // block, block=block, config=dict(max_model_len=128, admission="prompt"))
    ids = [b.add([7] * length, out, n=n, seed=1) for out, n in ((1, 1), (block, 2), (2 * block + 1, 1))]
    b.run()
    assert [len(b.tokens(r)) for r in ids] == [1, block, 2 * block + 1]


# -- A4 ---------------------------------------------------------------------------------------------------------------


def chequered(strategy: str) -> tuple[Bench, list[str]]:
    """64 blocks of 16 requests with 4 each, of which every second has ended."""
    b = Bench(
        strategy,
        pages=64,
        config=dict(admission="prompt", max_model_len=64, max_num_seqs=32, max_num_batched_tokens=256),
    )
    prompt, out = (13, 30) if strategy == "growing" else (9, 7)
    ids = [b.add(prompt, out) for _ in range(16)]
    b.step()
    assert b.kv.free == 0
    for r in ids[::2]:
        b.scheduler.abort(r, b.clock.now())
    return b, ids[1::2]


@pytest.mark.parametrize("strategy", ["growing", "reserve-oracle"])
def test_enough_in_total_and_no_run_long_enough_is_fragmented(strategy: str) -> None:
    b, rest = chequered(strategy)
    assert isinstance(b.kv, Contiguous)
    assert b.kv.fragmentation == 1 - 4 / 32
    waiter = b.add(44, 4)
    wait = b.why(waiter)
    assert wait.cause is Cause.FRAGMENTED
    assert (wait.need, wait.have, wait.largest_hole) == (11 if strategy == "growing" else 12, 32, 4)
    b.run()  # reads back every position: whoever moved has its own KV
    solo = Bench(strategy, pages=64, config=dict(max_model_len=64))
    prompt = list(b.all[rest[0]][0].request.prompt)
    s = solo.add(prompt, len(b.tokens(rest[0])))
    solo.run()
    assert solo.tokens(s) == b.tokens(rest[0])


def test_the_fragmented_one_starts_after_compaction() -> None:
    b, rest = chequered("growing")
    waiter = b.add(44, 4)
    steps = 0
    while not b.runs(waiter):
        b.step()
        steps += 1
    assert steps <= 2
    assert b.scheduler.totals.compactions > 0
    assert all(b.runs(r) for r in rest), "nobody was preempted for it"
    b.run()


@pytest.mark.parametrize("strategy", ["reserve-oracle", "reserve-pow2"])
def test_without_compaction_it_starts_as_soon_as_a_run_is_long_enough(strategy: str) -> None:
    b, rest = chequered(strategy)
    waiter = b.add(44, 4)
    need = 12 if strategy == "reserve-oracle" else 16
    freed = 0
    for r in rest[: (need - 4) // 8]:
        b.step()
        assert not b.runs(waiter)
        b.scheduler.abort(r, b.clock.now())
        freed += 1
    b.step()
    if 4 + 8 * freed >= need:
        assert b.runs(waiter)
    b.run()


def test_compaction_joins_all_holes_and_keeps_the_order_of_copies_safe() -> None:
    kv = Contiguous(12, 1, lambda a: a.known, grow=True)
    for seq in range(4):
        place(kv, seq, 3, 12)
    kv.release(0)
    kv.release(2)
    memory = [None, None, None, *"abc", None, None, None, *"xyz"]
    copies = kv.compact(12)
    for copy in copies:
        memory[copy.dst : copy.dst + copy.n] = memory[copy.src : copy.src + copy.n]
    kv.done(copies)
    assert [memory[p] for p in kv.view(1).tables[0]] == list("abc")
    assert [memory[p] for p in kv.view(3).tables[0]] == list("xyz")
    quote = kv.quote(ask(9, 6))
    assert (quote.ok, quote.largest_hole, kv.fragmentation) == (True, 6, 0.0)


def test_a_budget_bounds_what_one_compaction_copies() -> None:
    kv = Contiguous(16, 1, lambda a: a.known, grow=True)
    for seq in range(8):
        place(kv, seq, 2, 16)
    for seq in (0, 2, 4, 6):
        kv.release(seq)
    copies = kv.compact(3)
    assert sum(copy.n for copy in copies) <= 4  # whole regions until the budget is used up
    kv.done(copies)
    kv.check()


# -- quotes -----------------------------------------------------------------------------------------------------------


@EVERY
def test_a_refused_ask_changes_nothing_and_cannot_be_committed(strategy: str) -> None:
    kv = manager(strategy)
    place(kv, 1, 32)
    before = (kv.free, kv.evictable, kv.ledger())
    refused = [
        kv.quote(ask(2, 32, known=32, hold_back=9)),
        kv.quote(ask(2, 32, hold_back=1)),
        kv.quote(ask(2, 32, quota=3)),
        kv.quote(ask(2, 65)),
    ]
    assert [q.why for q in refused] == [Why.HELD, Why.HELD, Why.QUOTA, Why.NEVER]
    for quote in refused:
        assert quote.short > 0
        with pytest.raises(ValueError, match="refused"):
            kv.commit(quote)
    assert before == (kv.free, kv.evictable, kv.ledger())
    kv.check()


@EVERY
def test_a_refusal_names_what_was_needed(strategy: str) -> None:
    kv = manager(strategy)
    place(kv, 1, 32)
    for quote, have in (
        (kv.quote(ask(2, 32, hold_back=1)), 8),
        (kv.quote(ask(2, 32, quota=3)), 8),
    ):
        assert (quote.take, quote.available) == (8, have)
    place(kv, 2, 32)
    full = kv.quote(ask(3, 32))
    assert (full.why, full.take, full.available, full.short) == (Why.FULL, 8, 0, 8)


@EVERY
def test_a_stale_quote_is_refused_after_any_change(strategy: str) -> None:
    changes: list[Any] = [
        lambda kv: place(kv, 5, 4),
        lambda kv: kv.seal(1, 5, ()),
        lambda kv: kv.release(1),
        lambda kv: kv.fork(1, 7),
    ]
    for change in changes:
        kv = manager(strategy, pages=64)
        place(kv, 1, 6)
        quote = kv.quote(ask(2, 6))
        change(kv)
        with pytest.raises(StaleQuote):
            kv.commit(quote)
        kv.check()


@EVERY
def test_a_quote_is_good_for_one_commit(strategy: str) -> None:
    kv = manager(strategy, pages=64)
    quote = kv.quote(ask(1, 6))
    kv.commit(quote)
    with pytest.raises(StaleQuote):
        kv.commit(quote)
    kv.check()


@EVERY
def test_a_second_release_is_an_error(strategy: str) -> None:
    kv = manager(strategy)
    place(kv, 1, 6)
    place(kv, 2, 6)
    kv.release(1)
    free = kv.free
    with pytest.raises(KeyError):
        kv.release(1)
    assert kv.free == free
    kv.check()


@pytest.mark.parametrize("strategy", ON_DEMAND)
def test_a_partial_release_keeps_the_head(strategy: str) -> None:
    kv = manager(strategy, pages=16, max_model_len=64)
    place(kv, 1, 14, 40)
    assert kv.release(1, last=2) == 2
    assert kv.ledger().live == 8
    assert kv.blocks_of(1) == 2
    place(kv, 1, 14, 40)
    assert kv.blocks_of(1) >= 4
    kv.release(1)
    assert kv.free == 16


@EVERY
def test_a_release_of_the_whole_tail_leaves_an_empty_sequence(strategy: str) -> None:
    """'The sequence keeps the rest', even if that is nothing: it can still be asked for, and be released once."""
    kv = manager(strategy, pages=16, max_model_len=32)
    place(kv, 1, 14, 32)
    kv.release(1, last=100)
    assert kv.free == 16
    kv.check()
    kv.release(1)
    with pytest.raises(KeyError):
        kv.release(1)


def test_evictions_by_copy_on_write_are_counted() -> None:
    kv = Paged(4, 4)
    cached = list(range(8))
    kv.commit(kv.quote(ask(1, 8)))
    kv.seal(1, 8, KeyChain(cached, 4, b"").upto(8))
    kv.release(1)
    place(kv, 2, 6)
    kv.fork(2, 3)
    assert (kv.free, kv.evictable) == (0, 2)
    quote = kv.quote(ask(3, 7))
    grant = kv.commit(quote)
    assert (quote.take, quote.evict) == (1, 1)
    assert (grant.taken, grant.evicted) == (1, 1)


@EVERY
def test_the_longest_length_is_accepted_and_one_more_is_not(strategy: str) -> None:
    for pages in (7, 8, 16):
        kv = manager(strategy, pages=pages, max_model_len=28)
        longest = longest_length(kv)
        assert kv.quote(ask(1, longest)).ok
        over = kv.quote(ask(1, longest + 1))
        assert over.why is Why.NEVER


@EVERY
def test_a_fork_that_finds_no_room_changes_nothing(strategy: str) -> None:
    kv = manager(strategy, pages=8)
    place(kv, 1, 20, 32)
    before = kv.ledger()
    got = kv.fork(1, 2)
    if strategy == "paged":
        assert isinstance(got, Grant)
        return
    assert isinstance(got, Quote)
    assert got.why in (Why.FULL, Why.FRAGMENTED)
    assert got.short > 0
    assert before == kv.ledger()


# -- freed while a copy reads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_that_a_copy_still_reads_is_not_handed_out(strategy: str) -> None:
    kv = manager(strategy, pages=24, max_model_len=32)
    place(kv, 1, 6, 32)
    grant = kv.fork(1, 2)
    assert isinstance(grant, Grant)
    copies = list(grant.copies)
    if not copies:
        written = kv.commit(kv.quote(ask(2, 7, 32)))
        copies = list(written.copies)
    assert copies
    sources = {page for copy in copies for page in range(copy.src, copy.src + copy.n)}
    kv.release(1)
    place(kv, 3, 4, 4) if strategy in ON_DEMAND else place(kv, 3, 4, 8)
    assert not sources & {page for table in kv.view(3).tables for page in table}
    assert kv.ledger().quarantined > 0
    kv.check()
    kv.done(copies)
    assert kv.ledger().quarantined == 0
    kv.check()


@EVERY
def test_ending_right_after_a_fork_leaves_nothing_quarantined(strategy: str) -> None:
    b = Bench(strategy, pages=64, config=dict(max_model_len=64, admission="prompt"))
    r = b.add(6, 8, n=2)
    b.step()
    for seq in list(b.all[r]):
        b.scheduler.stop(seq, FinishReason.STOP, b.clock.now())
        b.look()
    b.run()


# -- growing together -------------------------------------------------------------------------------------------------


def _filled(kv: KVManager, seqs: int) -> dict[int, KeyChain]:
    """So many sequences that have filled two blocks each; the second one is not sealed yet."""
    chains = {}
    for seq in range(1, seqs + 1):
        chains[seq] = KeyChain([seq * 100 + i for i in range(64)], kv.block_size, b"")
        kv.commit(kv.quote(ask(seq, 2 * kv.block_size, 32)))
        kv.seal(seq, kv.block_size, chains[seq].upto(kv.block_size))
    return chains


@pytest.mark.parametrize("pages", [12, 16, 40])
def test_growing_together_is_growing_one_after_another(pages: int) -> None:
    together, single = Paged(pages, 4), Paged(pages, 4)
    for kv in (together, single):
        place(kv, 99, 16)
        kv.seal(99, 16, KeyChain(list(range(1000, 1016)), 4, b"").upto(16))
        kv.release(99)  # four cached blocks, which growing may have to evict
    chains = _filled(together, 4)
    _filled(single, 4)
    evicted = together.extend([(seq, 8, chain.upto(8)[1:]) for seq, chain in chains.items()], spare=0)
    grants = []
    for seq, chain in chains.items():
        single.seal(seq, 8, chain.upto(8))
        grants.append(single.commit(single.quote(ask(seq, 9, 32))))
    assert evicted == sum(grant.evicted for grant in grants)
    assert (together.free, together.evictable) == (single.free, single.evictable)
    assert together.ledger() == single.ledger()
    for seq, chain in chains.items():
        assert len(together.view(seq).tables[0]) == 3
        assert together.blocks_of(seq) == single.blocks_of(seq)
        assert together.miss(chain).matched == single.miss(chain).matched == 8
    together.check()


def test_growing_together_takes_nothing_unless_everybody_and_the_spare_fit() -> None:
    kv = Paged(11, 4)
    chains = _filled(kv, 4)
    before = kv.ledger()
    wanted = [(seq, 8, chain.upto(8)[1:]) for seq, chain in chains.items()]
    assert kv.extend(wanted, spare=0) is None
    assert kv.extend(wanted[:2], spare=2) is None
    assert kv.ledger() == before
    assert kv.extend(wanted[:2], spare=1) == 0


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "paged"])
def test_regions_do_not_grow_together(strategy: str) -> None:
    kv = manager(strategy, 16)
    place(kv, 1, 4, 8)
    assert kv.extend([(1, 4, ())], spare=0) is None
