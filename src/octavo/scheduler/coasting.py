"""Coasting: sequences that gain one plain token a step, and to which nothing else can happen for a while, are left
alone until something can. The decisions are those of stepping through every one of them.

Only a simulation can do this, because only there somebody knows what a model will say.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from octavo.runner.api import Coasting
from octavo.scheduler.roster import Roster
from octavo.types import Sequence

_entered = attrgetter("entered")


class Foresight(Protocol):
    """What a simulated model knows about its own answers."""

    @property
    def token(self) -> int:
        """The plain token: one that ends no answer."""

    @property
    def windows(self) -> tuple[int, ...]:
        """The model's different window sizes, in tokens."""

    def plain(self, seq: Sequence) -> int:
        """How many plain tokens the sequence certainly draws next."""


@dataclass(slots=True)
class _Nap:
    """Of one that coasts. Booked up to step `since`; `began`: tokens computed when it fell asleep. Its alarm rings at
    step `until` (-1: it has woken); from step `end` on more than a plain token may come to it, slots or not."""

    seq: Sequence
    since: int
    began: int
    until: int
    end: int


class Coast:
    """The running sequences, awake ones in order of entry and coasting ones by the step at which they wake.

    `now` counts settled steps. A coasting sequence is as it was when it began to coast until `rouse` or `sync` books
    what it has gained.
    """

    def __init__(
        self, foresight: Foresight, roster: Roster, block_size: int, extend: Callable[[list[Sequence]], bool]
    ) -> None:
        """`extend` gives one block to each of these sequences, or to none of them."""
        self.awake: list[Sequence] = []
        self.now = 0
        self._foresight = foresight
        self._roster = roster
        self._token, self._windows = foresight.token, foresight.windows
        self._block = block_size
        self._extend = extend
        self._asleep: dict[int, _Nap] = {}  # by sequence id
        self._alarms: dict[int, list[_Nap]] = {}  # by step; also of some that woke before
        self._alarm_steps: list[int] = []  # a heap of the steps in `_alarms`
        self._computed = 0  # of all that coast
        self._narrow = [[0, 0] for _ in self._windows]  # per window: those with less context, and their contexts' sum
        self._fresh: set[int] = set()  # awake, and gained a token in the last step
        self._woke: list[Sequence] = []
        self._taken: set[int] = set()  # fell asleep in the plan being made, and are still listed as awake

    # -- who runs -----------------------------------------------------------------------------------------------------

    def enter(self, seq: Sequence) -> None:
        self.awake.append(seq)

    def leave(self, seq: Sequence) -> None:
        """It runs no longer."""
        self.rouse(seq)
        self.awake.remove(seq)
        self._fresh.discard(seq.id)

    # -- falling asleep and waking ------------------------------------------------------------------------------------

    def take(self, seq: Sequence) -> bool:
        """Let a decoding sequence that has a slot for its next token coast, if it can for at least this step."""
        if seq.id not in self._fresh or len(seq.draws) != 1:
            return False
        now, computed = self.now, seq.computed
        end = now + min(seq.ceiling - 1 - len(seq.tokens), self._foresight.plain(seq))
        until = min(end, now + seq.slots - computed)
        for window in self._windows:
            until = min(until, now + self._undisturbed(computed, window))
        if until <= now:
            return False
        nap = self._asleep[seq.id] = _Nap(seq, now, computed, until, end)
        self._taken.add(seq.id)
        self._set_alarm(nap, until)
        self._roster.coasts(seq, now)
        self._count(nap, 1)
        return True

    def _set_alarm(self, nap: _Nap, at: int) -> None:
        nap.until = at
        if at in self._alarms:
            self._alarms[at].append(nap)
        else:
            self._alarms[at] = [nap]
            heapq.heappush(self._alarm_steps, at)

    def _undisturbed(self, computed: int, window: int) -> int:
        """Steps in which no block leaves the window and the context does not outgrow it."""
        beyond = computed - window + 1
        return -beyond if beyond < 0 else self._block - 1 - beyond % self._block

    def _count(self, nap: _Nap, sign: int) -> None:
        """Add a sequence to the sums, or take it out. With how much it began decides whether it counts as one with less
        context than the window; it wakes when that changes."""
        computed = nap.seq.computed
        self._computed += sign * computed
        for window, narrow in zip(self._windows, self._narrow, strict=True):
            if nap.began + 1 < window:
                narrow[0] += sign
                narrow[1] += sign * (computed + 1)

    def wake(self) -> None:
        """A plan begins: wake those whose time has come. Who has only used up its slots goes on if there are blocks
        for all of those."""
        now = self.now
        if not self._alarm_steps or self._alarm_steps[0] != now:
            return
        heapq.heappop(self._alarm_steps)
        due = [nap for nap in self._alarms.pop(now) if nap.until == now]
        full = [] if self._windows else [nap for nap in due if nap.end > now]
        if full:
            for nap in full:
                self._book(nap)
            if self._extend([nap.seq for nap in full]):
                for nap in full:
                    self._set_alarm(nap, min(now + self._block, nap.end))
                due = [nap for nap in due if nap.until == now]
        self._wake(due)

    def rouse(self, seq: Sequence) -> None:
        """Wake one before its time."""
        if seq.id in self._asleep:
            self._wake([self._asleep[seq.id]])

    def _wake(self, naps: list[_Nap]) -> None:
        for nap in naps:
            seq = nap.seq
            self._book(nap)
            self._count(nap, -1)
            nap.until = -1
            del self._asleep[seq.id]
            self._roster.wakes(seq)
            self._fresh.add(seq.id)
            self._woke.append(seq)
            if seq.id in self._taken:
                self._taken.remove(seq.id)
            else:
                self.awake.append(seq)
        self.awake.sort(key=_entered)

    def _book(self, nap: _Nap) -> None:
        """Write down what it has gained."""
        steps = self.now - nap.since
        if steps:
            nap.since = self.now
            seq = nap.seq
            seq.tokens.extend([self._token] * steps)
            seq.computed = seq.high_water = seq.computed + steps

    def sync(self) -> None:
        """Book everybody's gains; those that coast go on."""
        for nap in self._asleep.values():
            self._book(nap)

    # -- a step -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many coast."""
        return len(self._asleep)

    def depart(self) -> Coasting:
        """The plan is made: what the coasting sequences add to the step."""
        if self._taken:
            self.awake = [seq for seq in self.awake if seq.id not in self._taken]
            self._taken.clear()
        woke, self._woke = tuple(self._woke), []
        return self.batch(0, woke)

    def batch(self, ahead: int = 0, woke: tuple[Sequence, ...] = ()) -> Coasting:
        """What they add to the step that comes `ahead` steps after this one, if nobody wakes until then."""
        count = len(self._asleep)
        windowed = tuple(
            total + ahead * below + (count - below) * window
            for window, (below, total) in zip(self._windows, self._narrow, strict=True)
        )
        return Coasting(count, self._computed + (ahead + 1) * count, windowed, woke)

    def undisturbed(self) -> int:
        """Steps until the next of them wakes; 0 if anybody is awake."""
        if self.awake or not self._alarm_steps:
            return 0
        return self._alarm_steps[0] - self.now

    def advance(self, steps: int = 1) -> int:
        """So many steps have run: everybody who coasts has gained a token in each; how many in all."""
        self.now += steps
        gained = len(self._asleep) * steps
        self._computed += gained
        for narrow in self._narrow:
            narrow[1] += narrow[0] * steps
        return gained

    def gained(self, seqs: Iterator[int]) -> None:
        """These (by id) gained a token in the step although they were awake."""
        self._fresh = set(seqs)
