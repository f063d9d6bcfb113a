"""`octavo compare`: the same requests through the real engine under each placement strategy, with the same KV bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.commands import options
from octavo.commands.outputs import make_folder, same, try_writing
from octavo.commands.planning import strategies_named

if TYPE_CHECKING:
    from octavo.report.comparison import Comparison


def compare(
    model: options.Model,
    workload: Annotated[Path, typer.Option(help="JSONL workload or Azure trace CSV.")],
    kv_memory: Annotated[str, typer.Option(help="KV bytes that every strategy gets, e.g. 256MiB.")],
    strategies: Annotated[str, typer.Option(help="Comma-separated, or all.")] = "all",
    max_model_len: options.MaxModelLen = None,
    block_size: options.BlockSize = 16,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences at once.")] = 256,
    max_num_batched_tokens: options.MaxBatchedTokens = 512,
    requests: Annotated[int | None, typer.Option(help="Use only the first N requests.")] = None,
    length_scale: Annotated[float, typer.Option(help="Multiply prompt and output lengths.")] = 1.0,
    time_scale: Annotated[float, typer.Option(help="Multiply arrival times; 0: all at once.")] = 1.0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    kv_dtype: options.KVDtype = "auto",
    weights: options.Weights = "auto",
    implementation: options.Implementation = "auto",
    itl_target: options.ItlTarget = None,
    speculative_tokens: options.SpeculativeTokens = 0,
    report: Annotated[Path, typer.Option(help="Where the HTML report goes; the JSON lies beside it.")] = Path(
        "octavo-compare.html"
    ),
    log: Annotated[Path | None, typer.Option(help="Folder for one decision log per strategy.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON instead of a table.")] = False,
) -> None:
    """Run WORKLOAD on MODEL once per strategy and show what the KV memory did."""
    from octavo.config import EngineConfig, parse_bytes
    from octavo.planner.workload import read_workload, scale

    names = strategies_named(strategies, "strategies")
    _check_outputs(report, workload, log, names)
    items = scale(read_workload(workload), lengths=length_scale, time=time_scale, limit=requests)
    config = EngineConfig(
        model=model,
        block_size=block_size,
        kv_memory=parse_bytes(kv_memory, "kv_memory"),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=True,
        dtype=dtype,
        device=device,
        kv_dtype=kv_dtype,
        weights=weights,
        implementation=implementation,
        itl_target=itl_target,
        speculative_tokens=speculative_tokens,
    )
    _prepare(report, log)
    from octavo.comparing import run_comparison  # only now: bad input need not wait for torch

    comparison = run_comparison(config, names, items, _source(len(items), workload, length_scale, time_scale), log)
    _write(comparison, report)
    if as_json:
        import json

        print(json.dumps(comparison.to_json()))
        return
    from rich.console import Console

    from octavo.report.table import render

    Console().print(render(comparison))
    print(f"\nReport: {report.resolve()}")


def _prepare(report: Path, log: Path | None) -> None:
    """Make the folders and try the files before hours of work."""
    make_folder(report.parent, "report")
    for path in (report, report.with_suffix(".json")):
        try_writing(path, "report")
    if log is not None:
        make_folder(log, "log")


def _source(count: int, workload: Path, length_scale: float, time_scale: float) -> str:
    """Where the requests come from, as the report says it."""
    scaled = f", lengths times {length_scale:g}" if length_scale != 1 else ""
    scaled += f", arrival times times {time_scale:g}" if time_scale != 1 else ""
    return f"{count} requests of {workload.name}{scaled}"


def _check_outputs(report: Path, workload: Path, log: Path | None, names: tuple[str, ...]) -> None:
    """Before any work: the report and its JSON must be files that overwrite neither the input nor the logs."""
    from octavo.errors import OctavoError

    if report.suffix.lower() != ".html":
        raise OctavoError(f"report is {str(report)!r}; its name must end in .html (the JSON beside it ends in .json).")
    for path in (report, report.with_suffix(".json")):
        if os.path.isdir(path):
            raise OctavoError(f"report would be written to {str(path)!r}, which is a folder; give another name.")
        if same(path, workload):
            raise OctavoError(f"report would overwrite the workload {str(workload)!r}; give another name.")
        if log is not None and (os.path.realpath(log) + os.sep).startswith(os.path.realpath(path) + os.sep):
            raise OctavoError(f"log {str(log)!r} needs a folder where the report writes {str(path)!r}; rename one.")
    if log is None:
        return
    if os.path.exists(log) and not os.path.isdir(log):
        raise OctavoError(f"log is {str(log)!r}, which is a file; it must be a folder: give another name.")
    for name in names:
        if same(log / f"{name}.jsonl", workload):
            raise OctavoError(f"log {str(log)!r} would overwrite the workload {str(workload)!r}; give another folder.")


def _write(comparison: Comparison, report: Path) -> None:
    from octavo.report.page import write_page

    write_page(report, comparison)  # and the JSON beside it
