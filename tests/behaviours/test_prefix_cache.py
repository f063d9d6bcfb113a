"""C1, C3, C5, C7, C8: identities never meet, a weak hash returns nobody else's KV, and hits mean what they say."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import events as ev
from octavo.kv.api import Ask
from octavo.kv.paged import Paged
from octavo.kv.prefix import KeyChain, blake2b_256, encode_identity
from octavo.types import RequestError
from tests.simulation import Bench

Identity = tuple[tuple[str, str], ...]

IDENTITIES: list[Identity] = [
    (),
    (("adapter", "X"),),
    (("salt", "X"),),
    (("salt", "a"), ("tenant", "bc")),
    (("salt", "ab"), ("tenant", "c")),
    (("salt", ""), ("tenant", "abc")),
    (("media", "0f"),),
    (("media", "f0"),),
    (("media", "0f"), ("media", "f0")),
]


def constant(data: bytes) -> bytes:
    return b"\x07" * 32


def bench(pages: int = 64, block: int = 4, digest: Any = blake2b_256, **config: Any) -> Bench:
    return Bench(pages=pages, block=block, config=dict(admission="prompt") | config, extra=dict(digest=digest))


def hit(b: Bench, prompt: list[int], max_tokens: int = 1, **kwargs: Any) -> int:
    """Run one request to its end; returns the tokens it got from the cache."""
    r = b.add(prompt, max_tokens, **kwargs)
    b.run()
    return b.reused(r)


def served(length: int, block: int) -> int:
    return (length - 1) // block * block


# -- C1 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [15, 16, 17])
def test_each_identity_hits_itself_and_nobody_else(length: int) -> None:
    b = bench(pages=256)
    prompt = list(range(100, 100 + length))
    assert [hit(b, prompt, identity=i) for i in IDENTITIES] == [0] * len(IDENTITIES)
    assert [hit(b, prompt, identity=i) for i in IDENTITIES] == [served(length, 4)] * len(IDENTITIES)


def test_ten_thousand_random_identities_have_distinct_keys() -> None:
    rng = random.Random(44701)
    kinds = ("salt", "adapter", "tenant", "media", "sal", "t")

    def text() -> str:
        return "".join(rng.choice("ab\0:,é ") for _ in range(rng.randint(0, 4)))

    identities = {tuple((rng.choice(kinds), text()) for _ in range(rng.randint(0, 3))) for _ in range(20_000)}
    assert len(identities) >= 10_000
    assert len({encode_identity(i) for i in identities}) == len(identities)


PAIRS = st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=4).map(tuple)
FIXED = st.lists(st.text(max_size=4), max_size=3)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(PAIRS, FIXED, PAIRS, FIXED)
def test_two_identities_are_encoded_alike_only_if_they_are_equal(
    a: Identity, fixed_a: list[str], b: Identity, fixed_b: list[str]
) -> None:
    same = encode_identity(a, *fixed_a) == encode_identity(b, *fixed_b)
    assert same == ((a, fixed_a) == (b, fixed_b))


def test_engines_of_different_kv_dtype_make_different_keys() -> None:
    tokens = list(range(8))
    roots = [KeyChain(tokens, 4, encode_identity((), "model", dtype)).upto(8)[1].digest for dtype in ("bf16", "fp8")]
    assert roots[0] != roots[1]


def test_any_salt_that_json_can_carry_is_hashed_or_refused() -> None:
    b = bench()
    try:
        assert hit(b, list(range(9)), identity=(("salt", "\ud800"),)) == 0
    except RequestError:
        return
    assert hit(b, list(range(9)), identity=(("salt", "\ud801"),)) == 0


# -- C3 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 256, 65_536, 2**31, 2**32])
@pytest.mark.parametrize("at", [0, 5, 11])
def test_ids_that_are_equal_in_their_low_bits_are_different_tokens(at: int, step: int) -> None:
    b = bench()
    prompt = list(range(1, 18))
    assert hit(b, prompt) == 0
    other = [*prompt[:at], prompt[at] + step, *prompt[at + 1 :]]
    assert hit(b, other) == at // 4 * 4


def test_order_and_parents_matter() -> None:
    b = bench()
    first, second, third = list(range(4)), list(range(4, 8)), list(range(8, 12))
    assert hit(b, [*first, *second, *third, 1]) == 0
    assert hit(b, [*second, *first, *third, 1]) == 0  # the same blocks in another order
    assert hit(b, [*third, *second, 1]) == 0  # the same block behind another parent
    assert hit(b, [*first[::-1], *second, 1]) == 0
    assert hit(b, [*first, *second, *first, 1]) == 8


def test_a_hash_that_always_collides_changes_no_answer() -> None:
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9, 9, 9, 9], [8, 7, 6, 5, 4, 3, 2, 1, 9]]
    outputs, reused = [], []
    for digest in (blake2b_256, constant):
        b = bench(pages=256, digest=digest)
        ids = [b.add(prompts[i % 3], 9, identity=IDENTITIES[i % 2]) for i in range(12)]
        b.run()  # each step reads every position back from memory
        outputs.append([b.tokens(r) for r in ids])
        reused.append(sum(b.reused(r) for r in ids))
        assert isinstance(b.kv, Paged)
        assert (b.kv.collisions > 0) == (digest is constant)
    assert outputs[0] == outputs[1]
    assert reused[1] > 0, "equal prompts still hit"


def test_a_collision_is_counted_for_each_hit_refused() -> None:
    b = bench(digest=constant)
    assert hit(b, [1, 2, 3, 4, 5]) == 0
    assert isinstance(b.kv, Paged)
    assert b.kv.collisions == 0
    assert hit(b, [5, 6, 7, 8, 9]) == 0
    assert b.kv.collisions == 1


def test_a_collision_is_not_told_as_a_shared_prefix() -> None:
    b = bench(pages=256, digest=constant)
    b.add(list(range(40)), 4)
    other = b.add(list(range(100, 110)), 4)
    b.scheduler.plan(0.0)
    wait = b.scheduler.explain(other, b.clock.now())
    assert wait is None or not wait.shares_prefix


# -- C5 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_prompt_of_whole_blocks_leaves_one_token_to_compute(block: int, k: int) -> None:
    b = bench(pages=256 // block + 64, block=block, max_num_batched_tokens=128)
    prompt = list(range(7, 7 + k * block))
    ids = []
    for _ in range(3):
        ids.append(b.add(prompt, 2 * block + 1))
        b.run()
    assert [b.reused(r) for r in ids] == [0, (k - 1) * block, (k - 1) * block]
    assert b.tokens(ids[0]) == b.tokens(ids[1]) == b.tokens(ids[2])
    turn = [*prompt, *b.tokens(ids[0]), 1, 2, 3]
    assert hit(b, turn) == served(k * block + 2 * block + 1, block)


@pytest.mark.parametrize("block", [2, 4, 16])
def test_one_token_less_or_more_than_a_block(block: int) -> None:
    for length, want in ((block - 1, 0), (block + 1, block)):
        b = bench(block=block)
        prompt = list(range(length))
        assert [hit(b, prompt), hit(b, prompt)] == [0, want]


def test_positions_that_must_be_scored_are_computed() -> None:
    b = bench()
    prompt = list(range(17))
    hit(b, prompt)
    assert hit(b, prompt, prompt_logprobs=0) == 0
    assert hit(b, prompt) == 16


# -- C7 ---------------------------------------------------------------------------------------------------------------


def test_recomputing_after_a_preemption_is_no_hit() -> None:
    b = bench(pages=24)
    ids = [b.add(16, 40) for _ in range(5)]
    b.run()
    totals = b.scheduler.totals
    assert totals.preemptions > 0
    assert totals.recomputed > 0
    assert totals.hit_tokens == sum(b.reused(r) for r in ids) == 0
    assert totals.query_tokens == 5 * 16


def test_a_hit_that_has_to_wait_is_counted_once() -> None:
    b = bench(pages=20, max_num_batched_tokens=128)
    prompt = list(range(300, 333))
    assert hit(b, prompt) == 0
    b.add(30, 10)
    b.step()
    waiting = b.add([*prompt, *range(20)], 1)
    b.steps(6)
    assert not b.runs(waiting)
    b.run()
    assert b.scheduler.totals.hit_tokens == b.reused(waiting) == 32
    assert b.scheduler.totals.query_tokens == 33 + 30 + 53


def test_a_shared_prefix_below_one_block_is_told_apart_from_none() -> None:
    b = bench()
    assert hit(b, [1, 2, 3, 4, 5, 6]) == 0
    short = b.add([1, 2, 3, 9, 9, 9], 1)
    miss = b.scheduler.miss(short)
    assert miss is not None
    assert (miss.matched, miss.partial, miss.position, miss.here, miss.there) == (0, 3, 3, 9, 4)
    unlike = b.add([7, 2, 3, 4, 5, 6], 1)
    miss = b.scheduler.miss(unlike)
    assert miss is not None
    assert (miss.matched, miss.partial) == (0, 0)
    b.run()
    cold = bench()
    first = cold.add([1, 2, 3, 4, 5, 6], 1)
    miss = cold.scheduler.miss(first)
    assert miss is not None
    assert (miss.matched, miss.partial, miss.position) == (0, 0, None)


def test_a_miss_tells_nothing_of_prompts_of_another_identity() -> None:
    b = bench()
    theirs, ours = (("salt", "a"),), (("salt", "b"),)
    assert hit(b, [1, 2, 3, 4, 5, 6], identity=theirs) == 0
    miss = b.scheduler.miss(b.add([1, 2, 3, 9, 9, 9], 1, identity=ours))
    assert miss is not None
    assert (miss.matched, miss.partial, miss.position, miss.there) == (0, 0, None, None)
    b.run()
    miss = b.scheduler.miss(b.add([1, 2, 3, 4, 9, 9], 1, identity=ours))
    assert miss is not None
    assert (miss.matched, miss.partial, miss.position, miss.there) == (0, 3, 3, 9)


def test_the_counter_is_the_sum_over_requests() -> None:
    b = bench(pages=40, max_num_seqs=4)
    rng = random.Random(7)
    ids = []
    for _ in range(60):
        ids.append(b.add([rng.randint(0, 1) for _ in range(rng.randint(1, 30))], 4, n=rng.choice((1, 1, 2))))
        if rng.random() < 0.7:
            b.step()
    b.run()
    totals = b.scheduler.totals
    assert totals.hit_tokens == sum(seq.reused for r in ids for seq in b.all[r]) > 0
    assert totals.query_tokens == sum(b.all[r][0].prompt_length for r in ids)


# -- C8 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [8, 64, 512])
def test_equal_prompts_in_one_instant_are_computed_once(chunk: int) -> None:
    b = bench(pages=256, max_num_batched_tokens=chunk, max_num_seqs=8)
    prompt = list(range(600, 641))
    ids = [b.add(prompt, 6) for _ in range(8)]
    b.run()
    prefill = sum(w.count for plan in b.plans for w in plan.work if w.start < len(prompt))
    assert prefill <= 2 * len(prompt)
    assert len({tuple(b.tokens(r)) for r in ids}) == 1


@pytest.mark.parametrize("block", [4, 16])
def test_the_next_turn_hits_what_was_generated(block: int) -> None:
    b = bench(pages=64, block=block, max_num_batched_tokens=128)
    prompt = list(range(900, 1000))
    first = b.add(prompt, 50)
    b.run()
    assert hit(b, [*prompt, *b.tokens(first), *range(50)]) >= 149 // block * block


def test_the_explanation_names_the_first_differing_token() -> None:
    b = bench(pages=64, max_num_batched_tokens=128)
    prompt = list(range(400, 430))
    first = b.add(prompt, 20)
    b.run()
    history = [*prompt, *b.tokens(first)]
    dropped = [*history[:21], *history[22:], 5, 5]  # a template that drops the marker at position 21
    turn = b.add(dropped, 4)
    for phase in ("queued", "running"):
        miss = b.scheduler.miss(turn)
        assert miss is not None
        assert (miss.matched, miss.partial, miss.position) == (20, 1, 21), phase
        assert (miss.here, miss.there) == (history[22], history[21]), phase
        b.step()
    b.run()


def test_the_explanation_agrees_with_the_hit_when_a_window_blocks_it() -> None:
    """The full group still has the prefix, the window group has lost what the next token would see."""
    kv = Paged(12, 4, windows=(None, 5))
    tokens = list(range(17))
    commit(kv, 1, tokens)
    kv.release(1)
    other = list(range(50, 66))
    commit(kv, 2, other)  # evicts the least recently used blocks
    kv.release(2)
    chain = KeyChain(tokens, 4, b"")
    quote = kv.quote(Ask(3, 17, 17, 17, 17, tuple(chain.upto(16))))
    assert kv.miss(chain).matched == quote.reuse


# -- eviction ---------------------------------------------------------------------------------------------------------


def commit(kv: Paged, seq: int, tokens: list[int], upto: int | None = None) -> KeyChain:
    """Place a sequence, as if its tokens had been computed."""
    chain = KeyChain(tokens, kv.block_size, b"")
    upto = len(tokens) if upto is None else upto
    kv.commit(kv.quote(Ask(seq, upto, upto, upto, upto, tuple(chain.upto(upto - 1)))))
    kv.seal(seq, upto, chain.upto(upto))
    return chain


def reuse(kv: Paged, tokens: list[int]) -> int:
    chain = KeyChain(tokens, kv.block_size, b"")
    n = len(tokens)
    return kv.quote(Ask(999, n, n, n, n, tuple(chain.upto(n)))).reuse


def test_tails_are_evicted_before_the_heads_they_need() -> None:
    kv = Paged(8, 4)
    tokens = list(range(16))
    commit(kv, 1, tokens)
    kv.release(1)
    for n, left in ((5, 12), (6, 8), (7, 4), (8, 0)):
        kv.commit(kv.quote(Ask(2, n * 4, n * 4, n * 4, n * 4)))
        kv.release(2)
        assert reuse(kv, tokens) == left


def test_blocks_without_identity_are_taken_before_cached_ones_and_the_oldest_go_first() -> None:
    kv = Paged(10, 4)
    old, new = list(range(12)), list(range(100, 112))
    commit(kv, 1, old)
    commit(kv, 2, new)
    kv.release(1)
    kv.release(2)
    assert (kv.free, kv.evictable) == (4, 6)
    kv.commit(kv.quote(Ask(3, 16, 16, 16, 16)))
    assert (reuse(kv, old), reuse(kv, new)) == (12, 12)
    kv.commit(kv.quote(Ask(3, 28, 28, 28, 28)))
    assert (reuse(kv, old), reuse(kv, new)) == (0, 12)


def test_a_hit_refreshes_what_it_touches_and_a_question_does_not() -> None:
    for ask_only in (True, False):
        kv = Paged(8, 4)
        first, second = list(range(9)), list(range(100, 109))
        for seq, tokens in ((1, first), (2, second)):
            commit(kv, seq, tokens)
            kv.release(seq)
        if ask_only:
            assert reuse(kv, first) == 8
        else:
            commit(kv, 3, first)
            kv.release(3)
        kv.commit(kv.quote(Ask(4, 24, 24, 24, 24)))
        assert (reuse(kv, first), reuse(kv, second)) == ((0, 8) if ask_only else (8, 0))


def test_a_request_never_evicts_the_prefix_that_it_hits() -> None:
    kv = Paged(6, 4)
    tokens = list(range(17))
    commit(kv, 1, tokens[:16])
    kv.release(1)
    chain = KeyChain([*tokens, *range(50, 57)], 4, b"")
    quote = kv.quote(Ask(2, 24, 24, 24, 24, tuple(chain.upto(23))))
    assert (quote.ok, quote.reuse, quote.take, quote.evict) == (True, 16, 2, 0)
    quote = kv.quote(Ask(2, 24, 24, 24, 24, tuple(chain.upto(23)), hold_back=1))
    assert not quote.ok
    grant = kv.commit(kv.quote(Ask(2, 24, 24, 24, 24, tuple(chain.upto(23)))))
    assert (grant.reused, grant.taken, grant.evicted) == (16, 2, 0)


def test_a_recycled_block_forgets_its_old_content() -> None:
    kv = Paged(4, 4)
    for start in range(0, 400, 20):
        tokens = list(range(start, start + 16))
        assert reuse(kv, tokens) == 0
        commit(kv, 1, tokens)
        kv.release(1)
        assert reuse(kv, tokens) == 16
        assert start == 0 or reuse(kv, list(range(start - 20, start - 4))) == 0


def test_of_two_equal_blocks_one_stays_findable_when_the_other_goes() -> None:
    kv = Paged(8, 4)
    tokens = list(range(9))
    n = len(tokens)
    for seq in (1, 2):  # both begin before either has computed anything
        kv.commit(kv.quote(Ask(seq, n, n, n, n)))
    chain = KeyChain(tokens, 4, b"")
    for seq in (1, 2):
        kv.seal(seq, n, chain.upto(n))
    kv.release(1)
    kv.commit(kv.quote(Ask(3, 20, 20, 20, 20)))  # the three released ones and the two that were free
    assert reuse(kv, tokens) == 8
    kv.release(2)
    assert reuse(kv, tokens) == 8


def test_a_block_that_two_publish_outlives_the_first_of_its_content_once() -> None:
    """The sequences of a fork publish the same block, whose content somebody else has published before."""
    kv = Paged(4, 1)
    one = KeyChain([1], 1, b"").upto(1)
    for seq in (1, 2):
        kv.commit(kv.quote(Ask(seq, 1, 1, 1, 1)))
    kv.seal(1, 1, one)
    kv.seal(2, 1, ())
    kv.fork(2, 3)
    for seq in (2, 3):
        kv.seal(seq, 1, one)
    kv.release(1)
    kv.reset_cache()
    kv.check()
    assert kv.quote(Ask(9, 1, 1, 1, 1, one)).shared == tuple(map(tuple, kv.view(2).tables))
    kv.release(2)
    kv.release(3)
    assert (kv.free, kv.evictable) == (3, 1)
    kv.reset_cache()
    kv.check()
    assert kv.quote(Ask(9, 1, 1, 1, 1, one)).reuse == 0


def test_a_chain_that_collided_goes_on_where_it_is() -> None:
    """With a broken digest its blocks could not be published; later those in the way are gone."""
    kv = Paged(32, 1, windows=(None, 9))
    tokens = [1, 2, 3, 4, 5, 6]
    other, chain = KeyChain([1, 2, 9, 9], 1, b"", constant), KeyChain(tokens, 1, b"", constant)
    for seq, keys in ((1, other), (2, chain)):
        kv.commit(kv.quote(Ask(seq, 4, 4, 4, 4)))
        kv.seal(seq, 4, keys.upto(4))
    kv.release(1)
    kv.reset_cache()
    for upto, last in ((6, 2), (5, None)):
        kv.commit(kv.quote(Ask(2, upto, upto, upto, upto)))
        kv.seal(2, upto, chain.upto(upto))
        kv.check()
        assert kv.quote(Ask(9, 9, 9, 9, 9, chain.upto(upto))).reuse == upto
        wrong = KeyChain([1, 2, 3, 5], 1, b"", constant)
        assert kv.quote(Ask(9, 9, 9, 9, 9, wrong.upto(4))).reuse == 3
        if last:
            kv.release(2, last=last)
            kv.reset_cache()


def test_switched_off_nothing_is_shared() -> None:
    b = Bench(pages=64, sharing=False)
    prompt = list(range(17))
    assert [hit(b, prompt), hit(b, prompt)] == [0, 0]
    assert b.kv.evictable == 0


def test_resetting_keeps_what_is_in_use() -> None:
    b = bench(pages=64)
    prompt, other = list(range(17)), list(range(50, 67))
    hit(b, other)
    r = b.add(prompt, 10)
    b.steps(2)
    cached = b.kv.evictable
    assert b.scheduler.reset_cache() == cached > 0
    assert b.kv.evictable == 0
    b.run()
    assert b.reused(r) == 0
    assert hit(b, prompt) == 16
    assert hit(b, other) == 0


# -- windows ----------------------------------------------------------------------------------------------------------


def test_a_hit_is_the_longest_prefix_that_all_groups_can_serve() -> None:
    for windows, want in (((None,), 32), ((None, 9), 32), ((None, 9, 5), 32)):
        b = Bench(pages=96, windows=windows, config=dict(admission="prompt", max_num_batched_tokens=8))
        prompt = list(range(33))
        assert hit(b, prompt) == 0
        assert hit(b, prompt) == want  # blocks outside of the window do not matter
        assert hit(b, [*prompt[:20], 7, 7]) == 20


def test_a_window_group_keeps_what_the_next_token_sees_and_no_more() -> None:
    window, block = 9, 4
    kv = Paged(64, block, windows=(None, window), chunk=4)
    for computed in range(1, 60):
        kv.commit(kv.quote(Ask(1, computed, 60, 60, 60)))
        kv.seal(1, computed, ())
        full, sliding = kv.view(1).tables
        first = max(0, computed - window + 1) // block
        assert all(page >= 0 for page in full)
        assert [page >= 0 for page in sliding] == [i >= first for i in range(len(sliding))]


def test_preempted_and_evicted_are_not_the_same_as_never_seen() -> None:
    b = bench(pages=16)
    hit(b, list(range(17)))
    b.add(60, 4)
    b.run()
    assert any(e.evicted for e in b.of(ev.Granted))
    assert b.scheduler.totals.evicted == sum(e.evicted for e in b.of(ev.Granted))


@given(st.integers(0, 10**6))
@settings(max_examples=60)
def test_what_was_missed_does_not_depend_on_when_it_is_first_asked_for(seed: int) -> None:
    rng = random.Random(seed)
    asked, unasked = (Paged(12, 2, windows=windows) for windows in [(None, 3) if seed % 2 else (None,)] * 2)
    for seq in range(30):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        chain = KeyChain(tokens, 2, b"", blake2b_256)
        for kv in (asked, unasked):
            keys = chain.upto(len(tokens) - 1)
            quote = kv.quote(Ask(seq, len(tokens), len(tokens), len(tokens), len(tokens), keys))
            assert quote.ok
            kv.commit(quote)
            kv.seal(seq, len(tokens), chain.upto(len(tokens)))
            kv.release(seq)
        asked.miss(chain)
        asked.check()
    for _ in range(20):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        chain = KeyChain(tokens, 2, b"", blake2b_256)
        assert asked.miss(chain) == unasked.miss(chain)
    unasked.check()


def test_keys_that_came_since_are_looked_for() -> None:
    kv, tokens = Paged(8, 1), [1, 2, 3]
    full = KeyChain(tokens, 1, b"", blake2b_256)
    kv.commit(kv.quote(Ask(0, 3, 3, 3, 3, full.upto(3))))
    kv.seal(0, 3, full.upto(3))
    kv.release(0)
    growing = KeyChain(tokens[:2], 1, b"", blake2b_256)
    keys = growing.upto(1)
    assert kv.quote(Ask(1, 4, 4, 4, 4, keys)).reuse == 1
    assert growing.upto(2) is keys  # the chain's own list, which has grown
    assert kv.quote(Ask(1, 4, 4, 4, 4, keys)).reuse == 2


def test_a_hit_that_is_gone_is_not_served_from_memory_of_it() -> None:
    kv = Paged(4, 2)
    chain = KeyChain([1, 2, 3, 4, 5], 2, b"", blake2b_256)

    def ask(seq: int) -> int:
        return kv.quote(Ask(seq, 5, 5, 5, 5, chain.upto(4))).reuse

    kv.commit(kv.quote(Ask(0, 5, 5, 5, 5, chain.upto(4))))
    assert ask(1) == 0
    kv.seal(0, 5, chain.upto(5))
    assert ask(1) == 4
    kv.release(0)
    assert ask(1) == 4
    kv.reset_cache()
    assert ask(1) == 0
