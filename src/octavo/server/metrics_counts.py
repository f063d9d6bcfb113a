"""What the metrics add up on the engine's thread: plain integers, filled by events and steps."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from octavo import events as ev
from octavo.runner.api import StepPlan
from octavo.scheduler.explain import Cause
from octavo.scheduler.scheduler import Progress, Scheduler
from octavo.types import FinishReason, Request

# Upper bounds, in seconds, as vLLM has them: dashboards compare servers bucket by bucket.
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_TIME_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_TIME_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
SAMPLES_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)
STEP_TOKENS_BOUNDS = (1.0, 8.0, *(float(2**power) for power in range(4, 15)))

#: Why the prefix cache did not serve all of a prompt that it could have.
MISSES = (
    "sharing is off",  # by configuration or strategy, or because the request wants every position's logprobs
    "prompt shorter than a block",
    "nothing in common",
    "common part shorter than a block",
    "differs from what is cached",  # behind some blocks that were served
    "nothing cached behind the hit",  # no prompt went on from there, or that has been evicted
    "not examined",
)
_EXAMINED = 8192  # blocks of a pool in which every miss is looked into: looking takes a microsecond for each at worst

# Of several samples' reasons, the one that says most about the request.
_RANK = {FinishReason.STOP: 0, FinishReason.LENGTH: 1, FinishReason.ABORT: 2, FinishReason.ERROR: 3}


def one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `most`."""
    bounds = (float(digit * 10**power) for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= most)


