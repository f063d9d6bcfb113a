"""Keeps account of live requests: why each waits and how long, what it lost; and of the ended who waited longest."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher

from octavo.kv.prefix import Miss
from octavo.planner.explain.explained import Lost, Period, Question, Seen, Story
from octavo.scheduler.explain import Cause
from octavo.types import Request, Sequence

PERIODS = 200  # reasons kept for the request that was asked about
NEAREST = 3  # ids offered when there is none of the one asked for


@dataclass(slots=True)
class Account:
    """What is known of a live request."""

    request: Request
    arrival: float
    left: int  # samples that have not ended
    admitted: float | None = None
    first_token: float | None = None
    cached: int = 0
    recomputed: int = 0
    output: int = 0
    waited: Counter[str] = field(default_factory=Counter)
    seen: dict[str, Seen] = field(default_factory=dict)
    lost: list[Lost] = field(default_factory=list)
    out: dict[int, int] = field(default_factory=dict)  # sequence without memory -> its entry in `lost`
    periods: list[Period] = field(default_factory=list)
    left_out: int = 0
    missed: str | None = None

    def story(self, finished: float | None, reason: str | None) -> Story:
        return Story(
            id=self.request.id,
            arrival=self.arrival,
            prompt_tokens=len(self.request.prompt),
            output_tokens=self.output,
            samples=self.request.params.n,
            admitted=self.admitted,
            first_token=self.first_token,
            finished=finished,
            reason=reason,
            cached_tokens=self.cached,
            recomputed=self.recomputed,
            waited=dict(self.waited),
            seen=dict(self.seen),
            lost=tuple(self.lost),
            periods=tuple(self.periods),
            periods_left_out=self.left_out,
            missed=self.missed,
        )


@dataclass(slots=True)
class Standing:
    """A sequence in the line: the cause that holds since `since`.

    tries   how often its numbers were asked for in vain: what `explain` says now is not what it was refused for
    period  since when the cause and the one in front have held, and seen: what it was told then; both only for the
            request that was asked about
    """

    seq: Sequence
    account: Account
    label: str
    since: float
    period: float
    seen: Seen | None = None
    tries: int = 0


class Lives:
    """Stories of requests. Memory: the live ones, and the `worst` of those that ended."""

    def __init__(self, question: Question) -> None:
        self.standing: dict[int, Standing] = {}  # by sequence
        self.counts: Counter[str] = Counter()  # cause -> how many stand for it
        self.sequences: dict[int, tuple[Sequence, Account]] = {}
        self.requests = self.finished = 0
        self.asked: Story | None = None
        self._question = question
        self._accounts: dict[str, Account] = {}
        self._kept = 0
        self._worst: list[tuple[float, int, Story]] = []
        self._nearest: list[tuple[float, str]] = []

    def submitted(self, request: Request, seqs: list[Sequence], now: float) -> None:
        self.requests += 1
        account = Account(request, min(request.arrival, now), len(seqs))
        self._accounts[request.id] = account
        for seq in seqs:
            self.sequences[seq.id] = (seq, account)
        self.stand(seqs[0], account.arrival)
        if self._question.request is not None:
            self._compare(request.id, self._question.request)

    def stand(self, seq: Sequence, now: float) -> None:
        """It joins the line; what for is known after the next plan."""
        account = self.sequences[seq.id][1]
        self.standing[seq.id] = Standing(seq, account, Cause.NEXT_STEP.value, now, now)
        self.counts[Cause.NEXT_STEP.value] += 1

    def relabel(self, standing: Standing, label: str, now: float) -> None:
        """From now on it waits for something else."""
        self._pay(standing, now)
        self.counts[standing.label] -= 1
        self.counts[label] += 1
        standing.label, standing.tries = label, 0

    def _pay(self, standing: Standing, now: float) -> None:
        if now > standing.since:
            standing.account.waited[standing.label] += now - standing.since
        standing.since = now

    def leave(self, seq: Sequence, now: float) -> None:
        """It is out of the line: admitted, or ended."""
        standing = self.standing.pop(seq.id, None)
        if standing is not None:
            self._pay(standing, now)
            self.counts[standing.label] -= 1
            if self.is_asked(standing.account):
                self.close_period(standing, now)

    def is_asked(self, account: Account) -> bool:
        return account.request.id == self._question.request

    def close_period(self, standing: Standing, now: float) -> None:
        """The reason of the one asked about has changed, or it has left the line."""
        account = standing.account
        if now > standing.period:
            if len(account.periods) < PERIODS:
                account.periods.append(Period(standing.period, now, standing.label, standing.seen))
            else:
                account.left_out += 1
        standing.period, standing.seen = now, None

    def admitted(self, seq: Sequence, reused: int, again: bool, now: float) -> None:
        account = self.sequences[seq.id][1]
        self.leave(seq, now)
        if not again:
            account.admitted, account.cached = now, reused
        elif seq.id in account.out:
            entry = account.out.pop(seq.id)
            account.lost[entry] = replace(account.lost[entry], until=now, reused=reused)

    def preempted(self, seq: Sequence, by: int, discarded: int, in_plan: bool, now: float) -> None:
        """`by` took its memory; by itself: in a plan because it needed more and was the cheapest to preempt."""
        account = self.sequences[seq.id][1]
        other = self.sequences[by][1].request.id if by in self.sequences else None
        if by != seq.id:
            why = f"for {other}"
        elif in_plan:
            why = "because it needed more memory and was itself the one to give way"
        else:
            why, other = "from outside, or because a step failed", None
        account.out[seq.id] = len(account.lost)
        account.lost.append(Lost(now, None, other, why, discarded))
        self.stand(seq, now)

    def ended(self, seq_id: int, reason: str, tokens: int, now: float) -> None:
        """A sequence has ended; the story is complete when its last one has."""
        seq, account = self.sequences.pop(seq_id)
        self.leave(seq, now)
        account.output += max(0, tokens - len(account.request.prompt))
        account.left -= 1
        if not account.left:
            self.finished += 1
            del self._accounts[account.request.id]
            self._keep(account, account.story(now, reason))

    def close(self, now: float) -> None:
        """The log is over: whatever still lives is told up to here."""
        for standing in tuple(self.standing.values()):
            self.leave(standing.seq, now)
        for seq, account in self.sequences.values():
            account.output += seq.generated
        for account in self._accounts.values():
            self._keep(account, account.story(None, None))

    def _keep(self, account: Account, story: Story) -> None:
        if self.is_asked(account):
            self.asked = story  # an id may come again after its request has ended: the last one counts
        start, end = self._question.start, self._question.end
        outside = (end is not None and story.arrival > end) or (
            start is not None and story.finished is not None and story.finished < start
        )
        if outside or not story.total_waited or not self._question.worst:
            return
        self._kept += 1
        entry = (story.total_waited, -self._kept, story)  # among equals the earlier
        while len(self._worst) >= self._question.worst:
            if entry[:2] <= self._worst[0][:2]:
                return
            heapq.heappop(self._worst)
        heapq.heappush(self._worst, entry)

    def worst(self) -> tuple[Story, ...]:
        return tuple(story for _, _, story in sorted(self._worst, key=lambda entry: (-entry[0], -entry[1])))

    def nearest(self) -> tuple[str, ...]:
        """The ids most like the one asked for, most like it first."""
        return tuple(name for _, name in sorted(self._nearest, key=lambda entry: -entry[0]))

    def _compare(self, name: str, wanted: str) -> None:
        entry = (likeness(name, wanted), name)
        if entry not in self._nearest:
            self._nearest = heapq.nlargest(NEAREST, [*self._nearest, entry], key=lambda item: item[0])


def likeness(name: str, wanted: str) -> float:
    """0 (nothing in common) to 1 (equal)."""
    return SequenceMatcher(None, name, wanted, autojunk=False).ratio()


def miss_sentence(miss: Miss, prompt: int, shares: bool) -> str:
    """Why the prefix cache did not serve more of a prompt of `prompt` tokens."""
    if not shares:
        return "this engine keeps no prefix cache: every prompt is computed anew"
    served = f"the cache served {miss.matched:,} of its {prompt:,} prompt tokens"
    if miss.position is None:
        return f"{served}; nothing that was cached then continues from there"
    place = f"{served}; the cached prompt most like it agrees for {miss.partial:,} tokens more"
    if miss.here is None or miss.there is None:
        return f"{place}, to the end of one of the two: only whole blocks are served, and never a prompt's last token"
    return f"{place}, and at position {miss.position:,} has token {miss.there} where this one has {miss.here}"
