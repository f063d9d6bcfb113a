"""Looks on while a trace is replayed and boils it down: figures, timeline, pool map, lives of some requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field

from octavo import events as ev
from octavo.kv.api import Ledger
from octavo.planner.outcome import KV_LINES, Life, PoolMap, Timeline
from octavo.planner.sketch import Sketch
from octavo.planner.slo import SLO
from octavo.runner.api import StepPlan
from octavo.scheduler.explain import Cause
from octavo.scheduler.scheduler import Progress, Scheduler
from octavo.types import Sequence

POINTS = 400  # stretches of a timeline
MAP_COLUMNS, MAP_ROWS = 160, 128
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
    behind: dict[str, float] | None = None  # the line's clock when it last went out of sight; None: it is in sight
    lost: list[tuple[float, float | None]] = field(default_factory=list)


@dataclass(slots=True)
class _Stretch:
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

    def join(self, other: _Stretch) -> None:
        for name in ("seconds", "busy", "steps", "running", "kv_seconds", "preemptions", "finished"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.waiting.update(other.waiting)
        for line, value in other.kv.items():
            self.kv[line] += value
        self.end = other.end


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
        self.total = _Stretch()
        self.kv_peak: dict[str, float] = dict.fromkeys(KV_LINES, 0.0)
        self.refusals: list[tuple[str, str]] = []
        self._peak_at = (0, 0.0)
        self._slo = slo
        self._of: dict[int, Track] = {}  # by sequence
        self._lives: dict[int, Life] = {}  # by ordinal
        self._keep, self._stride = lives, 1
        self._tracked: dict[int, Track] = {}  # live requests of which a life is kept, while they wait
        self._in_sight: set[int] = set()  # of them, those who were offered memory in the last step
        self._clock: dict[str, float] = {}  # cause -> seconds for which all who were not waited for it
        self._stretches: list[_Stretch] = []
        self._with_timeline = with_timeline
        self._every, self._now = 1, _Stretch()
        self._map = _Mapper() if with_map else None
        self._step = 0
        self._seconds = self._since_ledger = 0.0
        self._look = False
        self._looks, self._look_every = 0, 8
        self._owed: list[tuple[str, str]] = []
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
            self._line_up(track, seq)

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
            self._leave_line(event.seq)
        elif isinstance(event, ev.Preempted):
            track = self._of[event.seq]
            self._catch_up(track)
            track.discarded = event.discarded
            track.lost.append((self._time, None))
            self._now.preemptions += 1
            if track.waited is not None and track.seq is not None:
                self._line_up(track, track.seq)

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
        self._step += 1
        self._seconds = seconds
        self._since_ledger += seconds
        running, waiting = len(scheduler.running), scheduler.waiting
        self.busy += seconds
        self.running += running * seconds
        self.waiting += waiting * seconds
        stretch = self._now
        stretch.seconds += seconds
        stretch.busy += seconds
        stretch.steps += 1
        stretch.running += running * seconds
        if waiting:
            self._wait(scheduler, seconds)
        for seq in plan.coasting.woke:
            if seq.id in self._of:
                self._catch_up(self._of[seq.id])
        if plan.coasting.sequences:
            self.itl.add(seconds, plan.coasting.sequences)
        self.running_peak = max(self.running_peak, running)
        self._look = self._step % self._look_every == 0 or running > self._peak_at[0]

    def on_skipped(self, scheduler: Scheduler, seconds: Seq[float], end: float) -> None:
        """Steps have run, one after another, in which nobody but coasting sequences took part."""
        running, waiting, total = len(scheduler.running), scheduler.waiting, sum(seconds)
        self._step += len(seconds)
        self._since_ledger += total
        self.busy += total
        self.running += running * total
        self.waiting += waiting * total
        stretch = self._now
        stretch.seconds += total
        stretch.busy += total
        stretch.steps += len(seconds)
        stretch.running += running * total
        stretch.end = end
        if waiting:
            self._wait(scheduler, total)
        for gap in seconds:
            self.itl.add(gap, running)

    @property
    def undisturbed(self) -> int:
        """Steps before one at which it wants to look."""
        to_look = self._look_every - 1 - self._step % self._look_every
        return min(to_look, self._every - self._now.steps - 1)

    # -- who waits for what -------------------------------------------------------------------------------------------

    def _wait(self, scheduler: Scheduler, seconds: float) -> None:
        """Everybody who waits has waited for so long. Only the few who were offered memory have causes of their own:
        all others share one, and each reads off their clock what came together while it was among them."""
        for cause, count in scheduler.waiting_by_cause().items():
            self.waited[cause] += count * seconds
            self._now.waiting[cause] += count * seconds
        if not self._tracked:
            return
        waits, shared = scheduler.standing()
        seen = self._tracked.keys() & waits.keys()
        for one in seen - self._in_sight:
            self._read_clock(self._tracked[one])
        for one in (self._in_sight - seen) & self._tracked.keys():
            self._tracked[one].behind = dict(self._clock)
        self._in_sight = seen
        for one in seen:
            waited = self._tracked[one].waited
            assert waited is not None
            waited[waits[one].cause.value] += seconds
        self._clock[shared.value] = self._clock.get(shared.value, 0.0) + seconds

    def _line_up(self, track: Track, seq: Sequence) -> None:
        self._tracked[seq.id] = track
        track.behind = dict(self._clock)

    def _leave_line(self, seq: int) -> None:
        track = self._tracked.pop(seq, None)
        if track is not None:
            self._read_clock(track)
            self._in_sight.discard(seq)

    def _read_clock(self, track: Track) -> None:
        """It comes into sight: write down what it waited for until now."""
        if track.behind is None or track.waited is None:
            return
        for cause, now in self._clock.items():
            track.waited[cause] += now - track.behind.get(cause, 0.0)
        track.behind = None

    # -- steps --------------------------------------------------------------------------------------------------------

    def on_written(self, scheduler: Scheduler) -> None:
        """The KV of the step is there and nothing has been given back."""
        if not self._look:
            return
        self._looks += 1
        if self._looks % LOOKS == 0:
            self._look_every *= 2
        ledger = scheduler.ledger()
        shares = _shares(ledger, self._never_used(scheduler))
        weight, self._since_ledger = self._since_ledger, 0.0
        stretch = self._now
        stretch.kv_seconds += weight
        for line, share in shares.items():
            stretch.kv[line] += share * weight
        at = (len(scheduler.running), shares["live"] + shares["cached"])
        if at > self._peak_at:
            self._peak_at, self.kv_peak = at, shares
        if self._map is not None:
            self._map.look(scheduler, self._time + self._seconds, self._of)

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
        self._now.end = end
        if self._now.steps >= self._every:
            self._cut()

    def _finish(self, seq: Sequence, reason: str, end: float) -> None:
        track = self._of.pop(seq.id)
        request_id = seq.request.id
        del self.tracks[request_id]
        self._leave_line(seq.id)
        self.finished += 1
        self._now.finished += 1
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
        if not self._with_timeline:
            return
        if self._now.steps:
            self._cut()
        pause = _Stretch(seconds=until - now, kv_seconds=until - now, end=until)
        for line, share in _shares(scheduler.ledger(), 0).items():
            pause.kv[line] = share * pause.seconds
        self._append(pause)

    def _cut(self) -> None:
        """A stretch is complete."""
        self.total.join(self._now)
        self._append(self._now)
        self._now = _Stretch()

    def _append(self, stretch: _Stretch) -> None:
        """Onto the timeline; when it has too many, join them two by two."""
        if self._with_timeline:
            self._stretches.append(stretch)
            if len(self._stretches) > POINTS:
                for first, second in zip(self._stretches[::2], self._stretches[1::2], strict=False):
                    first.join(second)
                odd = self._stretches[-1:] if len(self._stretches) % 2 else []
                self._stretches = self._stretches[: len(self._stretches) - len(odd) : 2] + odd
                self._every *= 2

    def close(self) -> None:
        """Nothing more comes."""
        if self._now.steps:
            self._cut()
        for seq in tuple(self._tracked):
            self._leave_line(seq)
        for request_id, track in self.tracks.items():
            if track.waited is not None:
                self._store(track, _life(request_id, track, None, None))

    @property
    def kv_mean(self) -> dict[str, float]:
        return {line: value / (self.total.kv_seconds or 1.0) for line, value in self.total.kv.items()}

    def lives(self) -> tuple[Life, ...]:
        return tuple(self._lives[n] for n in sorted(self._lives))

    def map(self) -> PoolMap | None:
        return None if self._map is None else self._map.result()

    def timeline(self) -> Timeline | None:
        if not self._with_timeline:
            return None
        parts = self._stretches
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


def _mean(weighted: float, part: _Stretch) -> float:
    return round(weighted / part.seconds, 3) if part.seconds else 0.0


def _shares(ledger: Ledger, never: int) -> dict[str, float]:
    lines = asdict(ledger)
    reserved = lines.pop("reserved")
    never = min(never, reserved)
    lines["slack"] += lines.pop("lookahead")
    lines["reserved_never_used"] = never
    lines["reserved_used_later"] = reserved - never
    return {line: lines[line] / ledger.capacity for line in KV_LINES}


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


class _Mapper:
    """Snapshots of who owns the pool, thinned to a fixed number."""

    def __init__(self) -> None:
        self._columns: list[tuple[float, tuple[int, ...], tuple[bool, ...]]] = []
        self._names: dict[str, int] = {}
        self._every, self._seen = 1, 0

    def look(self, scheduler: Scheduler, at: float, tracks: dict[int, Track]) -> None:
        self._seen += 1
        if self._seen % self._every:
            return
        kv = scheduler.kv
        pages = kv.capacity * kv.pages_per_block
        rows = min(MAP_ROWS, pages)
        cells, written = [-1] * rows, [False] * rows
        for page in kv.cached_pages():
            cells[page * rows // pages] = -2
        for seq in scheduler.running:
            if seq.view is None:
                continue
            owner = self._names.setdefault(seq.request.id, len(self._names))
            full = -(-seq.computed // kv.block_size)
            for table in seq.view.tables:
                for i, page in enumerate(table):
                    if page >= 0:
                        row = page * rows // pages
                        cells[row] = owner
                        written[row] = written[row] or i < full
        self._columns.append((at, tuple(cells), tuple(written)))
        if len(self._columns) > MAP_COLUMNS:
            self._columns = self._columns[::2]
            self._every *= 2

    def result(self) -> PoolMap:
        """The snapshots, with names of those requests only that they show."""
        seen = sorted({owner for _, cells, _ in self._columns for owner in cells if owner >= 0})
        place = {owner: i for i, owner in enumerate(seen)} | {-1: -1, -2: -2}
        names = {number: name for name, number in self._names.items()}
        return PoolMap(
            t=tuple(round(at, 6) for at, _, _ in self._columns),
            owner=tuple(tuple(place[owner] for owner in cells) for _, cells, _ in self._columns),
            written=tuple(written for _, _, written in self._columns),
            requests=tuple(names[owner] for owner in seen),
        )
