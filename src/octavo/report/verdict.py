"""Answers "GPU memory looks sufficient, so why can concurrency not go up, and what should I change?".

Only from measured figures: every number in the text is in a `RunSummary`, and a change is advised only where a run
showed that it helps. Where no run shows it, the text says what to run instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from octavo.report.summary import RunSummary
from octavo.report.wording import HOLDING, count, percent, seconds, size

HARDLY = 0.05  # requests waiting on average: below this nobody is kept from running
SAME = 1.05  # ratios below this are called equal: two runs of the same thing differ by as much
NEAR = 1.25  # the question is about concurrency: a strategy this little slower that runs more at once is preferred
WORTH_SAYING = 1.2  # a latency must change by this factor to be mentioned
FULL = 0.85  # a pool with this share of live token states has nothing to gain from other placement
REPLAY_ONLY = "reserve-oracle"  # knows lengths in advance: an upper bound, not a setting


class Limit(StrEnum):
    """What most of the waiting was for."""

    NONE = "none"
    MEMORY = "memory"
    SLOTS = "slots"
    BUDGET = "step budget"
    QUOTA = "quota"
    OTHER = "other"


def verdict(summaries: Sequence[RunSummary], *, max_model_len: int | None = None) -> str:
    """The answer in a few sentences; `max_model_len` in tokens lets it say what reserve-max reserves."""
    if not summaries:
        return "No run was recorded, so there is nothing to answer from."
    if all(s.peak_running == 0 for s in summaries):
        return _nothing_ran(summaries)
    base = _base(summaries)
    others = [s for s in summaries if s is not base and s.strategy != REPLAY_ONLY]
    oracle = next((s for s in summaries if s.strategy == REPLAY_ONLY and s is not base), None)
    parts = [_why(base, max_model_len)]
    if base.peak_running and limit_of(base) is not Limit.MEMORY:
        parts += [_advice(base), *_also(base, others)]
    elif not others:
        parts += [_oracle(oracle)] if oracle else []
        parts += [_advice(base)]
    else:
        parts += _compare(base, others)
    return " ".join(part for part in parts if part)


def limit_of(s: RunSummary) -> Limit:
    """The chief cause of waiting. A request behind one that waits for memory waits for memory too."""
    waited = _waited(s)
    if mean_waiting(s) < HARDLY:
        return Limit.NONE
    memory = sum(spent for cause, spent in waited.items() if cause.startswith("memory"))
    amounts = {
        Limit.MEMORY: memory + (waited.get("behind", 0.0) if memory else 0.0),
        Limit.SLOTS: waited.get("slots", 0.0),
        Limit.BUDGET: waited.get("step budget", 0.0),
        Limit.QUOTA: waited.get("quota", 0.0),
    }
    chief = max(amounts, key=lambda limit: amounts[limit])
    return chief if amounts[chief] > 0 else Limit.OTHER


def mean_waiting(s: RunSummary) -> float:
    """Requests that waited, on average over the run."""
    return sum(_waited(s).values()) / s.seconds if s.seconds else 0.0


def _waited(s: RunSummary) -> dict[str, float]:
    """Request-seconds by cause, without those that only waited for the next step to begin."""
    return {cause: spent for cause, spent in s.waited_by_cause.items() if cause != "next step" and spent > 0}


def _nobody(s: RunSummary) -> str:
    waited = _waited(s)
    return "hardly any request waited (fewer than 0.1 on average)" if waited else "no request waited"


def _nothing_ran(summaries: Sequence[RunSummary]) -> str:
    refused = max(s.refused for s in summaries)
    names = "Under every strategy" if len(summaries) > 1 else f"Under {summaries[0].strategy}"
    if refused:
        return (
            f"{names} nothing ran in {size(summaries[0].pool_bytes)} of KV memory: {refused} requests were refused at "
            "submit because they could never be served. The refusals name the numbers and what to raise or lower."
        )
    return f"{names} nothing ran: no request was taken up, so the run says nothing about concurrency."


def _base(summaries: Sequence[RunSummary]) -> RunSummary:
    """What the question is asked about: the traditional reserve-max, or else whatever ran fewest at once."""
    usable = [s for s in summaries if s.strategy != REPLAY_ONLY] or list(summaries)
    traditional = next((s for s in usable if s.strategy == "reserve-max"), None)
    return traditional or min(usable, key=lambda s: (s.peak_running, -s.seconds))


def _why(s: RunSummary, max_model_len: int | None) -> str:
    pool = size(s.pool_bytes)
    if not s.peak_running:
        return f"In {pool} of KV memory {s.strategy} ran nothing: it refused {s.refused} requests at submit."
    ran = f"In {pool} of KV memory {s.strategy} ran at most {_requests(s.peak_running)} at once"
    refused = f" It refused {s.refused} of {s.requests + s.refused} requests at submit." if s.refused else ""
    limit = limit_of(s)
    if limit is Limit.NONE:
        return f"{ran} and {_nobody(s)}, so memory did not limit concurrency here.{refused}"
    waiting = mean_waiting(s)
    ran += f" while {s.waited:,} of {s.requests:,} had to wait ({count(round(waiting, 1))} at a time on average)"
    if limit is not Limit.MEMORY:
        return f"{ran}, mostly for {_LIMIT_WORDS[limit]}, not for memory.{refused}"
    held = f"{percent(s.holding_mean)} of the pool held token states over time"
    held = f"Yet only {held}" if s.holding_mean < 0.5 else held
    rest = _parts_of_rest(s.kv_mean)
    if s.strategy == "reserve-max" and max_model_len:
        held += f": each request reserves {max_model_len:,} tokens"
    return f"{ran}: {_memory_words(s)}. {held}{'; ' + rest if rest else ''}.{refused}"


_LIMIT_WORDS = {
    Limit.SLOTS: "a place among the running requests (max_num_seqs)",
    Limit.BUDGET: "room in the step's token budget (max_num_batched_tokens)",
    Limit.QUOTA: "their tenant's quota",
    Limit.OTHER: "other requests",
}

_REST_WORDS = {
    "slack": "was slack in tail blocks",
    "reserved_used_later": "was reserved for tokens that came later",
    "reserved_never_used": "was reserved for tokens that never came",
    "quarantined": "was quarantined for copies",
    "fragmented": "was free but in pieces too small for the request that waited first",
    "held": "was held back for requests that already ran",
    "free": "was free",
}


def _requests(n: int) -> str:
    return f"{n:,} request" if n == 1 else f"{n:,} requests"


def _memory_words(s: RunSummary) -> str:
    """How much of the waiting memory explains, queueing behind such a request told apart."""
    waited = _waited(s)
    total = sum(waited.values())
    memory = {cause: spent for cause, spent in waited.items() if cause.startswith("memory")}
    chief = max(memory, key=lambda cause: memory[cause]).removeprefix("memory: ")
    behind = waited.get("behind", 0.0)
    words = {"full": "full memory", "fragmented": "free memory in pieces too small"}
    reason = "for " + words.get(chief, "memory held back for running requests")
    if behind:
        reason += " or behind a request that waited for it"
    share = (sum(memory.values()) + behind) / total
    return f"{percent(share) if share < 0.995 else 'all'} of the waiting was {reason}"


def _parts_of_rest(shares: dict[str, float]) -> str:
    parts = sorted(((v, k) for k, v in shares.items() if k not in HOLDING and v >= 0.1), reverse=True)[:2]
    return ", ".join(f"{percent(v)} {_REST_WORDS[k]}" for v, k in parts)


def _better(base: RunSummary, others: Sequence[RunSummary]) -> RunSummary | None:
    """Of those that ran more at once and finished about as soon as the soonest, the one that ran most; paged, the
    default, among equals."""
    near = _near(base, others)
    most = max((s.mean_running for s in near), default=0.0)
    equals = [s for s in near if s.mean_running * SAME >= most]
    return max(equals, key=lambda s: (s.strategy == "paged", s.peak_running), default=None)


def _near(base: RunSummary, others: Sequence[RunSummary]) -> list[RunSummary]:
    """Those that ran more at once than base and finished within NEAR of the soonest of them."""
    more = [s for s in others if s.peak_running > base.peak_running]
    soonest = max((_speed(base, s) for s in more), default=1.0)
    return [s for s in more if _speed(base, s) * NEAR >= soonest]


def _runners_up(best: RunSummary, near: Sequence[RunSummary]) -> str:
    """What else came close, with its figures, so that nobody reads more into the choice than was measured."""
    parts = [
        f"{s.strategy} ran {s.peak_running:,} and took {seconds(s.seconds)}"
        for s in near
        if s is not best and (s.mean_running * SAME >= best.mean_running or s.seconds * SAME < best.seconds)
    ]
    return f" ({'; '.join(parts)})" if parts else ""


def _same_work(a: RunSummary, b: RunSummary) -> bool:
    return a.requests == b.requests and abs(a.output_tokens - b.output_tokens) <= 0.01 * max(a.output_tokens, 1)


def _speed(base: RunSummary, s: RunSummary) -> float:
    """How many times as fast as base: by the clock for the same work, else by tokens a second."""
    if _same_work(base, s):
        return base.seconds / s.seconds if s.seconds else 1.0
    return s.tokens_per_second / base.tokens_per_second if base.tokens_per_second else float("inf")


def _compare(base: RunSummary, others: Sequence[RunSummary]) -> list[str]:
    best = _better(base, others)
    if best is None:
        return _none_better(base, others)
    speed = _speed(base, best)
    same_bytes = abs(best.pool_bytes - base.pool_bytes) <= 0.01 * base.pool_bytes
    where = "in the same bytes" if same_bytes else f"in {size(best.pool_bytes)}"
    ran = f"{best.strategy} ran {best.peak_running:,} {where}"
    ran += f" with {percent(best.holding_peak)} of the pool holding token states at the peak"
    out = [f"{ran}, and {_pace(base, best, speed)}.", _price(base, best)]
    if speed * SAME < 1:
        out.append(
            f"Change kv_strategy to {best.strategy} only if running more at once matters more than the total time."
        )
    else:
        out.append(f"Change kv_strategy to {best.strategy}{_runners_up(best, _near(base, others))}.")
    return [*out, _next_limit(best)]


def _pace(base: RunSummary, best: RunSummary, speed: float) -> str:
    if not base.peak_running:
        return f"finished {best.requests} requests in {seconds(best.seconds)}"
    if not _same_work(base, best):
        times = f"{speed:.1f} times the" if speed >= SAME or speed * SAME <= 1 else "about the same"
        return f"made {times} tokens a second ({best.tokens_per_second:,.0f} to {base.tokens_per_second:,.0f})"
    figures = f"({seconds(best.seconds)} instead of {seconds(base.seconds)})"
    if speed >= SAME:
        return f"finished {speed:.1f} times sooner {figures}" if speed >= 1.15 else f"finished sooner {figures}"
    if speed * SAME > 1:
        return f"took about as long {figures}"
    return f"took longer {figures}"


def _price(base: RunSummary, best: RunSummary) -> str:
    """What became better or worse for a single request."""
    if not base.peak_running:
        return ""
    gains, costs = [], []
    for words, a, b in (
        ("half of the first tokens came within", base.ttft.p50, best.ttft.p50),
        ("the median gap between tokens was", base.itl.p50, best.itl.p50),
    ):
        text = f"{words} {seconds(b)} instead of {seconds(a)}"
        if a > WORTH_SAYING * b:
            gains.append(text)
        elif b > WORTH_SAYING * a:
            costs.append(text)
    if best.preemptions > base.preemptions:
        times = "once" if best.preemptions == 1 else f"{best.preemptions:,} times"
        costs.append(f"requests were preempted {times}")
    text = ", ".join(gains)
    if costs:
        text += ("; the price: " if text else "the price: ") + " and ".join(costs)
    return text[:1].upper() + text[1:] + "." if text else ""


def _none_better(base: RunSummary, others: Sequence[RunSummary]) -> list[str]:
    best = max(others, key=lambda s: (s.peak_running, _speed(base, s)))
    names = " or ".join(s.strategy for s in others)
    if not base.peak_running:
        return [f"{names} ran nothing either."]
    if len(others) == 1:
        first = f"{names} did not run more at once in these bytes ({best.peak_running:,})."
    else:
        first = f"None of {', '.join(s.strategy for s in others)} ran more at once (at most {best.peak_running:,})."
    return [first, _advice(base if base.peak_running > best.peak_running else best, placement=False)]


def _also(base: RunSummary, others: Sequence[RunSummary]) -> list[str]:
    """Another strategy that did wait for memory although base did not: worth a warning."""
    worse = [s.strategy for s in others if limit_of(s) is Limit.MEMORY and s.peak_running < base.peak_running]
    return [f"Under {' and '.join(worse)} requests did wait for memory."] if worse else []


def _oracle(s: RunSummary) -> str:
    return f"{s.strategy}, which knows every length in advance and is no setting, ran {s.peak_running:,}."


def _next_limit(s: RunSummary) -> str:
    """What would be in the way after the change."""
    limit = limit_of(s)
    if limit is Limit.NONE:
        return f"With it {_nobody(s)}."
    if limit is Limit.MEMORY and s.kv_peak["live"] >= FULL:
        return (
            "The waiting that remains is mostly for memory that is really full: more concurrency then takes more KV "
            "memory or fewer KV bytes a token."
        )
    if limit is Limit.MEMORY:
        return ""
    return f"The waiting that remains is mostly for {_LIMIT_WORDS[limit]}."


def _advice(s: RunSummary, *, placement: bool = True) -> str:
    """What to change when no other run shows it. placement: other strategies were not tried."""
    limit = limit_of(s)
    if limit is Limit.NONE:
        return "To find the limit send more requests at once or give the cache less memory."
    if limit is Limit.SLOTS:
        return "Raise max_num_seqs."
    if limit is Limit.BUDGET:
        return "Raise max_num_batched_tokens."
    if limit is Limit.QUOTA:
        return "Raise the quota of the tenants that wait."
    if limit is Limit.OTHER:
        return "KV memory is not what to change."
    full = f"at the peak {percent(s.kv_peak['live'])} of the pool held token states of running requests"
    if s.kv_peak["live"] >= FULL:
        return f"Memory is really full ({full}): give the cache more memory or use fewer KV bytes a token."
    if not placement:
        return f"Other placement did not help ({full} under {s.strategy}): give the cache more memory."
    if s.strategy == "paged":
        return f"{full[:1].upper()}{full[1:]}. Run it with more KV memory to see whether concurrency follows."
    return "Run paged on the same bytes to see what it changes."
