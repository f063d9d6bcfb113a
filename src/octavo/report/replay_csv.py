"""A replay as CSV: one row for each strategy, or one for each request; column names say the unit."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path

from octavo.planner.outcome import KV_LINES, Distribution, Life, Outcome
from octavo.report.replay_data import ReplayReport

DISTRIBUTIONS = ("ttft", "itl", "tpot", "e2e", "queue")
PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "highest")


def write_csv(path: Path, report: ReplayReport) -> None:
    """Write `path` with a row for each strategy and, where lives were kept, `<name>.requests.csv` beside it."""
    path.write_text(strategies_csv(report.outcomes), encoding="utf-8", newline="")
    if any(outcome.lives for outcome in report.outcomes):
        beside = path.with_suffix(".requests.csv")
        beside.write_text(requests_csv(report.outcomes), encoding="utf-8", newline="")


def strategies_csv(outcomes: Sequence[Outcome]) -> str:
    """A row for each strategy; a figure that there is not is empty."""
    causes = sorted({cause for outcome in outcomes for cause in outcome.waited})
    return _table([_figures(outcome, causes) for outcome in outcomes])


def requests_csv(outcomes: Sequence[Outcome]) -> str:
    """A row for each strategy and request whose life was kept; times in seconds after the trace's start."""
    causes = sorted({cause for outcome in outcomes for life in outcome.lives for cause in life.waited or {}})
    return _table([_life(outcome.strategy, life, causes) for outcome in outcomes for life in outcome.lives])


def _figures(o: Outcome, causes: Iterable[str]) -> dict[str, object]:
    row: dict[str, object] = {"strategy": o.strategy, "pool_tokens": o.pool_tokens, "pool_bytes": o.pool_bytes}
    row |= {name: getattr(o, name) for name in ("block_size", "requests", "finished", "refused", "unfinished")}
    row |= {"seconds": o.seconds, "busy_seconds": o.busy_seconds, "steps": o.steps}
    row |= {"running_mean": o.running_mean, "running_peak": o.running_peak, "waiting_mean": o.waiting_mean}
    row |= {
        "bound_running_mean": o.bounds and o.bounds.running_mean,
        "bound_running_peak": o.bounds and o.bounds.running_peak,
    }
    row |= {f"kv_mean_{line}": o.kv_mean.get(line, 0.0) for line in KV_LINES}
    row |= {f"kv_peak_{line}": o.kv_peak.get(line, 0.0) for line in KV_LINES}
    for name in DISTRIBUTIONS:
        times: Distribution = getattr(o, name)
        row |= {f"{name}_{part}_s": getattr(times, part) if times.count else None for part in PERCENTILES}
    row |= {"attained": o.attained, "goodput_per_s": o.goodput}
    row |= {"requests_per_s": o.requests_per_second, "output_tokens_per_s": o.tokens_per_second}
    row |= {
        name: getattr(o, name) for name in ("prompt_tokens", "output_tokens", "preemptions", "discarded", "recomputed")
    }
    row |= {"query_tokens": o.query_tokens, "hit_tokens": o.hit_tokens}
    row |= {
        "ideal_hit_tokens": o.bounds and o.bounds.ideal_hits,
        "belady_hit_tokens": o.bounds and o.bounds.belady_hits,
    }
    return row | _waited(o.waited, causes) | {"binding": o.binding}


def _life(strategy: str, life: Life, causes: Iterable[str]) -> dict[str, object]:
    row: dict[str, object] = {"strategy": strategy, "id": life.id}
    for name in ("arrival", "admitted", "first_token", "finished"):
        row[f"{name}_s"] = getattr(life, name)
    for name in ("prompt_tokens", "cached_tokens", "output_tokens", "recomputed"):
        row[name] = getattr(life, name)
    row |= {"preemptions": len(life.preempted), "reason": life.reason}
    return row | _waited(life.waited or {}, causes)


def _waited(waited: Mapping[str, float], causes: Iterable[str]) -> dict[str, object]:
    return {f"waited_{cause.replace(': ', '_').replace(' ', '_')}_s": waited.get(cause, 0.0) for cause in causes}


def _table(rows: Sequence[Mapping[str, object]]) -> str:
    """RFC 4180. A text that a spreadsheet would take for a formula gets a leading apostrophe."""
    out = StringIO()
    if rows:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows([{name: _cell(value) for name, value in row.items()} for row in rows])
    return out.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return f"{value:.6g}" if isinstance(value, float) else value
