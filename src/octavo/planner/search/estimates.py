"""Means with 95 % confidence intervals from a few seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, stdev

#: Student's t, two-sided 95 %, by degrees of freedom; beyond the table the last is used (a little wide).
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `count` seeds; the 95 % interval is mean - error .. mean + error (inf: one seed tells no error)."""

    mean: float
    error: float
    count: int

    @property
    def low(self) -> float:
        return self.mean - self.error

    @property
    def high(self) -> float:
        return self.mean + self.error

    @property
    def differs_from_zero(self) -> bool:
        """Whether the interval leaves zero out."""
        return abs(self.mean) > self.error


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and half width of the 95 % interval (Student's t) of independent values, at least one."""
    count = len(values)
    if count == 1:
        return Estimate(values[0], inf, 1)
    t = _T95[min(count - 1, len(_T95)) - 1]
    return Estimate(fmean(values), t * stdev(values) / sqrt(count), count)


def paired(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """The change from `before` to `after`, seed by seed: what both have from the seed cancels out."""
    return estimate([new - old for old, new in zip(before, after, strict=True)])
