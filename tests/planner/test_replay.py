"""Replaying a trace: the outcome is that of stepping through everything, and adds up."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.kv.strategies import STRATEGIES
from octavo.planner.deployment import Deployment, Fidelity, Level, Resolved
from octavo.planner.outcome import KV_LINES
from octavo.planner.replay import ReplayOptions, replay
from octavo.planner.traces.api import TraceRequest
from octavo.runner.timing import StepShape
from octavo.scheduler.config import SchedulerConfig


@dataclass(frozen=True)
class Timer:
    """A time that every part of a shape moves."""

    windows: tuple[int, ...] = ()

    def seconds(self, shape: StepShape) -> float:
        chunks = sum(count * (before + count) for count, before in shape.chunks)
        return 5e-3 + 5e-5 * shape.tokens + 2e-8 * (shape.context + sum(shape.windowed)) + 1e-8 * chunks


def deployed(
    pages: int = 200, strategy: str = "paged", windows: tuple[int | None, ...] = (None,), **config: Any
) -> Resolved:
    """A deployment of so many pages, without a model."""
    limits = dict(max_model_len=1000, max_num_seqs=16, max_num_batched_tokens=128)
    timer = Timer(tuple(window for window in windows if window is not None))
    deployment = Deployment("none", strategy=strategy)
    fidelity = Fidelity(Level.DATASHEET, 0.2, "made up")
    scheduler = SchedulerConfig(**{**limits, **config})
    return Resolved(deployment, None, scheduler, pages, windows, 1 << 20, timer, None, fidelity)  # type: ignore[arg-type]


def traffic(seed: int, n: int, rate: float = 20.0, longest: int = 600, hashed: float = 0.5) -> list[TraceRequest]:
    """Random requests, some of which share prefixes."""
    rng = random.Random(seed)
    families = [[rng.randrange(1 << 40) for _ in range(40)] for _ in range(4)]
    requests, now = [], 0.0
    for i in range(n):
        now += rng.expovariate(rate)
        prompt = rng.randrange(1, longest)
        ids: tuple[int, ...] = ()
        if rng.random() < hashed:
            family, shared = rng.choice(families), rng.randrange(40)
            ids = tuple((family[:shared] + [rng.randrange(1 << 40) for _ in range(40)])[: -(-prompt // 24)])
        requests.append(TraceRequest(now, prompt, rng.randrange(1, 200), f"r{i}", ids, 24 if ids else 0))
    return requests


def nearly(a: Any, b: Any, within: float = 1e-9) -> bool:
    """Equal but for the last digits of sums of seconds."""
    if isinstance(a, float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=within)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(nearly(a[key], b[key], within) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(nearly(x, y, within) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_coasting_gives_the_outcome_of_stepping(data: st.DataObject) -> None:
    strategy = data.draw(st.sampled_from(("paged", *STRATEGIES)))
    windows = data.draw(st.sampled_from(((None,), (None, 100), (64, None)))) if strategy == "paged" else (None,)
    resolved = deployed(
        data.draw(st.sampled_from((80, 120, 400))) * len(windows),
        strategy,
        windows,
        max_num_seqs=data.draw(st.sampled_from((4, 16, 64))),
        max_num_batched_tokens=data.draw(st.sampled_from((64, 256, 700))),
        admission=data.draw(st.sampled_from(("prompt", "peak", "ceiling"))),
        victims=data.draw(st.sampled_from(("newest", "cheapest"))),
        max_skips=data.draw(st.sampled_from((0, 8))),
    )
    requests = traffic(
        data.draw(st.integers(0, 10_000)), data.draw(st.integers(1, 60)), data.draw(st.sampled_from((1.0, 20.0, 100.0)))
    )
    options = ReplayOptions(
        lives=20,
        known_lengths=data.draw(st.booleans()),
        concurrency=data.draw(st.sampled_from((None, 8))),
        max_tokens=data.draw(st.sampled_from((None, 256))),
    )
    quick, slow = replay(requests, resolved, options), replay(requests, resolved, replace(options, stepping=True))
    one, other = asdict(quick), asdict(slow)
    assert nearly(one.pop("timeline"), other.pop("timeline"), within=2e-3)  # its figures are rounded
    assert not [name for name, value in one.items() if not nearly(value, other[name])]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_request_ends_and_everything_adds_up(strategy: str) -> None:
    requests = traffic(1, 200, rate=30.0)
    outcome = replay(requests, deployed(200, strategy), ReplayOptions(lives=500, max_tokens=300))
    assert outcome.finished + outcome.refused == outcome.requests == len(requests)
    assert outcome.unfinished == 0
    assert outcome.output_tokens == sum(life.output_tokens for life in outcome.lives)
    assert sum(outcome.kv_mean[line] for line in KV_LINES) == pytest.approx(1)
    assert sum(outcome.kv_peak[line] for line in KV_LINES) == pytest.approx(1)
    assert outcome.ttft.count == outcome.e2e.count == outcome.finished
    assert outcome.itl.count == outcome.output_tokens - outcome.finished
    by_life: dict[str, float] = {}
    for life in outcome.lives:
        for cause, seconds in life.waited.items():
            by_life[cause] = by_life.get(cause, 0.0) + seconds
    assert nearly(by_life, dict(outcome.waited))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_life_waits_from_arrival_to_admission_and_while_preempted(strategy: str) -> None:
    resolved = deployed(90, strategy, admission="prompt", max_model_len=700)
    outcome = replay(traffic(3, 120, rate=40.0), resolved, ReplayOptions(lives=500, max_tokens=64))
    for life in outcome.lives:
        if life.admitted is None:
            continue
        preempted = sum(until - since for since, until in life.preempted if until is not None)
        assert sum(life.waited.values()) == pytest.approx(life.admitted - life.arrival + preempted)


def test_a_replay_is_the_same_twice() -> None:
    requests, resolved = traffic(5, 100), deployed(120)
    options = ReplayOptions(lives=10, map=True)
    assert replay(requests, resolved, options) == replay(requests, resolved, options)


def test_what_cannot_run_is_refused_and_counted() -> None:
    requests = [TraceRequest(0.0, 2000, 5, "long"), TraceRequest(0.1, 10, 5, "short")]
    outcome = replay(requests, deployed())
    assert (outcome.refused, outcome.finished) == (1, 1)
    assert outcome.refusals[0][0] == "long"
    assert "max_model_len is 1000" in outcome.refusals[0][1]


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    outcome = replay(traffic(2, 50), deployed(2000), ReplayOptions(concurrency=5))
    assert outcome.running_peak == 5
    assert outcome.finished == 50


def test_a_time_limit_leaves_the_rest_unfinished() -> None:
    outcome = replay(traffic(2, 100, rate=50.0), deployed(), ReplayOptions(time_limit=1.0))
    assert outcome.unfinished > 0
    assert outcome.finished + outcome.refused + outcome.unfinished == outcome.requests


def test_equal_prefixes_are_served_from_the_cache_up_to_the_last_full_block() -> None:
    ids = (7, 8, 9, 10)  # 64 tokens each; the prompt ends in the fourth
    first = TraceRequest(0.0, 200, 4, "a", ids, 64)
    second = TraceRequest(10.0, 200, 4, "b", ids, 64)
    assert replay([first, second], deployed()).hit_tokens == 192  # twelve blocks of 16; one token must be computed
    other = TraceRequest(10.0, 200, 4, "b", (7, 8, 11, 12), 64)
    assert replay([first, other], deployed()).hit_tokens == 128


def test_ids_that_differ_only_above_bit_31_never_share() -> None:
    first = TraceRequest(0.0, 100, 4, "a", (5, 6), 64)
    second = TraceRequest(10.0, 100, 4, "b", (5 + (1 << 32), 6 + (1 << 32)), 64)
    assert replay([first, second], deployed()).hit_tokens == 0


def test_ids_that_cover_the_answer_let_the_next_turn_reuse_it() -> None:
    first = TraceRequest(0.0, 64, 64, "a", tuple(range(8)), 16)
    second = TraceRequest(10.0, 160, 4, "b", (*range(8), 90, 91), 16)
    assert replay([first, second], deployed()).hit_tokens == 112  # all that was computed: the last token never was


def test_reserving_the_maximum_leaves_most_of_the_pool_never_used() -> None:
    requests = [TraceRequest(0.0, 100, 60, f"r{i}") for i in range(20)]
    reserve = replay(requests, deployed(200, "reserve-max"))
    paged = replay(requests, deployed(200, "paged"))
    assert reserve.running_peak == 3  # 200 blocks hold three times 63
    assert paged.running_peak > 3 * reserve.running_peak
    assert reserve.kv_mean["reserved_never_used"] > 0.6
    assert paged.kv_mean["reserved_never_used"] == 0
