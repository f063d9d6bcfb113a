"""A replay's report as the numbers that the page's scripts draw: rounded, and in runs of equal cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from octavo.planner.outcome import KV_LINES, Life, Outcome, PoolMap, Timeline
from octavo.report.replay_data import RateCurve, ReplayReport
from octavo.report.replay_phases import phases
from octavo.report.wording import LINE_MEANINGS, LINE_NAMES

PHASES = ("queued", "prefill", "decode", "preempted")


def pack(report: ReplayReport) -> dict[str, Any]:
    """Times in seconds after the trace's start; `runs` as `frame.js` and `charts.js` read them."""
    runs = [_run(outcome) for outcome in report.outcomes]
    bound = next((b.seconds for b in report.slo.bounds if b.metric == "ttft"), None) if report.slo else None
    return {
        "lines": [{"key": key, "name": LINE_NAMES[key], "meaning": LINE_MEANINGS[key]} for key in KV_LINES],
        "phases": PHASES,
        "main": report.main.strategy if report.main else "",
        "runs": runs,
        "curves": [_curve(curve) for curve in report.curves or ()],
        "ttft_bound": bound,
    }


def _run(o: Outcome) -> dict[str, Any]:
    spent = o.seconds or 1.0
    return {
        "name": o.strategy,
        "pool": o.pool_tokens,
        "block": o.block_size,
        "peak": o.running_peak,
        "mean": round(o.running_mean, 3),
        "kv_mean": {key: round(o.kv_mean.get(key, 0.0), 5) for key in KV_LINES},
        "waited": {cause: round(seconds / spent, 3) for cause, seconds in o.waited.items()},
        "preempted": o.preemptions,
        "timeline": _timeline(o.timeline),
        "map": _map(o.map),
        "requests": [_request(life, o.seconds) for life in o.lives],
    }


def _timeline(line: Timeline | None) -> dict[str, Any]:
    """Stretches by their beginnings, and one of nothing where the last ends."""
    if line is None or not line.t:
        return {"t": [], "running": [], "waiting": [], "causes": [], "preemptions": [], "step": []} | {
            key: [] for key in KV_LINES
        }
    there = range(len(line.t))
    causes = [{cause: round(v[i], 2) for cause, v in line.waiting.items() if round(v[i], 2) > 0} for i in there]
    nothing = (0.0,) * len(line.t)
    return {
        "t": [0.0, *_rounded(line.t, 4)],
        "running": [*_rounded(line.running, 2), 0],
        "waiting": [*(round(sum(entry.values()), 2) for entry in causes), 0],
        "causes": [*causes, {}],
        "preemptions": [*line.preemptions, 0],
        "step": [*_rounded(line.step, 6), 0],
        **{key: [*_rounded(line.kv.get(key, nothing), 4), 0] for key in KV_LINES},
    }


def _map(pool: PoolMap | None) -> dict[str, Any]:
    """A column is [code, cells, code, cells, …]; code -1: free, -2: cached, else 2 x owner + (1 if written)."""
    if pool is None:
        return {"t": [], "rows": 0, "columns": [], "requests": []}
    columns = [_column(owners, full) for owners, full in zip(pool.owner, pool.written, strict=True)]
    rows = len(pool.owner[0]) if pool.owner else 0
    return {"t": _rounded(pool.t, 4), "rows": rows, "columns": columns, "requests": list(pool.requests)}


def _column(owners: Sequence[int], written: Sequence[bool]) -> list[int]:
    column: list[int] = []
    for owner, full in zip(owners, written, strict=True):
        code = 2 * owner + bool(full) if owner >= 0 else owner
        if column and column[-2] == code:
            column[-1] += 1
        else:
            column += [code, 1]
    return column


def _request(life: Life, end: float) -> list[Any]:
    """[id, arrival, admitted, first token, finished, prompt, output, cached, preemptions, reason, recomputed,
    {cause: seconds}, [phase, its end, phase, its end, …]]; the first ten as in a comparison's page."""
    parts = [value for phase in phases(life, end) for value in (PHASES.index(phase.name), round(phase.end, 4))]
    times = [life.arrival, life.admitted, life.first_token, life.finished]
    return [
        life.id,
        *(None if time is None else round(time, 4) for time in times),
        *(life.prompt_tokens, life.output_tokens, life.cached_tokens, len(life.preempted), life.reason),
        life.recomputed,
        {cause: round(spent, 3) for cause, spent in (life.waited or {}).items()},
        parts,
    ]


def _curve(curve: RateCurve) -> dict[str, Any]:
    return {
        "name": curve.strategy,
        "rates": _rounded(curve.rates, 5),
        "goodput": [None if value is None else round(value, 5) for value in curve.goodput],
        "attained": [None if value is None else round(value, 5) for value in curve.attained],
        "running": _rounded(curve.running, 3),
        "ttft": _rounded(curve.ttft_p99, 5),
        "knee": curve.knee,
    }


def _rounded(values: Iterable[float], digits: int) -> list[float]:
    return [round(value, digits) for value in values]
