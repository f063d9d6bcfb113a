"""/metrics: counts along on the engine's thread, and tells it all at a scrape, as of one moment between two steps."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest

from octavo import events as ev
from octavo.aio import AsyncEngine, EngineDead
from octavo.build import BuiltEngine
from octavo.runner.api import StepPlan
from octavo.scheduler.scheduler import Progress, Scheduler
from octavo.server.metrics_counts import Counts
from octavo.server.metrics_families import Families
from octavo.server.metrics_octavo import add_octavo
from octavo.server.metrics_reading import Reading, take_reading
from octavo.server.metrics_vllm import add_compat, add_vllm
from octavo.types import FinishReason, Sequence

log = logging.getLogger("octavo.metrics")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PATIENCE = 2.0  # seconds that a scrape waits for the engine
#: Why a request is turned away before the engine has it.
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens", "queue_timeout", "draining", "invalid")


class Metrics:
    """The engine's sink and watcher, and a collector of a registry of its own."""

    def __init__(self, vllm: bool = True, compat: bool = False) -> None:
        """`vllm`: also under vLLM's names; `compat`: and under older ones of these."""
        self.registry = CollectorRegistry()
        self._vllm = vllm
        self._compat = vllm and compat
        self._built: BuiltEngine | None = None
        self._counts: Counts | None = None
        self._labels: dict[str, str] = {}
        self._rejected = Counter(dict.fromkeys(REJECTIONS, 0))
        self._reading: Reading | None = None  # the latest
        self._responding = False
        self._stalled = 0.0
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def attach(self, built: BuiltEngine, model_name: str) -> None:
        """The engine that is looked at; before its first request."""
        self._built = built
        self._counts = Counts(built.engine.scheduler)
        self._labels = {"model_name": model_name, "engine": "0"}

    # -- on the engine's thread ---------------------------------------------------------------------------------------

    def on_event(self, event: ev.Event) -> None:
        if self._counts is not None:
            self._counts.on_event(event)

    def on_written(self, scheduler: Scheduler) -> None:
        """Nothing: gauges are read at a scrape."""

    def on_step(self, scheduler: Scheduler, plan: StepPlan, progress: Seq[Progress], start: float, end: float) -> None:
        if self._counts is not None:
            self._counts.on_step(scheduler, plan, progress, start, end)

    def on_finish(self, seq: Sequence, reason: FinishReason, now: float) -> None:
        """Nothing: the event `Finished` has said so."""

    # -- on the event loop --------------------------------------------------------------------------------------------

    def http_rejected(self, reason: str) -> None:
        """A request was turned away before or at submit; `reason`: one of `REJECTIONS`."""
        self._rejected[reason] += 1

    async def scrape(self, engine: AsyncEngine, patience: float = PATIENCE) -> bytes:
        """All figures as text. Those of an engine that does not answer are the last known ones."""
        built, counts = self._built, self._counts
        try:
            if built is not None and counts is not None:
                reading = engine.call(lambda _: take_reading(built, counts))
                self._reading = await asyncio.wait_for(reading, patience)
                self._responding = True
        except (TimeoutError, EngineDead) as error:
            log.warning("the engine does not answer: %s", error or f"no step has ended for {patience:g} s")
            self._responding = False
        self._stalled = engine.health().stalled
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """What the registry asks for: the latest reading."""
        out = Families(self._labels)
        out.gauge("octavo_engine_responding", "1 if these figures are of now.", int(self._responding))
        says = "Seconds since anything moved although there is work; 0 without work."
        out.gauge("octavo_engine_last_step_age_seconds", says, self._stalled)
        says = "Requests turned away over HTTP, by why; also those that the engine refused as queue_full."
        out.counters("octavo_http_rejected", says, "reason", self._rejected)
        if self._reading is not None and self._built is not None:
            add_octavo(out, self._reading, self._built)
            if self._vllm:
                add_vllm(out, self._reading, self._built, self._rejected)
            if self._compat:
                add_compat(out, self._reading)
        return out
