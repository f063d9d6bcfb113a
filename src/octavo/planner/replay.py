"""Replays a trace through the serving scheduler and KV managers on a virtual clock."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from octavo.clock import VirtualClock
from octavo.errors import OctavoError
from octavo.kv.prefix import KeyChain
from octavo.kv.strategies import make_manager
from octavo.planner.deployment import Resolved
from octavo.planner.observer import Observer, Track
from octavo.planner.outcome import Outcome
from octavo.planner.slo import SLO
from octavo.planner.trace_keys import TraceChain
from octavo.planner.traces.api import TraceRequest
from octavo.runner.simulated import SimulatedRunner
from octavo.runner.timing import StepShape, shape_of
from octavo.scheduler.scheduler import Scheduler
from octavo.types import Request, RequestError, SamplingParams, Sequence

TOKEN, END = 0, 1  # what the simulated model says, and how it ends an answer; prompts consist of the former
_ENDS = frozenset({END})


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """
    strategy      overrides the deployment's
    slo           what attained and goodput are judged by
    max_tokens    the limit each client is taken to have given where the trace does not say; None: the model's length
    concurrency   closed loop: so many requests in flight, arrival times ignored; None: open loop at recorded times
    lives, map    how many lives of requests and whether snapshots of the pool are kept, for reports
    known_lengths the engine is told each request's output length (ignore_eos with max_tokens pinned), as benchmark
                  clients do; else it sees the client's limit and learns lengths as an engine does
    time_limit    seconds of simulated time after which the replay ends, what still runs counting as unfinished
    stepping      look at every sequence in every step instead of letting them coast; slower, with the same outcome
    """

    strategy: str | None = None
    slo: SLO | None = None
    max_tokens: int | None = None
    concurrency: int | None = None
    lives: int = 0
    map: bool = False
    timeline: bool = True
    known_lengths: bool = False
    time_limit: float | None = None
    stepping: bool = False


def replay(requests: Iterable[TraceRequest], resolved: Resolved, options: ReplayOptions = ReplayOptions()) -> Outcome:
    """Run `requests` through the scheduler on a virtual clock. The same input gives the same outcome."""
    collecting = gc.isenabled()
    gc.disable()  # what is dropped on the way is in no cycle, and looking for cycles takes a third of the time
    try:
        return _Replay(requests, resolved, options).run()
    finally:
        if collecting:
            gc.enable()


class _Replay:
    def __init__(self, requests: Iterable[TraceRequest], resolved: Resolved, options: ReplayOptions) -> None:
        settings, deployment = resolved.scheduler, resolved.deployment
        self.resolved, self.options = resolved, options
        self.strategy = options.strategy or deployment.strategy
        self.kv = make_manager(
            self.strategy,
            resolved.pages,
            deployment.block_size,
            max_model_len=settings.max_model_len,
            windows=resolved.windows,
            chunk=settings.max_num_batched_tokens,
            sharing=deployment.prefix_caching,
        )
        self.clock = VirtualClock()
        self.observer = Observer(options.slo, options.lives, options.map, options.timeline)
        timer = resolved.timer
        foresight = None if options.stepping else _Foresight(timer.windows, options.known_lengths)
        self.scheduler = Scheduler(settings, self.kv, self.observer.on_event, chain=self._chain, foresight=foresight)
        self.timer = timer
        self.runner = SimulatedRunner(
            self.clock, lambda plan: timer.seconds(shape_of(plan, timer.windows)), _token_of_known_length
        )
        self.upcoming = iter(requests)
        self.next: TraceRequest | None = next(self.upcoming, None)
        self.read = 0
        self._submitting: tuple[TraceRequest, int] | None = None

    def run(self) -> Outcome:
        limit = self.options.time_limit
        idle = 0
        while self._submit_due() or self.scheduler.busy or self.next is not None:
            now = self.clock.now()
            if limit is not None and now >= limit:
                break
            if not self.scheduler.busy:
                if self.next is None:
                    break  # what came was refused
                self.observer.idle(self.scheduler, now, self.next.arrival)
                self.clock.wait_until(self.next.arrival)
                continue
            if self._coast():
                continue
            idle = 0 if self._step(now) else idle + 1
            if idle > 3:
                raise OctavoError(f"the replay stands still at {now:.3f} s: nothing can run and nothing ends.")
        self.observer.close()
        return self._outcome()

    def _coast(self) -> bool:
        """Run the steps before the next one in which something is decided or looked at; whether there were any."""
        steps = min(self.scheduler.undisturbed, self.observer.undisturbed)
        limit = math.inf if self.options.time_limit is None else self.options.time_limit
        if self.next is not None and self.options.concurrency is None:
            limit = min(limit, self.next.arrival)
        seconds: list[float] = []
        start = self.clock.now()
        while len(seconds) < steps and self.clock.now() < limit:
            start = self.clock.now()
            count, context, windowed, _ = self.scheduler.coasting(len(seconds))
            seconds.append(self.timer.seconds(StepShape((), count, context, windowed, count, 0)))
            self.clock.advance(seconds[-1])
        if seconds:
            self.scheduler.skip(len(seconds), start)
            self.observer.on_skipped(self.scheduler, seconds, self.clock.now())
        return bool(seconds)

    def _step(self, now: float) -> bool:
        scheduler, observer = self.scheduler, self.observer
        observer.begin(now)
        plan = scheduler.plan(now)
        result = self.runner.run(plan)
        end = self.clock.now()
        observer.on_planned(scheduler, plan, end - now)
        progress = scheduler.settle(plan, result, end, lambda: observer.on_written(scheduler))
        observer.on_settled(progress, end)
        return not plan.empty

    # -- submitting ---------------------------------------------------------------------------------------------------

    def _submit_due(self) -> bool:
        """Submit what has arrived; whether anything was."""
        any_submitted = False
        for request in self._due():
            self._submit(request)
            any_submitted = True
        return any_submitted

    def _due(self) -> Iterator[TraceRequest]:
        concurrency = self.options.concurrency
        while self.next is not None:
            if concurrency is None:
                if self.next.arrival > self.clock.now():
                    return
            elif len(self.observer.tracks) >= concurrency:
                return
            request, self.next = self.next, next(self.upcoming, None)
            yield request

    def _submit(self, traced: TraceRequest) -> None:
        now = self.clock.now()
        arrival = traced.arrival if self.options.concurrency is None else now
        track = Track(self.read, arrival, traced.prompt_tokens, traced.prompt_tokens + traced.output_tokens)
        self._submitting = (traced, self.read)
        self.read += 1
        request = Request(
            id=traced.id,
            prompt=bytes(traced.prompt_tokens),
            params=self._params(traced),
            arrival=arrival,
            stop_token_ids=frozenset() if self.options.known_lengths else _ENDS,
            output_length=traced.output_tokens,
        )
        try:
            seq = self.scheduler.submit(request, now)[0]
        except RequestError as error:
            self.observer.refuse(traced.id, track, str(error))
            return
        self.observer.submitted(traced.id, track, seq, now)

    def _params(self, traced: TraceRequest) -> SamplingParams:
        if self.options.known_lengths:
            return _params(traced.output_tokens, True)
        given = traced.max_tokens if traced.max_tokens is not None else self.options.max_tokens
        if given is None:
            return _params(None, False)
        return _params(max(given, traced.output_tokens), False)

    def _chain(self, request: Request, tokens: list[int]) -> KeyChain:
        assert self._submitting is not None
        traced, ordinal = self._submitting
        return TraceChain(tokens, self.kv.block_size, traced, ordinal)

    # -- the outcome --------------------------------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        seen, totals, resolved = self.observer, self.scheduler.totals, self.resolved
        busy, seconds = seen.busy or 1.0, self.clock.now()
        return Outcome(
            strategy=self.strategy,
            pool_tokens=self.kv.capacity * self.kv.block_size,
            pool_bytes=resolved.pages * resolved.block_bytes,
            block_size=self.kv.block_size,
            requests=self.read,
            finished=seen.finished,
            refused=seen.refused,
            unfinished=self.read - seen.finished - seen.refused,
            seconds=seconds,
            busy_seconds=seen.busy,
            steps=self.scheduler.steps,
            running_mean=seen.running / busy,
            running_peak=seen.running_peak,
            waiting_mean=seen.waiting / busy,
            kv_mean=seen.kv_mean,
            kv_peak=seen.kv_peak,
            ttft=seen.ttft.distribution(),
            itl=seen.itl.distribution(),
            tpot=seen.tpot.distribution(),
            e2e=seen.e2e.distribution(),
            queue=seen.queue.distribution(),
            attained=None if self.options.slo is None else seen.attained / max(1, self.read),
            goodput=None if self.options.slo is None else seen.attained / (seconds or 1.0),
            output_tokens=seen.output_tokens,
            prompt_tokens=seen.prompt_tokens,
            preemptions=totals.preemptions,
            discarded=totals.discarded,
            recomputed=totals.recomputed,
            hit_tokens=totals.hit_tokens,
            query_tokens=totals.query_tokens,
            waited={cause: time for cause, time in sorted(seen.waited.items()) if time > 0},
            timeline=seen.timeline(),
            map=seen.map(),
            lives=seen.lives(),
            refusals=tuple(seen.refusals),
        )


_PARAMS: dict[tuple[int | None, bool], SamplingParams] = {}


def _params(max_tokens: int | None, ignore_eos: bool) -> SamplingParams:
    """Checking a SamplingParams takes longer than everything else in a submission: equal ones are made once."""
    key = (max_tokens, ignore_eos)
    if key not in _PARAMS:
        _PARAMS[key] = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    return _PARAMS[key]


@dataclass(frozen=True, slots=True)
class _Foresight:
    """A simulated model knows when it will end."""

    windows: tuple[int, ...]
    endless: bool  # only the limit of a request ends it
    token: int = TOKEN

    def plain(self, seq: Sequence) -> int:
        request = seq.request
        if self.endless or request.output_length is None:
            return 1 << 60
        return request.output_length - len(seq.tokens) + len(request.prompt) - 1


def _token_of_known_length(seq: Sequence) -> int:
    """The simulated model ends an answer at its recorded length."""
    return END if seq.generated + 1 == seq.request.output_length else TOKEN
