"""The budget waterfall and the what-if tornado as plain HTML: bars by style alone, text readable on any screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import log2

from octavo.planner.outcome import KV_LINES, Outcome
from octavo.report.replay_data import POOL, Budget, BudgetLine, Change
from octavo.report.replay_verdict import binary, gain, gains, judged_by
from octavo.report.wording import LINE_MEANINGS, LINE_NAMES, percent, seconds

CLASSES = {
    "left to others": "others",
    "weights": "weights",
    "activations": "activations",
    "workspace": "workspace",
    "graphs": "graphs",
    POOL: "pool",
}
SHOWN = 14  # changes before the rest is folded away


# -- budget ------------------------------------------------------------------------------------------------------------


def waterfall(budget: Budget | None, outcome: Outcome) -> str:
    """The device's memory from its total down to the pool; then the pool's lines in the mean, on its own scale."""
    pool = budget.pool if budget else None
    pool_bytes = pool.low if pool else outcome.pool_bytes
    rows = list(_device(budget)) if budget else [_row("KV pool", "", [("pool", 0, 1)], pool_bytes, 1.0, "sum")]
    at = 0.0
    for key in KV_LINES:
        share = outcome.kv_mean.get(key, 0.0)
        if share > 0:
            rows.append(_row(LINE_NAMES[key], LINE_MEANINGS[key], [(key, at, share)], share * pool_bytes, share, "in"))
            at += share
    words = f"Memory of the device by line, the KV pool's under {outcome.strategy}"
    return f'<div class="fall" role="group" aria-label="{escape(words)}">{"".join(rows)}</div>'


def _device(budget: Budget) -> Iterator[str]:
    """The lines that stand one after the other, from the left; hatched: from the low to the high end."""
    yield _row("device", "", [("total", 0, 1)], budget.total, 1.0, "sum")
    at = 0.0
    for line in budget.lines:
        wide, last = line.low / budget.total, line.name == POOL
        bars = [(CLASSES.get(line.name, "rest"), 1 - wide if last else at, wide)]
        if line.high > line.low:
            bars.append(("open", at + wide, (line.high - line.low) / budget.total))
        for _, amount in line.parts[:1]:
            bars.append(("part", at, amount / budget.total))
        yield _row(line.name, _about(line), bars, line.low, wide, "sum" if last else "", line.high)
        at += wide


def _about(line: BudgetLine) -> str:
    parts = ", ".join(f"{binary(amount)} {name}" for name, amount in line.parts)
    return "; ".join(part for part in (f"of it {parts}" if parts else "", line.source) if part)


def _row(
    name: str,
    about: str,
    bars: Sequence[tuple[str, float, float]],
    low: float,
    share: float,
    kind: str,
    high: float = 0,
) -> str:
    marks = "".join(
        f'<i class="{mark}" style="left:{100 * left:.2f}%;width:{100 * min(wide, 1 - left):.2f}%"></i>'
        for mark, left, wide in bars
    )
    amount = f"{binary(low)} to {binary(high)}" if high > low else binary(low)
    small = f"<small>{escape(about)}</small>" if about else ""
    return (
        f'<div class="{kind}"><span>{escape(name)}{small}</span><span class="track">{marks}</span>'
        f'<span class="number">{amount}<small>{percent(share)}</small></span></div>'
    )


def pools(outcomes: Sequence[Outcome]) -> str:
    """A bar of the pool for each strategy, with what the colours mean."""
    bars = "".join(f"<span>{escape(o.strategy)}</span>{_bar(o.kv_mean)}" for o in outcomes)
    there = [key for key in KV_LINES if any(o.kv_mean.get(key, 0.0) > 0 for o in outcomes)]
    legend = "".join(f'<li><i class="{key}"></i>{LINE_NAMES[key]}</li>' for key in there)
    return f'<div class="pools">{bars}</div><ul class="legend">{legend}</ul>'


def _bar(shares: Mapping[str, float]) -> str:
    there = [(key, shares.get(key, 0.0)) for key in KV_LINES if shares.get(key, 0.0) > 0]
    words = ", ".join(f"{LINE_NAMES[key]} {percent(share)}" for key, share in there)
    spans = "".join(
        f'<i class="{key}" style="width:{100 * share:.2f}%" title="{LINE_NAMES[key]}: {percent(share)}"></i>'
        for key, share in there
    )
    return f'<span class="bar" role="img" aria-label="{words}">{spans}</span>'


# -- what to change ----------------------------------------------------------------------------------------------------


def tornado(changes: Sequence[Change]) -> str:
    """A row for each change, the largest gain first; those with less gain are folded away."""
    ranked = sorted(changes, key=lambda change: -gain(change))
    first, rest = ranked[:SHOWN], ranked[SHOWN:]
    folded = f"<details><summary>{len(rest)} more, with less gain</summary>{_rows(rest)}</details>" if rest else ""
    return _rows(first) + folded


def _rows(changes: Sequence[Change]) -> str:
    """On one scale of factors, so that twice and half look alike."""
    ends = [_log(factor) for change in changes if change.after is not None for factor in gains(change)]
    up, down = max([0.0, *ends]), -min([0.0, *ends])
    scale = (up + down) * 1.04 or 1.0
    zero = down * 1.02 / scale
    rows = "".join(_change(change, zero, scale) for change in changes)
    return f'<div class="tornado" style="--zero:{100 * zero:.2f}%">{rows}</div>'


def _log(factor: float) -> float:
    """Capped: a change from or to nothing must not shrink all others to a line."""
    return max(-4.0, min(4.0, log2(factor))) if factor > 0 else -4.0


def _change(change: Change, zero: float, scale: float) -> str:
    flags = "".join(
        f"<code>{escape(engine)}: {escape(flag)}</code>"
        for engine, flag in (("octavo", change.flag_octavo), ("vllm", change.flag_vllm))
        if flag
    )
    name = f'<span class="name">{escape(change.name)}{flags}</span>'
    if change.after is None:
        note = escape(change.note) or "no reason given"
        return f'<div>{name}<span class="track"></span><span class="says">cannot run: {note}</span></div>'
    low, factor, high = (_log(end) / scale for end in gains(change))
    kind = "more" if factor >= 0 else "less"
    if low <= 0 <= high:
        kind += " none"
    bar = f'<i class="{kind}" style="left:{100 * (zero + min(0.0, factor)):.2f}%;width:{100 * abs(factor):.2f}%"></i>'
    if change.error:
        bar += f'<i class="whisker" style="left:{100 * (zero + low):.2f}%;width:{100 * (high - low):.2f}%"></i>'
    return f'<div>{name}<span class="track">{bar}</span><span class="says">{_says(change)}</span></div>'


def _says(change: Change) -> str:
    a, b, factor = change.before, change.after, gain(change)
    if a == b:
        return "no difference"
    assert b is not None  # those that cannot run are worded by their note
    error = f" ± {percent(change.error)}" if change.error is not None else ""
    times = "from none" if factor == float("inf") else f"× {factor:.2f}"
    by_goodput = judged_by(change) == "goodput"
    parts = [f"<b>{times}</b> {'goodput' if by_goodput else 'as fast'}{error}"]
    if by_goodput:
        parts[0] += f": {a.goodput:.2f} → {b.goodput:.2f} requests/s"
    parts.append(
        f"running {a.concurrency:,.1f} → {b.concurrency:,.1f}, p99 TTFT {seconds(a.ttft_p99)} → {seconds(b.ttft_p99)}"
    )
    parts.append(f"a request takes {seconds(a.e2e)} → {seconds(b.e2e)}")
    return "<br>".join([*parts, *([escape(change.note)] if change.note else [])])
