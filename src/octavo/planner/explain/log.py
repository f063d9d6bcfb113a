"""Decides a decision log again, on the very scheduler that wrote it, with somebody looking on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from octavo import events as ev
from octavo.log import LogCut, LogError, LogHeader, Replayer, plain, read_log
from octavo.scheduler.scheduler import Scheduler

#: Event -> what its record says
FIELDS = {kind.__name__: {field.name for field in fields(kind)} for kind in ev.Event.__subclasses__()}


class Watch(Protocol):
    """Somebody who looks on and changes nothing."""

    def begin(self, scheduler: Scheduler) -> None:
        """Nothing has happened yet."""

    def on_event(self, event: ev.Event) -> None:
        """An input or a decision, as it is made."""

    def on_planned(self, scheduler: Scheduler, now: float) -> None:
        """A plan is made: memory is taken, and whoever waits was refused."""

    def on_written(self, scheduler: Scheduler) -> None:
        """The step's KV is there and nothing has been given back yet."""


@dataclass(frozen=True, slots=True)
class Followed:
    """A log that was decided again: its records without the header, and how it breaks off ("" when it is whole)."""

    header: LogHeader
    records: int
    cut: str


def follow(path: str | Path, watch: Watch) -> Followed:
    """Feed a log's inputs to a fresh scheduler, record by record, with `watch` looking on.

    A log that breaks off is followed up to its last whole record. Raises LogError if it cannot be read, or if this
    Octavo decides otherwise than the log says: then nothing it could tell would be about that run.
    """
    header, records = read_log(path)
    made: deque[ev.Event] = deque()

    def sink(event: ev.Event) -> None:
        made.append(event)
        watch.on_event(event)

    scheduler = header.build(sink)
    watch.begin(scheduler)
    replayer = Replayer(scheduler, lambda: watch.on_written(scheduler))
    whole = _Whole(Path(path), records)
    for record in whole:
        if not made:
            replayer.feed(record)
            if record["event"] == "PlanBegan":
                watch.on_planned(scheduler, record["now"])
        event = made.popleft() if made else None
        if event is None or {"event": type(event).__name__, **plain(event)} != record:
            raise LogError(_differs(path, whole.count, record, event))
        if isinstance(event, ev.Finished):
            replayer.forget(event.seq)
    if whole.cut:
        cut = f"the log breaks off inside a record; told is what its {whole.count:,} whole records say"
        return Followed(header, whole.count, cut)
    if made:
        return Followed(header, whole.count, f"the log ends in the middle of a step, after its record {whole.count:,}")
    return Followed(header, whole.count, "")


class _Whole:
    """The records of a log up to one that was not written to its end. `count`: given out so far."""

    def __init__(self, path: Path, records: Iterator[dict[str, Any]]) -> None:
        self.count = 0
        self.cut = False
        self._path = path
        self._records = records

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            for record in self._records:
                self.count += 1
                kind = record.get("event") if isinstance(record, dict) else None
                if kind not in FIELDS or FIELDS[kind] != record.keys() - {"event"}:
                    raise LogError(f"{self._path}, record {self.count:,} is no event: {str(record)[:80]}.")
                yield record
        except LogCut:
            self.cut = True


def _differs(path: str | Path, count: int, record: dict[str, Any], event: ev.Event | None) -> str:
    now = "nothing" if event is None else f"{type(event).__name__} {plain(event)}"
    return (
        f"{path}, record {count:,}: the log says {str(record)[:160]}, and this Octavo decides {now[:160]}; "
        "explain a log with the version of Octavo that wrote it."
    )
