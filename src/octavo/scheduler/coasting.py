"""Coasting: sequences that gain one plain token a step, and to which nothing else can happen for a while, are left
alone until something can. The decisions are those of stepping through every one of them.

Only a simulation can do this, because only there somebody knows what a model will say.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Protocol

from octavo.runner.api import Coasting
from octavo.scheduler.roster import Roster
from octavo.types import Sequence


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
        self._windows = foresight.windows
        self._block = block_size
        self._extend = extend
        self._asleep: dict[int, tuple[Sequence, int, int]] = {}  # id -> (sequence, booked up to step, began with)
        self._alarms: dict[int, list[tuple[Sequence, int]]] = {}  # step -> (sequence, ticket)
        self._alarm_steps: list[int] = []  # a heap of the steps in `_alarms`
        self._tickets: dict[int, int] = {}  # sequence id -> ticket of its valid alarm
        self._ticket = 0
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
        steps = self._steps(seq)
        if steps < 1:
            return False
        self._asleep[seq.id] = (seq, self.now, seq.computed)
        self._taken.add(seq.id)
        self._set_alarm(seq, steps)
        self._count(seq, seq.computed, 1)
        return True

    def _set_alarm(self, seq: Sequence, steps: int) -> None:
        self._ticket += 1
        self._tickets[seq.id] = self._ticket
        at = self.now + steps
        if at not in self._alarms:
            self._alarms[at] = []
            heapq.heappush(self._alarm_steps, at)
        self._alarms[at].append((seq, self._ticket))
        self._roster.coasts(seq, self.now)

    def _undisturbed(self, computed: int, window: int) -> int:
        """Steps in which no block leaves the window and the context does not outgrow it."""
        beyond = computed - window + 1
        return -beyond if beyond < 0 else self._block - 1 - beyond % self._block

    def _count(self, seq: Sequence, began: int, sign: int) -> None:
        """Add a sequence to the sums, or take it out. `began`: tokens computed when it fell asleep, which decides
        whether it counts as one with less context than the window; it wakes when that changes."""
        self._computed += sign * seq.computed
        for window, narrow in zip(self._windows, self._narrow, strict=True):
            if began + 1 < window:
                narrow[0] += sign
                narrow[1] += sign * (seq.computed + 1)

    def wake(self) -> None:
        """A plan begins: wake those whose time has come. Who has only used up its slots goes on if there are blocks
        for all of those."""
        if not self._alarm_steps or self._alarm_steps[0] != self.now:
            return
        heapq.heappop(self._alarm_steps)
        due = [seq for seq, ticket in self._alarms.pop(self.now) if self._tickets.get(seq.id) == ticket]
        full = [] if self._windows else [seq for seq in due if self._only_full(seq)]
        if full and self._extend(full):
            for seq in full:
                self._set_alarm(seq, self._steps(seq))
            due = [seq for seq in due if self._tickets[seq.id] <= self._ticket - len(full)]
        for seq in due:
            self._book_and_wake(seq)
        self.awake.sort(key=_entered)

    def _only_full(self, seq: Sequence) -> bool:
        self._book(seq)
        return seq.computed == seq.slots and seq.ceiling - 1 > len(seq.tokens) and self._foresight.plain(seq) > 0

    def _steps(self, seq: Sequence) -> int:
        """Steps in which nothing but a plain token can come to it."""
        steps = min(seq.slots - seq.computed, seq.ceiling - 1 - len(seq.tokens), self._foresight.plain(seq))
        for window in self._windows:
            steps = min(steps, self._undisturbed(seq.computed, window))
        return steps

    def rouse(self, seq: Sequence) -> None:
        """Wake one before its time."""
        if seq.id in self._asleep:
            self._book_and_wake(seq)
            self.awake.sort(key=_entered)

    def _book_and_wake(self, seq: Sequence) -> None:
        self._book(seq)
        self._count(seq, self._asleep[seq.id][2], -1)
        del self._asleep[seq.id], self._tickets[seq.id]
        self._roster.wakes(seq)
        self._fresh.add(seq.id)
        self._woke.append(seq)
        if seq.id in self._taken:
            self._taken.remove(seq.id)
        else:
            self.awake.append(seq)

    def _book(self, seq: Sequence) -> None:
        """Write down what it has gained."""
        _, since, began = self._asleep[seq.id]
        steps = self.now - since
        if not steps:
            return
        seq.tokens.extend([self._foresight.token] * steps)
        seq.computed += steps
        seq.high_water = seq.computed
        self._asleep[seq.id] = (seq, self.now, began)

    def sync(self) -> None:
        """Book everybody's gains; those that coast go on."""
        for seq, _, _ in tuple(self._asleep.values()):
            self._book(seq)

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
        return self.batch()._replace(woke=woke)

    def batch(self, ahead: int = 0) -> Coasting:
        """What they add to the step that comes `ahead` steps after this one, if nobody wakes until then."""
        count = len(self._asleep)
        windowed = tuple(
            total + ahead * below + (count - below) * window
            for window, (below, total) in zip(self._windows, self._narrow, strict=True)
        )
        return Coasting(count, self._computed + (ahead + 1) * count, windowed)

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


def _entered(seq: Sequence) -> int:
    return seq.entered
