"""The calibration file: a fit of step times with what it was made on, so that it is used for nothing else.

made = Calibration(fit, ...)       see `shape_of_model`
save(made, path), load(path)       a small JSON file
made.timer(work, ...)              the timer and how far to trust it; refuses another model
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from octavo.planner.deployment import Fidelity, Level
from octavo.planner.timing.fitting import HeldOut, Point
from octavo.planner.timing.step_times import CalibrationError, FittedTimer, StepFit, Terms
from octavo.runner.rates import Coefficients
from octavo.runner.timing import RooflineTimer
from octavo.runner.work import ModelWork

STEPS, RATES, VERSION = "octavo-step-times", "octavo-rates", 1
_FACTS = ("model", "device", "engine", "weights", "kv_dtype", "date", "command")


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fit with what it was made on. `shape`: layers, hidden size and vocabulary of the model, which must be the same
    where it is used; `reach`: the largest step timed (tokens, decodes, context of one step ...); `host`: facts of the
    machine and the measurement, for people."""

    fit: StepFit
    model: str
    device: str
    engine: str
    weights: str
    kv_dtype: str
    shape: tuple[int, int, int]
    reach: Mapping[str, int]
    date: str
    command: str
    host: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def statement(self) -> str:
        """The sentence that every answer carries."""
        error = self.fit.held_out
        return (
            f"calibrated on {self.device} with {self.model} ({self.engine}): median error {error.median:.1%}, 90th "
            f"percentile {error.p90:.1%} on {error.points} held-out steps, {self.fit.used} fitted"
        )

    def timer(self, work: ModelWork, weights: str, kv_dtype: str) -> tuple[FittedTimer, Fidelity]:
        """The timer for a model of this shape. Raises CalibrationError for another model or more than one rank."""
        _check_model(self, 1, work)
        if sorted(work.windows) != sorted(self.fit.terms.windows):
            raise CalibrationError(
                f"The calibration was made with windows {self.fit.terms.windows}, the deployment's model has "
                f"{work.windows}: run `octavo calibrate` with its model."
            )
        reach = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in self.reach.items())
        notes = [
            f"Steps beyond those that were timed are extrapolated: {reach}.",
            *_differences(self, weights, kv_dtype),
        ]
        return self.fit.timer(), Fidelity(Level.CALIBRATED, self.fit.held_out.median, self.statement, tuple(notes))


@dataclass(frozen=True, slots=True)
class RateCalibration:
    """Rates of a device with `factors` on them, so that a replay gives the latencies of an engine's request log.
    `held_out`: error of single requests' end-to-end latency; `used`: requests fitted; else as `Calibration`."""

    coefficients: Coefficients
    factors: Mapping[str, float]
    held_out: HeldOut
    used: int
    model: str
    device: str
    engine: str
    weights: str
    kv_dtype: str
    tp: int
    shape: tuple[int, int, int]
    block_bytes: float
    date: str
    command: str

    @property
    def statement(self) -> str:
        """The sentence that every answer carries."""
        error = self.held_out
        factors = ", ".join(f"{name} x {factor:.2f}" for name, factor in self.factors.items())
        return (
            f"calibrated to a request log of {self.engine} on {self.device} with {self.model} ({factors}): median "
            f"error {error.median:.1%}, 90th percentile {error.p90:.1%} on {error.points} held-out requests, "
            f"{self.used} fitted"
        )

    @property
    def reach(self) -> Mapping[str, int]:
        """What it was made on."""
        return {"requests": self.used + self.held_out.points}

    def timer(self, work: ModelWork, weights: str, kv_dtype: str) -> tuple[RooflineTimer, Fidelity]:
        """The timer for a model of this shape. Raises CalibrationError for another model or number of ranks."""
        _check_model(self, self.tp, work)
        notes = _differences(self, weights, kv_dtype)
        timer = RooflineTimer(work, self.coefficients, self.block_bytes)
        return timer, Fidelity(Level.CALIBRATED, self.held_out.median, self.statement, tuple(notes))


def _check_model(made: Calibration | RateCalibration, tp: int, work: ModelWork) -> None:
    asked = (work.layers, work.hidden, work.vocab)
    if asked != made.shape or work.tp != tp:
        raise CalibrationError(
            f"The calibration was made with {made.model} and tp {tp} (layers, hidden size, vocabulary {made.shape}); "
            f"the deployment has {asked} and tp {work.tp}: run `octavo calibrate` with its model."
        )


def _differences(made: Calibration | RateCalibration, weights: str, kv_dtype: str) -> list[str]:
    if (made.weights, made.kv_dtype) == (weights, kv_dtype):
        return []
    return [f"Calibrated with {made.weights} weights and {made.kv_dtype} KV; used for {weights} and {kv_dtype}."]


