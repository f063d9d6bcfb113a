"""Synthetic workloads: lengths from distributions with given or fitted moments, drawn arrivals, shared prefixes.

Nothing is kept: a trace is drawn again, the same, each time it is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo.planner.traces.api import BadLine, Trace, TraceError, TraceRequest
from octavo.planner.traces.fields import MOST_TOKENS
from octavo.planner.traces.transforms import DRAWN_AT_ONCE, Process, arrivals

Shape = Literal["lognormal", "gamma", "uniform", "constant"]
HASH_BLOCK = 16  # of shared prefixes
OPT_LIMIT = 2048  # prompt and answer: the context of OPT, which the PagedAttention paper serves
MATCHES = 12  # rounds in which scales are fitted to means under a limit
MATCHED_ON = 65_536  # draws that they are fitted on
LEAST_ACCEPTED = 0.01  # of the draws under the limit; below, limit and means contradict each other


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens: its mean, and its coefficient of variation (of uniform at most 0.577)."""

    mean: float
    cv: float = 1.0
    shape: Shape = "lognormal"

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= MOST_TOKENS:
            raise TraceError(f"a mean length of {self.mean:g} tokens is asked for; it must be from 1 to {MOST_TOKENS}.")
        if self.shape not in ("lognormal", "gamma", "uniform", "constant"):
            raise TraceError(f"shape is {self.shape}; choose lognormal, gamma, uniform or constant.")
        most = 3**-0.5 if self.shape == "uniform" else 20.0
        if not 0 <= self.cv <= most:
            raise TraceError(f"cv is {self.cv:g}; of {self.shape} lengths it must be from 0 to {most:.3g}.")

    def draw(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Lengths before rounding, in units of the mean."""
        if self.shape == "constant" or self.cv == 0:
            return np.ones(count)
        if self.shape == "uniform":
            return rng.uniform(1 - self.cv * 3**0.5, 1 + self.cv * 3**0.5, count)
        if self.shape == "gamma":
            return rng.gamma(self.cv**-2, self.cv**2, count)
        sigma2 = math.log1p(self.cv**2)
        return rng.lognormal(-sigma2 / 2, math.sqrt(sigma2), count)


@dataclass(frozen=True)
class Synthetic:
    """
    prompt, output   lengths, drawn apart, rounded to whole tokens of at least 1
    rate             requests per second; process, cv: of the gaps, as in `with_arrivals`
    limit            most tokens of prompt and answer: pairs above it are drawn again, and the scales adjusted so that
                     the means hold nevertheless; None: no limit
    prefix           tokens that stand before each prompt, the same for all of a group; groups are drawn evenly
    """

    title: str
    prompt: Lengths
    output: Lengths
    requests: int = 1000
    rate: float = 1.0
    seed: int = 0
    process: Process = "poisson"
    cv: float = 1.0
    limit: int | None = None
    prefix: int = 0
    prefix_groups: int = 1
    timed: bool = field(default=True, init=False)
    bad_lines: tuple[BadLine, ...] = field(default=(), init=False)
    bad_count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name, ok, wanted in (
            ("requests", self.requests >= 1, "at least 1"),
            ("rate", 0 < self.rate < math.inf, "requests per second, above 0"),
            ("cv", 0 < self.cv < 100, "above 0 and below 100 (1: as Poisson)"),
            ("process", self.process in ("poisson", "gamma", "constant"), "poisson, gamma or constant"),
            ("seed", self.seed >= 0, "0 or above"),
            ("limit", self.limit is None or 2 <= self.limit <= MOST_TOKENS, "at least 2 tokens, or left out"),
            ("prefix", 0 <= self.prefix <= MOST_TOKENS, "tokens, 0 or more"),
            ("prefix_groups", self.prefix_groups >= 1, "at least 1"),
        ):
            if not ok:
                raise TraceError(f"{name} is {getattr(self, name)}; it must be {wanted}.")
        self._scales  # noqa: B018 - a limit that contradicts the means is refused here, not in the middle of a run

    @property
    def name(self) -> str:
        shared = f", {self.prefix} shared tokens" if self.prefix else ""
        return (
            f"{self.title}: {self.requests:,} requests, {self.prompt.shape} prompts of {self.prompt.mean:g} and "
            f"answers of {self.output.mean:g} tokens on average{shared}, {self.process} arrivals at {self.rate:g}/s "
            f"(seed {self.seed})"
        )

    def __iter__(self) -> Iterator[TraceRequest]:
        times = arrivals(self.rate, self.seed, self.process, self.cv)
        rng = np.random.default_rng([self.seed, 3])
        lengths = self._pairs(rng)
        groups = np.random.default_rng([self.seed, 4])
        blocks, block = self.prefix // HASH_BLOCK, HASH_BLOCK if self.prefix >= HASH_BLOCK else 0
        for number in range(self.requests):
            prompt, output = next(lengths)
            base = int(groups.integers(self.prefix_groups)) * blocks if blocks else 0
            hashes = tuple(range(base, base + blocks))
            yield TraceRequest(next(times), prompt + self.prefix, output, str(number), hashes, block)

    def _pairs(self, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
        scales = self._scales
        while True:
            drawn = _unscaled(self.prompt, self.output, DRAWN_AT_ONCE, rng)
            yield from map(tuple, _under(drawn * scales, self._room).tolist())

    @property
    def _room(self) -> int:
        return (self.limit or 3 * MOST_TOKENS) - self.prefix

    @property
    def _scales(self) -> NDArray[np.float64]:
        found: NDArray[np.float64] = _matched(self.prompt, self.output, self._room)
        return found


def _unscaled(prompt: Lengths, output: Lengths, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """[count, 2]: lengths in units of their means."""
    return np.stack([prompt.draw(count, rng), output.draw(count, rng)], axis=1)


def _under(lengths: NDArray[np.float64], room: int) -> NDArray[np.int64]:
    """The pairs of whole tokens, at least 1 each, that have at most `room` in all."""
    pairs = np.clip(np.rint(lengths), 1, MOST_TOKENS).astype(np.int64)
    fit: NDArray[np.int64] = pairs[pairs.sum(axis=1) <= room]
    return fit


@lru_cache(maxsize=64)
def _matched(prompt: Lengths, output: Lengths, room: int) -> NDArray[np.float64]:
    """[2]: factors on the two distributions with which the means hold after rounding and under the limit."""
    wanted = np.array([prompt.mean, output.mean], np.float64)
    scales = wanted.copy()
    drawn = _unscaled(prompt, output, MATCHED_ON, np.random.default_rng(0))
    for _ in range(MATCHES):
        pairs = _under(drawn * scales, room)
        if len(pairs) < LEAST_ACCEPTED * MATCHED_ON:
            raise TraceError(
                f"prompts of {wanted[0]:g} and answers of {wanted[1]:g} tokens on average do not fit under a limit "
                f"that leaves {room} tokens; raise it or lower them."
            )
        scales = scales * (wanted / pairs.mean(axis=0))
    return scales


def sharegpt_like(
    *, mean_prompt: float = 161.31, mean_output: float = 337.99, requests: int = 1000, rate: float = 1.0, seed: int = 0
) -> Synthetic:
    """Lengths like ShareGPT's in the PagedAttention paper (Kwon et al., SOSP 2023, figure 11: the means; OPT's limit).

    The paper gives no spread: the coefficients of variation, 1.95 and 0.75, are those of the Nanoflow ShareGPT table
    where prompt and answer have at most 2,048 tokens (55,857 rows, means 154.6 and 317.9, correlation 0.01).
    """
    lengths = Lengths(mean_prompt, 1.95), Lengths(mean_output, 0.75)
    return Synthetic("ShareGPT-like", *lengths, requests, rate, seed, limit=OPT_LIMIT)


def alpaca_like(
    *, mean_prompt: float = 19.31, mean_output: float = 58.45, requests: int = 1000, rate: float = 1.0, seed: int = 0
) -> Synthetic:
    """Lengths like Alpaca's in the PagedAttention paper (figure 11: the means; OPT's limit).

    Its spread is an assumption: coefficients of variation 0.6 (prompts) and 1.0 (answers); no table is at hand.
    """
    lengths = Lengths(mean_prompt, 0.6), Lengths(mean_output, 1.0)
    return Synthetic("Alpaca-like", *lengths, requests, rate, seed, limit=OPT_LIMIT)


def fitted(trace: Trace, *, requests: int | None = None, rate: float | None = None, seed: int = 0) -> Synthetic:
    """Lognormal lengths and gamma gaps with the moments of `trace` (means and coefficients of variation), read once.

    Prompt and answer become independent, and prefixes are lost; `resampled` keeps both. Without times in the trace the
    gaps are Poisson's and `rate` must be given.
    """
    table = np.fromiter(
        (number for r in trace for number in (r.arrival, r.prompt_tokens, r.output_tokens)), np.float64
    ).reshape(-1, 3)
    if len(table) < 2:
        raise TraceError(f"{trace.name} has {len(table)} requests; two are the least for moments.")
    prompt, output = (Lengths(*_moments(table[:, column])) for column in (1, 2))
    gaps = np.diff(table[:, 0])
    process: Process = "poisson"
    cv = 1.0
    if trace.timed and gaps.sum() > 0:
        process, (mean_gap, cv) = "gamma", _moments(gaps)
        process, cv = ("gamma", cv) if cv > 0 else ("constant", 1.0)
        rate = rate or 1 / mean_gap
    if rate is None:
        raise TraceError(f"{trace.name} has no arrival times, so no rate; give one.")
    return Synthetic(f"fitted to {trace.name}", prompt, output, requests or len(table), rate, seed, process, cv)


def _moments(values: NDArray[np.float64]) -> tuple[float, float]:
    mean = float(values.mean())
    return mean, float(values.std() / mean)
