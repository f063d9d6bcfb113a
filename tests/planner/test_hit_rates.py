"""Prefix hits: the serving scheduler and its prefix index with an unlimited pool, against the ideal of each hashed
trace counted here with plain sets, and against what a real engine measured."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.kv.spec import spec_from_config
from octavo.planner.bounds import BoundsMeter, bounds_of
from octavo.planner.deployment import Deployment, Fidelity, Level, Resolved
from octavo.planner.outcome import Outcome
from octavo.planner.replay import ReplayOptions, replay
from octavo.planner.traces.api import TraceRequest
from octavo.planner.traces.opening import open_trace
from octavo.runner.timing import StepShape
from octavo.scheduler.config import SchedulerConfig

ONE_LAYER = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
#: Trace -> block size of its ids, ideal hit share in % as shared/traces/README.md states it.
TRACES = {
    "ai-dynamo/mooncake_trace_1000.jsonl": (512, 39.1),
    "mooncake-fast25/conversation_trace.jsonl.gz": (512, 37.4),
    "mooncake-fast25/synthetic_trace.jsonl.gz": (512, 65.1),
    "llmservingsim-vllm-runs/derived_workload_llama-3.1-8b_blocks16.jsonl.gz": (16, 7.6),
    "llmservingsim-vllm-runs/derived_workload_qwen3_blocks16.jsonl.gz": (16, 7.9),
    "ai-dynamo/pi_request_trace.jsonl.gz": (16, 71.7),
}


class Steady:
    """So many seconds for each step."""

    windows = ()

    def __init__(self, step: float) -> None:
        self._step = step

    def seconds(self, shape: StepShape) -> float:
        return self._step


def unlimited(block_size: int, step: float = 1e-6) -> Resolved:
    """A pool that nothing fills, and steps that take any prompt whole."""
    return Resolved(
        deployment=Deployment(model="one layer", block_size=block_size),
        spec=spec_from_config(ONE_LAYER),
        scheduler=SchedulerConfig(max_model_len=1 << 21, max_num_seqs=4096, max_num_batched_tokens=1 << 21),
        pages=1 << 21,
        windows=(None,),
        block_bytes=block_size * 256,
        timer=Steady(step),
        plan=None,
        fidelity=Fidelity(Level.DATASHEET, 0.0, "steps of equal length"),
    )


def served(requests: Iterable[TraceRequest], block_size: int) -> Outcome:
    outcome = replay(requests, unlimited(block_size), ReplayOptions(known_lengths=True, timeline=False))
    assert (outcome.refused, outcome.unfinished, outcome.preemptions) == (0, 0, 0)
    return outcome


def prompts_only(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """With answers of one token: where ids cover prompts only, answers hit nothing."""
    return [replace(request, output_tokens=1) for request in requests]


def counted(requests: Iterable[TraceRequest]) -> int:
    """Tokens in full blocks of the trace's own size that an earlier request had; at least one is computed."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        block = request.hash_block
        for key in request.hashes[: (request.prompt_tokens - 1) // block]:
            if key not in seen:
                break
            hits += block
        full = (request.prompt_tokens + request.output_tokens) // block
        seen.update(request.hashes[: min(full, len(request.hashes))] if full else ())
    return hits


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * ("conversation" in n)) for n in TRACES])
def test_an_unlimited_pool_serves_the_ideal(shared: Path, name: str) -> None:
    block, published = TRACES[name]
    requests = prompts_only(open_trace(shared / "traces" / name))
    outcome = served(requests, block)
    prompts = sum(request.prompt_tokens for request in requests)
    assert outcome.hit_tokens == counted(requests)
    assert outcome.query_tokens == prompts
    assert bounds_of(requests, BoundsMeter(1 << 40, 4096, block)).ideal_hits == outcome.hit_tokens
    assert 100 * outcome.hit_tokens / prompts == pytest.approx(published, abs=0.2)


def test_blocks_smaller_than_the_traces_serve_the_ideal_too(shared: Path) -> None:
    """An id of 512 tokens as 32 blocks of 16: nothing is lost to the longer prompts' ends."""
    requests = prompts_only(open_trace(shared / "traces" / "ai-dynamo" / "mooncake_trace_1000.jsonl?requests=300"))
    outcome = served(requests, 16)
    assert outcome.hit_tokens == bounds_of(requests, BoundsMeter(1 << 40, 4096, 16)).ideal_hits
    assert 0 <= outcome.hit_tokens - counted(requests) < 512 * len(requests)


