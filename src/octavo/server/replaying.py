"""The what-if's work, in a process of its own: fit step times, replay the recorded traffic twice, compare.

Imports nothing of the engine's runners, so that the process starts quickly and stays small.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import fmean, median
from typing import Any

from octavo.errors import OctavoError
from octavo.kv.spec import KVSpec
from octavo.planner.deployment import Deployment, Fidelity, Level, Resolved
from octavo.planner.outcome import Outcome
from octavo.planner.replay import replay
from octavo.planner.timing.fitting import Bound, HeldOut
from octavo.planner.timing.from_log import split_log
from octavo.planner.timing.step_times import CalibrationError, StepFit, fit_steps
from octavo.planner.traces.api import TraceRequest
from octavo.runner.timing import StepShape
from octavo.scheduler.config import SchedulerConfig
from octavo.server.traffic import Recorded

# Beyond this a fit says nothing at all; below it, its error is told.
_BOUND = Bound(median=1.0, p90=10.0)
_ROUGH = 0.25  # median error from which the answer is said to be rough
_GUESS = 128  # tokens of an answer when none has ended yet
_NICE = 10  # the engine goes first


@dataclass(frozen=True, slots=True)
class Settings:
    """An engine as far as a replay depends on it. `page_bytes`: of one page of one layer group."""

    strategy: str
    block_size: int
    pages: int
    page_bytes: int
    windows: tuple[int | None, ...]
    prefix_caching: bool
    scheduler: SchedulerConfig

    @property
    def kv_bytes(self) -> int:
        return self.pages * self.page_bytes


@dataclass(frozen=True, slots=True)
class Job:
    """`requests`: in order of arrival; those that still run have no `took`, and as `output` what they have generated.
    `block_size`: of their hashes. `notes`: what the replay leaves out, as sentences."""

    requests: tuple[Recorded, ...]
    block_size: int
    steps: tuple[tuple[StepShape, float], ...]
    now: Settings
    changed: Settings
    window_s: float
    notes: tuple[str, ...] = ()


def work(answers: Connection, job: Job) -> None:
    """The process: sends ("", answer), or (code, sentence) for what is impossible or for times that no fit explains."""
    os.nice(_NICE)
    try:
        answers.send(("", answer(job)))
    except CalibrationError as error:
        answers.send(("steps_unexplained", str(error)))
    except OctavoError as error:
        answers.send(("impossible_change", str(error)))


def answer(job: Job) -> dict[str, Any]:
    """The JSON of the what-if. Raises OctavoError for settings that cannot work and steps that no fit explains."""
    windows = tuple(dict.fromkeys(window for window in job.now.windows if window is not None))
    fitted, held = split_log(job.steps)
    remedy = "The engine's machine may be busy with other work: ask again later."
    fit = fit_steps(fitted, held, windows, bound=_BOUND, remedy=remedy)
    trace = tuple(_trace(job))
    before, after = (replay(trace, _resolved(settings, fit)) for settings in (job.now, job.changed))
    now, changed = _summary(before, job.now), _summary(after, job.changed)
    difference = {
        name: changed[name] - now[name] for name in now if isinstance(now[name], (int, float)) and name != "block_size"
    }
    return {
        "requests": len(job.requests),
        "window_s": job.window_s,
        "now": now,
        "changed": changed,
        "difference": difference,
        "sentence": _sentence(job, before, after),
        "fidelity": " ".join([*_fidelity(job, before, fit.held_out, len(job.steps)), *job.notes]),
    }


def _trace(job: Job) -> Iterator[TraceRequest]:
    """One trace request for each sample. How long those that still run will be is guessed."""
    ended = [one.output for one in job.requests if one.took is not None and one.output]
    usual = round(median(ended)) if ended else _GUESS
    first = job.requests[0].arrival
    for one in sorted(job.requests, key=lambda request: request.arrival):
        output = one.output or 0
        if one.took is None:
            output = max(output + 1, usual)
            output = output if one.max_tokens is None else min(output, one.max_tokens)
        for sample in range(one.samples):
            yield TraceRequest(
                arrival=one.arrival - first,
                prompt_tokens=one.prompt_tokens,
                output_tokens=max(1, output),
                id=one.id if one.samples == 1 else f"{one.id}#{sample}",
                hashes=tuple(one.hashes or ()),
                hash_block=job.block_size,
                max_tokens=None if one.max_tokens is None else max(1, one.max_tokens),
            )


def _resolved(settings: Settings, fit: StepFit) -> Resolved:
    """The engine as the planner takes deployments. Of the model it needs nothing but its pages and step times."""
    deployment = Deployment(
        model="the live engine",
        strategy=settings.strategy,
        block_size=settings.block_size,
        prefix_caching=settings.prefix_caching,
    )
    return Resolved(
        deployment=deployment,
        spec=KVSpec("the live engine", (), "", 1, 0, None, settings.scheduler.max_model_len),
        scheduler=settings.scheduler,
        pages=settings.pages,
        windows=settings.windows,
        block_bytes=settings.page_bytes,
        timer=fit.timer(),
        plan=None,
        fidelity=Fidelity(Level.CALIBRATED, fit.held_out.median, "fitted to the live engine's own steps"),
    )


def _summary(outcome: Outcome, settings: Settings) -> dict[str, Any]:
    """Seconds, shares and counts; `used_share`: of the pool, with token states in it, weighted by time."""
    return {
        "strategy": settings.strategy,
        "block_size": settings.block_size,
        "kv_bytes": settings.kv_bytes,
        "max_num_seqs": settings.scheduler.max_num_seqs,
        "max_num_batched_tokens": settings.scheduler.max_num_batched_tokens,
        "concurrency_mean": round(outcome.running_mean, 4),
        "concurrency_max": outcome.running_peak,
        "ttft_mean": round(outcome.ttft.mean, 6),
        "ttft_p99": round(outcome.ttft.p99, 6),
        "itl_mean": round(outcome.itl.mean, 6),
        "e2e_mean": round(outcome.e2e.mean, 6),
        "preemptions": outcome.preemptions,
        "refused": outcome.refused,
        "waiting_by_cause_s": {cause: round(seconds, 6) for cause, seconds in outcome.waited.items()},
        "used_share": round(outcome.kv_mean.get("live", 0.0), 6),
    }


def _sentence(job: Job, before: Outcome, after: Outcome) -> str:
    now, changed = job.now, job.changed
    pairs = [
        (name, old, new)
        for name, old, new in (
            ("strategy", now.strategy, changed.strategy),
            ("block size", now.block_size, changed.block_size),
            ("KV bytes", now.kv_bytes, changed.kv_bytes),
            ("max_num_seqs", now.scheduler.max_num_seqs, changed.scheduler.max_num_seqs),
            (
                "max_num_batched_tokens",
                now.scheduler.max_num_batched_tokens,
                changed.scheduler.max_num_batched_tokens,
            ),
        )
        if old != new
    ]
    what = ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs) or "the settings as they are"
    refused = f"; {after.refused} requests would be refused, too long for the pool" * bool(after.refused)
    if (before.e2e, before.ttft, before.running_mean) == (after.e2e, after.ttft, after.running_mean):
        return f"{what}: nothing would change for these {len(job.requests)} requests{refused}."
    return (
        f"{what}: {before.running_mean:.3g} -> {after.running_mean:.3g} requests run at once in the mean, the first "
        f"token comes after {before.ttft.mean:.3g} -> {after.ttft.mean:.3g} s, a whole request takes "
        f"{before.e2e.mean:.3g} -> {after.e2e.mean:.3g} s, preemptions {before.preemptions} -> "
        f"{after.preemptions}{refused}."
    )


def _fidelity(job: Job, before: Outcome, held: HeldOut, steps: int) -> list[str]:
    """How far the answer can be trusted: the fit's own error, and the replay as configured beside what was measured."""
    out = [
        f"All figures are estimates: step times are fitted to {steps} recent steps of this engine; on the "
        f"{held.points} of them left out the fit is off by {held.median:.1%} (median) and {held.p90:.1%} (90th "
        "percentile)."
    ]
    if held.median > _ROUGH:
        out.append("That is rough: steps of the same shape took very different times, as on a machine with other work.")
    ended = [one for one in job.requests if one.took is not None and one.ttft is not None]
    if ended:
        ttft = fmean(one.ttft for one in ended if one.ttft is not None)
        took = fmean(one.took for one in ended if one.took is not None)
        out.append(
            f"As configured the replay gives {before.ttft.mean:.3g} s to the first token and {before.e2e.mean:.3g} s "
            f"for a whole request; {len(ended)} requests that have ended measured {ttft:.3g} s and {took:.3g} s."
        )
    running = sum(one.took is None for one in job.requests)
    if running:
        out.append(f"{running} requests still run and are taken to become as long as the median of those that ended.")
    out.append("The replay begins with an empty pool and an idle engine.")
    return out
