"""`octavo validate`: real runs of real engines, replayed; every figure beside the measured one, with its error."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from octavo.planner.validation.validation import Comparison, Validation


def validate(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with more runs (vllm_runs/<gpu>_<model>/); default: the runs that are built in."),
    ] = None,
    as_data: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay measured runs and print the error of every figure. Exit code 1 if one is above its stated bound."""
    # Imported here so that the other commands do not pay for them.
    from octavo.planner.validation.runs import BUNDLED, RunError, find_runs, read_run
    from octavo.planner.validation.validation import as_json
    from octavo.planner.validation.validation import validate as rerun

    done: list[Validation] = []
    left_out: list[str] = []
    for folder in find_runs(BUNDLED if data is None else data):
        try:
            done.append(rerun(read_run(folder)))
        except RunError as error:
            if data is None:
                raise
            left_out.append(str(error))
    if not done:
        raise RunError(f"none of the runs under {data} can be replayed: {left_out[0]}")
    if as_data:
        import json

        typer.echo(json.dumps(as_json(done) | {"left_out": left_out}, indent=2))
    else:
        _print(done, left_out)
    if not all(validation.within for validation in done):
        raise SystemExit(1)


def _print(done: list[Validation], left_out: list[str]) -> None:
    from rich.console import Console

    console = Console()
    for validation in done:
        console.print(f"[bold]{validation.run}[/] on {validation.engine}, replayed in {validation.seconds:.1f} s")
        console.print(_table(validation))
        console.print(f"Times: {validation.fidelity}", highlight=False)
        for note in validation.notes:
            console.print(f"- {note}", highlight=False)
        missed = [f"{row.metric} {row.statistic}" for row in validation.rows if not row.within]
        judged = sum(row.bound is not None for row in validation.rows)
        verdict = f"above the bound: {', '.join(missed)}" if missed else f"all {judged} judged figures within bounds"
        console.print(f"{verdict}\n", style="red" if missed else "green", highlight=False)
    for sentence in left_out:
        console.print(f"Left out: {sentence}", highlight=False)


def _table(validation: Validation) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("figure", "", "measured", "simulated", "error", "bound"):
        table.add_column(name, justify="left" if name in ("figure", "") else "right")
    for row in validation.rows:
        bound = "" if row.bound is None else f"{row.bound:.0%}"
        style = None if row.within else "red"
        figures = (_shown(row, row.measured), _shown(row, row.simulated), f"{row.error:+.1%}")
        table.add_row(row.metric, row.statistic, *figures, bound, style=style)
    return table


def _shown(row: Comparison, value: float) -> str:
    from octavo.planner.validation.validation import GAUGES

    if row.metric in GAUGES:
        return f"{value:.1f} %" if row.metric.endswith("pct") else f"{value:.1f}"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
