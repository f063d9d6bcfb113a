"""A trace in a file: read twice, first to survey it, then in order of arrival, with memory flat in its length.

The survey finds what a reader of a stream cannot know: the earliest arrival, whether the rows are in order, and
whether the file is any good. Rows that are out of order by less than WINDOW are put right by a heap on the way; worse
disorder is sorted in runs of WINDOW rows that are spilled to a temporary file and merged.
"""

from __future__ import annotations

import heapq
import math
import pickle
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from octavo.planner.traces.api import BadLine, TraceError, TraceRequest
from octavo.planner.traces.lines import Head, Row, Rows

WINDOW = 8192  # rows held to put neighbours in order; runs of as many rows where that is not enough
TOLD = 100  # bad lines kept with number and reason; the others are counted
BAD_SHARE = 0.5  # of the lines: above it the file is not what it is taken for


class Order(Enum):
    """How far the rows of a file are from the order of arrival."""

    SORTED = 0
    NEARLY = 1  # a heap of WINDOW rows puts them in order
    MIXED = 2


@dataclass(frozen=True, slots=True)
class Survey:
    """What the first reading finds; `first` is the earliest arrival, in seconds on the file's clock."""

    requests: int
    first: float
    order: Order
    bad_lines: tuple[BadLine, ...]
    bad_count: int


@dataclass(frozen=True)
class Format:
    """A file format: how it is told by a file's head, and how it is read.

    read     gets the path and the options of the format that were given; yields rows and bad lines, in file order
    timed    whether it knows when requests arrived; if not, all arrive at 0 until arrivals are drawn
    options  what `read` takes beside the path, with the type of each
    folder   whether it reads a folder, too
    """

    name: str
    about: str
    matches: Callable[[Head], bool]
    read: Callable[..., Rows]
    timed: bool = True
    options: Mapping[str, type] = field(default_factory=dict)
    folder: bool = False


@dataclass(frozen=True)
class FileTrace:
    """The requests of a file, as a Trace. Raises TraceError on iteration if the file holds no trace."""

    path: Path
    format: Format
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        given = "".join(f", {name} {value}" for name, value in self.options.items())
        return f"{self.path.name} ({self.format.name}{given})"

    @property
    def timed(self) -> bool:
        return self.format.timed

    @property
    def bad_lines(self) -> tuple[BadLine, ...]:
        return self.survey.bad_lines

    @property
    def bad_count(self) -> int:
        return self.survey.bad_count

    @cached_property
    def survey(self) -> Survey:
        """Reads the file once, if that has not been done. Raises TraceError."""
        survey = surveyed(self._rows())
        lines = survey.requests + survey.bad_count
        if survey.bad_count > BAD_SHARE * lines:
            first = survey.bad_lines[0]
            raise TraceError(
                f"{self.path}: {survey.bad_count:,} of {lines:,} lines cannot be used, the first is line "
                f"{first.line}: {first.reason} It was read as {self.format.name}; correct it, or name its format."
            )
        if not survey.requests:
            raise TraceError(
                f"{self.path} has no requests (read as {self.format.name}); give a file with at least one."
            )
        return survey

    def __iter__(self) -> Iterator[TraceRequest]:
        first, order = self.survey.first, self.survey.order
        rows: Iterator[Row] = (row for row in self._rows() if type(row) is Row)
        if order is Order.NEARLY:
            rows = windowed(rows)
        elif order is Order.MIXED:
            rows = merged(rows)
        for row in rows:
            yield TraceRequest(row[0] - first, *row[1:])

    def _rows(self) -> Rows:
        return self.format.read(self.path, **self.options)


def surveyed(rows: Rows) -> Survey:
    """One pass over a file's rows, keeping none."""
    bad: list[BadLine] = []
    bad_count = 0
    watch = _OrderWatch()
    for row in rows:
        if type(row) is Row:
            watch.see(row[0])
        else:
            bad_count += 1
            if bad_count <= TOLD:
                bad.append(row)  # type: ignore[arg-type]
    return Survey(watch.seen, watch.first, watch.order, tuple(bad), bad_count)


class _OrderWatch:
    """Tells how disordered times are that it sees one after the other: runs `windowed` on the times alone."""

    def __init__(self) -> None:
        self.seen = 0
        self.first, self.last = math.inf, -math.inf
        self.order = Order.SORTED
        self._held: deque[float] = deque()  # what `windowed` would hold, as long as times only grow
        self._heap: list[float] = []  # and from the first disorder on
        self._out = -math.inf  # the last time that it would have let go

    def see(self, time: float) -> None:
        self.seen += 1
        if time >= self.last and self.order is Order.SORTED:
            self._held.append(time)
            if len(self._held) > WINDOW:
                self._out = self._held.popleft()
        elif self.order is not Order.MIXED:
            self._disorder(time)
        if time > self.last:
            self.last = time
        if time < self.first:
            self.first = time

    def _disorder(self, time: float) -> None:
        if self.order is Order.SORTED:
            self.order, self._heap = Order.NEARLY, list(self._held)
        heapq.heappush(self._heap, time)
        if len(self._heap) > WINDOW:
            out = heapq.heappop(self._heap)
            if out < self._out:
                self.order = Order.MIXED
            self._out = out


def windowed(rows: Iterable[Row]) -> Iterator[Row]:
    """Nearly sorted rows in order of time, ties in file order."""
    heap: list[tuple[float, int, Row]] = []
    for index, row in enumerate(rows):
        heapq.heappush(heap, (row[0], index, row))
        if len(heap) > WINDOW:
            yield heapq.heappop(heap)[2]
    while heap:
        yield heapq.heappop(heap)[2]


def merged(rows: Iterator[Row]) -> Iterator[Row]:
    """Rows in any order, in order of time, ties in file order: an external merge sort. Needs disk for all rows."""
    by_time = itemgetter(0)
    with tempfile.TemporaryFile() as spill:
        runs: list[tuple[int, int]] = []  # where each run lies: first byte, rows
        while run := sorted(islice(rows, WINDOW), key=by_time):
            runs.append((spill.tell(), len(run)))
            for row in run:
                pickle.dump(tuple(row), spill)
        yield from heapq.merge(*(_run(spill, *place) for place in runs), key=by_time)  # stable: earlier runs first


def _run(spill: IO[bytes], place: int, count: int) -> Iterator[Row]:
    """One run, read 64 rows at a time: all runs share one file."""
    while count:
        spill.seek(place)
        rows = [Row(*pickle.load(spill)) for _ in range(min(64, count))]
        place, count = spill.tell(), count - len(rows)
        yield from rows
