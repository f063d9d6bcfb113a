"""`octavo plan` in the terminal: capacity, fleet and what to change, as tables with error bars."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import isinf

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from octavo.commands.replaying import device_words
from octavo.planner.search.capacity import Capacity, RateCurve
from octavo.planner.search.changes import Change, Figures, Verdict
from octavo.planner.search.estimates import Estimate
from octavo.planner.search.fleet import Fleet, FleetAnswer
from octavo.planner.search.planning import Plan, Question
from octavo.planner.search.whatif import WhatIf
from octavo.report.wording import seconds

SHOWN_FLEETS = 10
WIDTH = 120  # of what goes into a file or a pipe
HARDWARE = ("tp", "gpu")
FIGURES = {"goodput": "goodput", "e2e": "request time", "ttft_p99": "TTFT p99", "itl_p99": "ITL p99"}


def print_plan(question: Question, plan: Plan) -> None:
    """Print what was asked for, the times' fidelity last."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    window, slo = plan.window, question.options.slo
    console.print(Text(f"Plan: {question.base.model}", style="bold"))
    console.print(f"Traffic: {window.trace}; {window.statement}; {plan.seeds} seeds.", highlight=False)
    console.print(f"SLO: {slo or 'none: a rate is carried when the queue does not grow'}", highlight=False)
    if plan.curves:
        console.print(_capacities(question, plan.curves, window.rate))
    if plan.fleet is not None:
        console.print(_fleets(plan.fleet))
        for line in unfit_lines(plan.fleet):
            console.print(line, highlight=False)
    if plan.what_if is not None:
        _print_changes(console, plan.what_if)
    if question.resolved:
        fidelity = question.chosen.fidelity
        console.print(Text(f"Fidelity: {fidelity.statement}", style="dim"))
        for note in question.chosen.notes:
            console.print(Text(f"- {note}", style="dim"))


