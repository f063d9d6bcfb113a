"""A replay over time: figures added up in stretches of steps, at most so many of them however long it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from octavo.kv.api import Ledger
from octavo.planner.outcome import KV_LINES, Timeline

POINTS = 400


@dataclass(slots=True)
class Stretch:
    """What adds up between two points of the timeline, weighted by seconds."""

    seconds: float = 0.0
    busy: float = 0.0  # of them, with a step running
    steps: int = 0
    running: float = 0.0
    waiting: Counter[str] = field(default_factory=Counter)
    kv: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KV_LINES, 0.0))
    kv_seconds: float = 0.0
    preemptions: int = 0
    finished: int = 0
    end: float = 0.0

    def join(self, other: Stretch) -> None:
        for name in ("seconds", "busy", "steps", "running", "kv_seconds", "preemptions", "finished"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.waiting.update(other.waiting)
        for line, value in other.kv.items():
            self.kv[line] += value
        self.end = other.end


class Stretches:
    """`now` is the stretch that is being added up; `total` all of them, pauses left out. `kept`: whether a timeline is
    wanted, else only the total is."""

    def __init__(self, kept: bool) -> None:
        self.kept = kept
        self.now, self.total = Stretch(), Stretch()
        self._every = 1 if kept else 1 << 60  # steps in a stretch
        self._past: list[Stretch] = []

    @property
    def left(self) -> int:
        """Steps until this stretch is full."""
        return self._every - self.now.steps

    def cut(self) -> None:
        """The stretch is complete, or nothing more comes."""
        if self.now.steps:
            self.total.join(self.now)
            self._append(self.now)
            self.now = Stretch()

    def pause(self, seconds: float, end: float, shares: Mapping[str, float]) -> None:
        """Nothing ran for so long; `shares` of the pool meanwhile."""
        if not self.kept:
            return
        self.cut()
        kv = {line: share * seconds for line, share in shares.items()}
        self._append(Stretch(seconds=seconds, kv=kv, kv_seconds=seconds, end=end))

    def _append(self, stretch: Stretch) -> None:
        """When there are too many, they are joined two by two."""
        if not self.kept:
            return
        self._past.append(stretch)
        if len(self._past) > POINTS:
            for first, second in zip(self._past[::2], self._past[1::2], strict=False):
                first.join(second)
            self._past = self._past[::2]
            self._every *= 2

    def timeline(self) -> Timeline:
        """All stretches, the last one closed by `cut`."""
        parts = self._past
        causes = sorted({cause for part in parts for cause in part.waiting})
        kv: dict[str, list[float]] = {line: [] for line in KV_LINES}
        for part in parts:  # a stretch between two looks at the ledger shows the one before
            for line in KV_LINES:
                seen = part.kv[line] / part.kv_seconds if part.kv_seconds else (kv[line][-1] if kv[line] else 0.0)
                kv[line].append(round(seen, 5))
        return Timeline(
            t=tuple(round(part.end, 6) for part in parts),
            running=tuple(_mean(part.running, part) for part in parts),
            waiting={cause: tuple(_mean(part.waiting[cause], part) for part in parts) for cause in causes},
            kv={line: tuple(values) for line, values in kv.items()},
            preemptions=tuple(part.preemptions for part in parts),
            finished=tuple(part.finished for part in parts),
            step=tuple(part.busy / part.steps if part.steps else 0.0 for part in parts),
        )


def _mean(weighted: float, part: Stretch) -> float:
    return round(weighted / part.seconds, 3) if part.seconds else 0.0


def shares_of(ledger: Ledger, never: int) -> dict[str, float]:
    """The lines of the pool as shares of it; `never`: of the reserved slots, those that nobody will have written."""
    lines = asdict(ledger)
    reserved = lines.pop("reserved")
    never = min(never, reserved)
    lines["slack"] += lines.pop("lookahead")
    lines["reserved_never_used"] = never
    lines["reserved_used_later"] = reserved - never
    return {line: lines[line] / ledger.capacity for line in KV_LINES}
