"""A calibration from the request log of a running engine, whichever it is: no step is known, so the rates of its device
are scaled until a replay of the requests gives the latencies that were measured.

    log = read_requests("requests.csv")
    made = calibrate_requests(log, Deployment(model=..., gpu=..., engine="vllm-0.19", num_blocks=...))

Few numbers are free, each a factor of many rates at once: what computes, what moves bytes, what costs per launch, and
with tensor parallelism the link. A quarter of the requests is held out; a fit that misses them is refused.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.planner.deployment import Deployment, resolve
from octavo.planner.replay import ReplayOptions, replay
from octavo.planner.timing.calibration import RateCalibration, shape_of_model, today
from octavo.planner.timing.fitting import Bound, HeldOut, held_out
from octavo.planner.timing.step_times import CalibrationError
from octavo.planner.traces.api import TraceRequest
from octavo.runner.rates import Coefficients
from octavo.runner.timing import RooflineTimer

Array = NDArray[np.float64]

COLUMNS = ("id", "input_toks", "output_toks", "queued_s", "first_token_s", "last_token_s")
BOUND = Bound(median=0.10, p90=0.30)
LEAST_REQUESTS = 40
STRETCH = 10  # neighbouring requests share their fate: every fourth stretch of so many is held out
#: Free factors -> endings of the coefficients that each multiplies.
SCALES = {
    "compute": ("_compute",),
    "memory": ("_bandwidth",),
    "overhead": ("_start", "_sequence", "_tile", "_span", "_idle", "_gap"),
    "link": ("link_bandwidth",),
}
_REACH = math.log(4.0)  # a factor stays within 1/4 and 4
_SPRING = 0.02  # pulls factors to 1: a factor of e weighs like a residual of so much for every request
_SCALE = 0.1  # residuals below 10 % count squared, those above in proportion


@dataclass(frozen=True, slots=True)
class RequestLog:
    """Requests in order of arrival, with seconds from queueing to the first and to the last token of each."""

    name: str
    requests: tuple[TraceRequest, ...]
    ttft: Array
    e2e: Array


def read_requests(path: Path) -> RequestLog:
    """Read a CSV file (.gz too) with the columns of `COLUMNS`: token counts, and times in seconds on one clock.

    Raises CalibrationError naming the line and what is wrong with it.
    """
    rows: list[tuple[TraceRequest, float, float]] = []
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
            table = csv.DictReader(file)
            if not set(COLUMNS) <= set(table.fieldnames or ()):
                raise CalibrationError(f"{path}, line 1: a request log needs the columns {', '.join(COLUMNS)}.")
            for row in table:
                rows.append(_row(row, f"{path}, line {table.line_num}"))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CalibrationError(f"{path} cannot be read ({error}); give a CSV file of requests.") from error
    if len(rows) < LEAST_REQUESTS:
        raise CalibrationError(f"{path} has {len(rows)} requests; a calibration needs at least {LEAST_REQUESTS}.")
    rows.sort(key=lambda entry: entry[0].arrival)
    begin = rows[0][0].arrival
    requests = tuple(replace(request, arrival=request.arrival - begin) for request, _, _ in rows)
    return RequestLog(path.name, requests, np.array([r[1] for r in rows]), np.array([r[2] for r in rows]))


def _row(row: dict[str, str], where: str) -> tuple[TraceRequest, float, float]:
    try:
        prompt, output = int(row["input_toks"]), int(row["output_toks"])
        queued, first, last = (float(row[name]) for name in COLUMNS[3:])
    except (TypeError, ValueError) as error:
        raise CalibrationError(f"{where}: not a number ({error}); correct the line.") from error
    if prompt < 1 or output < 1 or not queued < first <= last < math.inf:
        raise CalibrationError(
            f"{where}: it needs at least a token of prompt and answer, and queued_s < first_token_s <= last_token_s."
        )
    return TraceRequest(queued, prompt, output, row["id"]), first - queued, last - queued


def calibrate_requests(log: RequestLog, deployment: Deployment, command: str = "") -> RateCalibration:
    """Scale the rates of `deployment`'s device until its replay gives the log's latencies.

    Raises CalibrationError if a replay refuses requests that the engine served, and for a held-out error (of the
    end-to-end latency of single requests) above `BOUND`.
    """
    resolved = resolve(deployment)
    timer = resolved.timer
    assert isinstance(timer, RooflineTimer), "without a calibration, times come from the device's rates"
    base, work = timer.coefficients, timer.work
    names = [name for name in SCALES if name != "link" or work.tp > 1]

    def simulated(factors: Array) -> Array:
        other = RooflineTimer(work, scaled(base, names, factors), resolved.block_bytes)
        options = ReplayOptions(lives=len(log.requests), known_lengths=True, timeline=False)
        outcome = replay(log.requests, replace(resolved, timer=other), options)
        return _latencies(log, {life.id: (life.first_token, life.finished) for life in outcome.lives})

    held = np.array([i // STRETCH % 4 == 3 for i in range(len(log.requests))])
    factors = _solve(simulated, np.array([log.ttft, log.e2e]), ~held, len(names))
    error = held_out(simulated(factors)[1][held], log.e2e[held])
    _check(error, log)
    shape, weights = shape_of_model(deployment.model, resolved.spec.dtype, deployment.weight_dtype or "auto")
    return RateCalibration(
        coefficients=scaled(base, names, factors),
        factors=dict(zip(names, (float(factor) for factor in factors), strict=True)),
        held_out=error,
        used=int((~held).sum()),
        model=deployment.model,
        device=deployment.gpu or "its device",
        engine=deployment.engine,
        weights=weights,
        kv_dtype=resolved.spec.dtype,
        tp=work.tp,
        shape=shape,
        block_bytes=float(resolved.block_bytes),
        date=today(),
        command=command,
    )


def scaled(base: Coefficients, names: Sequence[str], factors: Sequence[float] | Array) -> Coefficients:
    """`base` with each group of coefficients multiplied by its factor: rates and times alike are of their own kind."""
    changes: dict[str, Any] = {}
    for name, factor in zip(names, factors, strict=True):
        for entry in fields(base):
            of_link = entry.name.startswith("link_")
            if entry.name.endswith(SCALES[name]) and of_link == (name == "link"):
                changes[entry.name] = getattr(base, entry.name) * float(factor)
    return replace(base, **changes)


def _latencies(log: RequestLog, times: dict[str, tuple[float | None, float | None]]) -> Array:
    """[2, requests]: seconds to the first and to the last token."""
    rows = []
    for request in log.requests:
        first, last = times.get(request.id, (None, None))
        if first is None or last is None:
            raise CalibrationError(
                f"The engine served request {request.id}, but its replay does not: give its pool with --num-blocks or "
                "--kv-memory, and its limits with --max-model-len and --max-num-seqs."
            )
        rows.append((first - request.arrival, last - request.arrival))
    return np.array(rows).T


def _solve(simulated: Callable[[Array], Array], measured: Array, used: NDArray[np.bool_], count: int) -> Array:
    """The factors, found in logarithms by robust least squares on log latencies. Replays jump where a decision turns
    over, so slopes are taken over steps of 3 %."""
    from scipy.optimize import least_squares

    slack = 0.1 * np.median(measured[:, used], axis=1, keepdims=True)  # small waits are chance, not speed
    target = np.log(measured + slack)[:, used].ravel()
    spring = _SPRING * math.sqrt(target.size)

    def residuals(shifted: Array) -> Array:
        logs = shifted - 1.0
        found = np.log(simulated(np.exp(logs)) + slack)[:, used].ravel()
        return np.concatenate([found - target, spring * logs])

    # Shifted by 1, because scipy's step for the slopes is relative to the variable.
    limits = (np.full(count, 1.0 - _REACH), np.full(count, 1.0 + _REACH))
    best = least_squares(
        residuals, np.ones(count), bounds=limits, loss="soft_l1", f_scale=_SCALE, diff_step=0.03, max_nfev=15
    )
    out: Array = np.exp(best.x - 1.0)
    return out


def _check(error: HeldOut, log: RequestLog) -> None:
    if error.median > BOUND.median or error.p90 > BOUND.p90:
        raise CalibrationError(
            f"The calibration is refused: on {error.points} held-out requests of {log.name} the end-to-end latency is "
            f"off by {error.median:.1%} (median) and {error.p90:.1%} (90th percentile); the bound is "
            f"{BOUND.median:.0%} and {BOUND.p90:.0%}. Check that --gpu, --engine, --num-blocks and the limits are "
            "those of the engine that wrote it."
        )
