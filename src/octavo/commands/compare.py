"""`octavo compare`: the same requests through the real engine under each placement strategy, with the same KV bytes."""

from __future__ import annotations

import random
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.models.loader import LoadedModel
    from octavo.planner.workload import WorkItem
    from octavo.report.comparison import Comparison, StrategyRun


def compare(
    model: Annotated[str, typer.Argument(help="Directory, .gguf file, hub id, or demo.")],
    workload: Annotated[Path, typer.Option(help="JSONL workload or Azure trace CSV.")],
    kv_memory: Annotated[str, typer.Option(help="KV bytes that every strategy gets, e.g. 256MiB.")],
    strategies: Annotated[str, typer.Option(help="Comma-separated, or all.")] = "all",
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence; default: the model's.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a block.")] = 16,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences at once.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens in one step.")] = 512,
    requests: Annotated[int | None, typer.Option(help="Use only the first N requests.")] = None,
    length_scale: Annotated[float, typer.Option(help="Multiply prompt and output lengths.")] = 1.0,
    time_scale: Annotated[float, typer.Option(help="Multiply arrival times; 0: all at once.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    report: Annotated[Path, typer.Option(help="Where the HTML report goes; the JSON lies beside it.")] = Path(
        "octavo-compare.html"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON instead of a table.")] = False,
) -> None:
    """Run WORKLOAD on MODEL once per strategy and show what the KV memory did."""
    from octavo.config import EngineConfig, parse_bytes
    from octavo.planner.workload import read_workload, scale

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
    )
    scaled = f", lengths times {length_scale:g}" if length_scale != 1 else ""
    scaled += f", arrival times times {time_scale:g}" if time_scale != 1 else ""
    source = f"{len(items)} requests of {workload.name}{scaled}"
    comparison = run_comparison(config, _names(strategies), items, source)
    _write(comparison, report)
    if as_json:
        import json

        print(json.dumps(comparison.to_json()))
        return
    from rich.console import Console

    from octavo.report.table import render

    Console().print(render(comparison))
    print(f"\nReport: {report.resolve()}")


def _names(text: str) -> tuple[str, ...]:
    from octavo.errors import OctavoError
    from octavo.kv.strategies import STRATEGIES

    names = STRATEGIES if text == "all" else tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in STRATEGIES:
            raise OctavoError(f"strategies names {name!r}; choose from {', '.join(STRATEGIES)}, or all.")
    return names


def _write(comparison: Comparison, report: Path) -> None:
    from octavo.report.comparison import write_json
    from octavo.report.page import write_page

    report.parent.mkdir(parents=True, exist_ok=True)
    write_page(report, comparison)
    write_json(report.with_suffix(".json"), comparison)


def run_comparison(config: EngineConfig, strategies: tuple[str, ...], items: list[WorkItem], source: str) -> Comparison:
    """Load the model once and run `items` under each strategy, on a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from octavo.models.loader import load_model
    from octavo.report.comparison import compare as put_side_by_side

    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    prompts = make_prompts(items, loaded.vocab_size)
    columns = (TextColumn("{task.description:<15}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    runs = []
    length = config.max_model_len or loaded.max_positions
    with Progress(*columns, disable=not sys.stderr.isatty(), transient=True) as progress:
        for name in strategies:
            task = progress.add_task(name, total=len(items))
            run, length = _run(config, name, loaded, items, prompts, lambda t=task: progress.advance(t))
            runs.append(run)
            if not sys.stderr.isatty():
                print(f"{name}: {run.summary.seconds:.1f} s", file=sys.stderr, flush=True)
    return put_side_by_side(
        runs,
        title=f"{loaded.name} under {len(runs)} placement strategies",
        model=_describe(loaded),
        machine=machine_line(),
        command=shlex.join(["octavo", *sys.argv[1:]]),
        workload=source,
        kv_bytes=config.kv_memory or 0,
        block_size=config.block_size,
        max_model_len=length,
        notes=(
            "Prompts that the workload gives as lengths are pseudo-random tokens; every output token was generated "
            "by the model, greedily, and generation runs to the recorded length.",
            "reserve-oracle is told each request's true length, which only a recorded trace knows.",
        ),
    )


def _describe(loaded: LoadedModel) -> str:
    dtype = str(loaded.dtype).removeprefix("torch.")
    return f"{loaded.name}, {dtype}, {loaded.weight_bytes / 2**20:.0f} MiB of weights"


def make_prompts(items: list[WorkItem], vocab_size: int) -> list[str | list[int]]:
    """The texts where the workload has them, else seeded pseudo-random token ids of the recorded length."""
    rng = random.Random(0)
    return [
        item.prompt if item.prompt is not None else [rng.randrange(vocab_size) for _ in range(item.prompt_tokens)]
        for item in items
    ]


def _run(config, name, loaded: LoadedModel, items, prompts, on_done) -> tuple[StrategyRun, int]:  # type: ignore[no-untyped-def]
    from dataclasses import replace

    from octavo.build import build_engine
    from octavo.report.comparison import StrategyRun
    from octavo.report.recorder import Recorder
    from octavo.types import RequestError, SamplingParams

    recorder = Recorder()
    built = build_engine(replace(config, kv_strategy=name), loaded=loaded, sink=recorder.on_event, watchers=(recorder,))
    engine, clock = built.engine, built.engine.clock
    start, at = clock.now(), 0
    while at < len(items) or engine.busy:
        while at < len(items) and start + items[at].arrival <= clock.now():
            item = items[at]
            params = SamplingParams(temperature=0.0, max_tokens=item.output_tokens, ignore_eos=True)
            try:
                engine.submit(
                    prompts[at],
                    params,
                    request_id=f"r{at}",
                    arrival=start + item.arrival,
                    output_length=item.output_tokens,
                )
            except RequestError:
                on_done()  # counted and explained by the recorder
            at += 1
        if not engine.busy:
            clock.wait_until(start + items[at].arrival)
            continue
        for output in engine.step():
            if output.finished:
                on_done()
    return StrategyRun.of(name, recorder, built.pool_tokens, built.kv_bytes), built.max_model_len


def machine_line() -> str:
    """The processor, its cores and the torch build, as the report shows them."""
    import os
    import platform

    import torch

    cpu = next(
        (line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    return f"{device}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []
