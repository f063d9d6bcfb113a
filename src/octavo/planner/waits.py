"""What each request waits for, without looking at each of them in every step."""

from __future__ import annotations

from collections import Counter

from octavo.scheduler.scheduler import Scheduler


class Waits:
    """Adds up seconds by cause for the sequences that are followed. Only the few who were offered memory in a step have
    causes of their own: all others share one, and each reads off their clock what came together while it was among
    them."""

    def __init__(self) -> None:
        self._sums: dict[int, Counter[str]] = {}  # of those who wait, by sequence
        self._since: dict[int, dict[str, float]] = {}  # the clock when it went out of sight, of those who are
        self._clock: dict[str, float] = {}  # cause -> seconds for which all who were out of sight waited for it

    def enter(self, seq: int, sums: Counter[str]) -> None:
        """A sequence begins to wait; what it waits for is added to `sums`, complete when it leaves."""
        self._sums[seq] = sums
        self._since[seq] = dict(self._clock)

    def leave(self, seq: int) -> None:
        """It waits no longer, if it did."""
        if seq in self._since:
            self._read_clock(seq)
        self._sums.pop(seq, None)

    def leave_all(self) -> None:
        for seq in tuple(self._sums):
            self.leave(seq)

    def pass_by(self, scheduler: Scheduler, seconds: float) -> None:
        """Everybody who waits has waited for so long, as the last plan left them."""
        if not self._sums:
            return
        waits, shared = scheduler.standing()
        seen = self._sums.keys() & waits.keys()
        for seq in seen & self._since.keys():
            self._read_clock(seq)
        for seq in self._sums.keys() - seen - self._since.keys():
            self._since[seq] = dict(self._clock)
        for seq in seen:
            self._sums[seq][waits[seq].cause.value] += seconds
        self._clock[shared.value] = self._clock.get(shared.value, 0.0) + seconds

    def _read_clock(self, seq: int) -> None:
        since = self._since.pop(seq)
        for cause, now in self._clock.items():
            self._sums[seq][cause] += now - since.get(cause, 0.0)
