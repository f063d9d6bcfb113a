"""Decision logs of small simulated runs, one for each cause of waiting, and a probe that asks `explain` itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simulation import Bench

from octavo import events as ev
from octavo.log import LogHeader, LogWriter
from octavo.planner.explain.log import follow
from octavo.scheduler.explain import Wait
from octavo.scheduler.scheduler import Scheduler

BLOCK = 4


def recorded(path: Path, strategy: str, pages: int, config: dict[str, Any], live: Callable[[Bench], None]) -> Bench:
    """A bench whose every event goes to a log at `path` while `live` drives it."""
    bench = Bench(strategy, pages=pages, block=BLOCK, config=config)
    header = LogHeader(strategy, pages, BLOCK, (None,), True, bench.scheduler.config)
    writer = LogWriter(path, header)
    bench.scheduler = header.build(lambda event: (writer(event), bench.events.append(event)))
    bench.kv = bench.scheduler.kv
    live(bench)
    writer.close()
    return bench


def busy(bench: Bench, seed: int = 5) -> None:
    """Requests that come while others run, many more than fit; some are aborted, some preempted from outside."""
    rng = random.Random(seed)
    for step in range(160):
        if rng.random() < 0.4:
            n = 2 if rng.random() < 0.1 else 1
            bench.add([rng.randint(0, 3) for _ in range(rng.randint(1, 40))], rng.choice((1, 9, 30)), n=n, seed=step)
        live = sorted(bench.scheduler.requests)
        if live and rng.random() < 0.03:
            bench.scheduler.abort(rng.choice(live), bench.clock.now())
        elif live and rng.random() < 0.03:
            bench.scheduler.preempt(rng.choice(live), bench.clock.now())
        bench.step()
    bench.run()


def slots(bench: Bench) -> None:
    for _ in range(6):
        bench.add(8, 20)
    bench.run()


def full(bench: Bench) -> None:
    """A long one, and others that find no room behind it."""
    bench.add(30, 30)
    bench.steps(3)
    for _ in range(4):
        bench.add(40, 24)
    bench.run()


def fragmented(bench: Bench) -> None:
    """Every second of four regions is given back: half of the pool is free, in two pieces."""
    ids = [bench.add(9, 7) for _ in range(4)]
    bench.step()
    for request in ids[::2]:
        bench.scheduler.abort(request, bench.clock.now())
    bench.add(30, 2)
    bench.run()


def held(bench: Bench) -> None:
    """There is room for the second one now, and not for what both may come to."""
    bench.add(8, 24)
    bench.step()
    bench.add(8, 48)
    bench.run()


def budget(bench: Bench) -> None:
    for _ in range(4):
        bench.add(60, 4)
    bench.run()


def quota(bench: Bench) -> None:
    for _ in range(4):
        bench.add(20, 20, tenant="t")
    bench.run()


def strict(bench: Bench) -> None:
    """A small one stands behind a big one that has no room."""
    bench.add(40, 20)
    bench.step()
    bench.add(44, 4)
    bench.add(2, 2)
    bench.run()


#: cause -> (pages, settings, what happens, strategies that it happens to)
EVERY = ("growing", "paged", "reserve-max", "reserve-oracle", "reserve-pow2")
PROMPT = dict(admission="prompt", max_num_batched_tokens=256, max_model_len=64)
SCENARIOS: dict[str, tuple[int, dict[str, Any], Callable[[Bench], None], tuple[str, ...]]] = {
    "slots": (256, {**PROMPT, "max_num_seqs": 2}, slots, EVERY),
    "memory: full": (20, PROMPT, full, EVERY),
    "memory: fragmented": (16, {**PROMPT, "max_num_seqs": 4}, fragmented, ("reserve-oracle", "reserve-pow2")),
    "memory: held": (15, {**PROMPT, "admission": "peak"}, held, ("growing", "paged")),
    "step budget": (256, {**PROMPT, "max_num_batched_tokens": 16}, budget, EVERY),
    "behind (memory: full)": (20, {**PROMPT, "max_skips": 0}, strict, EVERY),
    "quota": (80, {**PROMPT, "quotas": {"t": 20}}, quota, EVERY),
}
CASES = [(cause, strategy) for cause, scenario in SCENARIOS.items() for strategy in scenario[3]]


def scenario(path: Path, cause: str, strategy: str) -> Bench:
    pages, config, live, _ = SCENARIOS[cause]
    return recorded(path, strategy, pages, config, live)


@dataclass
class Probe:
    """Asks the scheduler after every plan why each request waits, and notes what else can be known by counting."""

    waits: dict[tuple[float, str], Wait] = field(default_factory=dict)
    running_seconds: float = 0.0
    events: list[ev.Event] = field(default_factory=list)
    _scheduler: Scheduler | None = None
    _now: float = 0.0

    def begin(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def on_event(self, event: ev.Event) -> None:
        self.events.append(event)
        now = getattr(event, "now", None)
        if now is not None and self._scheduler is not None:
            self.running_seconds += len(self._scheduler.running) * (now - self._now)
            self._now = now

    def on_planned(self, scheduler: Scheduler, now: float) -> None:
        for request in scheduler.requests:
            wait = scheduler.explain(request, now)
            if wait is not None:
                self.waits[now, request] = wait

    def on_written(self, scheduler: Scheduler) -> None:
        """Nothing is asked then."""


def probed(path: Path) -> Probe:
    probe = Probe()
    follow(path, probe)
    return probe
