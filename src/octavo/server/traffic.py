"""The recent traffic as it really came, and how long steps really took: what a what-if replays, and by what clock."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.kv.prefix import BlockKey, Key
from octavo.runner.api import StepPlan
from octavo.runner.timing import StepShape, shape_of
from octavo.types import Request, Sequence

REQUESTS = 10_000
SECONDS = 1800.0
HASHES = 2_000_000  # block hashes kept in all, 8 bytes each
STEPS = 4000
_EVERY = 0.02  # seconds between two steps kept, once there are enough
_ENOUGH = 400


@dataclass(slots=True)
class Recorded:
    """One request. Times on the engine's clock. `output`: tokens of its longest sample; None: it still runs.

    hashes  of its full blocks, each standing for all before it as well; set when it has ended
    ttft    seconds to its first token; took: to its end
    """

    id: str
    arrival: float
    prompt_tokens: int
    samples: int
    max_tokens: int | None
    tenant: str
    output: int | None = None
    hashes: array[int] | None = None
    ttft: float | None = None
    took: float | None = None
    kept: bool = True


class Traffic:
    """Fed on the engine's thread; bounded in requests, in time and in memory."""

    def __init__(self) -> None:
        self.steps: deque[tuple[StepShape, float]] = deque(maxlen=STEPS)
        self._requests: deque[Recorded] = deque()
        self._refused: deque[float] = deque(maxlen=REQUESTS)
        self._hashes = 0
        self._step: tuple[StepShape, float, float, bool] | None = None  # the last: shape, start, end, work was left

    # -- requests -----------------------------------------------------------------------------------------------------

    def submitted(self, request: Request) -> Recorded:
        recorded = Recorded(
            request.id,
            request.arrival,
            len(request.prompt),
            request.params.n,
            request.params.max_tokens,
            request.tenant,
        )
        self._requests.append(recorded)
        while len(self._requests) > REQUESTS or self._requests[0].arrival < request.arrival - SECONDS:
            self._forget()
        return recorded

    def refused(self, now: float) -> None:
        self._refused.append(now)

    def ended(self, recorded: Recorded, seq: Sequence, output: int, now: float) -> None:
        """`seq`: the sample whose tokens stand for the request; `output`: tokens that the longest of them generated."""
        recorded.output, recorded.took = output, now - recorded.arrival
        if not recorded.kept:
            return
        recorded.hashes = hashes_of(seq, len(seq.tokens))
        self._hashes += len(recorded.hashes)
        while self._hashes > HASHES and self._requests:
            self._forget()

    def _forget(self) -> None:
        oldest = self._requests.popleft()
        oldest.kept = False
        self._hashes -= len(oldest.hashes or ())

    def since(self, when: float) -> tuple[list[Recorded], int]:
        """Requests that have come since `when`, in order of arrival, and how many were refused since."""
        return [one for one in self._requests if one.arrival >= when], sum(at >= when for at in self._refused)

    # -- steps --------------------------------------------------------------------------------------------------------

    def stepped(self, plan: StepPlan, windows: tuple[int, ...], start: float, end: float, busy: bool) -> None:
        """A step lasts to the beginning of the next one where work is left, so that the engine's own time counts.
        `busy`: work is left."""
        if self._step is not None:
            shape, began, ended, more = self._step
            seconds = (start if more else ended) - began
            if seconds > 0:
                self.steps.append((shape, seconds))
            self._step = None
        rare = len(self.steps) < _ENOUGH or int(start / _EVERY) != int(end / _EVERY)
        if plan.work and rare:
            self._step = (shape_of(plan, windows), start, end, busy)


def hashes_of(seq: Sequence, tokens: int) -> array[int]:
    """Prefix identity of the full blocks within a sequence's first `tokens` tokens."""
    return trace_hashes(seq.keys.upto(tokens))


def trace_hashes(keys: Iterable[Key]) -> array[int]:
    """Keys as the ids of blocks that a trace has."""
    return array("Q", [int.from_bytes(key.digest[:8], "little") for key in keys if isinstance(key, BlockKey)])
