"""What happened to each request, in words: kept while it lives and for the last thousand that have ended."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from octavo import events as ev
from octavo.kv.prefix import Miss
from octavo.server.snapshot import Row
from octavo.server.traffic import Recorded
from octavo.types import Request, Sequence, phase_of

ENDED = 1000  # requests remembered
MOMENTS = 64  # of one request; the first stays, the oldest of the others go


class Moment(NamedTuple):
    """One entry of a request's history. `at`: seconds on the engine's clock."""

    step: int
    at: float
    event: str
    text: str

    def json(self) -> dict[str, Any]:
        return {**self._asdict(), "at": round(self.at, 6)}


@dataclass(slots=True)
class Life:
    """One request. `seqs` is empty once it has ended; then `row` is how it ended. `since`: when it began to stand in
    the line; `waited`: seconds it stood there before."""

    request: Request | None
    seqs: Seq[Sequence]
    recorded: Recorded
    since: float | None
    first: Moment
    label: str | None = None
    waited: float = 0.0
    later: deque[Moment] = field(default_factory=lambda: deque(maxlen=MOMENTS - 1))
    miss: Miss | None = None
    missed: str = ""
    row: Row | None = None
    reason: str | None = None
    error: str | None = None

    def history(self) -> list[Moment]:
        return [self.first, *self.later]

    def in_line(self, now: float) -> float:
        return self.waited + (0.0 if self.since is None else now - self.since)

    def leaves_line(self, now: float) -> None:
        self.waited, self.since = self.in_line(now), None

    def detail(self) -> dict[str, Any]:
        """What is told of it beside its row."""
        miss = None
        if self.missed:
            found = self.miss or Miss(0)
            miss = {
                "sentence": self.missed,
                "matched": found.matched,
                "partial": found.partial,
                "position": found.position,
                "here": found.here,
                "there": found.there,
            }
        return {
            "miss": miss,
            "finish_reason": self.reason,
            "error": self.error,
            "history": [moment.json() for moment in self.history()],
        }


class Lives:
    """By the engine's id. Written on the engine's thread."""

    def __init__(self) -> None:
        self._live: dict[str, Life] = {}
        self._ended: OrderedDict[str, Life] = OrderedDict()
        self._of_seq: dict[int, Life] = {}

    def begin(self, life: Life, request_id: str) -> None:
        self._live[request_id] = life
        self._ended.pop(request_id, None)  # ids may come again
        self._of_seq.update((seq.id, life) for seq in life.seqs)

    def of_seq(self, seq: int) -> Life | None:
        return self._of_seq.get(seq)

    def live(self, request_id: str) -> Life | None:
        return self._live.get(request_id)

    def find(self, name: str, labels: Mapping[str, str]) -> Life | None:
        """By the engine's id, or by what the client calls it: of several the latest."""
        found = self._live.get(name) or self._ended.get(name)
        if found is not None:
            return found
        ids = [one for one, label in tuple(labels.items()) if label == name and one in self._live]
        if ids:
            return self._live[ids[-1]]
        return next((life for life in reversed(self._ended.values()) if life.row and life.row.label == name), None)

    def end(self, life: Life, row: Row) -> None:
        """Its last sample has ended; only what is told of it stays."""
        for seq in life.seqs:
            self._of_seq.pop(seq.id, None)
        self._live.pop(row.id, None)
        life.row, life.request, life.seqs = row, None, ()
        self._ended[row.id] = life
        if len(self._ended) > ENDED:
            self._ended.popitem(last=False)


def text_of(event: ev.Event, life: Life) -> str:
    """What a decision means for the request, in words."""
    match event:
        case ev.Admitted():
            again = " again" if event.again else ""
            return f"admitted{again} with {event.known:,} tokens known, {event.reused:,} of them from the prefix cache"
        case ev.Blocked() if event.behind is not None:
            return f"waits: {event.cause} {event.behind}"
        case ev.Blocked():
            return f"waits: {event.cause}: needs {event.need}, {event.have} available, {event.short} short"
        case ev.Preempted():
            whose = "for itself" if event.by == event.seq else f"for sequence {event.by}"
            return (
                f"preempted {whose} (time {event.times}): {event.released} blocks taken back, "
                f"{event.discarded:,} computed tokens discarded"
            )
        case ev.Forked():
            return f"sample {event.child} " + ("shares the prompt" if event.shared else "computes the prompt itself")
        case ev.Stopped():
            done = sum(seq.generated for seq in life.seqs)
            return f"ended from outside ({event.reason}) while in {phase_of(life.seqs)}, {done:,} tokens generated"
        case ev.Finished():
            return f"ended ({event.reason}) with {event.tokens:,} tokens; {event.released} blocks came free"
        case ev.Failed():
            return "the step that computed it failed"
    return type(event).__name__
