"""Looks on while a trace is replayed and boils it down: figures, timeline, pool map, lives of some requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo import events as ev
from octavo.planner.outcome import KV_LINES, Life, PoolMap, Timeline
from octavo.planner.sketch import Sketch
from octavo.planner.slo import SLO
from octavo.planner.snapshots import Snapshots
from octavo.planner.stretches import Stretches, shares_of
from octavo.planner.waits import Waits
from octavo.runner.api import StepPlan
from octavo.scheduler.explain import Cause
from octavo.scheduler.scheduler import Progress, Scheduler
from octavo.types import Sequence

LOOKS = 64  # at the ledger before the steps between two looks double


@dataclass(slots=True)
class Track:
    """What is remembered of a live request."""

    ordinal: int
    arrival: float
    prompt_tokens: int
    final: int  # tokens it will have come to, if nothing cuts it short
    seq: Sequence | None = None
    admitted: float | None = None
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    cached: int = 0
    discarded: int = 0
    recomputed: int = 0
    waited: Counter[str] | None = None  # None: no life is kept of it
    lost: list[tuple[float, float | None]] = field(default_factory=list)


class Observer:
    """Feed `on_event` as the scheduler's sink, `on_planned` before the step runs, `on_written` while it settles,
    `on_settled` after it. Its memory does not grow with the trace."""

    def __init__(self, slo: SLO | None, lives: int, with_map: bool, with_timeline: bool) -> None:
        self.ttft, self.itl, self.tpot, self.e2e, self.queue = (Sketch() for _ in range(5))
        self.waited: Counter[str] = Counter()
        self.tracks: dict[str, Track] = {}
        self.finished = self.refused = self.attained = self.output_tokens = self.prompt_tokens = 0
        self.busy = self.running = self.waiting = 0.0
        self.running_peak = 0
        self.kv_peak: dict[str, float] = dict.fromkeys(KV_LINES, 0.0)
        self.refusals: list[tuple[str, str]] = []
        self._peak_at = (0, 0.0)
        self._slo = slo
        self._of: dict[int, Track] = {}  # by sequence
        self._lives: dict[int, Life] = {}  # by ordinal
        self._keep, self._stride = lives, 1
        self._waits = Waits()  # of those of which a life is kept
        self._line = Stretches(with_timeline)
        self._map = Snapshots() if with_map else None
        self._step = 0
        self._seconds = self._since_ledger = 0.0
        self._look = False
        self._looks, self._look_every = 0, 8
        self._time = 0.0

    # -- requests -----------------------------------------------------------------------------------------------------

    def submitted(self, request_id: str, track: Track, seq: Sequence, now: float) -> None:
        """A request was accepted at `now`, having arrived at `track.arrival`."""
        track.seq = seq
        self.tracks[request_id] = self._of[seq.id] = track
        self.prompt_tokens += track.prompt_tokens
        self.waited[Cause.NEXT_STEP.value] += now - track.arrival
        if self._keep and track.ordinal % self._stride == 0:
            track.waited = Counter({Cause.NEXT_STEP.value: now - track.arrival})
            self._waits.enter(seq.id, track.waited)

    def refuse(self, request_id: str, track: Track, message: str) -> None:
        self.refused += 1
        if len(self.refusals) < 100:
            self.refusals.append((request_id, message))
        if self._keep and track.ordinal % self._stride == 0:
            self._store(track, _life(request_id, track, None, f"refused: {message}"))

    def on_event(self, event: ev.Event) -> None:
        """The scheduler's sink."""
        if isinstance(event, ev.Admitted):
            track = self._of[event.seq]
            if track.admitted is None:
                track.admitted, track.cached = self._time, event.reused
                self.queue.add(self._time - track.arrival)
            if event.again:
                track.recomputed += max(0, track.discarded - event.reused)
                if track.lost:
                    track.lost[-1] = (track.lost[-1][0], self._time)
            self._waits.leave(event.seq)
        elif isinstance(event, ev.Preempted):
            track = self._of[event.seq]
            self._catch_up(track)
            track.discarded = event.discarded
            track.lost.append((self._time, None))
            self._line.now.preemptions += 1
            if track.waited is not None:
                self._waits.enter(event.seq, track.waited)

    def _catch_up(self, track: Track) -> None:
        """A sequence that coasted gained its last token when the step before this one ended."""
        assert track.seq is not None
        if track.seq.generated > track.tokens:
            track.tokens, track.last = track.seq.generated, self._time

    def begin(self, now: float) -> None:
        """A step is about to be planned."""
        self._time = now

    def on_planned(self, scheduler: Scheduler, plan: StepPlan, seconds: float) -> None:
        """The step has been planned and will take `seconds`."""
        self._seconds = seconds
        self._pass(scheduler, 1, seconds)
        for seq in plan.coasting.woke:
            if seq.id in self._of:
                self._catch_up(self._of[seq.id])
        if plan.coasting.sequences:
            self.itl.add(seconds, plan.coasting.sequences)
        running = len(scheduler.running)
        self.running_peak = max(self.running_peak, running)
        self._look = self._step % self._look_every == 0 or running > self._peak_at[0]

    def on_skipped(self, scheduler: Scheduler, seconds: Seq[float], end: float) -> None:
        """Steps have run, one after another, in which nobody but coasting sequences took part."""
        self._pass(scheduler, len(seconds), sum(seconds))
        self._line.now.end = end
        for gap in seconds:
            self.itl.add(gap, len(scheduler.running))

    def _pass(self, scheduler: Scheduler, steps: int, seconds: float) -> None:
        """So many steps take so long, with those running and waiting whom the last plan left so."""
        running, waiting, stretch = len(scheduler.running), scheduler.waiting, self._line.now
        self._step += steps
        self._since_ledger += seconds
        self.busy += seconds
        self.running += running * seconds
        self.waiting += waiting * seconds
        stretch.seconds += seconds
        stretch.busy += seconds
        stretch.steps += steps
        stretch.running += running * seconds
        if waiting:
            for cause, count in scheduler.waiting_by_cause().items():
                self.waited[cause] += count * seconds
                stretch.waiting[cause] += count * seconds
            self._waits.pass_by(scheduler, seconds)

    @property
    def undisturbed(self) -> int:
        """Steps before one at which it wants to look."""
        to_look = self._look_every - 1 - self._step % self._look_every
        return min(to_look, self._line.left - 1)

    # -- steps --------------------------------------------------------------------------------------------------------

    def on_written(self, scheduler: Scheduler) -> None:
        """The KV of the step is there and nothing has been given back."""
        if not self._look:
            return
        self._looks += 1
        if self._looks % LOOKS == 0:
            self._look_every *= 2
        ledger = scheduler.ledger()
        shares = shares_of(ledger, self._never_used(scheduler))
        weight, self._since_ledger = self._since_ledger, 0.0
        stretch = self._line.now
        stretch.kv_seconds += weight
        for line, share in shares.items():
            stretch.kv[line] += share * weight
        at = (len(scheduler.running), shares["live"] + shares["cached"])
        if at > self._peak_at:
            self._peak_at, self.kv_peak = at, shares
        if self._map is not None:
            self._map.look(scheduler, self._time + self._seconds)

    def _never_used(self, scheduler: Scheduler) -> int:
        """Slots of whole blocks that are reserved now and that nobody will have written."""
        size = scheduler.kv.block_size
        never = 0
        for seq in scheduler.running:
            final = max(self._of[seq.id].final, len(seq.tokens))
            never += max(0, seq.slots - -(-final // size) * size)
        return never

    def on_settled(self, progress: Seq[Progress], end: float) -> None:
        """The step has ended at `end`."""
        gap = self._seconds
        steady = 0
        for seq, token, reason, _ in progress:
            track = self._of[seq.id]
            if token is not None:
                track.tokens = seq.generated
                if track.first is None:
                    track.first = end
                    self.ttft.add(end - track.arrival)
                elif track.last == self._time:
                    steady += 1
                else:
                    self.itl.add(end - track.last)
                track.last = end
            if reason is not None:
                self._finish(seq, reason.value, end)
        if steady:
            self.itl.add(gap, steady)
        self._line.now.end = end
        if self._line.left <= 0:
            self._line.cut()

    def _finish(self, seq: Sequence, reason: str, end: float) -> None:
        track = self._of.pop(seq.id)
        request_id = seq.request.id
        del self.tracks[request_id]
        self._waits.leave(seq.id)
        self.finished += 1
        self._line.now.finished += 1
        self.output_tokens += track.tokens
        e2e = end - track.arrival
        self.e2e.add(e2e)
        tpot = None
        if track.first is not None and track.tokens > 1:
            tpot = (track.last - track.first) / (track.tokens - 1)
            self.tpot.add(tpot)
        if self._slo is not None and track.first is not None and track.admitted is not None:
            self.attained += self._slo.request_within(
                ttft=track.first - track.arrival,
                itl=tpot,
                tpot=tpot,
                e2e=e2e,
                queue=track.admitted - track.arrival,
            )
        if track.waited is not None:
            self._store(track, _life(request_id, track, end, reason))

    def _store(self, track: Track, life: Life) -> None:
        """Keep a life; when there are too many, every second one."""
        if track.ordinal % self._stride:
            return
        self._lives[track.ordinal] = life
        if len(self._lives) > self._keep:
            self._stride *= 2
            self._lives = {n: life for n, life in self._lives.items() if n % self._stride == 0}

    # -- what comes out -----------------------------------------------------------------------------------------------

    def idle(self, scheduler: Scheduler, now: float, until: float) -> None:
        """Nothing runs for a while."""
        self._line.pause(until - now, until, shares_of(scheduler.ledger(), 0))

    def close(self) -> None:
        """Nothing more comes."""
        self._line.cut()
        self._waits.leave_all()
        for request_id, track in self.tracks.items():
            if track.waited is not None:
                self._store(track, _life(request_id, track, None, None))

    @property
    def kv_mean(self) -> dict[str, float]:
        total = self._line.total
        return {line: value / (total.kv_seconds or 1.0) for line, value in total.kv.items()}

    def lives(self) -> tuple[Life, ...]:
        return tuple(self._lives[n] for n in sorted(self._lives))

    def map(self) -> PoolMap | None:
        return None if self._map is None else self._map.result()

    def timeline(self) -> Timeline | None:
        return self._line.timeline() if self._line.kept else None


def _life(request_id: str, track: Track, finished: float | None, reason: str | None) -> Life:
    return Life(
        id=request_id,
        arrival=track.arrival,
        prompt_tokens=track.prompt_tokens,
        output_tokens=track.tokens,
        admitted=track.admitted,
        first_token=track.first,
        finished=finished,
        reason=reason,
        cached_tokens=track.cached,
        recomputed=track.recomputed,
        waited={cause: seconds for cause, seconds in (track.waited or {}).items() if seconds > 0},
        preempted=tuple(track.lost),
    )
