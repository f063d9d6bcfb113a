"""`octavo replay TRACE`: recorded traffic through the serving scheduler under a timing model, per strategy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    from octavo.report.replay_data import ReplayReport


def replay(
    context: typer.Context,
    trace: options.TracePath,
    model: options.PlannedModel,
    gpu: options.Gpu = None,
    memory: options.DeviceMemory = None,
    tp: options.TensorParallel = 1,
    engine: options.PlannedEngine = "octavo",
    strategy: Annotated[str, typer.Option(help="Comma-separated, or all.")] = "paged",
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
    requests: Annotated[int | None, typer.Option(help="Only the first N requests.")] = None,
    scale: options.SpeedUp = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second, instead of the recorded rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Another draw of the traffic; default: as recorded.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Closed loop: so many requests in flight.")] = None,
    max_tokens: options.ClientLimit = None,
    known_lengths: options.KnownLengths = False,
    slo: options.Slo = None,
    report: Annotated[Path | None, typer.Option(help="HTML report; its JSON lies beside it.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Figures as CSV, and NAME.requests.csv beside it.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Trace for ui.perfetto.dev.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report's JSON instead of a table.")] = False,
    workers: options.WorkerCount = None,
) -> None:
    """Replay TRACE on a deployment and say where memory and time went, under each strategy. Exit code 1: under none of
    them could any request be taken."""
    from octavo.commands.replaying import report_of, run_strategies
    from octavo.planner.deployment import resolve
    from octavo.planner.search.jobs import Workers
    from octavo.planner.slo import parse_slo

    given = context.params
    names = strategies_named(strategy)
    outputs = {"report": report, "csv": csv, "perfetto": perfetto}
    check_outputs(outputs, trace)
    objectives = None if slo is None else parse_slo(slo)
    settings = replay_options(given, objectives, keep=as_json or any(outputs.values()))
    resolved = [resolve(deployment_of(given, strategy=name)) for name in names]  # the impossible ends here
    traffic = trace_of(given)
    prepare_outputs(outputs)
    with Workers(workers) as pool:
        outcomes = run_strategies(traffic, resolved, settings, pool)
    answer = report_of(
        f"Replay: {model}",
        command_line(context),
        traffic,
        resolved,
        outcomes,
        objectives,
        given_limits=max_tokens is not None or known_lengths,
    )
    write_outputs(answer, outputs)
    _print(answer, outputs, as_json)
    if all(outcome.refused and outcome.refused == outcome.requests for outcome in outcomes):
        raise typer.Exit(1)


def _print(answer: ReplayReport, outputs: Mapping[str, Path | None], as_json: bool) -> None:
    if as_json:
        import json

        typer.echo(json.dumps(answer.to_json(), allow_nan=False))
        return
    from rich.console import Console

    from octavo.report.replay_table import render

    Console().print(render(answer))
    for option, path in outputs.items():
        if path is not None:
            typer.echo(f"{option}: {path.resolve()}")
