"""Adds up what happens over time in buckets of seconds, whose number is bounded whatever the length of the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from octavo.kv.api import Ledger
from octavo.planner.explain.explained import Question, Seen, Stretch

FINEST = 1 / 128  # seconds: a power of two, so that doubling it comes to one second
BUCKETS = 4096  # most kept; then they are joined two by two
SHORT = 16.0  # seconds: shorter runs are told in finer steps than a second
LINES = 32  # about as many for those


@dataclass(slots=True)
class Bucket:
    """Sums over one bucket. Seconds are request-seconds; kv: sums of shares over `looks` at the ledger."""

    running: float = 0.0
    waiting: Counter[str] = field(default_factory=Counter)
    kv: Counter[str] = field(default_factory=Counter)
    looks: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    prefill: int = 0
    decode: int = 0
    preemptions: int = 0
    discarded: int = 0
    recomputed: int = 0
    finished: int = 0
    seen: dict[str, Seen] = field(default_factory=dict)

    def join(self, other: Bucket) -> None:
        """Add what came after."""
        for item in fields(self):
            mine, its = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, Counter):
                mine.update(its)
            elif isinstance(mine, dict):
                for label, seen in its.items():
                    mine.setdefault(label, seen)
            else:
                setattr(self, item.name, mine + its)


class Seconds:
    """Buckets of `interval` seconds, or of one second (finer for short runs), within the window asked for."""

    def __init__(self, question: Question) -> None:
        self._from = float("-inf") if question.start is None else question.start
        self._to = float("inf") if question.end is None else question.end
        self._asked = question.interval
        self._width = question.interval or FINEST
        self._buckets: dict[int, Bucket] = {}
        self._first: float | None = None
        self._last = 0.0
        self.waited: Counter[str] = Counter()

    @property
    def span(self) -> tuple[float, float]:
        """What was looked at and had anything in it."""
        return (0.0, 0.0) if self._first is None else (self._first, self._last)

    def at(self, now: float) -> Bucket | None:
        """The bucket of that moment; None outside the window."""
        if not self._from <= now <= self._to:
            return None
        self._first = now if self._first is None else min(self._first, now)
        self._last = max(self._last, now)
        return self._bucket(int(now // self._width))

    def _bucket(self, index: int) -> Bucket:
        bucket = self._buckets.get(index)
        if bucket is None:
            while len(self._buckets) >= BUCKETS:
                self._double()
                index //= 2
            bucket = self._buckets.setdefault(index, Bucket())
        return bucket

    def _double(self) -> None:
        self._width *= 2
        old, self._buckets = self._buckets, {}
        for index in sorted(old):
            if (into := self._buckets.get(index // 2)) is None:
                self._buckets[index // 2] = old[index]
            else:
                into.join(old[index])

    def add(self, start: float, end: float, running: int, waiting: Mapping[str, int]) -> None:
        """So many ran and waited from `start` to `end`."""
        start, end = max(start, self._from), min(end, self._to)
        if end <= start or not (running or waiting):
            return
        while (end - start) / self._width > BUCKETS:
            self._double()
        while start < end:
            bucket = self.at(start)
            assert bucket is not None  # it lies in the window
            until = min(end, (start // self._width + 1) * self._width)
            until = end if until <= start else until
            bucket.running += running * (until - start)
            for label, count in waiting.items():
                bucket.waiting[label] += count * (until - start)
                self.waited[label] += count * (until - start)
            start = until
        self._last = max(self._last, end)

    def look(self, now: float, ledger: Ledger) -> None:
        bucket = self.at(now)
        if bucket is not None:
            bucket.looks += 1
            bucket.kv.update({line: slots / ledger.capacity for line, slots in asdict(ledger).items()})

    def wants_look(self, now: float) -> bool:
        """One look at the ledger for each bucket is enough: it is the slow part."""
        bucket = self.at(now)
        return bucket is not None and not bucket.looks

    def stretches(self) -> tuple[Stretch, ...]:
        """In order, without gaps: where nothing ran or waited, one stretch of nothing."""
        if self._first is None:
            return ()
        if self._asked is None:
            seconds = self._last - self._first
            while self._width < 1.0 and (seconds >= SHORT or seconds / self._width > LINES):
                self._double()
        out: list[Stretch] = []
        end = self._first
        for index in sorted(self._buckets):
            start = max(self._first, index * self._width)
            if start > end:
                out.append(_stretch(Bucket(), end, start))
            end = min(self._last, (index + 1) * self._width)
            out.append(_stretch(self._buckets[index], start, end))
        return tuple(out)


def _stretch(bucket: Bucket, start: float, end: float) -> Stretch:
    seconds = (end - start) or 1.0
    return Stretch(
        start=start,
        end=end,
        running=bucket.running / seconds,
        waiting={label: amount / seconds for label, amount in bucket.waiting.items()},
        kv={line: share / bucket.looks for line, share in bucket.kv.items()} if bucket.looks else {},
        steps=bucket.steps,
        step_seconds=bucket.step_seconds / bucket.steps if bucket.steps else 0.0,
        preemptions=bucket.preemptions,
        finished=bucket.finished,
        prefill_tokens=bucket.prefill,
        decode_tokens=bucket.decode,
        discarded=bucket.discarded,
        recomputed=bucket.recomputed,
        seen=bucket.seen,
    )
