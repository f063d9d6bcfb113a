"""One sample a second of the last ten minutes: the ledger, who ran, who waited for what, and how fast tokens came."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.build import BuiltEngine
from octavo.server.snapshot import take_head

KEPT = 600  # seconds
INTERVAL = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One second, `at` its end. The ledger is that of the last step in it. Latencies in seconds, None where nothing
    happened; ITL: between two tokens of one sequence."""

    at: float
    lines: Mapping[str, int]
    running: int
    waiting: int
    waiting_by_cause: Mapping[str, int]
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    itl_p50: float | None = None
    itl_p99: float | None = None
    tokens_per_s: float | None = None

    def json(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "lines": dict(self.lines),
            "running": self.running,
            "waiting": self.waiting,
            "waiting_by_cause": dict(self.waiting_by_cause),
            "ttft_p50": self.ttft_p50,
            "ttft_p99": self.ttft_p99,
            "itl_p50": self.itl_p50,
            "itl_p99": self.itl_p99,
            "tokens_per_s": self.tokens_per_s,
        }


@dataclass(slots=True)
class _Second:
    """What has been counted in one second. `gaps`: (seconds, how many tokens came after so long)."""

    number: int
    tokens: int = 0
    ttfts: list[float] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)


class Timeline:
    """Fed after each step, on the engine's thread."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._second = _Second(0)
        self._open = False  # something was counted since the second was last looked at

    def add(self, built: BuiltEngine, now: float, tokens: int, ttfts: Seq[float], gaps: Seq[tuple[float, int]]) -> None:
        """A step has ended at `now`."""
        if int(now) != self._second.number:
            if self._open:
                self._close(built)
            self._second = _Second(int(now))
        self._open = True
        second = self._second
        second.tokens += tokens
        second.ttfts += ttfts
        second.gaps += gaps
        if not built.engine.busy:  # nobody will close it before the next request comes
            self._close(built)

    def samples(self, built: BuiltEngine, now: float) -> tuple[Sample, ...]:
        """One sample for each second up to `now`: where no step ran, all was as before."""
        if int(now) != self._second.number:
            self._second = _Second(int(now))
        self._close(built)
        return self.kept(now)

    def kept(self, now: float) -> tuple[Sample, ...]:
        """The same without looking at the engine: for when its thread stands still."""
        out: list[Sample] = []
        for sample in tuple(self._samples):
            while out and out[-1].at + INTERVAL < sample.at:
                out.append(_quiet(out[-1], out[-1].at + INTERVAL))
            out.append(sample)
        while out and out[-1].at + INTERVAL <= now:
            out.append(_quiet(out[-1], out[-1].at + INTERVAL))
        return tuple(out[-KEPT:])

    def _close(self, built: BuiltEngine) -> None:
        second, head, self._open = self._second, take_head(built), False
        moved = bool(second.tokens)
        sample = Sample(
            at=float(second.number + 1),
            lines=head.ledger.lines,
            running=head.running,
            waiting=head.waiting,
            waiting_by_cause=head.waiting_by_cause,
            ttft_p50=percentile([(t, 1) for t in second.ttfts], 0.5),
            ttft_p99=percentile([(t, 1) for t in second.ttfts], 0.99),
            itl_p50=percentile(second.gaps, 0.5),
            itl_p99=percentile(second.gaps, 0.99),
            tokens_per_s=second.tokens / INTERVAL if moved else None,
        )
        if self._samples and self._samples[-1].at == sample.at:
            self._samples[-1] = sample
        else:
            self._samples.append(sample)


def _quiet(before: Sample, at: float) -> Sample:
    """A second in which no step ended."""
    return replace(before, at=at, ttft_p50=None, ttft_p99=None, itl_p50=None, itl_p99=None, tokens_per_s=None)


def percentile(counted: Seq[tuple[float, int]], share: float) -> float | None:
    """The smallest value that `share` of all are not above; of (value, how many)."""
    total = sum(count for _, count in counted)
    seen = 0
    for value, count in sorted(counted):
        seen += count
        if seen >= share * total:
            return round(value, 6)
    return None
