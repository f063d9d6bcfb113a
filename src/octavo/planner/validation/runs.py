"""Runs of real engines as they were measured: the requests, when each got its tokens, and the engine's gauges.

The folder layout is LLMServingSim's: `vllm_runs/<gpu>_<model>/` with meta.json, requests.csv.gz and timeseries.csv, and
the workloads beside it. Arrivals are the engine's own queueing times, not the workload's.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import OctavoError
from octavo.planner.deployment import Deployment
from octavo.planner.traces.api import TraceRequest

BUNDLED = Path(__file__).parent.parent / "data" / "runs"
_GPUS = {"RTX4090": "RTX 4090", "RTXPRO6000": "RTX PRO 6000 Blackwell Server"}
_HASH_BLOCK = 16


class RunError(OctavoError):
    """A measured run that cannot be read or rerun: which file, which field, why."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What a real engine did with a workload.

    requests     in order of arrival, arrivals on the run's clock
    first, last  request id -> when its first and last token came, in seconds on that clock
    gauges       name (running, waiting, kv_cache_pct) -> its values, one a second while requests were there; empty
                 where it was not recorded
    """

    name: str
    deployment: Deployment
    requests: tuple[TraceRequest, ...]
    first: Mapping[str, float]
    last: Mapping[str, float]
    gauges: Mapping[str, tuple[float, ...]]


def find_runs(folder: Path = BUNDLED) -> list[Path]:
    """The run folders under `folder`, in order of name. Raises RunError if there are none."""
    found = sorted(path.parent for path in folder.glob("**/vllm_runs/*/meta.json"))
    if not found:
        raise RunError(f"{folder} holds no measured runs (vllm_runs/*/meta.json); name the folder of the profiles.")
    return found


def read_run(folder: Path) -> MeasuredRun:
    """Read one run. Raises RunError naming the file and the field that is missing or has no counterpart here."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        deployment = _deployment(folder.name, meta)
        rows = list(_table(folder / "requests.csv.gz"))
        hashes = _hashes(folder.parent.parent / f"workload_{Path(meta['dataset_path']).name}.gz")
        requests = [_request(row, ids) for row, ids in zip(rows, hashes, strict=True)]
        first = {row["id"]: float(row["first_token_s"]) for row in rows}
        last = {row["id"]: float(row["last_token_s"]) for row in rows}
        gauges = _gauges(folder / "timeseries.csv", max(last.values()))
    except KeyError as error:
        raise RunError(f"{folder}: {error.args[0]} is missing; it is needed to rerun it.") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{folder} cannot be read ({error}); give a folder as LLMServingSim writes it.") from error
    return MeasuredRun(folder.name, deployment, tuple(sorted(requests, key=lambda r: r.arrival)), first, last, gauges)


def _deployment(name: str, meta: Mapping[str, Any]) -> Deployment:
    """The engine as it was started. What the run did not fix is left to the engine profile."""
    given, gpu = meta["engine_kwargs"], name.split("_")[0]
    if gpu not in _GPUS:
        raise RunError(f"{name}: the device {gpu} is unknown; known are {', '.join(_GPUS)}.")
    if given["data_parallel_size"] != 1:
        raise RunError(
            f"{name}: data_parallel_size is {given['data_parallel_size']}; ranks that wait for each other in every "
            "step are not modelled, so only runs of one replica are rerun."
        )
    cache = meta.get("kv_cache", {})
    return Deployment(
        model=meta["model"],
        gpu=_GPUS[gpu],
        tp=given["tensor_parallel_size"],
        engine=f"vllm-{meta['vllm_version']}",
        block_size=cache.get("block_size", _HASH_BLOCK),
        kv_dtype=given["kv_cache_dtype"],
        max_model_len=given["max_model_len"],
        max_num_seqs=given["max_num_seqs"],
        max_num_batched_tokens=given["max_num_batched_tokens"],
        num_blocks=cache.get("num_gpu_blocks"),
    )


def _table(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
        yield from csv.DictReader(file)


def _hashes(path: Path) -> list[tuple[int, ...]]:
    with gzip.open(path, "rt") as file:
        return [tuple(json.loads(line)["hash_ids_16"]) for line in file]


def _request(row: Mapping[str, str], hashes: tuple[int, ...]) -> TraceRequest:
    return TraceRequest(
        arrival=float(row["queued_s"]),
        prompt_tokens=int(row["input_toks"]),
        output_tokens=int(row["output_toks"]),
        id=row["id"],
        hashes=hashes,
        hash_block=_HASH_BLOCK,
    )


def _gauges(path: Path, end: float) -> dict[str, tuple[float, ...]]:
    """Values up to the last token. A gauge that is 0 throughout was not recorded."""
    rows = [row for row in _table(path) if float(row["t"]) <= end]
    columns = {name: tuple(float(row[name]) for row in rows) for name in ("running", "waiting", "kv_cache_pct")}
    return {name: values if any(values) else () for name, values in columns.items()}