def _capacities(question: Question, curves: tuple[RateCurve, ...], recorded: float) -> Table:
    resolved = question.chosen
    table = _table(f"One replica ({device_words(resolved)}): largest rate; the trace has {recorded:.3g} a second")
    for name in ("strategy", "requests/s", "then running, mean", "then TTFT p99", "beyond it"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for curve in curves:
        held = [point for point in curve.points if point.sustained]
        over = [point for point in curve.points if not point.sustained]
        last = held[-1] if held else None
        table.add_row(
            curve.strategy,
            rate_words(curve.knee),
            "–" if last is None else f"{last.running_mean:.3g}",
            "–" if last is None else seconds(last.ttft_p99),
            (over[0].binding or "the SLO") if over else "–",
        )
    return table


def rate_words(capacity: Capacity) -> str:
    """The rate with its error: "3.2 ± 0.1", "at least 8"."""
    if capacity.impossible is not None:
        return "cannot run"
    if capacity.at_least:
        return f"at least {capacity.rate.mean:.3g}"
    return f"{capacity.rate.mean:.3g}" + _error(capacity.rate)


def _error(estimate: Estimate) -> str:
    return "" if isinf(estimate.error) else f" ± {estimate.error:.2g}"


def _fleets(answer: FleetAnswer) -> Table:
    table = _table(f"Fleets for {answer.rate:g} requests a second, best first")
    for name in ("devices", "device", "tp", "KV", "replicas", "a replica carries", "$/h"):
        table.add_column(name, justify="left" if name in ("device", "KV") else "right")
    for at, fleet in enumerate(answer.fleets[:SHOWN_FLEETS]):
        most = "" if fleet.most_replicas == fleet.replicas else f" (up to {fleet.most_replicas})"
        table.add_row(
            str(fleet.devices),
            fleet.gpu,
            str(fleet.tp),
            fleet.kv_dtype,
            f"{fleet.replicas}{most}",
            rate_words(fleet.capacity) + ("" if at < answer.searched else " (coarse)"),
            "–" if fleet.cost is None else f"{fleet.cost:.2f}",
        )
    return table


def unfit_lines(answer: FleetAnswer) -> Iterator[str]:
    """Kinds that cannot carry anything, with the reason; those of one device and reason together."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for unfit in answer.unfit:
        reasons.setdefault((unfit.gpu, unfit.reason), []).append(f"tp {unfit.tp} {unfit.kv_dtype}")
    for (gpu, reason), kinds in reasons.items():
        yield f"Not {gpu} ({', '.join(kinds)}): {reason}"


def fleet_sentences(answer: FleetAnswer | None) -> tuple[str, ...]:
    """The three best fleets in words, for the report."""
    if answer is None:
        return ()
    return tuple(f"{_fleet_words(fleet)} carry {answer.rate:g} requests a second." for fleet in answer.fleets[:3])


def _fleet_words(fleet: Fleet) -> str:
    cost = "" if fleet.cost is None else f" for {fleet.cost:.2f} $/h"
    kind = f"{fleet.replicas} x {fleet.tp} {fleet.gpu} with {fleet.kv_dtype} KV"
    return f"{kind}{cost} ({rate_words(fleet.capacity)} a second each)"


def _print_changes(console: Console, found: WhatIf) -> None:
    """What helps or harms as a table, the rest in a line, and the answer in sentences."""
    console.print(_changes(found))
    for change in found.changes:
        if change.after is not None and len(change.knobs) == 1 and change.verdict is not Verdict.NONE:
            vllm = f"; vLLM: {change.vllm}" if change.vllm else ""
            console.print(Text(f"{change.name}: {change.octavo}{vllm}", style="dim"))
    still = [change.name for change in found.changes if change.verdict is Verdict.NONE]
    if still:
        console.print(f"No measurable change: {', '.join(still)}.", highlight=False)
    for change in found.changes:
        if change.after is None:
            console.print(f"{change.name} cannot run: {change.reason}", highlight=False)
    console.print(Text(found.statement, style="bold"))
    settings = next((c for c in found.changes if c.better and not any(k.setting in HARDWARE for k in c.knobs)), None)
    if settings is not None:
        worse = "".join(f"; {FIGURES[name]} gets worse" for name in settings.worse)
        console.print(Text(f"Best on the same device: {settings.name} ({settings.octavo}){worse}.", style="bold"))


def _changes(found: WhatIf) -> Table:
    goodput = found.judged_by == "goodput"
    by = "goodput" if goodput else "the time of a request"
    table = _table(f"What to change, best first by {by} (± 95 % interval of the change)")
    columns = ["change", "running", "peak", *(["goodput/s"] if goodput else []), "request takes", "TTFT p99", "ITL p99"]
    for name in (*columns, "verdict"):
        numbers = name in columns[1:]
        table.add_column(name, justify="right" if numbers else "left", no_wrap=numbers, min_width=0 if numbers else 14)
    before = found.before
    now = ["as it is", f"{before.running_mean:.3g}", f"{before.running_peak:.0f}"]
    now += [f"{before.goodput:.3g}"] if goodput else []
    table.add_row(*now, seconds(before.e2e), seconds(before.ttft_p99), seconds(before.itl_p99), "")
    for change in found.changes:
        if change.after is not None and change.verdict is not Verdict.NONE:
            table.add_row(*_row(change, change.after, goodput))
    return table


def _row(change: Change, after: Figures, goodput: bool) -> list[str]:
    moved = change.difference
    cells = [change.name, f"{after.running_mean:.3g}", f"{after.running_peak:.0f}"]
    cells += [f"{after.goodput:.3g}{_error(moved['goodput'])}"] if goodput else []
    for name in ("e2e", "ttft_p99", "itl_p99"):
        cells.append(f"{seconds(getattr(after, name))} ± {seconds(moved[name].error)}")
    worse = ", ".join(FIGURES[name] for name in change.worse)
    verdict = f"mixed: worse {worse}" if change.verdict is Verdict.MIXED else change.verdict.value
    return [*cells, verdict]


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
