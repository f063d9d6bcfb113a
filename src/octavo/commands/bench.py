"""`octavo bench MODEL`: how fast a model runs here, alone and with many requests at once, and where the time goes."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.commands import options
from octavo.commands.outputs import make_folder, same, try_writing

if TYPE_CHECKING:
    from octavo.benching.plan import BenchPlan
    from octavo.benching.result import BenchResult
    from octavo.planner.workload import WorkItem

STDOUT = "-"


def bench(
    model: options.Model,
    mode: Annotated[
        str | None,
        typer.Option(
            help="latency (one request alone), throughput (many at once) or sweep (how many at once); default: "
            "latency, then sweep."
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency",
            "--max-concurrency",
            help="Requests in flight. throughput: a number, default 64; sweep: a list, default 1,2,4,8,16,32,64.",
        ),
    ] = None,
    input_len: Annotated[
        int | None,
        typer.Option(
            "--input-len",
            "--random-input-len",
            help="Prompt tokens. Default: 512 for latency, lognormal from 32 to 512 for the others.",
        ),
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option(
            "--output-len",
            "--random-output-len",
            help="Output tokens. Default: 128 for latency, lognormal from 16 to 256 for the others.",
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            "--num-prompts",
            "--requests",
            help="Requests of a batch, default 64 (with a workload: all). A sweep runs the first max(6, 4 x N) with N "
            "at once.",
        ),
    ] = None,
    workload: Annotated[
        Path | None,
        typer.Option(
            "--workload",
            "--dataset-path",
            help="JSONL workload or Azure trace CSV; arrival times are left out, --concurrency paces the requests.",
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option("--rounds", "--num-iters", help="Times each point is measured; medians are shown.")
    ] = 3,
    seed: Annotated[int, typer.Option(help="Makes the random lengths and tokens again.")] = 1234,
    kv_memory: options.KVMemory = None,
    kv_dtype: options.KVDtype = "auto",
    weights: options.Weights = "auto",
    implementation: options.Implementation = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    block_size: options.BlockSize = 16,
    max_model_len: options.MaxModelLen = None,
    max_num_batched_tokens: options.MaxBatchedTokens = 512,
    kv_strategy: options.KVStrategy = "paged",
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Share equal prefixes; the cache is emptied before each round.",
        ),
    ] = False,
    speculative_tokens: options.SpeculativeTokens = 0,
    itl_target: options.ItlTarget = None,
    threads: Annotated[int | None, typer.Option(help="Threads that compute; default: torch's.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write one HTML page with plots there.")] = None,
    json_to: Annotated[
        Path | None, typer.Option("--json", "--output-json", help="Write the result as JSON; - : print it.")
    ] = None,
) -> None:
    """Measure MODEL: TTFT, ITL, TPOT, tokens per second, and where the time of a step goes against its floor."""
    from octavo.benching.plan import BenchOptions, make_plan
    from octavo.config import EngineConfig, parse_bytes

    items, source = _workload(workload)
    wanted = BenchOptions(mode, concurrency, input_len, output_len, num_prompts, rounds, seed, items, source)
    plan = make_plan(wanted)
    _check_threads(threads)
    _check_at_once(plan, max_num_batched_tokens)
    config = EngineConfig(
        model=model,
        kv_strategy=kv_strategy,
        block_size=block_size,
        dtype=dtype,
        device=device,
        weights=weights,
        implementation=implementation,
        kv_dtype=kv_dtype,
        kv_memory=None if kv_memory is None else parse_bytes(kv_memory, "kv_memory"),
        max_model_len=max_model_len,
        max_num_seqs=plan.concurrency,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=prefix_caching,
        speculative_tokens=speculative_tokens,
        itl_target=itl_target,
    )
    _check_outputs(report, json_to, workload)
    from octavo.benching.run import run_bench  # only now: bad input need not wait for torch

    result = run_bench(plan, config, command=shlex.join(["octavo", *sys.argv[1:]]), threads=threads)
    _write(result, report, json_to)


def _workload(path: Path | None) -> tuple[tuple[WorkItem, ...] | None, str]:
    """The requests of a workload file, and its name."""
    from octavo.planner.workload import read_workload

    return (None, "") if path is None else (tuple(read_workload(path)), path.name)


def _check_threads(threads: int | None) -> None:
    from octavo.errors import OctavoError

    cores = os.cpu_count() or 1
    if threads is not None and not 1 <= threads <= cores:
        raise OctavoError(f"threads is {threads}; it must be from 1 to {cores}, the cores of this machine.")


def _check_at_once(plan: BenchPlan, budget: int) -> None:
    from octavo.errors import OctavoError

    if plan.concurrency > budget:
        raise OctavoError(
            f"concurrency is {plan.concurrency}, more than max_num_batched_tokens ({budget}): a step could not give "
            "every request its token; lower the former or raise the latter."
        )


def _check_outputs(report: Path | None, json_to: Path | None, workload: Path | None) -> None:
    """Before any work: what will be written must be files that overwrite neither the input nor each other."""
    from octavo.errors import OctavoError

    if report is not None and report.suffix.lower() != ".html":
        raise OctavoError(f"report is {str(report)!r}; its name must end in .html.")
    written = {"report": report, "json": None if json_to == Path(STDOUT) else json_to}
    for option, path in written.items():
        if path is None:
            continue
        if os.path.isdir(path):
            raise OctavoError(f"{option} would be written to {str(path)!r}, which is a folder; give another name.")
        if workload is not None and same(path, workload):
            raise OctavoError(f"{option} would overwrite the workload {str(workload)!r}; give another name.")
        make_folder(path.parent, option)
        try_writing(path, option)
    if report is not None and written["json"] is not None and same(report, written["json"]):
        raise OctavoError(f"json and report are both {str(report)!r}; give one of them another name.")


def _write(result: BenchResult, report: Path | None, json_to: Path | None) -> None:
    if report is not None:
        from octavo.report.bench_page import write_page

        write_page(report, result)
    if json_to == Path(STDOUT):
        import json

        print(json.dumps(result.to_json(), allow_nan=False))
        return
    if json_to is not None:
        from octavo.benching.result import write_json

        write_json(json_to, result)
    from rich.console import Console

    from octavo.report.bench_table import render

    console = Console() if sys.stdout.isatty() else Console(width=140)  # a pipe has no width of its own
    console.print(render(result))
    if written := [str(path.resolve()) for path in (report, json_to) if path is not None]:
        print(f"\nWritten: {', '.join(written)}")
