"""`octavo compare`: the same requests through the real engine under each placement strategy, with the same KV bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from octavo.report.comparison import Comparison


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
    log: Annotated[Path | None, typer.Option(help="Folder for one decision log per strategy.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON instead of a table.")] = False,
) -> None:
    """Run WORKLOAD on MODEL once per strategy and show what the KV memory did."""
    from octavo.comparing import run_comparison
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
    if log is not None:
        log.mkdir(parents=True, exist_ok=True)
    comparison = run_comparison(config, _names(strategies), items, source, log)
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
    from octavo.report.page import write_page

    report.parent.mkdir(parents=True, exist_ok=True)
    write_page(report, comparison)  # and the JSON beside it
