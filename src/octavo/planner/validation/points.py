"""Measured serving points: mean TTFT and TPOT of an engine under a closed loop of fixed concurrency, and our reruns.

The table is AIConfigurator's silicon_e2e.csv (Apache-2.0). It says neither the KV dtype nor the number of requests nor
how lengths were drawn, so these are fixed here, once and for all rows:

- requests: 10 x concurrency; prompt and answer uniform in 0.8 .. 1.0 of the stated lengths, answers pinned;
- KV dtype: that of the weights where they are bf16; else bf16 on Hopper with 80 GB and fp8 on all larger devices (the
  one choice that was made by looking at measurements: PLANNER 2b, the mean TTFT of H200 rows fits an fp8 pool alone);
- engine: the profile of the vLLM version named, of vLLM 0.11 where none is or for other engines, whose rules we lack;
- max_model_len: both lengths and 256 tokens; everything else the engine's defaults, without prefix caching.
"""

from __future__ import annotations

import csv
import gzip
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import OctavoError
from octavo.planner.catalogue import CatalogueError, find_model
from octavo.planner.deployment import Deployment, Level, resolve
from octavo.planner.replay import ReplayOptions, replay
from octavo.planner.traces.api import TraceRequest

DEVICES = {"h100_sxm": "H100 SXM 80GB", "h200_sxm": "H200 SXM 141GB", "b200_sxm": "B200 SXM 180GB"}
NODE = 8  # ranks
ROUNDS = 10  # requests per place of the closed loop
SHORTEST = 0.8  # of the stated lengths
_INTERNAL = "source_file=data/"  # the others come from a public benchmark
_DEFAULT_ENGINE = "vllm-0.11"
_WEIGHTS = {"": "bf16", "bf16": "bf16", "fp8": "fp8", "int4": "int4"}
_MXFP4 = ("openai/gpt-oss-120b", "openai/gpt-oss-20b")


@dataclass(frozen=True, slots=True)
class Point:
    """One row. ttft, tpot: measured means, seconds; expert_ranks: over which the experts are spread, 0: not said."""

    id: str
    engine: str
    version: str
    model: str
    system: str
    precision: str
    mode: str
    prompt: int
    output: int
    concurrency: int
    tp: int
    pipeline: int
    attention_replicas: int
    expert_ranks: int
    source: str
    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Rerun:
    """A row and what came out: simulated means in seconds, and the level of the timing model."""

    point: Point
    ttft: float
    tpot: float
    preemptions: int
    level: Level

    @property
    def ttft_error(self) -> float:
        return self.ttft / self.point.ttft - 1.0

    @property
    def tpot_error(self) -> float:
        return self.tpot / self.point.tpot - 1.0


def read_points(path: Path) -> list[Point]:
    """All rows of the table, as they stand."""
    with gzip.open(path, "rt", newline="") as file:
        return [_point(row) for row in csv.DictReader(file)]


def _point(row: Mapping[str, str]) -> Point:
    def count(name: str) -> int:
        return int(float(row[name] or 0))

    return Point(
        id=row["id"],
        engine=row["backend"],
        version=row["backend_version"],
        model=row["model_path"],
        system=row["system"],
        precision=row["precision"],
        mode=row["mode"],
        prompt=count("isl"),
        output=count("osl"),
        concurrency=count("batch_size"),
        tp=count("tp_size"),
        pipeline=count("pp_size"),
        attention_replicas=count("attention_dp_size"),
        expert_ranks=count("moe_tp_size") * count("moe_ep_size"),
        source=row["silicon_data_source"],
        ttft=float(row["silicon_ttft_ms"]) / 1e3,
        tpot=float(row["silicon_tpot_ms"]) / 1e3,
    )


def left_out(point: Point) -> str | None:
    """Why a row is outside what the model claims to know, None if it is inside. Decided by the row alone, never by how
    well it would come out."""
    if point.mode != "agg":
        return "prompts and answers on different workers"
    if point.system not in DEVICES:
        return "no kernel times of this device"
    if point.tp > NODE:
        return "more ranks than a node has (the table multiplies tp by ep there)"
    if point.pipeline > 1 or point.attention_replicas > 1 or point.expert_ranks > point.tp:
        return "pipeline stages or data-parallel attention"
    if _INTERNAL in point.source:
        return "an internal run whose protocol is not published"
    if not _known_shape(point):
        return "the model's shape is not in the catalogue"
    if _weights(point) is None:
        return "no kernel times of NVFP4"
    return None


def _catalogue_name(model: str) -> str:
    """Quantised copies have the shape of the original."""
    return re.sub(r"^nvidia/", "", re.sub(r"-(FP8|NVFP4)$", "", model))


def _known_shape(point: Point) -> bool:
    try:
        return find_model(_catalogue_name(point.model)) is not None
    except CatalogueError:  # the name could stand for several
        return False


def _weights(point: Point) -> str | None:
    if point.model in _MXFP4:
        return "mxfp4"
    return _WEIGHTS.get(point.precision)


def deployment_of(point: Point) -> Deployment:
    """The row as a deployment, under the conventions above."""
    weights = _weights(point)
    large = DEVICES[point.system] != DEVICES["h100_sxm"]
    named = point.engine == "vllm" and re.match(r"\d+\.\d+", point.version)
    return Deployment(
        model=_catalogue_name(point.model),
        gpu=DEVICES[point.system],
        tp=max(1, point.tp),
        engine=f"vllm-{named[0]}" if named else _DEFAULT_ENGINE,
        kv_dtype="fp8" if large and weights != "bf16" else "bf16",
        weight_dtype=weights,
        max_model_len=point.prompt + point.output + 256,
        prefix_caching=False,
    )


def workload(point: Point) -> Iterator[TraceRequest]:
    """The requests of a row; equal rows draw equal lengths."""
    draw = random.Random(f"{point.prompt} {point.output} {point.concurrency}")
    for n in range(ROUNDS * point.concurrency):
        prompt, output = (round(length * draw.uniform(SHORTEST, 1.0)) for length in (point.prompt, point.output))
        yield TraceRequest(0.0, prompt, output, str(n))


def rerun(point: Point) -> Rerun:
    """Simulate a row. Raises OctavoError where the deployment cannot work on paper."""
    reason = left_out(point)
    if reason is not None:
        raise OctavoError(f"{point.id} is not rerun: {reason}.")
    resolved = resolve(deployment_of(point))
    options = ReplayOptions(concurrency=point.concurrency, known_lengths=True, timeline=False)
    outcome = replay(workload(point), resolved, options)
    return Rerun(point, outcome.ttft.mean, outcome.tpot.mean, outcome.preemptions, resolved.fidelity.level)
