"""`octavo size MODEL`: KV bytes per token, and what a memory budget holds. Imports neither torch nor transformers."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def size(
    model: Annotated[
        str, typer.Argument(help="config.json, model directory, .gguf file, hub id, catalogue name, or `demo`.")
    ],
    memory: Annotated[str | None, typer.Option(help="Total memory of one device, e.g. 24GiB.")] = None,
    gpu: Annotated[str | None, typer.Option(help="A device of the catalogue instead, e.g. 'RTX 4090'.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV bytes of one device; wins over the plan.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Measured number of blocks; wins over the plan.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence; must fit.")] = None,
    kv_dtype: Annotated[
        str,
        typer.Option(
            help="float32, bf16, fp16, int8, fp8 (a scale per token and head, as the engine stores them), "
            "fp8_per_tensor (vLLM's fp8), int4 or q8_0 (llama.cpp's)."
        ),
    ] = "bf16",
    weight_dtype: Annotated[str | None, typer.Option(help="Weights stored as; default: as published.")] = None,
    weight_memory: Annotated[str | None, typer.Option(help="Measured weights of one device.")] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel degree.")] = 1,
    block_size: Annotated[int, typer.Option(help="Tokens in a block.")] = 16,
    users: Annotated[int | None, typer.Option(help="Memory for so many sequences of --length.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of each of them.")] = None,
    engine: Annotated[
        str, typer.Option(help="Whose memory costs and defaults: octavo, or vllm-0.19 and other versions.")
    ] = "octavo",
    utilization: Annotated[
        str | None, typer.Option(help="Share of the device the engine may use; default: the engine's.")
    ] = None,
    mla: Annotated[str, typer.Option(help="MLA cache: latent or expanded.")] = "latent",
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most running sequences (activation estimate); default: the engine's.")
    ] = None,
    max_batched_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of a step; default: the engine's.")
    ] = None,
    as_data: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """KV bytes per token of a model, and the lengths and concurrency that a memory budget gives."""
    # Imported here so that the other commands do not pay for them.
    from octavo.commands.size_report import as_json, print_report
    from octavo.planner.sizing import SizeRequest, size_model

    result = size_model(
        SizeRequest(
            model=model,
            kv_dtype=kv_dtype,
            tp=tp,
            mla=mla,
            block_size=block_size,
            max_model_len=max_model_len,
            memory=_in_bytes(memory, "memory"),
            gpu=gpu,
            kv_memory=_in_bytes(kv_memory, "kv-memory"),
            num_blocks=num_blocks,
            weight_dtype=weight_dtype,
            weight_memory=_in_bytes(weight_memory, "weight-memory"),
            users=users,
            length=length,
            utilization=utilization,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            engine=engine,
        )
    )
    if as_data:
        typer.echo(json.dumps(as_json(result), indent=2))
    else:
        print_report(result)


def _in_bytes(text: str | None, name: str) -> int | None:
    from octavo.config import parse_bytes

    return None if text is None else parse_bytes(text, name)
