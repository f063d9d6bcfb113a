"""Fitting the coefficients of the timing model: robust least squares on log times, a weak prior, held-out points.

    fit_kernel(kernel, prior)      coefficients of the timing model from one operator's table
    space_filling(candidates, n)   which shapes to time: the farthest from those already chosen, in log space

Residuals are log(predicted / measured) under a soft-L1 loss, so that a slow outlier weighs no more than its size; every
coefficient is fitted as the logarithm of its ratio to the prior, so it stays positive and the prior is a spring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import OctavoError
from octavo.runner.rates import Coefficients
from octavo.runner.timing import StepShape

Array = NDArray[np.float64]
Rows = NDArray[np.intp]
Point = tuple[StepShape, float]

_SCALE = 0.05  # residuals below 5 % count squared, those above in proportion
_DOUBT = 8.0  # a factor from so many points is believed by half
_REACH = math.log(1e4)  # a coefficient stays within four orders of magnitude of its prior
_SHARPNESS = (1.2, 12.0)


class FitError(OctavoError, ValueError):
    """Measurements that nothing can be fitted to, or not be checked with."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operator's table. `predict(coefficients, rows)` gives the seconds of those rows; `fitted`: coefficients that
    the table tells; `tokens`: rows of the multiplied matrix, where a table over them may correct the fit."""

    operator: str
    format: str
    measured: Array
    fitted: tuple[str, ...]
    predict: Callable[[Coefficients, Rows], Array]
    tokens: Array | None = None


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Error on points that were not used for fitting: median and 90th percentile of |predicted / measured - 1|."""

    median: float
    p90: float
    points: int


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest held-out error with which a fit is accepted."""

    median: float = 0.10
    p90: float = 0.30


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted coefficients. `fitted`: their names; `used`: points behind the held-out error; `draws`: refits to as many
    points, drawn with repetition, for error bars."""

    coefficients: Coefficients
    fitted: tuple[str, ...]
    held_out: HeldOut
    used: int
    draws: tuple[Coefficients, ...] = ()


@dataclass(frozen=True, slots=True)
class Search:
    """How to fit. strength: weight of the prior (a coefficient e times its prior counts like a residual of so much);
    share: part of the points used for fitting, the rest is held out."""

    share: float = 0.25
    strength: float = 0.01
    starts: int = 4
    draws: int = 8
    seed: int = 0


def fit_kernel(
    kernel: Kernel,
    prior: Coefficients,
    search: Search | None = None,
    bound: Bound | None = None,
    knots: Sequence[int] = (),
) -> Fit:
    """Fit one operator's table: a share of the points to learn the error on the others, then all points to keep.

    knots: rows at which a GEMM gets a factor, for where its efficiency follows no roofline.
    Raises FitError for times that are not above 0 and when the held-out error is above `bound`.
    """
    search = search or Search()
    if not np.all(np.isfinite(kernel.measured) & (kernel.measured > 0)):
        raise FitError("A measured time is not a number above 0: measure again.")
    rng = np.random.default_rng(search.seed)
    every = rng.permutation(len(kernel.measured))
    used, held = np.split(every, [max(1, round(search.share * len(every)))])
    part = _with_factors(kernel, _solve(kernel, used, prior, search, rng), used, knots)
    error = held_out(kernel.predict(part, held), kernel.measured[held])
    if bound is not None and (error.median > bound.median or error.p90 > bound.p90):
        raise FitError(
            f"The fit is refused: on {error.points} held-out points its error is {error.median:.1%} (median) and "
            f"{error.p90:.1%} (90th percentile), the bound is {bound.median:.0%} and {bound.p90:.0%}. Measure again "
            "on a machine without other work, or more shapes."
        )
    once = replace(search, starts=1)
    found = _solve(kernel, every, replace(part, gemm_factors=()), once, rng)
    draws = []
    for _ in range(search.draws):
        again = rng.choice(every, len(used))
        draws.append(_with_factors(kernel, _solve(kernel, again, found, once, rng), again, knots))
    return Fit(_with_factors(kernel, found, every, knots), kernel.fitted, error, len(used), tuple(draws))


