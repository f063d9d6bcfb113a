"""Scrapes metrics of an engine that the test itself steps, and reads the text back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from octavo.build import BuiltEngine
from octavo.outputs import RequestOutput
from octavo.server.metrics import Metrics
from octavo.types import SamplingParams
from tests.server.engines import simulated


class Figures:
    """A scrape by name and labels. `model_name` and `engine` are left out: they are the same everywhere."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
        for family in self.families.values():
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
                self.samples.setdefault(sample.name, {})[frozenset(labels.items())] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[name][frozenset(labels.items())]

    def by(self, name: str, label: str) -> dict[str, float]:
        """The samples of a name, by the value of its only label."""
        return {dict(labels)[label]: value for labels, value in self.samples[name].items()}

    def some(self, name: str, label: str) -> dict[str, float]:
        """Those that are not 0."""
        return {key: value for key, value in self.by(name, label).items() if value}


class Stepped:
    """Stands for the `AsyncEngine`, without a thread: the test steps, and asks between two steps."""

    def __init__(self, built: BuiltEngine) -> None:
        self._engine = built.engine

    async def call(self, ask: Callable[[Any], Any]) -> Any:
        return ask(self._engine)

    def health(self) -> Any:
        return SimpleNamespace(alive=True, error=None, busy=self._engine.busy, stalled=0.0, steps=0)


class Watched:
    """A simulated engine with metrics."""

    def __init__(self, *, vllm: bool = True, compat: bool = False, **how: Any) -> None:
        self.metrics = Metrics(vllm=vllm, compat=compat)
        self.events: list[Any] = []

        def sink(event: Any) -> None:
            self.events.append(event)
            self.metrics.on_event(event)

        self.built = simulated(sink, (self.metrics,), **how)
        self.engine = self.built.engine
        self.metrics.attach(self.built, "m")
        self.outputs: dict[str, RequestOutput] = {}
        self._count = 0

    def add(self, prompt: int | list[int], max_tokens: int | None = 8, **how: Any) -> str:
        """An int prompt: so many tokens unlike any other request's."""
        self._count += 1
        tokens = [self._count * 1000 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        other = {name: how.pop(name) for name in ("tenant", "priority", "deadline", "request_id") if name in how}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **how)
        return self.engine.submit(tokens, params, **other)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for output in self.engine.step():
                self.outputs[output.request_id] = output

    def drain(self) -> None:
        while self.engine.busy:
            self.step()

    def scrape(self) -> Figures:
        return Figures(asyncio.run(self.metrics.scrape(Stepped(self.built))).decode())  # type: ignore[arg-type]


def true_at_each_scrape(w: Watched) -> Figures:
    """What holds whatever the load."""
    figures = w.scrape()
    kv, scheduler = w.engine.scheduler.kv, w.engine.scheduler
    lines = figures.by("octavo_memory_bytes", "line")
    assert sum(lines.values()) == figures("octavo_memory_budget_bytes")
    blocks = figures.by("octavo_kv_blocks", "state")
    assert blocks == {"pinned": kv.capacity - kv.free - kv.evictable, "cached": kv.evictable, "free": kv.free}
    assert sum(blocks.values()) == figures("octavo_kv_pool_blocks") == kv.capacity
    waiting = sum(figures.by("octavo_requests_waiting", "reason").values())
    assert waiting == figures("vllm:num_requests_waiting")
    assert waiting == sum(figures.by("vllm:num_requests_waiting_by_reason", "reason").values())
    live = figures("octavo_requests_running") + waiting
    assert live == len(scheduler.requests)
    ended = sum(figures.by("octavo_requests_finished_total", "reason").values())
    assert figures("octavo_requests_accepted_total") == ended + figures("octavo_requests_expired_total") + live
    assert sum(figures.by("octavo_limiting_resource", "resource").values()) == 1
    assert all(value >= 0 for samples in figures.samples.values() for value in samples.values())
    return figures
