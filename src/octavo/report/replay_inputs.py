"""What the planner found, as the report's data: budget, settings, curves and changes."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf
from typing import TYPE_CHECKING

from octavo.kv.budget import Amount, MemoryPlan
from octavo.planner.deployment import Resolved
from octavo.report.replay_data import POOL, Budget, BudgetLine, Change, Figures, RateCurve, Setting
from octavo.report.wording import count

if TYPE_CHECKING:
    from octavo.planner.search import capacity, changes
    from octavo.planner.search.whatif import WhatIf

FROM_DEPLOYMENT = ("engine", "strategy", "block_size", "tp", "kv_dtype", "utilization", "num_blocks", "kv_memory")
FROM_SCHEDULER = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "admission", "victims", "max_skips")


def settings_of(resolved: Resolved) -> tuple[Setting, ...]:
    """What the deployment came to, and where each value came from."""
    deployment, sources = resolved.deployment, resolved.sources
    values = {name: getattr(deployment, name) for name in FROM_DEPLOYMENT}
    values |= {name: getattr(resolved.scheduler, name) for name in FROM_SCHEDULER}
    values["prefix_caching"] = deployment.prefix_caching
    return tuple(
        Setting(name, _shown(value), sources.get(name, "flag, or its default"))
        for name, value in values.items()
        if value is not None
    )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return count(value) if isinstance(value, int) else str(value)


def budget_of(resolved: Resolved) -> Budget | None:
    """The memory of one rank's device, None when it is not known."""
    return None if resolved.plan is None else plan_budget(resolved.plan, resolved.pages * resolved.block_bytes)


def plan_budget(plan: MemoryPlan, pool_bytes: int) -> Budget:
    """A memory plan as lines that end in the pool really laid out.

    What utilisation leaves to others is a line, and so is what lies between the estimates' low ends and the pool.
    """
    total = plan.total.low
    usable = total * plan.utilization.numerator // plan.utilization.denominator
    share = f"1 - utilization {float(plan.utilization):g}"
    logits = (("logits: vocabulary × sequences", plan.logits),) if plan.logits else ()
    lines = [
        BudgetLine("left to others", total - usable, total - usable, share),
        _line("weights", plan.weights),
        _line("activations", plan.activations, logits),
        _line("workspace", plan.workspace),
        _line("graphs", plan.graphs),
    ]
    lines = [line for line in lines if line.high > 0]
    rest = total - sum(line.low for line in lines) - pool_bytes
    if rest > 0:
        lines.append(BudgetLine("not given out", rest, rest, "between the estimates' low ends and the pool"))
    return Budget(
        total,
        (*lines, BudgetLine(POOL, pool_bytes, pool_bytes, "whole blocks; its lines follow on a scale of their own")),
    )


def _line(name: str, amount: Amount, parts: tuple[tuple[str, int], ...] = ()) -> BudgetLine:
    return BudgetLine(name, amount.low, amount.high, amount.source, parts)


def curves_of(found: Sequence[capacity.RateCurve]) -> tuple[RateCurve, ...]:
    """Curves over the offered rate; one that no run could be made of is left out."""
    return tuple(_curve(curve) for curve in found if curve.points)


def _curve(curve: capacity.RateCurve) -> RateCurve:
    points, rate = curve.points, curve.knee.rate
    known = rate.mean > 0 and not isinf(rate.error)
    return RateCurve(
        strategy=curve.strategy,
        rates=tuple(point.rate for point in points),
        goodput=tuple(point.goodput for point in points),
        attained=tuple(point.attained for point in points),
        running=tuple(point.running_mean for point in points),
        ttft_p99=tuple(point.ttft_p99 for point in points),
        knee=rate.mean if rate.mean > 0 else None,
        error=rate.error / rate.mean if known else None,
    )


def changes_of(found: WhatIf) -> tuple[Change, ...]:
    """Every change that was tried, against the deployment as it is."""
    by_goodput = found.judged_by == "goodput"
    before = _figures(found.before, by_goodput)
    return tuple(
        Change(
            name=change.name,
            flag_octavo=change.octavo,
            flag_vllm=change.vllm,
            before=before,
            after=None if change.after is None else _figures(change.after, by_goodput),
            error=_error(change, found),
            note=change.reason,
        )
        for change in found.changes
    )


def _figures(figures: changes.Figures, by_goodput: bool) -> Figures:
    goodput = figures.goodput if by_goodput else None
    return Figures(figures.running_mean, goodput, figures.ttft_p99, figures.e2e)


def _error(change: changes.Change, found: WhatIf) -> float | None:
    """The error bar of the judged figure's change, in parts of what it was."""
    before = getattr(found.before, found.judged_by)
    moved = change.difference.get(found.judged_by)
    if moved is None or not before or isinf(moved.error):
        return None
    return float(moved.error / before)
