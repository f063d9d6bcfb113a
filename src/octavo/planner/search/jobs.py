"""Many replays at once over local cores: picklable jobs in, results in the order of the jobs, whoever ends first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from typing import TypeVar

from octavo.errors import OctavoError
from octavo.planner.deployment import Deployment, Resolved, resolve
from octavo.planner.outcome import Outcome
from octavo.planner.replay import ReplayOptions, replay
from octavo.planner.traces.api import TraceRequest
from octavo.runner.timing import RooflineTimer

Given = TypeVar("Given")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Job:
    """One replay: of these requests (a tuple, or a Trace that a worker reads), on this deployment.

    seed: see `worked_out`
    """

    deployment: Deployment
    requests: Iterable[TraceRequest]
    options: ReplayOptions
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Impossible:
    """A deployment that cannot work, in the words of the error (with the shortfall in bytes where memory lacks)."""

    reason: str


def run_job(job: Job) -> Outcome | Impossible:
    """Replay a job. Other errors than that the deployment cannot work are the caller's."""
    resolved = worked_out(job.deployment, job.seed)
    return resolved if isinstance(resolved, Impossible) else replay(job.requests, resolved, job.options)


@lru_cache(maxsize=16)
def worked_out(deployment: Deployment, seed: int = 0) -> Resolved | Impossible:
    """`resolve`, remembered: a worker replays one deployment many times.

    Seed 0 has the times as fitted; others, in turn, those of a fit to resampled points where the fit offers them, so
    that an error bar over seeds covers the timing model, too.
    """
    try:
        resolved = resolve(deployment)
    except OctavoError as error:
        return Impossible(str(error))
    drawn = resolved.timer.alternatives() if seed and isinstance(resolved.timer, RooflineTimer) else []
    return replace(resolved, timer=drawn[(seed - 1) % len(drawn)]) if drawn else resolved


class Workers:
    """Calls top-level functions in `count` processes (None: as many as cores), or here when that is 1.

    Processes are started afresh instead of forked, so that nothing of the caller's threads or memory reaches them and
    the same code runs on every platform. Use as a context manager: the processes end with it.
    """

    def __init__(self, count: int | None = None) -> None:
        if count is not None and count < 1:
            raise OctavoError(f"workers is {count}; it must be at least 1, or left out for one per core.")
        self.count = count or _cores()
        self._pool: ProcessPoolExecutor | None = None

    def map(self, function: Callable[[Given], Found], jobs: Iterable[Given]) -> list[Found]:
        """`function` of each job, in the order of the jobs."""
        given = list(jobs)
        if self.count == 1 or len(given) < 2:
            return [function(job) for job in given]
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.count, mp_context=get_context("spawn"))
        return list(self._pool.map(function, given))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
