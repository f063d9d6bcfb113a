"""`octavo calibrate MODEL`: fits the planner's times to steps timed here, or to the log of an engine that ran."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.commands import options
from octavo.commands.outputs import make_folder, same, try_writing

if TYPE_CHECKING:
    from octavo.planner.timing.calibration import Calibration, RateCalibration

LEAST_SHAPES, MOST_SHAPES = 60, 5000
#: Options that only one way of calibrating reads; the others refuse them rather than pass them over.
_TIMING = ("shapes", "seconds", "implementation", "dtype", "device", "threads")
_REQUESTS = ("gpu", "tp", "engine", "num_blocks", "weight_dtype", "prefix_caching")
_BOTH = ("kv_memory", "kv_dtype", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens")


def calibrate(
    context: typer.Context,
    model: options.Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the calibration goes.")] = Path(
        "octavo-calibration.json"
    ),
    from_log: Annotated[
        Path | None, typer.Option(help="Fit the steps of this decision log of MODEL's engine instead of timing any.")
    ] = None,
    from_requests: Annotated[
        Path | None,
        typer.Option(
            help="Scale the rates of --gpu to this request log of an engine: CSV with id, input_toks, output_toks, "
            "queued_s, first_token_s, last_token_s."
        ),
    ] = None,
    shapes: Annotated[int, typer.Option(help="Step shapes to time; a quarter of them is held out.")] = 240,
    seconds: Annotated[float, typer.Option(help="Further rounds begin only within this time.")] = 60.0,
    weights: options.Weights = "auto",
    implementation: options.Implementation = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads that compute; default: torch's.")] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="KV bytes; bounds the context of a timed step. Default: 1GiB where timed.")
    ] = None,
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", "--kv-cache-dtype", help="auto (the model's), bfloat16, int8, fp8 ...")
    ] = "auto",
    block_size: options.BlockSize = 16,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.PlannedSeqs = None,
    max_num_batched_tokens: options.PlannedTokens = None,
    gpu: options.Gpu = None,
    tp: options.TensorParallel = 1,
    engine: options.PlannedEngine = "octavo",
    num_blocks: options.NumBlocks = None,
    weight_dtype: options.WeightDtype = None,
    prefix_caching: options.PrefixCaching = True,
) -> None:
    """Time a few hundred steps of MODEL on this machine, or read a log, and write what the planner needs to know."""
    from octavo.planner.timing.calibration import save

    given = context.params
    _check_sources(context, from_log, from_requests)
    _check(shapes, seconds, threads)
    _check_output(output, from_log or from_requests)
    command = shlex.join(["octavo", *sys.argv[1:]])
    made: Calibration | RateCalibration
    if from_log is not None:
        from octavo.planner.timing.from_log import calibrate_log

        made = calibrate_log(from_log, model, weights, command)
    elif from_requests is not None:
        made = _requests(from_requests, given, command)
    else:
        made = _timed(given, command)
    save(made, output)
    reach = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in made.reach.items())
    print(f"{made.statement[0].upper()}{made.statement[1:]}.")
    print(f"Made on at most: {reach}.")
    print(f"\nWritten: {output.resolve()}")
    print(f"Use it:  octavo replay TRACE --model {model} --calibration {output}")


def _timed(given: dict[str, Any], command: str) -> Calibration:
    from octavo.config import EngineConfig, parse_bytes

    names = ("model", "block_size", "dtype", "device", "weights", "implementation", "kv_dtype", "max_model_len")
    limits = {name: given[name] for name in ("max_num_seqs", "max_num_batched_tokens") if given[name] is not None}
    memory = parse_bytes(given["kv_memory"] or "1GiB", "kv_memory")
    config = EngineConfig(kv_memory=memory, **{name: given[name] for name in names}, **limits)
    from octavo.calibrating import calibrate_here  # only now: bad input need not wait for torch

    return calibrate_here(config, given["shapes"], given["seconds"], command, given["threads"])


def _requests(path: Path, given: dict[str, Any], command: str) -> RateCalibration:
    from octavo.config import parse_bytes
    from octavo.planner.deployment import Deployment
    from octavo.planner.timing.from_requests import calibrate_requests, read_requests

    memory = None if given["kv_memory"] is None else parse_bytes(given["kv_memory"], "kv_memory")
    names = ("model", *_REQUESTS, *(name for name in _BOTH if name != "kv_memory"))
    deployment = Deployment(kv_memory=memory, **{name: given[name] for name in names})
    return calibrate_requests(read_requests(path), deployment, command)


def _check_sources(context: typer.Context, log: Path | None, requests: Path | None) -> None:
    from octavo.errors import OctavoError

    if log is not None and requests is not None:
        raise OctavoError("from_log and from_requests are both given; give one of them.")
    unused: tuple[str, ...] = _REQUESTS
    how = "--from-requests"
    if log is not None:
        unused, how = (*_TIMING, *_REQUESTS, *_BOTH), "steps that are timed here or --from-requests"
    elif requests is not None:
        unused, how = (*_TIMING, "weights"), "steps that are timed here"
    for name in unused:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise OctavoError(f"{name} is {context.params[name]!r}, but it belongs to {how}; leave it out.")
    if requests is not None and context.params["gpu"] is None:
        raise OctavoError("gpu is missing: a request log scales the rates of a device of the catalogue; give --gpu.")


def _check(shapes: int, seconds: float, threads: int | None) -> None:
    from octavo.errors import OctavoError

    if not LEAST_SHAPES <= shapes <= MOST_SHAPES:
        raise OctavoError(f"shapes is {shapes}; it must be from {LEAST_SHAPES} to {MOST_SHAPES}.")
    if not 0 <= seconds < float("inf"):
        raise OctavoError(f"seconds is {seconds}; it must be a number of seconds, 0 or more.")
    cores = os.cpu_count() or 1
    if threads is not None and not 1 <= threads <= cores:
        raise OctavoError(f"threads is {threads}; it must be from 1 to {cores}, the cores of this machine.")


def _check_output(output: Path, log: Path | None) -> None:
    from octavo.errors import OctavoError

    if os.path.isdir(output):
        raise OctavoError(f"output would be written to {str(output)!r}, which is a folder; give another name.")
    if log is not None and same(output, log):
        raise OctavoError(f"output would overwrite the log {str(log)!r}; give another name.")
    make_folder(output.parent, "output")
    try_writing(output, "output")
