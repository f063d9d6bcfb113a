"""Command line options that several commands share: each is worded once, and means the field of `EngineConfig`."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="Directory, .gguf file, hub id, or demo.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Weights = Annotated[
    str, typer.Option("--weights", "--quantization", help="auto, int8, int8_group, int4 or int4_affine.")
]
Implementation = Annotated[str, typer.Option(help="auto, native or transformers.")]
KVDtype = Annotated[
    str,
    typer.Option(
        "--kv-dtype",
        "--kv-cache-dtype",
        help="auto (the model's), float32, bfloat16, float16, int8 or fp8: how KV is stored.",
    ),
]
KVStrategy = Annotated[str, typer.Option(help="Where KV goes.")]
KVMemory = Annotated[str | None, typer.Option(help="KV bytes, e.g. 256MiB; default: what is left.")]
BlockSize = Annotated[int, typer.Option(help="Tokens in a block.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest sequence; default: the model's.")]
MaxBatchedTokens = Annotated[int, typer.Option(help="Most tokens in one step.")]
SpeculativeTokens = Annotated[int, typer.Option(help="Most tokens drafted by prompt lookup; 0: none.")]
ItlTarget = Annotated[
    float | None, typer.Option(help="Seconds that a running stream should wait for its next token at most.")
]
