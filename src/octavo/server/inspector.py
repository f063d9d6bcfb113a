"""Looks on and remembers, within bounds: lives of requests, decisions, a timeline, recent traffic and step times.

Everything but `decisions` runs on the engine's thread, on the path of every token: there is a dictionary entry per
token and a few microseconds per decision, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields
from typing import Any, NamedTuple

from octavo import events as ev
from octavo.build import BuiltEngine
from octavo.planner.explain.lives import miss_sentence
from octavo.runner.api import StepPlan
from octavo.scheduler.scheduler import Progress, Scheduler
from octavo.server.lives import Life, Lives, Moment, text_of
from octavo.server.snapshot import row_of
from octavo.server.timeline import Timeline
from octavo.server.traffic import Traffic
from octavo.types import FinishReason, Sequence, Status

RING = 4096  # decisions kept for those who read them
_MISS_SHARE = 100  # looking for the reason of a miss may take one part in so many of all time
_SMOOTH = 0.1  # weight of the latest step in the mean time between tokens


class Decision(NamedTuple):
    """One decision as readers get it. `data`: the event, or what is told of it."""

    number: int
    at: float
    name: str
    request: str | None
    data: ev.Event | Mapping[str, Any]

    def json(self) -> dict[str, Any]:
        data = self.data
        told = {f.name: getattr(data, f.name) for f in fields(data)} if isinstance(data, ev.Event) else dict(data)
        return {**told, "request": self.request, "at": round(self.at, 6)}


class Decisions(NamedTuple):
    """What a reader gets at once: decisions, how many it has lost before them, and where to go on."""

    entries: tuple[Decision, ...]
    lost: int
    after: int


class Inspector:
    """A sink and a watcher of one engine: give it to `build_engine`, then `attach` it."""

    def __init__(self) -> None:
        self.lives = Lives()
        self.timeline = Timeline()
        self.traffic = Traffic()
        self.labels: dict[
            str, str
        ] = {}  # what clients call their requests, by the engine's id; whoever takes them in writes
        self.itl: float | None = None  # seconds between two tokens of a sequence, of late
        self._built: BuiltEngine | None = None
        self._now = 0.0
        self._windows: tuple[int, ...] = ()
        self._came: dict[int, float] = {}  # sequence -> when its last token came
        self._gone: list[int] = []
        self._ring: list[Decision | None] = [None] * RING
        self._count = 0
        self._look_again = 0.0
        self._handlers = {
            ev.PlanBegan: self._timed,
            ev.Settled: self._timed,
            ev.Planned: _ignored,
            ev.Submitted: self._submitted,
            ev.Refused: self._refused,
            ev.Admitted: self._admitted,
            ev.Preempted: self._preempted,
            ev.Finished: self._finished,
            ev.Failed: self._failed,
            ev.Stopped: self._told,
            ev.Blocked: self._told,
            ev.Forked: self._forked,
            ev.Compacted: self._compacted,
        }

    def attach(self, built: BuiltEngine) -> None:
        """Before the first request."""
        self._built = built
        self._windows = tuple(dict.fromkeys(w for w in built.layout.windows if w is not None))

    # -- for readers --------------------------------------------------------------------------------------------------

    def waited(self, request_id: str, now: float) -> float:
        """Seconds that a live request has spent in the line, before and between admissions."""
        life = self.lives.live(request_id)
        return 0.0 if life is None else life.in_line(now)

    @property
    def decided(self) -> int:
        """Decisions so far."""
        return self._count

    def decisions(self, after: int) -> Decisions:
        """Those from number `after` on. From any thread: a reader that is too slow loses some and is told how many, and
        the engine never waits for it."""
        end = self._count
        found = [self._ring[number % RING] for number in range(max(after, end - RING), end)]
        entries = tuple(one for one in found if one is not None and after <= one.number < end)
        return Decisions(entries, max(0, end - after) - len(entries), max(after, end))

    # -- events -------------------------------------------------------------------------------------------------------

    def on_event(self, event: ev.Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is None:
            life = self.lives.of_seq(event.seq) if isinstance(event, ev.Granted) else None
            self._publish(event, life)
        else:
            handler(event)

    def _publish(self, event: ev.Event, life: Life | None, data: Mapping[str, Any] | None = None) -> None:
        request = None if life is None else life.recorded.id
        number = self._count
        decision = Decision(number, self._now, type(event).__name__, request, event if data is None else data)
        self._ring[number % RING] = decision
        self._count = number + 1

    def _timed(self, event: Any) -> None:
        self._now = event.now

    def _submitted(self, event: ev.Submitted) -> None:
        assert self._built is not None
        self._now, request = event.now, event.request
        text = f"submitted: {len(request.prompt):,} prompt tokens"
        life = Life(
            request,
            self._built.engine.scheduler.requests[request.id],
            self.traffic.submitted(request),
            event.now,
            Moment(event.step, event.now, "Submitted", text),
            self.labels.get(request.id),  # gone by the time it ends, if its client has gone
        )
        self.lives.begin(life, request.id)
        self._publish(event, life, {"step": event.step, "prompt_tokens": len(request.prompt), "seqs": event.seqs})

    def _refused(self, event: ev.Refused) -> None:
        self._now = event.now
        self.traffic.refused(event.now)
        tokens = len(event.request.prompt)
        told = {"step": event.step, "prompt_tokens": tokens, "code": event.code, "message": event.message}
        self._publish(event, None, told)

    def _told(self, event: Any) -> None:
        life = self.lives.of_seq(event.seq)
        self._now = getattr(event, "now", self._now)
        self._publish(event, life)
        if life is not None:
            life.later.append(Moment(event.step, self._now, type(event).__name__, text_of(event, life)))

    def _admitted(self, event: ev.Admitted) -> None:
        self._told(event)
        life = self.lives.of_seq(event.seq)
        if life is not None:
            life.leaves_line(self._now)
            if not event.again:
                self._look_for_miss(life)

    def _look_for_miss(self, life: Life) -> None:
        """Why the cache did not serve more of the prompt, now that its own blocks are not cached yet. With many cached
        prompts it takes long to find the one most like it: then only some requests are looked at."""
        assert self._built is not None
        assert life.request is not None
        began = time.perf_counter()
        if began < self._look_again:
            return
        kv = self._built.engine.scheduler.kv
        life.miss = self._built.engine.scheduler.miss(life.request.id)
        if life.miss is not None:
            life.missed = miss_sentence(life.miss, len(life.request.prompt), kv.shares)
        ended = time.perf_counter()
        self._look_again = ended + _MISS_SHARE * max(0.0, ended - began - 1e-4)

    def _preempted(self, event: ev.Preempted) -> None:
        self._told(event)
        life = self.lives.of_seq(event.seq)
        if life is not None:
            life.since = self._now

    def _forked(self, event: ev.Forked) -> None:
        life = self.lives.of_seq(event.parent)
        self._publish(event, life)
        if life is not None:
            life.later.append(Moment(event.step, self._now, "Forked", text_of(event, life)))
            if not event.shared:
                life.since = self._now

    def _compacted(self, event: ev.Compacted) -> None:
        moved = sum(copy.n for copy in event.copies)
        self._publish(event, None, {"step": event.step, "moves": len(event.copies), "blocks": moved})

    def _failed(self, event: ev.Failed) -> None:
        self._now = event.now
        self._publish(event, None)
        for seq in event.seqs:
            life = self.lives.of_seq(seq)
            if life is not None:
                life.error = "the step that computed it failed"
                life.later.append(Moment(event.step, event.now, "Failed", text_of(event, life)))

    def _finished(self, event: ev.Finished) -> None:
        self._told(event)
        life = self.lives.of_seq(event.seq)
        if life is None or any(seq.status is not Status.FINISHED for seq in life.seqs):
            return
        assert self._built is not None
        life.leaves_line(self._now)
        life.reason = event.reason
        first = max(life.seqs, key=lambda seq: seq.generated)
        if first.stop_match == "deadline":
            life.error = "it was not given memory before its deadline"
        self.traffic.ended(life.recorded, first, first.generated, self._now)
        row = row_of(life.seqs, self._built.engine.scheduler.kv, {}, None, self.labels, self, self._now)
        row = row._replace(state="finished", phase="ended", computed_tokens=first.high_water)
        row = row._replace(label=life.label or row.label, waited_s=round(life.waited, 6))
        self.lives.end(life, row)

    # -- steps --------------------------------------------------------------------------------------------------------

    def on_written(self, scheduler: Scheduler) -> None:
        """What a step wrote is seen after it, in the ledger."""

    def on_step(self, scheduler: Scheduler, plan: StepPlan, progress: Seq[Progress], start: float, end: float) -> None:
        assert self._built is not None
        came, tokens = self._came, 0
        before: dict[float, int] = {}  # when the token before came -> how many tokens
        ttfts: list[float] = []
        for seq, token, finished, _ in progress:
            if token is not None:
                tokens += 1
                last = came.get(seq.id)
                if last is not None:
                    before[last] = before.get(last, 0) + 1
                elif not seq.index:
                    ttfts.append(end - seq.request.arrival)
                    self._first_token(seq, end)
                came[seq.id] = end
            if finished is not None:
                self._gone.append(seq.id)
        for seq_id in self._gone:
            came.pop(seq_id, None)
        self._gone.clear()
        gaps = [(end - last, count) for last, count in before.items()]
        if gaps:
            mean = sum(gap * count for gap, count in gaps) / sum(count for _, count in gaps)
            self.itl = mean if self.itl is None else self.itl + _SMOOTH * (mean - self.itl)
        self.traffic.stepped(plan, self._windows, start, end, scheduler.busy)
        self.timeline.add(self._built, end, tokens, ttfts, gaps)

    def _first_token(self, seq: Sequence, now: float) -> None:
        life = self.lives.find(seq.request.id, {})
        if life is not None:
            life.recorded.ttft = now - seq.request.arrival

    def on_finish(self, seq: Sequence, reason: FinishReason, now: float) -> None:
        """Ended from outside: a stop string, an abort, a failed step."""
        self._gone.append(seq.id)


def _ignored(event: ev.Event) -> None:
    """What a step computes is in the timeline."""
