"""What a replay found: figures, timeline, lives of requests; immutable, and as JSON with a stable schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SCHEMA = "octavo.replay/1"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds: exact mean and count; percentiles within 0.5 % (0.0 throughout when nothing was counted)."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    highest: float = 0.0


@dataclass(frozen=True, slots=True)
class Life:
    """One request's life. Times in seconds after the trace's start; None: it did not come to that.

    reason     "stop", "length", "refused: ..." ...
    waited     cause -> seconds it stood in the line, before and between admissions
    preempted  (when, until when) it had lost its memory; recomputed: tokens computed again for it
    """

    id: str
    arrival: float
    prompt_tokens: int
    output_tokens: int
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    reason: str | None = None
    cached_tokens: int = 0
    recomputed: int = 0
    waited: Mapping[str, float] = None  # type: ignore[assignment]
    preempted: tuple[tuple[float, float | None], ...] = ()


#: The lines of the KV pool, exclusive: their shares sum to 1.
KV_LINES = (
    "live",
    "cached",
    "slack",
    "reserved_used_later",
    "reserved_never_used",
    "quarantined",
    "fragmented",
    "held",
    "free",
)


@dataclass(frozen=True, slots=True)
class Timeline:
    """At most 400 stretches of about as many steps each, or without any. Columns of equal length; means over a stretch
    are weighted by time.

    t            where the stretch ends, seconds
    waiting      cause -> requests waiting for it;  kv: line -> share of the pool
    preemptions, finished: counts in the stretch;  step: mean step time, seconds (0: nothing ran)
    """

    t: tuple[float, ...]
    running: tuple[float, ...]
    waiting: Mapping[str, tuple[float, ...]]
    kv: Mapping[str, tuple[float, ...]]
    preemptions: tuple[int, ...]
    finished: tuple[int, ...]
    step: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PoolMap:
    """Snapshots of the pool over time, thinned to rows. owner[i][j]: index into `requests` of who owns stretch j at
    t[i], -1 free, -2 cached; written: whether token states are there."""

    t: tuple[float, ...]
    owner: tuple[tuple[int, ...], ...]
    written: tuple[tuple[bool, ...], ...]
    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no scheduler could beat.

    running_mean, running_peak  most requests at once in the mean over time and at the peak, for one that knows all
                                lengths, packs token states without waste and is bound by the same pool and max_num_seqs
    ideal_hits                  prompt tokens that an unlimited prefix cache would serve; belady_hits: an optimal one
                                of the pool's size (None: the trace has no prefix ids)
    """

    running_mean: float
    running_peak: int
    ideal_hits: int | None = None
    belady_hits: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One replay of one trace on one deployment under one strategy.

    requests          read from the trace; finished, refused, unfinished (0 unless a time limit ended the replay)
    seconds           from the first arrival to the last end; busy_seconds: of it, with a step running
    running_mean      requests holding memory, weighted by time while any run; waiting_mean likewise
    kv_mean, kv_peak  shares of the pool over busy time, and at the fullest step with most running
    attained          share of requests within the SLO; goodput: such requests a second (None without an SLO)
    waited            cause -> seconds, summed over requests; `binding`: the cause with most of it
    discarded         tokens thrown away by preemptions; recomputed: of them, computed again
    """

    strategy: str
    pool_tokens: int
    pool_bytes: int
    block_size: int
    requests: int
    finished: int
    refused: int
    unfinished: int
    seconds: float
    busy_seconds: float
    steps: int
    running_mean: float
    running_peak: int
    waiting_mean: float
    kv_mean: Mapping[str, float]
    kv_peak: Mapping[str, float]
    ttft: Distribution
    itl: Distribution
    tpot: Distribution
    e2e: Distribution
    queue: Distribution
    attained: float | None
    goodput: float | None
    output_tokens: int
    prompt_tokens: int
    preemptions: int
    discarded: int
    recomputed: int
    hit_tokens: int
    query_tokens: int
    waited: Mapping[str, float]
    timeline: Timeline | None = None
    map: PoolMap | None = None
    lives: tuple[Life, ...] = ()
    refusals: tuple[tuple[str, str], ...] = ()
    bounds: Bounds | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def requests_per_second(self) -> float:
        return self.finished / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens asked for that the prefix cache served."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0

    @property
    def binding(self) -> str | None:
        """The cause with most of the waiting time; None if nobody waited for more than the end of a running step."""
        causes = {cause: seconds for cause, seconds in self.waited.items() if cause != "next step"}
        return max(causes, key=lambda cause: causes[cause]) if causes else None