def _with_factors(kernel: Kernel, found: Coefficients, rows: Rows, knots: Sequence[int]) -> Coefficients:
    """`found` with a factor at each of `knots`: the median of measured / predicted among the rows nearer to it than to
    others (in logarithms). Few rows count for less, and an eighth beyond the last knot the factor is 1."""
    if not knots or kernel.tokens is None:
        return found
    ends = np.array([*knots, knots[-1] * 9 / 8], float)
    nearest = np.argmin(np.abs(np.log(kernel.tokens[rows])[:, None] - np.log(ends)), axis=1)
    gap = np.log(kernel.measured[rows] / kernel.predict(found, rows))
    near = [(float(knot), gap[nearest == i]) for i, knot in enumerate(knots) if np.any(nearest == i)]
    table = [(k, round(math.exp(float(np.median(g)) * len(g) / (len(g) + _DOUBT)), 3)) for k, g in near]
    return replace(found, gemm_factors=(*table, (float(ends[-1]), 1.0)))


def held_out(predicted: Array, measured: Array) -> HeldOut:
    """The error of predictions. Raises FitError without points."""
    if not len(measured):
        raise FitError("No points are left to check the fit with: time more shapes.")
    error = np.abs(predicted / measured - 1.0)
    return HeldOut(float(np.median(error)), float(np.quantile(error, 0.9)), len(measured))


def _solve(kernel: Kernel, rows: Rows, prior: Coefficients, search: Search, rng: np.random.Generator) -> Coefficients:
    """The best of several starts. Start 0 is the prior itself."""
    from scipy.optimize import least_squares

    names, measured = kernel.fitted, kernel.measured[rows]
    centre = np.array([getattr(prior, name) for name in names], float)
    low, high = _limits(names, centre)
    spring = search.strength * math.sqrt(len(measured))
    target = np.log(measured)

    def residuals(logs: Array) -> Array:
        gap = np.log(kernel.predict(_with(prior, names, centre * np.exp(logs)), rows)) - target
        return np.concatenate([gap, spring * logs])

    best: Any = None
    for start in range(search.starts):
        at = np.zeros(len(names)) if start == 0 else rng.normal(0.0, 0.7, len(names))
        at = np.clip(at, low + 1e-6, high - 1e-6)
        tried = least_squares(
            residuals, at, bounds=(low, high), loss="soft_l1", f_scale=_SCALE, diff_step=1e-4, ftol=1e-6, xtol=1e-6
        )
        if best is None or tried.cost < best.cost:
            best = tried
    return _with(prior, names, centre * np.exp(best.x))


def _limits(names: tuple[str, ...], centre: Array) -> tuple[Array, Array]:
    """Bounds of the logarithms of value / prior."""
    low, high = np.full(len(names), -_REACH), np.full(len(names), _REACH)
    for i, name in enumerate(names):
        if name == "gemm_sharpness":
            low[i], high[i] = (math.log(end / centre[i]) for end in _SHARPNESS)
        elif name in ("cache_gain", "moe_imbalance"):
            low[i] = math.log(1.0 / centre[i]) - 1e-5  # at least 1
    return low, high


def _with(prior: Coefficients, names: Sequence[str], values: Array) -> Coefficients:
    changed: dict[str, Any] = {name: float(value) for name, value in zip(names, values, strict=True)}
    return replace(prior, **changed)


def space_filling(candidates: Sequence[StepShape], n: int) -> list[StepShape]:
    """`n` of the candidates, each the farthest from those chosen before in log shape space (greedy k-centre).

    A random choice leaves holes in which a fit runs wild (PLANNER 2b: one of eight random draws 35 % off).
    The first is the one nearest the middle; equal distances go to the earlier candidate.
    """
    if n >= len(candidates):
        return list(candidates)
    at = np.array([_features(shape) for shape in candidates])
    spread = np.ptp(at, axis=0)
    at = at / np.where(spread > 0, spread, 1.0)
    chosen = [int(np.argmin(np.linalg.norm(at - at.mean(axis=0), axis=1)))]
    nearest = np.linalg.norm(at - at[chosen[0]], axis=1)
    while len(chosen) < n:
        chosen.append(int(np.argmax(nearest)))
        nearest = np.minimum(nearest, np.linalg.norm(at - at[chosen[-1]], axis=1))
    return [candidates[i] for i in chosen]


def _features(shape: StepShape) -> list[float]:
    """Where a shape lies: log counts of prompt tokens, tokens before them, decodes, their mean context, samples,
    copies."""
    computed = sum(count for count, _ in shape.chunks)
    before = sum(start for _, start in shape.chunks)
    mean = shape.context / shape.decodes if shape.decodes else 0.0
    counts = (computed, before, len(shape.chunks), shape.decodes, mean, shape.samples, shape.copied)
    return [math.log1p(count) for count in counts]
