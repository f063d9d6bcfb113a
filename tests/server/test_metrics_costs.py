"""P4 and C7: what preemption, copies, drafts and cache misses cost, to the token."""

from __future__ import annotations

import pytest

from octavo import events as ev
from octavo.types import Status
from tests.server.scraping import Watched, true_at_each_scrape

# -- P4: preemption, and what else steps cost -------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", [True, False])
def test_preemption_figures_fit_the_step_log(sharing: bool) -> None:
    w = Watched(pages=14, sharing=sharing, admission="prompt", max_num_batched_tokens=32)
    for i in range(5):
        w.add(9 + i, 24)
    w.drain()
    figures = true_at_each_scrape(w)
    preempted = [event for event in w.events if isinstance(event, ev.Preempted)]
    assert len(preempted) > 1
    assert figures("octavo_preemptions_total") == figures("vllm:num_preemptions_total") == len(preempted)
    assert figures("octavo_preemption_discarded_tokens_total") == sum(event.discarded for event in preempted)
    computed, again, high = 0, 0, dict[int, int]()
    planned = [event for event in w.events if isinstance(event, ev.Planned)]
    for event in planned:
        for seq, start, count, _ in event.work:
            computed += count
            again += max(0, min(high.get(seq, 0), start + count) - start)
            high[seq] = max(high.get(seq, 0), start + count)
    assert figures("octavo_preemption_recomputed_tokens_total") == again > 0
    assert figures("octavo_computed_tokens_total") == computed == figures("vllm:iteration_tokens_total_sum")
    assert figures("octavo_steps_total") == len(planned) == figures("vllm:iteration_tokens_total_count")


def test_copies_and_compactions_are_counted() -> None:
    w = Watched(strategy="growing", pages=24, admission="prompt")
    for i in range(8):
        w.add(5 + 3 * i, 30)
    w.drain()
    figures = true_at_each_scrape(w)
    copied = sum(copy.n for event in w.events if isinstance(event, ev.Planned) for copy in event.copies)
    assert figures("octavo_copied_blocks_total") == copied > 0
    assert figures("octavo_compactions_total") == sum(isinstance(event, ev.Compacted) for event in w.events)


def test_drafts_are_counted() -> None:
    w = Watched(speculative_tokens=4, pages=64)
    w.add([1, 2, 3, 4, 5, 6] * 6, 40)
    w.drain()
    figures = true_at_each_scrape(w)
    output = next(iter(w.outputs.values()))
    assert figures("octavo_drafted_tokens_total") == output.metrics.drafted_tokens
    assert figures("octavo_drafts_accepted_tokens_total") == output.metrics.accepted_tokens


# -- C7: the prefix cache ---------------------------------------------------------------------------------------------


def test_unrelated_prompts_under_preemption_are_no_hits() -> None:
    w = Watched(pages=14, admission="prompt")
    for i in range(5):
        w.add(9 + i, 24)
    w.drain()
    figures = w.scrape()
    assert figures("octavo_preemptions_total") > 0
    assert figures("vllm:prefix_cache_hits_total") == 0
    assert figures("vllm:prefix_cache_queries_total") == sum(9 + i for i in range(5))
    assert figures.some("octavo_prefix_cache_misses_total", "reason") == {"nothing in common": 5}


def test_a_hit_that_has_to_wait_for_memory_counts_once_on_admission() -> None:
    w = Watched(pages=16, admission="prompt")
    prefix = list(range(1, 13))
    w.add([*prefix, 500], 1)
    w.drain()  # three blocks are cached
    w.add(40, 12)
    w.step()
    late = w.add([*prefix, *range(600, 616)], 4)
    for _ in range(5):
        w.step()
        assert w.engine.scheduler.requests[late][0].status is Status.WAITING
        assert w.scrape()("vllm:prefix_cache_hits_total") == 0
    w.drain()
    figures = w.scrape()
    assert figures("vllm:prefix_cache_hits_total") == w.outputs[late].usage["cached_tokens"] == 12
    assert figures("vllm:prefix_cache_queries_total") == 13 + 40 + 28


def test_a_common_part_shorter_than_a_block_is_told_from_nothing_in_common() -> None:
    w = Watched(block=16, pages=32)
    for i in range(3):  # 15 of 16 tokens are shared
        w.add([*range(1, 16), *range(100 * i + 100, 100 * i + 120)], 2)
        w.drain()
    w.add(30, 2)
    w.drain()
    figures = w.scrape()
    assert figures.some("octavo_prefix_cache_misses_total", "reason") == {
        "nothing in common": 2,
        "common part shorter than a block": 2,
    }
    assert figures("octavo_prefix_cache_unusable_tokens_total") == 30
    assert figures("vllm:prefix_cache_hits_total") == 0


def test_misses_behind_a_hit_short_prompts_and_no_sharing() -> None:
    w = Watched(block=4, pages=64)
    turn = list(range(1, 13))
    for prompt in (turn, [*turn, *range(50, 60)], [*turn[:8], *range(70, 80)], [9, 9, 9], turn):
        w.add(prompt, 1)
        w.drain()
    w.add(turn, 1, prompt_logprobs=1)
    w.drain()
    assert w.scrape().some("octavo_prefix_cache_misses_total", "reason") == {
        "nothing in common": 1,
        "nothing cached behind the hit": 1,
        "differs from what is cached": 1,
        "prompt shorter than a block": 1,
        "sharing is off": 1,
    }
    off = Watched(strategy="reserve-max", pages=128)
    off.add(turn, 1)
    off.drain()
    assert off.scrape().some("octavo_prefix_cache_misses_total", "reason") == {"sharing is off": 1}


def test_cached_tokens_of_all_answers_sum_to_the_counter_and_a_prompt_with_samples_counts_once() -> None:
    w = Watched(pages=64)
    turn = list(range(1, 30))
    for n in (1, 3, 2):
        w.add(turn, 4, n=n)
        w.drain()
    figures = w.scrape()
    cached = sum(output.usage["cached_tokens"] for output in w.outputs.values())
    assert figures("vllm:prefix_cache_hits_total") == cached == 2 * 28
    assert figures("vllm:prefix_cache_queries_total") == 3 * 29 == figures("vllm:prompt_tokens_total")
    assert figures.some("vllm:prompt_tokens_by_source_total", "source") == {
        "local_compute": 3 * 29 - cached,
        "local_cache_hit": cached,
    }
    assert figures("vllm:request_prefill_kv_computed_tokens_sum") == 3 * 29 - cached
