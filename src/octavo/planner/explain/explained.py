"""What an explanation says, as immutable data: stretches of time, stories of requests, and causes with their roots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from octavo.scheduler.explain import Cause, Wait

SCHEMA = "octavo.explain/1"
HOLDERS = 3  # named of those who sit on what is needed
SHARED_PREFIX = "shared prefix"  # root of a wait for somebody who computes the very prefix that one needs


@dataclass(frozen=True, slots=True)
class Question:
    """
    start, end  seconds on the log's clock to look at; None: from the beginning, to the end
    interval    seconds of one line; None: one second, finer for runs of less than 16 s
    request     id of the one request to tell about; None: all of them
    worst       how many of the longest-waiting requests to tell about
    strategy    which outcome of a replay's report; None: the one it is about
    """

    start: float | None = None
    end: float | None = None
    interval: float | None = None
    request: str | None = None
    worst: int = 5
    strategy: str | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What the scheduler's `explain` said of `request` at second `at`. `need`, `have` and `short` count `unit`; behind
    others they are those of the request in front that the limit itself keeps waiting."""

    at: float
    request: str
    sentence: str
    need: int
    have: int
    short: int
    unit: str
    behind: str | None
    holders: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, wait: Wait, request: str, at: float) -> Seen:
        last = innermost(wait)
        holders = tuple((holder.request, holder.amount) for holder in last.holders[:HOLDERS])
        return cls(at, request, wait.sentence(), last.need, last.have, last.short, last.unit, wait.behind, holders)


@dataclass(frozen=True, slots=True)
class Stretch:
    """What went on from `start` to `end` (seconds).

    running, waiting   requests, means over time; waiting: cause -> how many
    steps              that ended in it, and the mean seconds of one
    kv                 line of the pool -> share; {} when nothing was looked at
    None               the source does not say
    seen               cause -> what the first in line with it was told, first of the stretch
    """

    start: float
    end: float
    running: float
    waiting: Mapping[str, float]
    kv: Mapping[str, float]
    steps: int | None
    step_seconds: float
    preemptions: int
    finished: int
    prefill_tokens: int | None = None
    decode_tokens: int | None = None
    discarded: int | None = None
    recomputed: int | None = None
    seen: Mapping[str, Seen] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def binding(self) -> str | None:
        """The limit that most of the waiting requests wait for; None if nobody waits for any."""
        return chief(self.waiting)


@dataclass(frozen=True, slots=True)
class Lost:
    """A preemption: memory taken back at second `at`, `discarded` tokens of KV thrown away, and back in at `until` with
    `reused` of them from the cache. by: the request it was taken for; why: the same in words. None or "": not known."""

    at: float
    until: float | None
    by: str | None = None
    why: str = ""
    discarded: int | None = None
    reused: int | None = None


@dataclass(frozen=True, slots=True)
class Period:
    """One reason why a request waited, from `start` to `end`; `seen` at its beginning."""

    start: float
    end: float
    cause: str
    seen: Seen | None


@dataclass(frozen=True, slots=True)
class Story:
    """A request's life. Times in seconds, None: it did not come to that by the end.

    waited   cause -> seconds in the line; with n > 1 summed over the samples that stood in it
    seen     cause -> what it was told when that cause first held
    periods  one after the other, for a request that was asked about
    missed   why its prompt did not come from the cache, for one that was asked about
    """

    id: str
    arrival: float
    prompt_tokens: int
    output_tokens: int
    samples: int = 1
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    reason: str | None = None
    cached_tokens: int = 0
    recomputed: int = 0
    waited: Mapping[str, float] = field(default_factory=dict)
    seen: Mapping[str, Seen] = field(default_factory=dict)
    lost: tuple[Lost, ...] = ()
    periods: tuple[Period, ...] = ()
    periods_left_out: int = 0
    missed: str | None = None

    @property
    def total_waited(self) -> float:
        return sum(self.waited.values())


