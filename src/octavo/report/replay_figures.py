"""The figures of a strategy in words, in groups: the rows of the tables in page and terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.planner.outcome import KV_LINES, Distribution, Outcome
from octavo.report.replay_data import ReplayReport
from octavo.report.replay_verdict import NEXT_STEP, WASTE, limit_of
from octavo.report.wording import LINE_NAMES, percent, rate, seconds

Cell = Callable[[Outcome], str]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of every strategy: `group` and `name` label it, `cell` words it."""

    group: str
    name: str
    cell: Cell


def rows(report: ReplayReport) -> tuple[Row, ...]:
    """The rows that say something for at least one outcome."""
    return (*_concurrency(report), *_memory(report), *_waiting(report), *_times(), *_rates(report), *_prefix(report))


def binding(o: Outcome) -> str:
    """The limit that binds."""
    limit = limit_of(o)
    return limit[0] if limit else "none"


def binding_share(o: Outcome) -> str:
    """The share of the waiting time that was for it."""
    limit = limit_of(o)
    return percent(limit[1]) if limit else "–"


def waste(o: Outcome) -> float:
    """Share of the pool that was taken and held no token, or was free in pieces too small, in the mean."""
    return sum(o.kv_mean.get(line, 0.0) for line in WASTE)


def _concurrency(report: ReplayReport) -> list[Row]:
    out = [
        Row("running", "mean", lambda o: f"{o.running_mean:,.1f}"),
        Row("running", "peak", lambda o: f"{o.running_peak:,}"),
    ]
    if any(o.bounds for o in report.outcomes):
        out += [
            Row("upper bound", "mean", lambda o: f"{o.bounds.running_mean:,.1f}" if o.bounds else "–"),
        ]
    out += [Row("binding limit", "", binding), Row("binding limit", "of the waiting", binding_share)]
    if any(o.refused or o.unfinished for o in report.outcomes):
        out.append(Row("refused", "unfinished", lambda o: f"{o.refused:,} / {o.unfinished:,} of {o.requests:,}"))
    return out


def _memory(report: ReplayReport) -> list[Row]:
    def line(key: str) -> Row:
        return Row("KV", LINE_NAMES[key], lambda o: percent(o.kv_mean.get(key, 0.0)))

    there = [key for key in KV_LINES if any(o.kv_mean.get(key, 0.0) > 0 for o in report.outcomes)]
    return [
        *(line(key) for key in there),
        Row("KV", "waste", lambda o: percent(waste(o))),
        Row("preempted", "", lambda o: f"{o.preemptions:,}"),
        Row("preempted", "recomputed", lambda o: f"{o.recomputed:,} tok"),
    ]


def _waiting(report: ReplayReport) -> list[Row]:
    """Requests waiting for each cause in the mean: request-seconds over seconds."""

    def cause_row(cause: str) -> Row:
        return Row("waiting", cause, lambda o: f"{o.waited.get(cause, 0.0) / (o.seconds or 1.0):,.2f}")

    causes = {cause for o in report.outcomes for cause in o.waited}
    return [cause_row(cause) for cause in sorted(causes, key=lambda cause: (cause == NEXT_STEP, cause))]


def _times() -> list[Row]:
    def row(label: str, name: str, part: str) -> Row:
        def cell(o: Outcome) -> str:
            times: Distribution = getattr(o, name)
            return seconds(getattr(times, part)) if times.count else "–"

        return Row(label, part, cell)

    parts = ("mean", "p50", "p99")
    labels = (("TTFT", "ttft"), ("ITL", "itl"), ("E2E", "e2e"))
    return [row(label, name, part) for label, name in labels for part in parts]


def _rates(report: ReplayReport) -> list[Row]:
    out = [Row("output", "tokens/s", lambda o: rate(o.tokens_per_second))]
    if any(o.attained is not None for o in report.outcomes):
        out += [
            Row("within SLO", "", lambda o: "–" if o.attained is None else percent(o.attained)),
            Row("goodput", "requests/s", lambda o: "–" if o.goodput is None else f"{o.goodput:.2f}"),
        ]
    return [*out, Row("took", "", lambda o: seconds(o.seconds))]


def _prefix(report: ReplayReport) -> list[Row]:
    """Share of the prompt tokens that the prefix cache served, beside what an unlimited and an optimal one would."""
    asked = max((o.query_tokens for o in report.outcomes), default=0)
    ideal = any(o.bounds and o.bounds.ideal_hits is not None for o in report.outcomes)
    out = []
    if asked and (ideal or any(o.hit_tokens for o in report.outcomes)):
        out.append(Row("prefix hits", "", lambda o: percent(o.hit_rate)))
    if ideal:
        out.append(Row("prefix hits", "ideal", lambda o: _hits(o, "ideal_hits")))
        out.append(Row("prefix hits", "Belady", lambda o: _hits(o, "belady_hits")))
    return out


def _hits(o: Outcome, name: str) -> str:
    hits = getattr(o.bounds, name, None)
    return "–" if hits is None or not o.prompt_tokens else percent(hits / o.prompt_tokens)
