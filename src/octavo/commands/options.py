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

# -- A deployment on paper, as `octavo replay` and `octavo plan` take it; each means the field of `Deployment` --------
TracePath = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help="Trace file or folder of any known format, or synthetic:NAME; options may follow a '?', as ?requests=500.",
    ),
]
PlannedModel = Annotated[
    str, typer.Option("--model", help="config.json, model directory, .gguf file, hub id or catalogue name.")
]
Gpu = Annotated[str | None, typer.Option(help="A device of the catalogue, e.g. 'H100 SXM'.")]
DeviceMemory = Annotated[str | None, typer.Option(help="Memory of one device instead, e.g. 24GiB.")]
TensorParallel = Annotated[int, typer.Option("--tp", "--tensor-parallel-size", help="Tensor-parallel degree.")]
PlannedEngine = Annotated[
    str, typer.Option("--engine", help="Rules and memory costs: octavo, or vllm-0.19 and others.")
]
PlannedKVDtype = Annotated[
    str, typer.Option("--kv-dtype", "--kv-cache-dtype", help="auto (the model's), bf16, fp16, fp8, int8 ...")
]
WeightDtype = Annotated[str | None, typer.Option(help="Weights stored as; default: as published.")]
Utilization = Annotated[
    str | None,
    typer.Option(
        "--utilization", "--gpu-memory-utilization", help="Share of the device to use; default: the engine's."
    ),
]
PlannedSeqs = Annotated[
    int | None, typer.Option("--max-num-seqs", help="Most sequences at once; default: the engine's.")
]
PlannedTokens = Annotated[
    int | None, typer.Option("--max-num-batched-tokens", help="Most tokens in one step; default: the engine's.")
]
Admission = Annotated[str | None, typer.Option(help="Charged on entry: prompt, ceiling or peak.")]
Victims = Annotated[str | None, typer.Option(help="Preempted first: cheapest or newest.")]
MaxSkips = Annotated[int | None, typer.Option(help="How often later requests may pass one that waits for memory.")]
PrefixCaching = Annotated[
    bool, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Share equal prefixes.")
]
PlannedKVMemory = Annotated[
    str | None, typer.Option("--kv-memory", help="KV bytes of one device, e.g. 12GiB; beats the memory plan.")
]
NumBlocks = Annotated[int | None, typer.Option(help="Measured number of KV blocks; beats all other memory options.")]
CalibrationFile = Annotated[str | None, typer.Option("--calibration", help="File of `octavo calibrate`.")]

# -- What is replayed -------------------------------------------------------------------------------------------------
Window = Annotated[str | None, typer.Option(help="Only arrivals from START:END seconds, e.g. 600:1200.")]
SpeedUp = Annotated[float | None, typer.Option("--scale", help="So many times the recorded rate.")]
Slo = Annotated[str | None, typer.Option(help="Objectives, e.g. 'ttft<1s@p99,itl<50ms@p95'.")]
ClientLimit = Annotated[
    int | None, typer.Option("--max-tokens", help="Limit that clients give where the trace does not say.")
]
KnownLengths = Annotated[
    bool, typer.Option("--known-lengths", help="The engine is told each answer's length, as benchmark clients do.")
]
WorkerCount = Annotated[int | None, typer.Option("--workers", help="Processes; default: one per core.")]
