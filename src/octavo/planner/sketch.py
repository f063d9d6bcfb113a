"""A histogram of durations with narrow logarithmic bins: percentiles of any number of values in flat memory."""

from __future__ import annotations

import math
from collections import defaultdict

from octavo.planner.outcome import Distribution

_WIDTH = 1.005  # each bin is half a per cent wide
_LOG = math.log(_WIDTH)
_LEAST = 1e-9  # seconds; anything below counts as this


class Sketch:
    """Counts durations in seconds. Mean, count and extremes are exact, percentiles (nearest rank) within 0.5 %."""

    def __init__(self) -> None:
        self._bins: defaultdict[int, int] = defaultdict(int)
        self._count = 0
        self._sum = 0.0
        self._highest = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count one duration, `times` times."""
        at = math.floor(math.log(seconds if seconds > _LEAST else _LEAST) / _LOG)
        self._bins[at] += times
        self._count += times
        self._sum += seconds * times
        if seconds > self._highest:
            self._highest = seconds

    def distribution(self) -> Distribution:
        """What has been counted so far."""
        if not self._count:
            return Distribution()
        levels = [self._percentile(q) for q in (50, 90, 95, 99)]
        return Distribution(self._count, self._sum / self._count, *levels, self._highest)

    def _percentile(self, q: int) -> float:
        rank = max(1, math.ceil(q * self._count / 100))
        for at in sorted(self._bins):
            rank -= self._bins[at]
            if rank <= 0:
                return min(self._highest, math.exp((at + 0.5) * _LOG))
        return self._highest