@dataclass(frozen=True, slots=True)
class Setup:
    """The limits in force; None: the source does not say."""

    strategy: str
    pool_tokens: int
    block_size: int
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    admission: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which limit bound, over time and for each request.

    source      the file; kind: "log" (Octavo's decisions, decided again) or "run" (a replay's report)
    start, end  what was looked at, in seconds on the source's clock
    waited      cause -> request-seconds in that window
    stories     the longest-waiting requests, longest first; asked: the one asked about
    discarded, recomputed  tokens; None: a report's window does not say
    cut         how the log breaks off, "" when it is whole
    others      strategies that the report has as well
    """

    source: str
    kind: str
    setup: Setup
    start: float
    end: float
    requests: int
    finished: int
    refused: int
    preemptions: int
    discarded: int | None
    recomputed: int | None
    waited: Mapping[str, float]
    stretches: tuple[Stretch, ...]
    stories: tuple[Story, ...]
    asked: Story | None = None
    refusals: tuple[tuple[str, str], ...] = ()
    cut: str = ""
    others: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def limits(self) -> dict[str, float]:
        """Limit -> request-seconds of waiting for it, most first; queueing behind one that waits for it included."""
        return by_limit(self.waited)


def innermost(wait: Wait) -> Wait:
    """The wait at the bottom of it: that of the one in front, if it waits behind somebody."""
    while wait.behind_wait is not None:
        wait = wait.behind_wait
    return wait


def label_of(wait: Wait) -> str:
    """A cause as explanations count it: behind somebody, with what that one waits for."""
    if wait.cause is not Cause.BEHIND:
        return wait.cause.value
    last = innermost(wait)
    return behind(SHARED_PREFIX if last.shares_prefix else last.cause.value)


def behind(root: str) -> str:
    return f"{Cause.BEHIND.value} ({root})"


def root_of(label: str) -> str:
    """The limit that a cause comes down to."""
    return label.removeprefix(f"{Cause.BEHIND.value} (").removesuffix(")") if label != Cause.BEHIND else label


def by_limit(waited: Mapping[str, float]) -> dict[str, float]:
    """Causes added up by the limit they come down to, most first. Waiting for the running step to end is none.

    A run's report says "behind" without what for: only memory makes others queue so (see `WaitingRoom`), so it is
    counted with the memory cause that has most.
    """
    limits: dict[str, float] = {}
    for label, amount in waited.items():
        if amount > 0 and (root := root_of(label)) != Cause.NEXT_STEP:
            limits[root] = limits.get(root, 0.0) + amount
    memory = [root for root in limits if root.startswith("memory")]
    if memory and Cause.BEHIND.value in limits:
        limits[max(memory, key=lambda root: limits[root])] += limits.pop(Cause.BEHIND.value)
    return dict(sorted(limits.items(), key=lambda item: -item[1]))


def chief(waited: Mapping[str, float]) -> str | None:
    """The limit with most of it."""
    return next(iter(by_limit(waited)), None)


def joined(parts: Iterable[Stretch]) -> Stretch:
    """Neighbouring stretches as one."""
    parts = tuple(parts)
    first, last = parts[0], parts[-1]
    steps = _sum(part.steps for part in parts)
    weights = [part.steps if part.steps is not None else part.seconds for part in parts]
    looked = [part for part in parts if part.kv]
    seen: dict[str, Seen] = {}
    for part in parts:
        seen = {**part.seen, **seen}
    return Stretch(
        start=first.start,
        end=last.end,
        running=_mean([part.running for part in parts], parts),
        waiting={
            label: _mean([part.waiting.get(label, 0.0) for part in parts], parts)
            for label in dict.fromkeys(label for part in parts for label in part.waiting)
        },
        kv={line: _mean([part.kv[line] for part in looked], looked) for line in (looked[0].kv if looked else ())},
        steps=steps,
        step_seconds=sum(w * p.step_seconds for w, p in zip(weights, parts, strict=True)) / (sum(weights) or 1.0),
        preemptions=sum(part.preemptions for part in parts),
        finished=sum(part.finished for part in parts),
        prefill_tokens=_sum(part.prefill_tokens for part in parts),
        decode_tokens=_sum(part.decode_tokens for part in parts),
        discarded=_sum(part.discarded for part in parts),
        recomputed=_sum(part.recomputed for part in parts),
        seen=seen,
    )


def _mean(values: list[float], parts: Iterable[Stretch]) -> float:
    seconds = [part.seconds for part in parts]
    total = sum(seconds)
    return sum(v * s for v, s in zip(values, seconds, strict=True)) / total if total else sum(values) / len(values)


def _sum(values: Iterable[int | None]) -> int | None:
    """None as soon as one is not known."""
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total