def test_answers_are_served_as_well(shared: Path) -> None:
    """These ids cover the answers; each request comes when all before it have ended."""
    workload = shared / "facts" / "profiles" / "llmservingsim" / "workload_sharegpt-llama-3.1-8b-300-sps10.jsonl.gz"
    requests = [replace(request, arrival=10.0 * n) for n, request in enumerate(open_trace(workload))]
    outcome = served(requests, 16)
    assert outcome.hit_tokens == counted(requests)
    assert outcome.hit_tokens == bounds_of(requests, BoundsMeter(1 << 40, 4096, 16)).ideal_hits
    assert outcome.hit_tokens >= counted(prompts_only(requests))


@pytest.mark.slow
def test_agent_sessions_are_served_the_ideal(shared: Path) -> None:
    """10,774 prompts of 115,000 tokens on average, in blocks of 64; sessions share nothing, as their ids say."""
    requests = prompts_only(open_trace(f"{shared / 'traces' / 'kv-cache-tester' / 'traces'}?shared_prefix=0"))
    assert len(requests) == 10_774 - 3  # three have no answer: bad lines
    assert 100 * counted(requests) / sum(r.prompt_tokens for r in requests) == pytest.approx(96.0, abs=0.2)
    first = requests[:1500]  # the others take minutes and show nothing new
    assert served(first, 64).hit_tokens == counted(first)


# -- a real engine's measured hits ---------------------------------------------------------------------------------

#: Requests (in order of arrival) whose measured hits differ from a replay in which answers come back word for word,
#: and why. Tokens that the measured engine served less.
ANSWERS_NOT_VERBATIM = {  # the next turn renders the answer (thinking, tool calls) otherwise from some block on
    2: 208,
    6: 32,
    8: 320,
    9: 80,
    11: 352,
    13: 16,
    15: 64,
}
#: Started 20 ms after the request with the same 96 tokens on the same worker, when none of them was computed. Octavo
#: lets the second one wait for them instead of computing them twice.
CONCURRENT = {5: 96}


def workers_of(path: Path) -> dict[str, int]:
    """Request id -> the worker that served it: each has a cache of its own."""
    with gzip.open(path, "rt") as file:
        events = [json.loads(line)["event"] for line in file]
    ended = [event["request"] for event in events if event["event_type"] == "request_end"]
    return {request["request_id"]: request["worker"]["prefill_worker_id"] for request in ended}


def with_answers(requests: list[TraceRequest]) -> list[TraceRequest]:
    """The ids of each answer, as far as the next request whose prompt goes on from it knows them."""
    done = []
    for n, request in enumerate(requests):
        own, total = request.prompt_tokens // 16, (request.prompt_tokens + request.output_tokens) // 16
        prompt = request.hashes[:own]
        longer = (r.hashes for r in requests[n + 1 :] if len(r.hashes) > own + 1 and r.hashes[:own] == prompt)
        following = next(longer, ())
        known = following[:total] if len(following) > len(request.hashes) else request.hashes
        done.append(replace(request, hashes=known))
    return done


def hits_per_worker(requests: list[TraceRequest], workers: dict[str, int]) -> dict[str, int]:
    """Request id -> tokens served, each worker with a pool of its own and steps of 26 ms (the least measured)."""
    found: dict[str, int] = {}
    for worker in set(workers.values()):
        own = [request for request in requests if workers[request.id] == worker]
        options = ReplayOptions(known_lengths=True, lives=len(own), timeline=False)
        outcome = replay(own, unlimited(16, step=0.026), options)
        found |= {life.id: life.cached_tokens for life in outcome.lives}
    return found


def test_measured_hits_are_reproduced_or_explained(shared: Path) -> None:
    """Dynamo's two workers cache apart, and cache answers: of 17 requests 9 are exact, 7 had an answer rendered anew
    and one started before its twin was computed."""
    path = shared / "traces" / "ai-dynamo" / "pi_request_trace.jsonl.gz"
    requests, workers = list(open_trace(path)), workers_of(path)
    prompts = hits_per_worker(prompts_only(requests), workers)
    answers = hits_per_worker(with_answers(requests), workers)
    exact = 0
    for n, request in enumerate(requests):
        measured = request.cached_tokens
        assert measured is not None
        if n in CONCURRENT:
            assert (measured, answers[request.id]) == (0, CONCURRENT[n])
            continue
        assert prompts[request.id] <= measured <= answers[request.id]
        assert answers[request.id] - measured == ANSWERS_NOT_VERBATIM.get(n, 0)
        exact += answers[request.id] == measured
    assert exact == 9


def test_one_cache_for_both_workers_would_serve_more(shared: Path) -> None:
    """Why the published ideal (71.7 %) is not what was measured: the router spread a session over two caches."""
    path = shared / "traces" / "ai-dynamo" / "pi_request_trace.jsonl.gz"
    requests = prompts_only(open_trace(path))
    apart = sum(hits_per_worker(requests, workers_of(path)).values())
    assert apart < counted(requests)
