"""Time as an object: wall time for serving, virtual time for simulation."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some fixed point."""

    def wait_until(self, when: float) -> None:
        """Return when `now() >= when`."""


class WallClock:
    """Monotonic seconds since the clock was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._start

    def wait_until(self, when: float) -> None:
        time.sleep(max(0.0, when - self.now()))


class VirtualClock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, when: float) -> None:
        self._now = max(self._now, when)

    def advance(self, seconds: float) -> None:
        self._now += seconds
