"""Bounds on concurrency and prefix hits, against exhaustive search on small cases."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest

from octavo.planner.bounds import BoundsMeter, bounds_of
from octavo.planner.deployment import resolve
from octavo.planner.replay import ReplayOptions, replay
from octavo.planner.traces.api import TraceRequest
from octavo.planner.validation.runs import BUNDLED, read_run


def request(prompt: int, output: int, hashes: tuple[int, ...] = (), block: int = 0) -> TraceRequest:
    return TraceRequest(0.0, prompt, output, f"{prompt}-{output}-{hashes}", hashes, block)


def most_running(lengths: list[tuple[int, int]], pool: int, most: int) -> tuple[float, int]:
    """Over all schedules in which whoever runs advances by a token a step: the largest mean and peak. Each request
    holds prompt + step - 1 tokens; they may start at any step, and empty steps do not count."""

    @cache
    def fewest_steps(state: tuple[int, ...]) -> tuple[int, int]:
        if all(done == output for done, (_, output) in zip(state, lengths, strict=True)):
            return 0, 0
        running = [i for i, done in enumerate(state) if 0 < done < lengths[i][1]]
        fresh = [i for i, done in enumerate(state) if done == 0]
        best, peak = 10**9, 0
        for k in range(len(fresh) + 1):
            for starting in combinations(fresh, k):
                batch = [*running, *starting]
                if not batch or len(batch) > most or sum(lengths[i][0] + state[i] for i in batch) > pool:
                    continue
                steps, top = fewest_steps(tuple(done + (i in batch) for i, done in enumerate(state)))
                if steps < 10**9:
                    best, peak = min(best, steps + 1), max(peak, top, len(batch))
        return best, peak

    steps, peak = fewest_steps((0,) * len(lengths))
    assert steps < 10**9, "every request must fit alone"
    return sum(output for _, output in lengths) / steps, peak


@pytest.mark.parametrize("seed", range(40))
def test_no_schedule_runs_more_requests(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [(draw.randint(1, 6), draw.randint(1, 4)) for _ in range(draw.randint(1, 5))]
    pool = max(p + o for p, o in lengths) + draw.randint(0, 8)
    most = draw.randint(1, 4)
    mean, peak = most_running(lengths, pool, most)
    bounds = bounds_of((request(p, o) for p, o in lengths), BoundsMeter(pool, most, 1))
    assert mean <= bounds.running_mean + 1e-9
    assert peak <= bounds.running_peak


def test_a_pool_that_divides_evenly_reaches_the_bound() -> None:
    """Four requests of constant size 10 in 20 slots run two by two."""
    bounds = bounds_of((request(10, 1) for _ in range(4)), BoundsMeter(20, 256, 16))
    assert (bounds.running_mean, bounds.running_peak) == (2.0, 2)


def test_longer_requests_weigh_more_in_what_is_held() -> None:
    """1 step of 10 tokens and 9 steps of 100..108: the mean of what is held is over steps, not over requests."""
    bounds = bounds_of([request(10, 1), request(100, 9)], BoundsMeter(946, 256, 16))
    assert bounds.running_mean == pytest.approx(min(2, 946 * 10 / (10 + 9 * 104)))


def test_a_window_bounds_what_is_held() -> None:
    windowed = bounds_of([request(100, 50)] * 8, BoundsMeter(40, 256, 16, windows=(20,)))
    assert windowed.running_mean == 2.0
    assert bounds_of([request(10, 20)] * 8, BoundsMeter(40, 256, 16, windows=(20,))).running_mean == pytest.approx(
        40 * 20 / (sum(min(10 + j, 20) for j in range(20)))
    )


def test_the_queue_and_max_num_seqs_bound_it_too() -> None:
    many = [request(10, 10)] * 100
    assert bounds_of(many, BoundsMeter(10**6, 7, 16)).running_mean == 7
    assert bounds_of(many, BoundsMeter(10**6, 256, 16), present=3.5).running_mean == 3.5
    assert bounds_of(many, BoundsMeter(10**6, 256, 16)).running_peak == 100


def test_shared_prefixes_are_held_once() -> None:
    alone = bounds_of([request(64, 8, (1, 2, 3, 4), 16)] + [request(64, 8)] * 3, BoundsMeter(128, 256, 16))
    shared = bounds_of([request(64, 8, (1, 2, 3, 4), 16)] * 4, BoundsMeter(128, 256, 16))
    assert shared.running_mean > alone.running_mean
    unshared = bounds_of([request(64, 8, (1, 2, 3, 4), 16)] * 4, BoundsMeter(128, 256, 16, sharing=False))
    assert unshared.running_mean == alone.running_mean
    assert unshared.ideal_hits is None


def test_hits_are_full_blocks_of_the_engines_size_and_leave_a_token() -> None:
    first = request(100, 1, (1, 2, 3, 4), 32)  # the last id stands for 4 tokens only
    assert hits([first, first], 32) == 96
    assert hits([first, first], 16) == 96
    assert hits([first, first], 50) == 50  # 100 tokens in cache, but one must be computed
    assert hits([first, first], 8) == 96
    assert hits([first, first], 4) == 96  # all 25 blocks are there; the last is computed again
    assert hits([first, first], 64) == 64
    assert hits([first, first], 128) == 0
    assert hits([first, request(100, 1, (1, 2, 9, 10), 32)], 16) == 64
    assert hits([first, request(100, 1, (8, 2, 3, 4), 32)], 16) == 0  # a prefix, not a set


def test_answers_that_ids_cover_are_cached_too() -> None:
    turn = request(32, 32, (1, 2, 3, 4), 16)
    follow_up = request(80, 1, (1, 2, 3, 4, 5), 16)
    assert hits([turn, follow_up], 16) == 64


def test_ids_of_64_bits_do_not_meet() -> None:
    assert hits([request(32, 1, (1, 2), 16), request(32, 1, (1 + 2**32, 2 + 2**63), 16)], 16) == 0


def hits(requests: list[TraceRequest], block: int) -> int:
    found = bounds_of(requests, BoundsMeter(10**6, 256, block)).ideal_hits
    assert found is not None
    return found


def best_replacement(references: list[int], capacity: int) -> int:
    """Most hits of any replacement, bypassing allowed: exhaustive."""

    @cache
    def best(at: int, held: frozenset[int]) -> int:
        if at == len(references):
            return 0
        page = references[at]
        if page in held:
            return 1 + best(at + 1, held)
        options = [held] if len(held) == capacity else [held | {page}]
        options += [held - {old} | {page} for old in held if len(held) == capacity]
        return max(best(at + 1, choice) for choice in options)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(40))
def test_belady_is_the_best_replacement(seed: int) -> None:
    """Requests of one cacheable block each: the reference string is theirs."""
    draw = random.Random(seed)
    pages = [draw.randint(1, 5) for _ in range(draw.randint(1, 14))]
    capacity = draw.randint(1, 4)
    bounds = bounds_of((request(17, 1, (page,), 16) for page in pages), BoundsMeter(16 * capacity, 1, 16))
    assert bounds.belady_hits == 16 * best_replacement(pages, capacity)


@pytest.mark.parametrize("seed", range(20))
def test_belady_counts_blocks_whatever_an_id_covers(seed: int) -> None:
    """The same prompts with one id a block, and with one id per four blocks."""
    draw = random.Random(seed)
    prompts = [[draw.randint(1, 3) for _ in range(draw.randint(1, 3))] for _ in range(12)]
    fine, coarse = [], []
    for prompt in prompts:
        ids = tuple(hash(tuple(prompt[: n + 1])) & (2**63 - 1) for n in range(len(prompt)))
        tokens = 64 * len(ids) + draw.choice((0, 5))
        coarse.append(request(tokens, 1, ids, 64))
        fine.append(request(tokens, 1, tuple((key * 4 + part) % 2**64 for key in ids for part in range(4)), 16))
    for pages in (1, 5, 9, 1000):
        one = bounds_of(coarse, BoundsMeter(16 * pages, 1, 16))
        other = bounds_of(fine, BoundsMeter(16 * pages, 1, 16))
        assert one.ideal_hits == other.ideal_hits
        assert one.belady_hits == other.belady_hits
        assert one.belady_hits is not None
        assert one.ideal_hits is not None
        assert one.belady_hits <= one.ideal_hits
    assert one.belady_hits == one.ideal_hits


def test_a_trace_without_ids_has_no_hit_bounds() -> None:
    bounds = bounds_of([request(100, 10)], BoundsMeter(1000, 256, 16))
    assert (bounds.ideal_hits, bounds.belady_hits) == (None, None)


def test_belady_can_be_left_out() -> None:
    bounds = bounds_of([request(33, 1, (1, 2, 3), 16)] * 2, BoundsMeter(1000, 256, 16, belady=False))
    assert (bounds.ideal_hits, bounds.belady_hits) == (32, None)


def test_a_replay_stays_under_the_bound_and_near_it() -> None:
    """The RTX 4090 run (32.5 requests at once measured), with peaks reserved, as preemption gets past the bound."""
    run = read_run(BUNDLED / "vllm_runs" / "RTX4090_Llama-3.1-8B")
    resolved = resolve(replace(run.deployment, admission="peak"))
    outcome = replay(run.requests, resolved, ReplayOptions(known_lengths=True, timeline=False))
    bounds = bounds_of(run.requests, BoundsMeter.of(resolved))
    assert outcome.preemptions == 0
    assert 0.85 * bounds.running_mean < outcome.running_mean <= bounds.running_mean
    assert outcome.running_peak <= bounds.running_peak
    assert bounds.ideal_hits is not None
    assert outcome.hit_tokens <= bounds.ideal_hits
