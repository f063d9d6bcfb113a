"""Where the time of loading goes: seconds by phase, in the order in which they began."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Phases:
    """A stopwatch for phases that do not overlap. `seconds` may be read at any time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


def process_age() -> float | None:
    """Seconds since this process was started, to 10 ms: what imports and loading took together. None: not known."""
    stat, uptime = Path("/proc/self/stat"), Path("/proc/uptime")
    if not stat.is_file() or not uptime.is_file():
        return None
    started = int(stat.read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(uptime.read_text().split()[0]) - started
