"""Command line options that several commands share: each is worded once, and means the field of `EngineConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

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


# -- Settings of `octavo serve`: the words for every field of `EngineConfig` and `ServerConfig` ------------------------
@dataclass(frozen=True, slots=True)
class Wording:
    """Help for a setting, and other flags that mean it besides its own name."""

    help: str
    names: tuple[str, ...] = ()


def help_of(option: Any) -> str:
    """The help of an option or argument above."""
    return str(get_args(option)[1].help)


def _shared(option: Any) -> Wording:
    """The words of an option above."""
    info = get_args(option)[1]
    first = () if info.default is ... else (info.default,)
    return Wording(help_of(option), tuple(name for name in (*first, *(info.param_decls or ())) if "/" not in name))


SETTINGS: Mapping[str, Wording] = {
    "host": Wording("Address to listen on; 0.0.0.0: all."),
    "port": Wording("0: one that is free."),
    "served_model_name": Wording("Name that clients give; may be repeated. Default: MODEL."),
    "api_keys": Wording("Key that is let in; may be repeated. Others see flags: prefer OCTAVO_API_KEY or the file."),
    "max_body_bytes": Wording("Largest request body, e.g. 8MiB."),
    "max_queue_seconds": Wording("A request not admitted after so long gets 503. Default: it waits."),
    "cors_origins": Wording("Origin whose pages may call the server; may be repeated."),
    "vllm_metrics": Wording("Figures also under vLLM's names."),
    "metrics_compat": Wording("And under vLLM's older names."),
    "access_log": Wording("One JSON line per request on stderr."),
    "otlp_endpoint": Wording("Where OpenTelemetry traces go, e.g. http://localhost:4318."),
    "drain_seconds": Wording("How long running requests may go on after SIGTERM."),
    "stall_seconds": Wording("Unhealthy when no step ran for so long with work waiting."),
    "max_unread_tokens": Wording("Tokens kept for a client that does not read; then its request is aborted."),
    "page": Wording("The page at /."),
    "chat_template": Wording("File with a Jinja template instead of the model's."),
    "tool_parser": Wording("How the model writes tool calls: auto, hermes, llama3 or none."),
    "kv_strategy": _shared(KVStrategy),
    "block_size": _shared(BlockSize),
    "dtype": _shared(Dtype),
    "device": _shared(Device),
    "weights": _shared(Weights),
    "implementation": _shared(Implementation),
    "kv_dtype": _shared(KVDtype),
    "kv_memory": _shared(KVMemory),
    "memory_utilization": Wording("Share of the device's memory to use.", ("--gpu-memory-utilization",)),
    "max_model_len": _shared(MaxModelLen),
    "max_num_seqs": Wording("Most sequences that run at once."),
    "max_num_batched_tokens": _shared(MaxBatchedTokens),
    "enable_prefix_caching": _shared(PrefixCaching),
    "admission": _shared(Admission),
    "victims": _shared(Victims),
    "max_preemptions": Wording("After so many a sequence is protected."),
    "max_skips": _shared(MaxSkips),
    "order": Wording("Who goes first: fcfs, priority or fair (shares by tenant)."),
    "max_queue": Wording("Most sequences that may wait; more get 429."),
    "max_queued_tokens": Wording("Most prompt tokens that may wait; more get 429."),
    "quotas": Wording("Most KV blocks of tenants, e.g. alice=40,bob=20."),
    "tenant_weights": Wording("Parts of tenants where the order is fair, e.g. alice=2,bob=1."),
    "speculative_tokens": _shared(SpeculativeTokens),
    "speculative_limit": Wording("Most tokens of a step that drafts."),
    "itl_target": _shared(ItlTarget),
    "seed": Wording("Makes requests without a seed repeatable."),
    "check": Wording("Verify every invariant after each step: slow, for hunting bugs."),
}
