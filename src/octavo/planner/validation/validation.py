"""The simulator against reality: measured runs are replayed and every figure is put beside the engine's own.

Nothing is fitted to these runs: times come from kernel measurements, the pool from the engine's own log or the memory
plan, the rest from the engine's start-up arguments. Output lengths are pinned, as the benchmark client did.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from octavo.planner.deployment import Resolved, resolve
from octavo.planner.outcome import Outcome
from octavo.planner.replay import ReplayOptions, replay
from octavo.planner.validation.runs import MeasuredRun

SCHEMA = "octavo.validation/1"
METRICS = ("ttft", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p99")
GAUGES = ("running", "waiting", "kv_cache_pct")
#: Run -> statistic -> the largest relative error that is accepted. What is not named is shown and not judged.
BOUNDS: Mapping[str, Mapping[str, float]] = {
    "RTX4090_Llama-3.1-8B": {"mean": 0.03, "p99": 0.03, "gauge": 0.03},
    "RTXPRO6000_Llama-3.1-8B": {"mean": 0.05},
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure: measured, simulated, and the relative error that is accepted (None: not judged). Times in seconds,
    gauges in requests or % of the pool's blocks."""

    metric: str
    statistic: str
    measured: float
    simulated: float
    bound: float | None

    @property
    def error(self) -> float:
        """Relative: 0.01 is 1 % too much."""
        return self.simulated / self.measured - 1.0 if self.measured else 0.0

    @property
    def within(self) -> bool:
        return self.bound is None or abs(self.error) <= self.bound


@dataclass(frozen=True, slots=True)
class Validation:
    """A run and its replay. `seconds`: what the replay took; `fidelity`: the sentence on the timing model."""

    run: str
    engine: str
    rows: tuple[Comparison, ...]
    preemptions: int
    seconds: float
    fidelity: str
    notes: tuple[str, ...]

    @property
    def within(self) -> bool:
        """Whether every error is within its stated bound."""
        return all(row.within for row in self.rows)


def validate(run: MeasuredRun, resolved: Resolved | None = None) -> Validation:
    """Replay a run. `resolved` replaces what its deployment resolves to, for experiments with other timers."""
    started = time.perf_counter()
    resolved = resolved or resolve(run.deployment)
    options = ReplayOptions(lives=len(run.requests), known_lengths=True)
    outcome = replay(run.requests, resolved, options)
    bounds = BOUNDS.get(run.name, {})
    rows = (*_latencies(run, outcome, bounds), *_gauges(run, outcome, bounds))
    return Validation(
        run=run.name,
        engine=run.deployment.engine,
        rows=rows,
        preemptions=outcome.preemptions,
        seconds=time.perf_counter() - started,
        fidelity=resolved.fidelity.statement,
        notes=resolved.notes,
    )


def _latencies(run: MeasuredRun, outcome: Outcome, bounds: Mapping[str, float]) -> Iterable[Comparison]:
    first = {life.id: life.first_token or np.nan for life in outcome.lives}
    last = {life.id: life.finished or np.nan for life in outcome.lives}
    measured, simulated = _times(run, run.first, run.last), _times(run, first, last)
    for metric in METRICS:
        for statistic in STATISTICS:
            ours = _figure(simulated[metric], statistic)
            yield Comparison(metric, statistic, _figure(measured[metric], statistic), ours, bounds.get(statistic))


def _times(run: MeasuredRun, first: Mapping[str, float], last: Mapping[str, float]) -> dict[str, np.ndarray[Any, Any]]:
    """Per request, in seconds: from queueing to the first and to the last token, and between tokens."""
    rows = [(first[r.id] - r.arrival, last[r.id] - r.arrival, max(1, r.output_tokens - 1)) for r in run.requests]
    ttft, e2e, gaps = np.array(rows).T
    return {"ttft": ttft, "tpot": (e2e - ttft) / gaps, "e2e": e2e}


def _figure(values: np.ndarray[Any, Any], statistic: str) -> float:
    return float(values.mean() if statistic == "mean" else np.percentile(values, float(statistic[1:])))


def _gauges(run: MeasuredRun, outcome: Outcome, bounds: Mapping[str, float]) -> Iterable[Comparison]:
    """Means over the run. vLLM counts a block as used while a live request refers to it, whether it is full or not."""
    used = sum(outcome.kv_mean[line] for line in ("live", "slack", "reserved_used_later", "quarantined"))
    simulated = {"running": outcome.running_mean, "waiting": outcome.waiting_mean, "kv_cache_pct": 100.0 * used}
    for gauge in GAUGES:
        values: Sequence[float] = run.gauges.get(gauge, ())
        if values:
            yield Comparison(gauge, "mean", float(np.mean(values)), simulated[gauge], bounds.get("gauge"))


def as_json(validations: Iterable[Validation]) -> dict[str, Any]:
    """All figures, with a stable schema."""
    runs = []
    for v in validations:
        data = {name: value for name, value in asdict(v).items() if name != "rows"}
        rows = [asdict(row) | {"error": row.error, "within": row.within} for row in v.rows]
        runs.append(data | {"rows": rows, "within": v.within})
    return {"schema": SCHEMA, "runs": runs}
