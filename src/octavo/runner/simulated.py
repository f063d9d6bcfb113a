"""A runner that computes nothing: tokens from a function, time from a timing model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from octavo.clock import VirtualClock
from octavo.runner.api import SeqWork, StepPlan, StepResult
from octavo.types import Sequence

TokenSource = Callable[[Sequence], int]
Timing = Callable[[StepPlan], float]


@dataclass(frozen=True, slots=True)
class LinearTiming:
    """The simplest timing model, in seconds: a constant per step and a term per computed token.

    An illustration, not a fit: it orders strategies, it does not predict a device.
    """

    step: float = 5e-3
    token: float = 5e-5
    copied_block: float = 1e-5

    def __call__(self, plan: StepPlan) -> float:
        copied = sum(copy.n for copy in plan.copies)
        return self.step + self.token * plan.tokens + self.copied_block * copied


def placeholder_token(seq: Sequence) -> int:
    """A token that depends only on the request's own past: equal histories generate equal tokens."""
    return (seq.tokens[-1] * 31 + len(seq.tokens)) % 997 + 3


class SimulatedRunner:
    """Executes a plan by letting virtual time pass. Lengths are whatever the requests' limits say."""

    def __init__(
        self, clock: VirtualClock, timing: Timing | None = None, token: TokenSource = placeholder_token
    ) -> None:
        self._clock = clock
        self._timing = timing or LinearTiming()
        self._token = token

    def run(self, plan: StepPlan) -> StepResult:
        self._clock.advance(self._timing(plan))
        # A sample that has not been forked yet has the same tokens as the sequence that computes its prompt.
        return StepResult(tuple(self._drawn(work) for work in plan.work))

    def _drawn(self, work: SeqWork) -> tuple[int, ...]:
        if work.draft:
            return work.gained(self._following(work))
        return tuple(self._token(seq) for seq in work.samples)

    def _following(self, work: SeqWork) -> Iterator[int]:
        """What the sequence says next, and next behind each of its drafted tokens."""
        yield self._token(work.seq)
        for n in range(1, len(work.draft) + 1):
            yield self._token(replace(work.seq, tokens=work.seq.tokens + list(work.draft[:n])))

    def forget(self, seq: Sequence) -> None:
        """Nothing is kept per sequence."""
