"""M1: the figures of a scrape are true and of one moment: memory, who runs, who waits and why, how long it took."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest

from octavo import events as ev
from octavo.clock import VirtualClock
from octavo.kv.strategies import STRATEGIES
from octavo.runner.api import StepPlan, StepResult
from octavo.runner.memory import DeviceBudget
from octavo.runner.simulated import SimulatedRunner
from octavo.types import RequestError
from tests.server.engines import WEIGHTS
from tests.server.scraping import Watched, true_at_each_scrape

LINES = (
    *("weights", "activations", "workspace", "live", "reserved", "slack", "lookahead", "quarantined", "cached"),
    *("free", "fragmented", "held back", "padding"),
)
EVERY = pytest.mark.parametrize("strategy", STRATEGIES)


# -- M1: usage --------------------------------------------------------------------------------------------------------


def test_an_idle_empty_engine_is_all_free() -> None:
    figures = true_at_each_scrape(Watched(pages=64))
    assert figures("vllm:kv_cache_usage_perc") == 0
    assert figures.by("octavo_kv_blocks", "state") == {"pinned": 0, "cached": 0, "free": 64}
    assert figures.some("octavo_limiting_resource", "resource") == {"none": 1}


def test_an_idle_engine_with_a_full_cache_is_not_in_use() -> None:
    w = Watched(pages=16)
    for _ in range(6):
        w.add(17, 4)
    w.drain()
    figures = true_at_each_scrape(w)
    assert figures("vllm:kv_cache_usage_perc") == 0
    assert figures("octavo_kv_blocks", state="cached") > 8
    assert figures("octavo_memory_bytes", line="cached") > figures("octavo_memory_bytes", line="free")


def test_a_request_of_three_blocks_uses_three_blocks() -> None:
    w = Watched(pages=64)
    w.add(10, 6)
    w.step()
    figures = true_at_each_scrape(w)
    slot = w.built.layout.page_bytes // 4
    assert figures("vllm:kv_cache_usage_perc") == 3 / 64
    assert figures("octavo_memory_bytes", line="live") == 10 * slot
    assert figures("octavo_memory_bytes", line="slack") == 2 * slot
    assert figures("octavo_requests_running") == 1


@pytest.mark.parametrize(
    ("resource", "cause", "how", "requests"),
    [
        ("tokens", "step budget", {"max_num_batched_tokens": 16, "pages": 256}, [(64, 1)] * 6),
        ("slots", "slots", {"max_num_seqs": 2, "pages": 256}, [(8, 20)] * 6),
        ("memory", "memory: full", {"pages": 12, "admission": "prompt"}, [(24, 20)] * 6),
    ],
)
def test_the_limiting_resource_is_named_in_each_load(
    resource: str, cause: str, how: dict[str, Any], requests: list[tuple[int, int]]
) -> None:
    w = Watched(**how)
    for prompt, output in requests:
        w.add(prompt, output)
    w.step(2)
    figures = true_at_each_scrape(w)
    assert figures.some("octavo_limiting_resource", "resource") == {resource: 1}
    assert figures("octavo_requests_waiting", reason=cause) > 0
    w.drain()
    assert true_at_each_scrape(w).some("octavo_limiting_resource", "resource") == {"none": 1}


def test_a_quota_limits() -> None:
    w = Watched(pages=64, quotas={"a": 6})
    for _ in range(3):
        w.add(16, 8, tenant="a")
    w.step(2)
    figures = true_at_each_scrape(w)
    assert figures.some("octavo_limiting_resource", "resource") == {"quota": 1}
    assert figures("vllm:num_requests_waiting_by_reason", reason="quota") == 2


def test_reasons_of_waiting_under_the_known_names() -> None:
    w = Watched(pages=12, admission="prompt")
    for _ in range(4):
        w.add(24, 20)
    w.step()
    assert w.scrape().some("vllm:num_requests_waiting_by_reason", "reason") == {"capacity": 2}
    narrow = Watched(pages=64, max_num_batched_tokens=8)
    for _ in range(3):
        narrow.add(29, 4)
    narrow.step()
    figures = true_at_each_scrape(narrow)
    assert figures.some("vllm:num_requests_waiting_by_reason", "reason") == {"token_budget": 2}
    wide = Watched(pages=64, max_num_batched_tokens=256)
    wide.add([*range(1, 60), *range(100, 130)], 4)
    wide.add([*range(1, 60), *range(200, 230)], 4)
    wide.step()
    figures = true_at_each_scrape(wide)
    assert figures.some("vllm:num_requests_waiting_by_reason", "reason") == {"deferred": 1}  # for the common prefix
    assert figures.some("octavo_requests_waiting", "reason") == {"behind": 1}


# -- the ledger, and what else holds at every scrape ------------------------------------------------------------------


@EVERY
def test_figures_are_true_at_every_scrape_of_a_random_life(strategy: str) -> None:
    chance = random.Random(strategy)
    limits = {"max_model_len": 96, "max_num_batched_tokens": 24, "max_queue": 8}
    w = Watched(strategy=strategy, pages=40, spare=100, admission="prompt", **limits)
    before: dict[str, float] = {}
    for _ in range(60):
        for _ in range(chance.randint(0, 3)):
            with suppress(RequestError):  # queue_full
                w.add(chance.randint(1, 40), chance.randint(1, 30), n=chance.choice((1, 1, 3)))
        if w.engine.scheduler.requests and chance.random() < 0.3:
            w.engine.abort(chance.choice(list(w.engine.scheduler.requests)))
        w.step(chance.randint(0, 3))
        figures = true_at_each_scrape(w)
        assert set(LINES) <= set(figures.by("octavo_memory_bytes", "line"))
        counters = {name: sum(samples.values()) for name, samples in figures.samples.items() if name[-6:] == "_total"}
        assert all(value >= before.get(name, 0) for name, value in counters.items())
        before = counters
    w.drain()
    figures = true_at_each_scrape(w)
    refused = figures("octavo_requests_refused_total", code="queue_full")
    assert refused == len([event for event in w.events if isinstance(event, ev.Refused)])
    assert figures("octavo_requests_accepted_total") + refused == sum(
        isinstance(event, (ev.Submitted, ev.Refused)) for event in w.events
    )
    assert figures("octavo_requests_finished_total", reason="abort") > 0
    assert figures("octavo_kv_blocks", state="pinned") == 0


@pytest.mark.parametrize("strategy", ["paged", "reserve-max", "growing"])
def test_the_ledger_with_window_layers_and_a_measured_budget(strategy: str) -> None:
    measured = DeviceBudget(weights=5_000_000, activations=70_001, workspace=301, total=9_000_003)
    w = Watched(strategy=strategy, pages=96, windows=(None, 10), measured=measured, max_model_len=64)
    for i in range(6):
        w.add(5 + 7 * i, 9, n=1 + i % 2)
    while w.engine.busy:
        w.step()
        figures = true_at_each_scrape(w)
    assert figures("octavo_memory_budget_bytes") == 9_000_003
    assert figures("octavo_memory_bytes", line="workspace") == 301


def test_the_budget_of_a_given_kv_memory_is_weights_and_that_memory() -> None:
    w = Watched(pages=10, spare=17)
    figures = true_at_each_scrape(w)
    assert figures("octavo_memory_budget_bytes") == WEIGHTS + w.built.kv_bytes + 17
    assert figures("octavo_memory_bytes", line="padding") == 17


# -- requests ---------------------------------------------------------------------------------------------------------


def test_a_request_with_samples_counts_once() -> None:
    w = Watched()
    w.add(10, 5, n=3)
    w.add(10, 5)
    assert w.scrape()("vllm:num_requests_waiting") == 2
    w.step(2)
    figures = true_at_each_scrape(w)
    assert figures("vllm:num_requests_running") == 2
    assert figures.by("octavo_samples", "state") == {"running": 4, "waiting": 0}
    w.drain()
    figures = w.scrape()
    assert figures.some("vllm:request_success_total", "finished_reason") == {"length": 2}
    assert figures("vllm:prompt_tokens_total") == 20
    assert figures("vllm:generation_tokens_total") == 20 == figures("vllm:request_generation_tokens_sum")
    assert figures("vllm:request_max_num_generation_tokens_sum") == 10
    assert figures("vllm:request_params_n_sum") == 4


def test_refused_expired_aborted_and_finished_requests_are_told_apart() -> None:
    w = Watched(max_num_seqs=1)
    with pytest.raises(RequestError, match="max_model_len"):
        w.add(300, 4)
    w.add(8, 6)
    gone = w.add(8, 6)
    w.add(8, 6, deadline=0.004)
    w.step(2)
    w.engine.abort(gone)
    w.drain()
    figures = true_at_each_scrape(w)
    assert figures.some("octavo_requests_refused_total", "code") == {"context_length_exceeded": 1}
    assert figures("octavo_requests_accepted_total") == 3
    assert figures("octavo_requests_expired_total") == 1
    assert figures.some("octavo_requests_finished_total", "reason") == {"length": 1, "abort": 1}
    assert figures.some("vllm:request_success_total", "finished_reason") == {"length": 1, "abort": 1, "error": 1}
    assert figures("vllm:e2e_request_latency_seconds_count") == 1


class Fragile(SimulatedRunner):
    """Cannot run a step with prompts of 13 tokens."""

    def run(self, plan: StepPlan) -> StepResult:
        if any(work.seq.prompt_length == 13 for work in plan.work):
            raise RuntimeError("thirteen")
        return super().run(plan)


def test_a_request_that_fails_in_a_step_is_counted_as_an_error() -> None:
    clock = VirtualClock()
    w = Watched(clock=clock, runner=Fragile(clock))
    w.add(13, 4)
    w.step()
    figures = true_at_each_scrape(w)
    assert figures.some("octavo_requests_finished_total", "reason") == {"error": 1}
    assert figures("octavo_step_failures_total") >= 1
    w.add(12, 4)
    w.drain()
    assert true_at_each_scrape(w).some("octavo_requests_finished_total", "reason") == {"error": 1, "length": 1}


def test_what_was_turned_away_over_http_is_counted_by_reason() -> None:
    w = Watched()
    for reason in ("max_num_queued_reqs", "draining", "max_num_queued_reqs"):
        w.metrics.http_rejected(reason)
    figures = w.scrape()
    assert figures.some("octavo_http_rejected_total", "reason") == {"max_num_queued_reqs": 2, "draining": 1}
    wanted = {"max_num_queued_reqs": 2, "max_num_queued_tokens": 0}
    assert figures.by("vllm:admission_rejections_total", "reason") == wanted


# -- times ------------------------------------------------------------------------------------------------------------


def test_latencies_are_those_that_the_outputs_have() -> None:
    w = Watched(max_num_seqs=2, max_num_batched_tokens=16)
    for i in range(5):
        w.add(10 + 7 * i, 3 + i)
    w.step(3)
    w.add(6, 1)
    w.drain()
    figures = w.scrape()
    metrics = [output.metrics for output in w.outputs.values()]
    for name, values in {
        "time_to_first_token_seconds": [m.first_token - m.arrival for m in metrics],
        "e2e_request_latency_seconds": [m.finished - m.arrival for m in metrics],
        "request_queue_time_seconds": [m.admitted - m.arrival for m in metrics],
        "request_inference_time_seconds": [m.finished - m.admitted for m in metrics],
        "request_prefill_time_seconds": [m.first_token - m.admitted for m in metrics],
        "request_decode_time_seconds": [m.finished - m.first_token for m in metrics],
        "inter_token_latency_seconds": [
            b - a for m in metrics for a, b in zip(m.token_times, m.token_times[1:], strict=False)
        ],
        "request_time_per_output_token_seconds": [
            (m.finished - m.first_token) / (len(m.token_times) - 1) for m in metrics if len(m.token_times) > 1
        ],
    }.items():
        assert figures(f"vllm:{name}_count") == len(values)
        assert figures(f"vllm:{name}_sum") == pytest.approx(sum(values))
        for labels, count in figures.samples[f"vllm:{name}_bucket"].items():
            assert count == sum(value <= float(dict(labels)["le"]) for value in values)


def test_the_time_waited_by_cause_is_the_time_that_requests_stood_in_the_line() -> None:
    w = Watched(pages=24, max_num_seqs=3, admission="ceiling")
    clock: Any = w.engine.clock
    for i in range(9):
        w.add(12 + 5 * i, 12)
        clock.advance(0.001)
        if i % 3 == 0:
            w.step()
    w.drain()
    clock.advance(5)  # nobody waits: this is nobody's time
    w.add(4, 2)
    w.drain()
    figures = w.scrape()
    waited = figures.by("octavo_request_waited_seconds_total", "reason")
    stood = sum(output.metrics.admitted - output.metrics.arrival for output in w.outputs.values())
    assert sum(waited.values()) == pytest.approx(stood)
    assert waited["slots"] > 0
    assert waited["memory: held"] + waited["memory: full"] > 0


def test_whoever_gives_up_waits_no_longer_even_if_nothing_runs_then() -> None:
    w = Watched(max_num_seqs=1)
    first, second = w.add(8, 50), w.add(8, 50)
    w.step(4)
    clock: Any = w.engine.clock
    submitted, given_up = 0.0, clock.now()
    for request in (second, first):
        w.engine.abort(request)
    clock.advance(3600)
    w.add(8, 2)
    w.drain()
    waited = w.scrape().by("octavo_request_waited_seconds_total", "reason")
    assert sum(waited.values()) == pytest.approx(given_up - submitted)
    assert waited["slots"] == pytest.approx(given_up - submitted)
