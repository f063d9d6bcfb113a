"""Scrapes of an engine in its thread: of one moment each, and answered even if the engine does not."""

from __future__ import annotations

import asyncio
import threading

from octavo.aio import AsyncEngine, Submission
from octavo.clock import VirtualClock
from octavo.runner.api import StepPlan, StepResult
from octavo.runner.simulated import SimulatedRunner
from octavo.server.metrics import CONTENT_TYPE, Metrics
from octavo.types import SamplingParams
from tests.server.engines import simulated
from tests.server.scraping import Figures


class Held(SimulatedRunner):
    """Does not finish a step before it may."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.entered, self.go = threading.Event(), threading.Event()

    def run(self, plan: StepPlan) -> StepResult:
        self.entered.set()
        self.go.wait(30)
        return super().run(plan)


def test_an_engine_that_does_not_answer_leaves_a_scrape_with_the_last_figures() -> None:
    clock = VirtualClock()
    runner = Held(clock)
    metrics = Metrics()
    built = simulated(metrics.on_event, (metrics,), clock=clock, runner=runner)
    metrics.attach(built, "m")

    async def story() -> list[Figures]:
        engine = AsyncEngine(built.engine)
        first = Figures((await metrics.scrape(engine)).decode())  # not started
        engine.start()
        second = Figures((await metrics.scrape(engine)).decode())
        (stream,) = await engine.submit([Submission("a", [1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))])
        await asyncio.to_thread(runner.entered.wait)
        third = Figures((await metrics.scrape(engine, patience=0.05)).decode())
        runner.go.set()
        async for _ in stream:
            pass
        fourth = Figures((await metrics.scrape(engine)).decode())
        await engine.stop()
        return [first, second, third, fourth]

    first, second, third, fourth = asyncio.run(story())
    assert [figures("octavo_engine_responding") for figures in (first, second, third, fourth)] == [0, 1, 0, 1]
    assert "octavo_kv_pool_blocks" not in first.samples
    assert third("octavo_requests_accepted_total") == 0  # the last known
    assert third("octavo_engine_last_step_age_seconds") > 0
    assert fourth("octavo_requests_finished_total", reason="length") == 1


def test_scrapes_beside_a_running_engine_are_of_one_moment_each() -> None:
    metrics = Metrics()
    built = simulated(metrics.on_event, (metrics,), pages=40, admission="prompt", max_queue=64)
    metrics.attach(built, "m")

    async def client(engine: AsyncEngine, number: int) -> None:
        params = SamplingParams(max_tokens=20 + number % 7, ignore_eos=True)
        (stream,) = await engine.submit([Submission(f"c{number}", list(range(number, number + 20)), params)])
        async for _ in stream:
            if number % 5 == 0:
                stream.abort()

    async def story() -> None:
        engine = AsyncEngine(built.engine)
        engine.start()
        clients = [asyncio.create_task(client(engine, number)) for number in range(40)]
        while True:
            figures = Figures((await metrics.scrape(engine)).decode())
            assert sum(figures.by("octavo_memory_bytes", "line").values()) == figures("octavo_memory_budget_bytes")
            live = figures("vllm:num_requests_running") + figures("vllm:num_requests_waiting")
            ended = sum(figures.by("octavo_requests_finished_total", "reason").values())
            assert figures("octavo_requests_accepted_total") == live + ended
            if all(one.done() for one in clients):
                break
        await asyncio.gather(*clients)
        figures = Figures((await metrics.scrape(engine)).decode())  # behind the last aborts
        await engine.stop()
        assert figures("vllm:num_requests_running") == 0

    asyncio.run(story())


def test_the_content_type_is_that_of_the_text_format() -> None:
    assert CONTENT_TYPE == "text/plain; version=0.0.4; charset=utf-8"