class Histogram:
    """Counts by upper bound (inclusive, as Prometheus has it), and the sum of all values."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def copy(self) -> Histogram:
        twin = Histogram(self.bounds)
        twin.counts, twin.sum = self.counts.copy(), self.sum
        return twin


@dataclass(slots=True)
class Tallies:
    """Everything that has been added up. Waited seconds are of sequences; a request counts once otherwise."""

    refused: Counter[str] = field(default_factory=Counter)  # by code
    finished: Counter[str] = field(default_factory=Counter)  # by reason, those that expired among the errors
    waited: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds by cause
    misses: Counter[str] = field(default_factory=Counter)  # prompts by reason
    unusable_tokens: int = 0  # shared with a cached prompt behind the last whole block
    copied_blocks: int = 0
    steps: int = 0
    failures: int = 0  # of the runner
    step_seconds: float = 0.0
    histograms: dict[str, Histogram] = field(default_factory=dict)

    def copy(self) -> Tallies:
        twin = copy(self)
        twin.refused, twin.finished = self.refused.copy(), self.finished.copy()
        twin.waited, twin.misses = self.waited.copy(), self.misses.copy()
        twin.histograms = {name: histogram.copy() for name, histogram in self.histograms.items()}
        return twin


def histograms(max_model_len: int) -> dict[str, Histogram]:
    """All of them, empty, by what they count."""
    lengths = one_two_five(max_model_len)
    bounds: Mapping[str, tuple[float, ...]] = {
        "ttft": TTFT_BOUNDS,
        "itl": TOKEN_TIME_BOUNDS,
        "tpot": TOKEN_TIME_BOUNDS,
        **dict.fromkeys(("e2e", "queue", "inference", "prefill", "decode"), REQUEST_TIME_BOUNDS),
        **dict.fromkeys(("prompt", "generation", "max_generation", "max_tokens", "prompt_computed"), lengths),
        "n": SAMPLES_BOUNDS,
        "step_tokens": STEP_TOKENS_BOUNDS,
    }
    return {name: Histogram(bound) for name, bound in bounds.items()}


class _Life:
    """What is remembered of a request until all its samples have ended."""

    __slots__ = ("admitted", "ended", "first", "generated", "left", "longest", "reason", "request", "reused", "seqs")

    def __init__(self, request: Request, seqs: tuple[int, ...]) -> None:
        self.request = request
        self.seqs = seqs
        self.left = len(seqs)  # that have not ended
        self.admitted: float | None = None
        self.first: float | None = None  # when its first token came
        self.ended = 0.0
        self.reason = FinishReason.STOP
        self.reused = 0  # prompt tokens that came from the cache
        self.generated = self.longest = 0  # tokens of all samples; of the longest one


class _Stream:
    """One sample: when its latest token came."""

    __slots__ = ("last", "life")

    def __init__(self, life: _Life) -> None:
        self.life = life
        self.last: float | None = None


class Counts:
    """Sink and watcher of one engine. For each token it does a look-up and an addition."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.tallies = Tallies(histograms=histograms(scheduler.config.max_model_len))
        self._scheduler = scheduler
        self._streams: dict[int, _Stream] = {}
        self._ended: list[_Life] = []  # to be added up when the tokens of the step are
        self._now = 0.0  # the latest time that an event has told
        self._previous: float | None = None  # the end of the last step
        self._in_step = False
        self._causes: Counter[str] = Counter()  # how many wait for what
        self._mark = 0.0  # up to when their time has been added up
        self._admissions = 0
        self._examine_every = -(-scheduler.kv.capacity // _EXAMINED)
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.PlanBegan: self._plan_began,
            ev.Settled: self._tick,
            ev.Stopped: self._tick,
            ev.Submitted: self._submitted,
            ev.Refused: self._refused,
            ev.Admitted: self._admitted,
            ev.Finished: self._finished,
            ev.Failed: self._failed,
        }

    # -- events -------------------------------------------------------------------------------------------------------

    def on_event(self, event: ev.Event) -> None:
        handle = self._handlers.get(type(event))
        if handle is not None:
            handle(event)

    def _tick(self, event: ev.Settled | ev.Stopped) -> None:
        self._now = event.now

    def _plan_began(self, event: ev.PlanBegan) -> None:
        self._now, self._in_step = event.now, True
        self._add_waits(event.now)

    def _submitted(self, event: ev.Submitted) -> None:
        life = _Life(event.request, event.seqs)
        for seq in event.seqs:
            self._streams[seq] = _Stream(life)
        self._add_waits(event.now)
        self._causes[Cause.NEXT_STEP.value] += 1

    def _refused(self, event: ev.Refused) -> None:
        self.tallies.refused[event.code] += 1

    def _admitted(self, event: ev.Admitted) -> None:
        if event.again:
            return
        life = self._streams[event.seq].life
        life.admitted, life.reused = self._now, event.reused
        self._note_miss(life.request, event.known, event.reused)

    def _note_miss(self, request: Request, known: int, reused: int) -> None:
        """Why more of the prompt did not come from the cache; once for a prompt, when it is first admitted."""
        scheduler = self._scheduler
        size = scheduler.kv.block_size
        self._admissions += 1
        if not scheduler.kv.shares or request.params.prompt_logprobs is not None:
            reason = "sharing is off"
        elif known <= size:
            reason = "prompt shorter than a block"
        elif reused >= (known - 1) // size * size:
            return  # all that can be served was
        elif self._admissions % self._examine_every:
            reason = "not examined"
        else:
            miss = scheduler.miss(request.id)
            assert miss is not None  # it lives: it has just been admitted
            self.tallies.unusable_tokens += miss.partial
            if not miss.matched:
                reason = "common part shorter than a block" if miss.partial else "nothing in common"
            else:
                reason = "nothing cached behind the hit" if miss.position is None else "differs from what is cached"
        self.tallies.misses[reason] += 1

    def _finished(self, event: ev.Finished) -> None:
        life = self._streams[event.seq].life
        generated = event.tokens - len(life.request.prompt)
        life.generated += generated
        life.longest = max(life.longest, generated)
        life.reason = max(life.reason, FinishReason(event.reason), key=_RANK.__getitem__)
        life.left -= 1
        if not life.left:
            life.ended = self._now
            self._ended.append(life)
        if not self._in_step:  # it may have waited
            self._add_waits(self._now)
            self._causes = self._scheduler.waiting_by_cause().copy()

    def _failed(self, event: ev.Failed) -> None:
        self._now, self._in_step = event.now, False
        self.tallies.failures += 1

    # -- steps --------------------------------------------------------------------------------------------------------

    def on_step(self, scheduler: Scheduler, plan: StepPlan, progress: Seq[Progress], start: float, end: float) -> None:
        tallies = self.tallies
        if not plan.empty:
            tallies.steps += 1
            tallies.step_seconds += end - start
            tallies.histograms["step_tokens"].add(plan.tokens)
            for one in plan.copies:
                tallies.copied_blocks += one.n
        self._causes = scheduler.waiting_by_cause().copy()  # since the plan was made
        self._add_waits(end)
        self._add_tokens(progress, end)
        self._previous, self._in_step = end, False
        self.add_ended()

    def _add_waits(self, now: float) -> None:
        """Add up the time waited since the last time."""
        passed, self._mark = now - self._mark, now
        for cause, count in self._causes.items():
            self.tallies.waited[cause] += count * passed

    def _add_tokens(self, progress: Seq[Progress], now: float) -> None:
        streams, previous, itl = self._streams, self._previous, self.tallies.histograms["itl"]
        same = 0  # most have gained a token in the last step, too: they are counted together
        for item in progress:
            if item.token is None or item.nth:
                continue
            stream = streams[item.seq.id]
            last, stream.last = stream.last, now
            if last is None:
                self._first_token(stream.life, now)
            elif last == previous:
                same += 1
            else:
                itl.add(now - last)
        if same and previous is not None:
            itl.add(now - previous, same)

    def _first_token(self, life: _Life, now: float) -> None:
        if life.first is None:
            life.first = now
            self.tallies.histograms["ttft"].add(now - life.request.arrival)

    def add_ended(self) -> None:
        """Requests that have ended since: also those that no step ended."""
        for life in self._ended:
            for seq in life.seqs:
                del self._streams[seq]
            self.tallies.finished[life.reason.value] += 1
            if life.reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._add_request(life)
        self._ended.clear()

    def _add_request(self, life: _Life) -> None:
        """The figures of one that got all it asked for."""
        request, add = life.request, {name: one.add for name, one in self.tallies.histograms.items()}
        assert life.admitted is not None
        add["e2e"](life.ended - request.arrival)
        add["queue"](life.admitted - request.arrival)
        add["inference"](life.ended - life.admitted)
        add["prompt"](len(request.prompt))
        add["generation"](life.generated)
        add["max_generation"](life.longest)
        add["prompt_computed"](len(request.prompt) - life.reused)
        add["n"](request.params.n)
        if request.params.max_tokens is not None:
            add["max_tokens"](request.params.max_tokens)
        if life.first is not None:
            add["prefill"](life.first - life.admitted)
            add["decode"](life.ended - life.first)
            if life.longest > 1:
                add["tpot"]((life.ended - life.first) / (life.longest - 1))
