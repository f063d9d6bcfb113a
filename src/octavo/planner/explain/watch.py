"""Looks on while a log is decided again: who waits for what, second by second and request by request."""

from __future__ import annotations

from octavo import events as ev
from octavo.planner.explain.explained import Question, Seen, Story, behind, label_of
from octavo.planner.explain.lives import Account, Lives, Standing, miss_sentence
from octavo.planner.explain.seconds import Seconds
from octavo.scheduler.explain import Cause
from octavo.scheduler.scheduler import Scheduler
from octavo.types import Sequence, Status

PATIENCE = 1.0  # seconds without a step, somebody waiting, after which the missing step is the reason
REFUSALS = 20  # kept with their sentences
TRIES = 8  # at a cause's numbers for a request: more would cost time in every step


class LogWatch:
    """What holds after a plan holds until the next one: that is where every waiting second's cause comes from."""

    def __init__(self, question: Question) -> None:
        self.seconds = Seconds(question)
        self.lives = Lives(question)
        self.refused = 0
        self.refusals: list[tuple[str, str]] = []  # id, sentence
        self.refused_asked: Story | None = None  # of the request that was asked about
        self.now = 0.0
        self._question = question
        self._scheduler: Scheduler | None = None
        self._in_step = False
        self._planned_at = 0.0
        self._work: ev.Planned | None = None
        self._newly: list[Sequence] = []  # admitted in the plan being made
        self._prefix: set[int] = set()  # sequences last told that somebody computes their prefix

    def begin(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def close(self) -> None:
        """The log is over."""
        self.lives.close(self.now)

    # -- events -------------------------------------------------------------------------------------------------------

    def on_event(self, event: ev.Event) -> None:
        match event:
            case ev.Submitted():
                self._stalled(event.now)
                self._tick(event.now)
                self._submitted(event)
            case ev.PlanBegan():
                self._stalled(event.now)
                self._tick(event.now)
                self._in_step, self._planned_at, self._work = True, event.now, None
            case ev.Planned():
                self._work = event
            case ev.Settled():
                self._tick(event.now)
                self._settled(event)
            case ev.Stopped() | ev.PreemptAsked():
                self._stalled(event.now)
                self._tick(event.now)
            case ev.Failed():
                self._tick(event.now)
                self._in_step = False
            case ev.Refused():
                self._refuse(event)
            case _:
                self._decided(event)

    def _decided(self, event: ev.Event) -> None:
        lives = self.lives
        match event:
            case ev.Admitted():
                seq = lives.sequences[event.seq][0]
                lives.admitted(seq, event.reused, event.again, self.now)
                self._prefix.discard(event.seq)
                if not event.again:
                    self._newly.append(seq)
            case ev.Blocked():
                (self._prefix.add if event.cause == Cause.BEHIND else self._prefix.discard)(event.seq)
            case ev.Preempted():
                seq = lives.sequences[event.seq][0]
                lives.preempted(seq, event.by, event.discarded, self._in_step, self.now)
                if (bucket := self.seconds.at(self.now)) is not None:
                    bucket.preemptions += 1
                    bucket.discarded += event.discarded
            case ev.Forked() if not event.shared:
                lives.stand(lives.sequences[event.child][0], self.now)
            case ev.Finished():
                before = lives.finished
                lives.ended(event.seq, event.reason, event.tokens, self.now)
                self._prefix.discard(event.seq)
                if (bucket := self.seconds.at(self.now)) is not None:
                    bucket.finished += lives.finished - before

    def _tick(self, now: float) -> None:
        """Time has passed since the last event; what held then held all the while."""
        assert self._scheduler is not None
        waiting = {label: count for label, count in self.lives.counts.items() if count}
        self.seconds.add(self.now, now, len(self._scheduler.running), waiting)
        self.now = max(self.now, now)

    def _stalled(self, now: float) -> None:
        """Something happens, between steps, long after everything before it, and somebody waits: for a step."""
        if not self._in_step and now - self.now > PATIENCE:
            for standing in self.lives.standing.values():
                if self.lives.is_asked(standing.account):
                    self.lives.close_period(standing, self.now)
                self.lives.relabel(standing, Cause.STALLED.value, self.now)

    def _submitted(self, event: ev.Submitted) -> None:
        assert self._scheduler is not None
        request = event.request
        if request.arrival < event.now:
            self.seconds.add(request.arrival, event.now, 0, {Cause.NEXT_STEP.value: 1})
        self.lives.submitted(request, self._scheduler.requests[request.id], event.now)

    def _refuse(self, event: ev.Refused) -> None:
        self._tick(event.now)
        self.refused += 1
        request = event.request
        if len(self.refusals) < REFUSALS:
            self.refusals.append((request.id, event.message))
        if request.id == self._question.request:
            reason = f"refused: {event.message}"
            self.refused_asked = Story(request.id, request.arrival, len(request.prompt), 0, reason=reason)

    def _settled(self, event: ev.Settled) -> None:
        """The step has run, and nothing of it has been booked yet."""
        self._in_step = False
        bucket = self.seconds.at(self.now)
        if self._work is None or self._work.step != event.step:
            return
        drafts = dict(self._work.drafts)
        prefill = decode = recomputed = 0
        for (seq_id, start, count, _), drawn in zip(self._work.work, event.tokens, strict=True):
            if seq_id not in self.lives.sequences:
                continue  # ended while the step ran
            seq, account = self.lives.sequences[seq_id]
            draft = len(drafts.get(seq_id, ()))
            if seq.generated and count - draft == 1:
                decode += count
            else:
                prefill += count
            if not draft and seq.status is Status.RUNNING:
                again = max(0, min(start + count, seq.high_water) - start)
                account.recomputed += again
                recomputed += again
            if drawn and account.first_token is None:
                account.first_token = self.now
        if bucket is not None:
            bucket.steps += 1
            bucket.step_seconds += self.now - self._planned_at
            bucket.prefill += prefill
            bucket.decode += decode
            bucket.recomputed += recomputed

    # -- after a plan -------------------------------------------------------------------------------------------------

    def on_planned(self, scheduler: Scheduler, now: float) -> None:
        for seq in self._newly:
            account = self.lives.sequences[seq.id][1]
            if self.lives.is_asked(account):
                self._say_missed(scheduler, account)
        self._newly.clear()
        root: str | None = None
        first: dict[str, Standing] = {}
        waits, shared = scheduler.standing()
        for standing in tuple(self.lives.standing.values()):
            wait = waits.get(standing.seq.id)
            label = (shared if wait is None else wait.cause).value
            if label == Cause.BEHIND:
                if standing.seq.id in self._prefix:
                    label = self._behind(scheduler, standing, now)
                else:  # never offered anything in this round: all of them stand behind the same one
                    root = root or self._behind(scheduler, standing, now)
                    label = root
            self._note(scheduler, standing, label, now)
            if label not in first or self._place(standing) < self._place(first[label]):
                first[label] = standing
        self._represent(scheduler, first, now)

    def _behind(self, scheduler: Scheduler, standing: Standing, now: float) -> str:
        wait = scheduler.explain(standing.seq.request.id, now)
        label = Cause.BEHIND.value if wait is None else label_of(wait)
        return label if label.startswith(Cause.BEHIND) else behind(label)

    def _note(self, scheduler: Scheduler, standing: Standing, label: str, now: float) -> None:
        """It waits for `label` now: book the change, and keep the numbers when they are new."""
        if self.lives.is_asked(standing.account):
            self._note_asked(scheduler, standing, label, now)
            return
        if label != standing.label:
            self.lives.relabel(standing, label, now)
        if label not in standing.account.seen and standing.tries < TRIES and label != Cause.NEXT_STEP:
            standing.tries += 1
            seen = self._seen(scheduler, standing, label, now)
            if seen is not None:
                standing.account.seen[label] = seen

    def _note_asked(self, scheduler: Scheduler, standing: Standing, label: str, now: float) -> None:
        """The same in full: a new period begins with another cause and with another one in front."""
        seen = self._seen(scheduler, standing, label, now)
        other = seen is not None and standing.seen is not None and seen.behind != standing.seen.behind
        if label != standing.label or other:
            self.lives.close_period(standing, now)
        if label != standing.label:
            self.lives.relabel(standing, label, now)
        if seen is not None:
            standing.account.seen.setdefault(label, seen)
            standing.seen = standing.seen or seen

    def _seen(self, scheduler: Scheduler, standing: Standing, label: str, now: float) -> Seen | None:
        """What it is told now; None if that is another cause than the one memory was refused for: an explanation is
        of this moment, and one preempted in this very step may find room already."""
        request = standing.seq.request.id
        wait = scheduler.explain(request, now)
        return None if wait is None or label_of(wait) != label else Seen.of(wait, request, now)

    def _place(self, standing: Standing) -> tuple[int, int]:
        """Where it stands in the line."""
        assert self._scheduler is not None
        by_priority = self._scheduler.config.order == "priority"
        return (standing.seq.request.priority if by_priority else 0, standing.seq.id)

    def _represent(self, scheduler: Scheduler, first: dict[str, Standing], now: float) -> None:
        """Numbers for the bucket: what the first in line with each cause is told."""
        bucket = self.seconds.at(now) if first else None
        if bucket is None:
            return
        for label, standing in first.items():
            if label not in bucket.seen:
                seen = self._seen(scheduler, standing, label, now)
                if seen is not None:
                    bucket.seen[label] = seen

    def on_written(self, scheduler: Scheduler) -> None:
        if self.seconds.wants_look(self.now):
            self.seconds.look(self.now, scheduler.ledger())

    def _say_missed(self, scheduler: Scheduler, account: Account) -> None:
        miss = scheduler.miss(account.request.id)
        if miss is not None:
            account.missed = miss_sentence(miss, len(account.request.prompt), scheduler.kv.shares)
