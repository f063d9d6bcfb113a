"""A calibration from the decision log of an engine: its plans say which steps, its clock how long they took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.log import read_log
from octavo.planner.timing.calibration import Calibration, reach_of, shape_of_model, today
from octavo.planner.timing.fitting import Point
from octavo.planner.timing.step_times import fit_steps
from octavo.runner.timing import StepShape


def calibrate_log(path: Path, model: str, weights: str = "auto", command: str = "") -> Calibration:
    """Fit the steps of a decision log that an engine of `model` wrote. Raises LogError for what is no log,
    CalibrationError for one with too few steps or with steps that the fit does not explain."""
    header, _ = read_log(path)
    points, windows = log_points(path)
    fitted, held = split_log(points)
    remedy = "The engine's machine may have been busy, or the log mixes settings: use the log of another run."
    fit = fit_steps(fitted, held, windows, remedy=remedy)
    name, _, stored, kv_dtype = (*header.engine_identity, "", "", "", "bf16")[:4]
    shape, form = shape_of_model(model, kv_dtype, weights)
    return Calibration(
        fit,
        model=name or model,
        device="the machine of its log",
        engine=f"octavo, {stored or 'weights unknown'}",
        weights=form,
        kv_dtype=kv_dtype,
        shape=shape,
        reach=reach_of(fitted),
        date=today(),
        command=command,
        host={"log": path.name, "steps": len(points)},
    )


def log_points(path: Path) -> tuple[list[Point], tuple[int, ...]]:
    """(steps of a decision log with their durations, the model's windows).

    A step lasts from the moment when its plan is asked for to the next such moment where work is left, so that the
    engine's own time counts; the last step before a pause ends when it is settled. Raises LogError for a file that is
    no log.
    """
    header, records = read_log(path)
    windows = tuple(dict.fromkeys(window for window in header.windows if window is not None))
    return list(_timed_steps(records, windows)), windows


def _timed_steps(records: Iterator[dict[str, Any]], windows: tuple[int, ...]) -> Iterator[Point]:
    live: set[int] = set()
    began = settled = 0.0
    shape: StepShape | None = None
    ran: StepShape | None = None
    for record in records:
        kind = record["event"]
        if kind == "Submitted":
            if not live:
                yield from _ended(ran, settled - began)
                ran = None
            live.update(record["seqs"])
        elif kind == "Finished":
            live.discard(record["seq"])
        elif kind == "PlanBegan":
            yield from _ended(ran, record["now"] - began)
            began, shape, ran = record["now"], None, None
        elif kind == "Planned":
            shape = _logged_shape(record, windows)
        elif kind == "Settled":
            settled, ran = record["now"], shape
    yield from _ended(ran, settled - began)


def _ended(shape: StepShape | None, seconds: float) -> Iterator[Point]:
    if shape is not None and shape.tokens and seconds > 0:
        yield shape, seconds


def _logged_shape(record: Mapping[str, Any], windows: tuple[int, ...]) -> StepShape:
    """The shape of a `Planned` record, as `shape_of` gives it for the plan."""
    chunks = tuple((count, start) for _, start, count, _ in record["work"] if count > 1)
    contexts = [start + 1 for _, start, count, _ in record["work"] if count == 1]
    return StepShape(
        chunks,
        len(contexts),
        sum(contexts),
        tuple(sum(min(context, window) for context in contexts) for window in windows),
        sum(samples for *_, samples in record["work"]),
        sum(copy["n"] for copy in record["copies"]),
    )


def split_log(points: Sequence[Point], most: int = 4000, stretch: int = 25) -> tuple[list[Point], list[Point]]:
    """(points to fit, held-out points) of a log: at most `most`, evenly thinned; every fourth stretch of `stretch`
    steps is held out, because neighbouring steps are nearly the same step."""
    kept = list(points)[:: -(-len(points) // most) or 1]
    fitted = [point for i, point in enumerate(kept) if i // stretch % 4 != 3]
    return fitted, [point for i, point in enumerate(kept) if i // stretch % 4 == 3]
