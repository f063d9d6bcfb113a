"""`octavo plan`: the largest rate that a deployment carries, the cheapest fleet for a rate, and what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.commands import options
from octavo.commands.planning import (
    check_outputs,
    command_line,
    deployment_of,
    prepare_outputs,
    replay_options,
    strategies_named,
    trace_of,
    write_outputs,
)

if TYPE_CHECKING:
    from octavo.planner.search.jobs import Workers
    from octavo.planner.search.planning import Plan, Question
    from octavo.planner.traces.api import Trace
    from octavo.report.replay_data import ReplayReport


def plan(
    context: typer.Context,
    trace: Annotated[str, typer.Option(help="Trace file or folder of any known format, or synthetic:NAME.")],
    model: options.PlannedModel,
    gpu: options.Gpu = None,
    memory: options.DeviceMemory = None,
    tp: options.TensorParallel = 1,
    engine: options.PlannedEngine = "octavo",
    strategy: Annotated[str, typer.Option(help="Whose rates are compared: comma-separated, or all.")] = "paged",
    block_size: options.BlockSize = 16,
    kv_dtype: options.PlannedKVDtype = "auto",
    weight_dtype: options.WeightDtype = None,
    utilization: options.Utilization = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.PlannedSeqs = None,
    max_num_batched_tokens: options.PlannedTokens = None,
    admission: options.Admission = None,
    victims: options.Victims = None,
    max_skips: options.MaxSkips = None,
    prefix_caching: options.PrefixCaching = True,
    kv_memory: options.PlannedKVMemory = None,
    num_blocks: options.NumBlocks = None,
    calibration: options.CalibrationFile = None,
    window: options.Window = None,
    busiest: Annotated[int, typer.Option(help="Plan with the N requests in a row that come fastest.")] = 400,
    scale: options.SpeedUp = None,
    max_tokens: options.ClientLimit = None,
    known_lengths: options.KnownLengths = False,
    slo: options.Slo = None,
    seeds: Annotated[int, typer.Option(help="Draws of the traffic, for error bars.")] = 4,
    capacity: Annotated[bool, typer.Option(help="Search the largest rate of one replica.")] = True,
    what_if: Annotated[bool, typer.Option(help="Try every knob at the trace's rate.")] = True,
    rate: Annotated[float | None, typer.Option(help="Requests a second that a fleet must carry.")] = None,
    devices: Annotated[str | None, typer.Option(help="Devices to choose from, comma-separated.")] = None,
    price: Annotated[str | None, typer.Option(help="Dollars an hour, e.g. 'h100=2.5,l40s=0.9'.")] = None,
    report: Annotated[Path | None, typer.Option(help="HTML report; its JSON lies beside it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    workers: options.WorkerCount = None,
) -> None:
    """Plan with TRACE's busiest stretch: capacity under the SLO, a fleet for --rate, and what to change, ranked."""
    from octavo.planner.search.jobs import Workers
    from octavo.planner.search.planning import make_plan

    outputs = {"report": report}
    check_outputs(outputs, trace)
    traffic = trace_of(context.params | {"rate": None})  # the rate is the fleet's, not the trace's
    question = _question(context.params, traffic)  # the impossible ends here
    prepare_outputs(outputs)
    with Workers(workers) as pool:
        answer = make_plan(question, pool)
        if report is not None:
            write_outputs(_report(command_line(context), question, answer, traffic, pool), outputs)
    _print(question, answer, as_json)


def _print(question: Question, answer: Plan, as_json: bool) -> None:
    if as_json:
        import json

        from octavo.commands.plan_json import plan_json

        typer.echo(json.dumps(plan_json(question, answer), allow_nan=False))
        return
    from octavo.commands.plan_report import print_plan

    print_plan(question, answer)


def _question(given: Mapping[str, Any], traffic: Trace) -> Question:
    """The question that the options ask. Raises OctavoError for what cannot be read or cannot work."""
    from octavo.errors import OctavoError
    from octavo.planner.deployment import resolve
    from octavo.planner.search.fleet import parse_prices
    from octavo.planner.search.planning import Question
    from octavo.planner.search.samples import busiest_window
    from octavo.planner.slo import parse_slo

    for name, least in (("busiest", 2), ("seeds", 2)):
        if given[name] < least:
            raise OctavoError(f"{name} is {given[name]}; it must be at least {least}.")
    if given["rate"] is not None and not 0 < given["rate"] < math.inf:
        raise OctavoError(f"rate is {given['rate']:g}; it must be a number above 0, in requests a second.")
    placed = any(given[name] is not None for name in ("gpu", "memory", "kv_memory", "num_blocks"))
    if not placed and given["rate"] is not None and given["report"] is not None:
        raise OctavoError("report is about one deployment; give --gpu (or --memory), or leave --report out.")
    names = strategies_named(given["strategy"])
    deployments = [deployment_of(given, strategy=name) for name in names]
    slo = None if given["slo"] is None else parse_slo(given["slo"])
    prices = {} if given["price"] is None else parse_prices(given["price"])
    resolved = tuple(resolve(each) for each in deployments) if placed or given["rate"] is None else ()
    return Question(
        window=busiest_window(traffic, given["busiest"]),
        base=deployments[names.index("paged") if "paged" in names else 0],
        resolved=resolved,
        options=replay_options(given, slo, keep=given["report"] is not None),
        seeds=given["seeds"],
        capacity=given["capacity"],
        changes=given["what_if"],
        rate=given["rate"],
        devices=_devices(given["devices"]),
        prices=prices,
    )


def _devices(text: str | None) -> tuple[str, ...]:
    """Devices by commas, by their catalogue names. Raises CatalogueError."""
    from octavo.planner.catalogue import find_device

    return () if text is None else tuple(find_device(name.strip()).name for name in text.split(","))


def _report(command: str, question: Question, answer: Plan, traffic: Trace, pool: Workers) -> ReplayReport:
    """The window replayed as it was recorded, with curves, changes and fleet."""
    from octavo.commands.plan_report import fleet_sentences
    from octavo.commands.replaying import report_of, run_strategies
    from octavo.planner.traces.transforms import Listed
    from octavo.report.replay_inputs import changes_of, curves_of

    window = question.window
    shown = Listed(f"{traffic.name}, {window.statement}", window.requests, bad_lines=traffic.bad_lines)
    outcomes = run_strategies(shown, question.resolved, question.options, pool)
    title = f"Plan: {question.base.model}"
    given = question.options.max_tokens is not None or question.options.known_lengths
    slo = question.options.slo
    page = report_of(title, command, shown, question.resolved, outcomes, slo, given_limits=given)
    changes = answer.what_if
    return replace(
        page,
        curves=curves_of(answer.curves) or None,
        changes=None if changes is None else changes_of(changes),
        bottleneck="" if changes is None else changes.statement,
        notes=(*page.notes, *fleet_sentences(answer.fleet)),
    )