def shape_of_model(model: str, kv_dtype: str, weights: str) -> tuple[tuple[int, int, int], str]:
    """((layers, hidden size, vocabulary), weight format) of a model as the planner counts them, from its config.

    `weights`: as `EngineConfig` has it. Raises OctavoError for a model that cannot be found or read.
    """
    from octavo.kv.spec import spec_from_config
    from octavo.models.config_source import find_source
    from octavo.planner.costs import reading, storage_of
    from octavo.runner.work import model_work

    source = find_source(model)
    with reading(source):
        spec = spec_from_config(source.config, kv_dtype=kv_dtype, names=source.names)
        stored = storage_of(source, None)
        work = model_work(source.config, spec, stored, source.names)
    return (work.layers, work.hidden, work.vocab), stored.name if weights == "auto" else weights


def today() -> str:
    """The date, UTC."""
    return datetime.now(UTC).date().isoformat()


def reach_of(points: Sequence[Point]) -> dict[str, int]:
    """The largest of each kind that was timed."""
    shapes = [shape for shape, _ in points]
    return {
        "tokens": max(shape.tokens for shape in shapes),
        "decodes": max(shape.decodes for shape in shapes),
        "context": max(shape.context for shape in shapes),
        "chunk_end": max((count + start for shape in shapes for count, start in shape.chunks), default=0),
    }


def save(made: Calibration | RateCalibration, path: Path) -> None:
    """Write a calibration file. Raises CalibrationError if it cannot be written."""
    record = _steps_record(made) if isinstance(made, Calibration) else _rates_record(made)
    try:
        path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise CalibrationError(f"{path} cannot be written ({error.strerror}); give another name.") from error


def _steps_record(made: Calibration) -> dict[str, Any]:
    fit = made.fit
    return {
        "format": STEPS,
        "version": VERSION,
        **{name: getattr(made, name) for name in _FACTS},
        "shape": list(made.shape),
        "reach": dict(made.reach),
        "host": dict(made.host),
        "held_out": asdict(fit.held_out),
        "points": fit.used,
        "windows": list(fit.terms.windows),
        "knots": list(fit.terms.knots),
        "seconds": dict(zip(fit.terms.names, fit.values, strict=True)),
        "draws": [[float(f"{value:.5g}") for value in draw] for draw in fit.draws],
    }


def _rates_record(made: RateCalibration) -> dict[str, Any]:
    rates = asdict(made.coefficients)
    return {
        "format": RATES,
        "version": VERSION,
        **{name: getattr(made, name) for name in (*_FACTS, "tp", "block_bytes")},
        "shape": list(made.shape),
        "held_out": asdict(made.held_out),
        "requests": made.used,
        "factors": dict(made.factors),
        "coefficients": {name: value for name, value in rates.items() if value != math.inf},  # JSON has no infinity
    }


def load(path: Path) -> Calibration | RateCalibration:
    """Read a calibration file. Raises CalibrationError naming the file and what is wrong with it."""
    again = "run `octavo calibrate` again."
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CalibrationError(f"{path} is not a readable calibration file ({error}): {again}") from error
    readers: dict[str, Callable[[Mapping[str, Any]], Calibration | RateCalibration]] = {STEPS: _steps, RATES: _rates}
    if not isinstance(data, dict) or data.get("format") not in readers or data.get("version") != VERSION:
        raise CalibrationError(f"{path} is not a calibration file of version {VERSION}: {again}")
    try:
        return readers[data["format"]](data)
    except (KeyError, TypeError, ValueError) as error:
        raise CalibrationError(f"{path} lacks something or has it wrong ({error!r}): {again}") from error


def _steps(data: Mapping[str, Any]) -> Calibration:
    terms = Terms(tuple(data["windows"]), tuple(data["knots"]))
    values = _coefficients(terms, [data["seconds"][name] for name in terms.names])
    draws = tuple(_coefficients(terms, draw) for draw in data["draws"])
    fit = StepFit(terms, values, draws, HeldOut(**data["held_out"]), int(data["points"]))
    facts = {name: data[name] for name in (*_FACTS, "reach", "host")}
    return Calibration(fit, shape=_triple(data["shape"]), **facts)


def _rates(data: Mapping[str, Any]) -> RateCalibration:
    rates = dict(data["coefficients"])
    rates["gemm_factors"] = tuple((float(rows), float(factor)) for rows, factor in rates.get("gemm_factors", ()))
    if not all(isinstance(value, tuple) or 0 <= value < math.inf for value in rates.values()):
        raise ValueError("coefficients must be numbers from 0 on")
    facts = {name: data[name] for name in (*_FACTS, "tp", "block_bytes", "factors")}
    held = HeldOut(**data["held_out"])
    return RateCalibration(
        Coefficients(**rates), held_out=held, used=data["requests"], shape=_triple(data["shape"]), **facts
    )


def _triple(values: Sequence[int]) -> tuple[int, int, int]:
    layers, hidden, vocabulary = values
    return layers, hidden, vocabulary


def _coefficients(terms: Terms, values: Sequence[Any]) -> tuple[float, ...]:
    rising = terms.knots[0] == 0 and all(low < high for low, high in pairwise(terms.knots))
    if not rising or len(values) != len(terms.names) or not all(0 <= float(value) < math.inf for value in values):
        raise ValueError("seconds and draws must be numbers from 0 on, one for each term, and knots must rise from 0")
    return tuple(float(value) for value in values)
