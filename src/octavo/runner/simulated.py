"""A runner that computes nothing: tokens from a function, time from a timing model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.clock import VirtualClock
from octavo.runner.api import StepPlan, StepResult
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
        return StepResult(tuple(tuple(self._token(s) for s in work.samples) for work in plan.work))

    def forget(self, seq: Sequence) -> None:
        """Nothing is kept per sequence."""
