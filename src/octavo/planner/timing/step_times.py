"""Step times of one model on one machine, from steps that were timed there: the terms, their fit, the timer.

    found = fit_steps(points, held, windows)     refuses (CalibrationError) what the held-out steps do not bear out
    found.timer()                                the `StepTimer` of a simulation

Where `runner.timing` counts a model's work and fits a device's rates, this measures whole engine steps and assumes
little: a monotone curve over the step's tokens, attention linear in the (query, key) pairs, and something per
sequence, drawn token and copied block. All terms are linear and none is negative, so the fit has one solution and a
batch that only decodes takes a time affine in its context. It holds for this model on this machine, no other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.errors import OctavoError
from octavo.planner.timing.fitting import Bound, HeldOut, Point, held_out
from octavo.runner.rates import pairs
from octavo.runner.timing import StepShape

Array = NDArray[np.float64]

BOUND = Bound(median=0.10, p90=0.25)
LEAST_POINTS = 40
DRAWS = 8
#: Seconds per step, per decoding sequence, per prompt chunk; per step that draws and per drawn token; per token of
#: context of the decodes, and what each takes more beside prompt chunks; per (query, key) pair of the chunks, and per
#: key of a chunk; per step with copies and per copied block.
PLAIN = (
    "step",
    "decode",
    "chunk",
    "head",
    "sample",
    "context",
    "context_beside_chunks",
    "pair",
    "chunk_context",
    "copy",
    "copied_block",
)
_SCALE = 0.05  # residuals below 5 % count squared, those above in proportion
_SPRING = 1e-3  # pulls a term that the points cannot tell to 0


class CalibrationError(OctavoError, ValueError):
    """A calibration that is refused, unreadable or of another model."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Which terms there are: those of `PLAIN`; per window of the model, context and pairs within it; and the seconds
    per token between two of `knots`, of which the first is 0 and the last has no end."""

    windows: tuple[int, ...]
    knots: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        tokens = [f"token_from_{low}" for low in self.knots]
        windowed = [f"{kind}_in_window_{w}" for w in self.windows for kind in ("context", "pair")]
        return (*PLAIN, *windowed, *tokens)

    def of(self, shape: StepShape) -> list[float]:
        """How often each term counts in a step, in the order of `names`."""
        chunks, context = shape.chunks, float(shape.context)
        plain = (
            1.0,
            float(shape.decodes),
            float(len(chunks)),
            float(shape.samples > 0),
            float(shape.samples),
            context,
            context if chunks else 0.0,
            sum(pairs(*chunk) for chunk in chunks),
            sum(start + 0.5 * count for count, start in chunks),
            float(shape.copied > 0),
            float(shape.copied),
        )
        windowed: list[float] = []
        for window, tokens in zip(self.windows, shape.windowed, strict=True):
            windowed += (float(tokens), sum(pairs(*chunk, window) for chunk in chunks))
        return [*plain, *windowed, *self.tokens(shape.tokens)]

    def tokens(self, tokens: int) -> list[float]:
        """Tokens of a step between each two knots."""
        ends = (*self.knots[1:], math.inf)
        return [float(min(max(tokens - low, 0), high - low)) for low, high in zip(self.knots, ends, strict=True)]


def knots_upto(tokens: int) -> tuple[int, ...]:
    """Knots of the curve over tokens: 0, 1 and powers of two, the last below `tokens`."""
    return (0, *(1 << n for n in range(max(1, (tokens - 1).bit_length()))))


class FittedTimer:
    """A `StepTimer`: seconds = terms x coefficients."""

    def __init__(self, terms: Terms, values: Sequence[float], draws: Sequence[Sequence[float]] = ()) -> None:
        self.terms, self.values, self._draws = terms, tuple(values), tuple(draws)
        named = dict(zip(terms.names, self.values, strict=True))
        self._step, self._decode, self._chunk, self._head, self._sample, self._context = self.values[:6]
        self._mixed, self._pair, self._chunk_context, self._copy, self._block = self.values[6:11]
        self._windowed = [named[f"context_in_window_{w}"] for w in terms.windows]
        self._windowed_pairs = [(w, named[f"pair_in_window_{w}"]) for w in terms.windows]
        self._slopes = self.values[-len(terms.knots) :]
        self._by_tokens: dict[int, float] = {}

    @property
    def windows(self) -> tuple[int, ...]:
        return self.terms.windows

    def seconds(self, shape: StepShape) -> float:
        chunks, samples, tokens = shape.chunks, shape.samples, shape.tokens
        fixed = self._by_tokens.get(tokens)
        if fixed is None:
            counts = self.terms.tokens(tokens)
            fixed = self._step + sum(c * s for c, s in zip(counts, self._slopes, strict=True))
            self._by_tokens[tokens] = fixed
        seconds = fixed + self._decode * shape.decodes + self._context * shape.context
        for rate, context in zip(self._windowed, shape.windowed):  # noqa: B905 - one entry each, asked for by `windows`
            seconds += rate * context
        if samples:
            seconds += self._head + self._sample * samples
        if shape.copied:
            seconds += self._copy + self._block * shape.copied
        if chunks:
            seconds += self._chunk * len(chunks) + self._mixed * shape.context
            for count, start in chunks:
                seconds += self._pair * pairs(count, start) + self._chunk_context * (start + 0.5 * count)
                for window, rate in self._windowed_pairs:
                    seconds += rate * pairs(count, start, window)
        return seconds

    def affine(self, shape: StepShape) -> tuple[float, float]:
        """(seconds now, seconds per further token of context) of a batch that only decodes, windows taken as full."""
        return self.seconds(shape), self._context

    def alternatives(self, n: int | None = None) -> list[FittedTimer]:
        """Up to `n` timers (None: all there are) that differ as the fit is uncertain."""
        return [FittedTimer(self.terms, draw) for draw in self._draws[:n]]

    def breakdown(self, shape: StepShape) -> dict[str, float]:
        """The terms of `seconds(shape)`, those of tokens as one; they sum to it."""
        named = dict(zip(self.terms.names, (c * v for c, v in zip(self.terms.of(shape), self.values, strict=True))))  # noqa: B905
        tokens = sum(named.pop(name) for name in self.terms.names if name.startswith("token_from_"))
        return {**named, "tokens": tokens}


@dataclass(frozen=True, slots=True)
class StepFit:
    """A fit that its held-out steps bear out. `used`: points fitted; `draws`: refits to resampled points."""

    terms: Terms
    values: tuple[float, ...]
    draws: tuple[tuple[float, ...], ...]
    held_out: HeldOut
    used: int

    def timer(self) -> FittedTimer:
        return FittedTimer(self.terms, self.values, self.draws)


def fit_steps(
    points: Sequence[Point],
    held: Sequence[Point],
    windows: tuple[int, ...] = (),
    *,
    bound: Bound = BOUND,
    remedy: str = "The machine may be busy with other work: free it and calibrate again.",
) -> StepFit:
    """Fit the terms to `points` (shape, seconds) and check them on `held`, steps that the fit has not seen.

    Robust least squares on log times, no coefficient below 0. Raises CalibrationError with too few points, a time
    that is not above 0, and a held-out error above `bound`: then the sentence ends in `remedy`.
    """
    if len(points) < LEAST_POINTS or not held:
        raise CalibrationError(
            f"{len(points)} steps to fit and {len(held)} to check with; a calibration needs at least {LEAST_POINTS} "
            "and 1: time more shapes."
        )
    terms = Terms(windows, knots_upto(max(shape.tokens for shape, _ in points)))
    counts, seconds = _table(terms, points)
    values = _solve(counts, seconds)
    rng = np.random.default_rng(0)
    rows = [rng.choice(len(seconds), len(seconds)) for _ in range(DRAWS)]
    draws = tuple(_floats(_solve(counts[chosen], seconds[chosen])) for chosen in rows)
    checks, measured = _table(terms, held)
    error = held_out(checks @ values, measured)
    if error.median > bound.median or error.p90 > bound.p90:
        raise CalibrationError(
            f"The calibration is refused: on {error.points} held-out steps its error is {error.median:.1%} (median) "
            f"and {error.p90:.1%} (90th percentile); the bound is {bound.median:.0%} and {bound.p90:.0%}. {remedy}"
        )
    return StepFit(terms, _floats(values), draws, error, len(points))


def _table(terms: Terms, points: Sequence[Point]) -> tuple[Array, Array]:
    seconds = np.array([time for _, time in points], float)
    if not np.all(np.isfinite(seconds) & (seconds > 0)):
        raise CalibrationError("A measured time is not a number above 0: measure again.")
    return np.array([terms.of(shape) for shape, _ in points], float), seconds


def _floats(values: Array) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _solve(counts: Array, seconds: Array) -> Array:
    """Coefficients >= 0 that minimise a soft-L1 loss of log(predicted / measured). [points, terms], [points]."""
    from scipy.optimize import least_squares, nnls

    share = (counts / seconds[:, None]).mean(axis=0)  # a term's mean share of a step, were its coefficient 1
    share[share == 0.0] = 1.0
    scaled = counts / share
    spring = _SPRING * np.eye(scaled.shape[1]) * math.sqrt(len(seconds))

    def residuals(x: Array) -> Array:
        return np.concatenate([np.log((scaled @ x + 1e-12) / seconds), spring @ x])

    def slopes(x: Array) -> Array:
        return np.concatenate([scaled / (scaled @ x + 1e-12)[:, None], spring])

    start, _ = nnls(scaled / seconds[:, None], np.ones(len(seconds)))
    found = least_squares(
        residuals, start + 1e-4, jac=slopes, bounds=(0.0, np.inf), loss="soft_l1", f_scale=_SCALE, max_nfev=400
    )
    out: Array = found.x / share
    return out
