"""A replay's verdict: what the memory holds, what stops concurrency, what to change; only from the report's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.planner.outcome import Outcome
from octavo.report.replay_data import Change, ReplayReport
from octavo.report.wording import LINE_NAMES, percent, seconds

HARDLY = 0.05  # requests waiting in the mean: below this nobody is kept from running
GOOD = 0.99  # share of requests within the SLO above which nothing is missing
WORTH = 1.01  # a change must better its figure by this factor, and by more than its error bar, to be called one
MUCH = 0.1  # share of the pool from which waste is worth a word
WASTE = ("slack", "reserved_used_later", "reserved_never_used", "fragmented")  # no tokens, and nobody else's room
REPLAY_ONLY = "reserve-oracle"  # knows lengths in advance: an upper bound, not a setting
NEXT_STEP = "next step"  # there is room, and the step that is running must end first
UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
LIMITS = {
    "slots": "the places among the running requests (max_num_seqs)",
    "step budget": "the token budget of a step (max_num_batched_tokens)",
    "quota": "their tenant's quota",
    "behind": "other requests in front of them",
    "never": "memory that they can never have",
}


def verdict(report: ReplayReport) -> str:
    """The answer in a few sentences."""
    outcome = report.main
    if outcome is None:
        return "Nothing was replayed, so there is nothing to answer from."
    if not outcome.running_peak:
        return _nothing_ran(outcome)
    parts = [_held(report, outcome), _stops(outcome), _refused(outcome), _unfinished(outcome), _slo(report, outcome)]
    parts += [_others(report, outcome), changes_sentence(report.changes)]
    return " ".join(part for part in parts if part)


def fidelity_line(report: ReplayReport) -> str:
    """How far the times can be trusted, in one line; said with every answer."""
    fidelity = report.fidelity
    if fidelity is None:
        return "Fidelity: not stated; take the times as an illustration, not as a device's."
    level, statement = fidelity.level.value, fidelity.statement.rstrip(". ")
    said = statement if statement.startswith(level) else f"{level}; {statement}".rstrip("; ")
    return f"Fidelity: {said}; a step's time is off by {percent(fidelity.error)} in the median."


def limit_of(outcome: Outcome) -> tuple[str, float] | None:
    """The cause that binds and its share of the waiting time; None when hardly anybody waited.

    A request behind one that waits for memory waits for memory too. Waiting for the running step to end is no limit.
    """
    waited = binding_times(outcome)
    total = sum(waited.values())
    if not total or not outcome.seconds or total / outcome.seconds < HARDLY:
        return None
    memory = {cause: spent for cause, spent in waited.items() if cause.startswith("memory")}
    amounts = {cause: spent for cause, spent in waited.items() if cause not in memory}
    if memory:
        chief = max(memory, key=lambda cause: memory[cause])
        amounts[chief] = sum(memory.values()) + amounts.pop("behind", 0.0)
    cause = max(amounts, key=lambda name: amounts[name])
    return cause, amounts[cause] / total


def binding_times(outcome: Outcome) -> dict[str, float]:
    """Cause -> request-seconds, without those that only waited for the next step to begin."""
    return {cause: spent for cause, spent in outcome.waited.items() if cause != NEXT_STEP and spent > 0}


def chief_words(waited: Mapping[str, float]) -> str:
    """The cause with most of the seconds, or a dash."""
    return max(waited, key=lambda cause: waited[cause]) if waited else "–"


def changes_sentence(changes: Sequence[Change] | None) -> str:
    """The best change of settings with what it does, or of hardware if only that helps, or that none helps; "" when
    none was tried."""
    if not changes:
        return ""
    able = [change for change in changes if change.after is not None]
    if not able:
        return f"None of the {len(changes)} changes tried can run." if len(changes) > 1 else "The change cannot run."
    settings = [change for change in able if not _is_hardware(change) and helps(change)]
    best = max(settings or able, key=gain)
    if not helps(best):
        many = len(able) > 1
        who = (
            f"None of the {len(able)} changes tried betters"
            if many
            else f"{best.name}, the change tried, does not better"
        )
        return f"{who} {judged_by(best)} by more than its error bar."
    return f"{best.name}: {change_words(best)}."


def _is_hardware(change: Change) -> bool:
    """Whether it needs other devices, or more."""
    return "--gpu " in change.flag_octavo or "--tp " in change.flag_octavo


def judged_by(change: Change) -> str:
    """Which figure ranks it."""
    return "goodput" if _by_goodput(change) else "the time of a request"


def gain(change: Change) -> float:
    """How many times better the judged figure is; below 1: worse. 0 for a change that cannot run."""
    return gains(change)[1]


def gains(change: Change) -> tuple[float, float, float]:
    """The gain at the low end of the error bar, in the mean, and at the high end."""
    before, after = change.before, change.after
    if after is None:
        return 0.0, 0.0, 0.0
    error = change.error or 0.0
    if before.goodput is not None and after.goodput is not None:
        factor = _ratio(after.goodput, before.goodput)
        return max(0.0, factor - error), factor, factor + error
    took = _ratio(after.e2e, before.e2e)
    return _ratio(1.0, took + error), _ratio(1.0, took), _ratio(1.0, max(0.0, took - error))


def helps(change: Change) -> bool:
    """Whether the judged figure is better by more than its error bar."""
    low, factor, _ = gains(change)
    return low > 1 and factor >= WORTH


def _by_goodput(change: Change) -> bool:
    return change.before.goodput is not None and change.after is not None and change.after.goodput is not None


def _ratio(after: float, before: float) -> float:
    return after / before if before else (float("inf") if after else 1.0)


def change_words(change: Change) -> str:
    """As in "38 → 71 running in the mean, p99 TTFT 12.1 s → 2.30 s (± 9 %)"."""
    a, b = change.before, change.after
    if b is None:
        return f"cannot run: {change.note}" if change.note else "cannot run"
    words = [f"{_few(a.concurrency)} → {_few(b.concurrency)} running in the mean"]
    if a.goodput is not None and b.goodput is not None:
        words.append(f"goodput {a.goodput:.2f} → {b.goodput:.2f} requests/s")
    words.append(f"p99 TTFT {seconds(a.ttft_p99)} → {seconds(b.ttft_p99)}")
    if not _by_goodput(change):
        words.append(f"a request takes {seconds(a.e2e)} → {seconds(b.e2e)}")
    bar = f" (± {percent(change.error)} in {judged_by(change)})" if change.error is not None else ""
    return ", ".join(words) + bar


def binary(amount: float) -> str:
    """Bytes as the devices' makers and engines count memory: "7.4 GiB"."""
    for unit, size in UNITS:
        if amount >= size * 0.9995:
            value = amount / size
            return f"{value:.0f} {unit}" if value >= 99.95 or value == int(value) else f"{value:.1f} {unit}"
    return f"{amount:.0f} B"


def _few(value: float) -> str:
    """One decimal where it says something."""
    return f"{value:,.1f}" if value < 9.95 and value != int(value) else f"{value:,.0f}"


def _nothing_ran(o: Outcome) -> str:
    if not o.refused:
        return f"Under {o.strategy} nothing ran: no request was taken up."
    reason = f" The first: {o.refusals[0][1]}" if o.refusals else ""
    where = f"in {binary(o.pool_bytes)} of KV memory"
    return f"Under {o.strategy} nothing ran {where}: all {o.refused:,} requests were refused.{reason}"


def _held(report: ReplayReport, o: Outcome) -> str:
    live = o.kv_mean.get("live", 0.0)
    pool = f"{percent(live)} of the {binary(o.pool_bytes)} KV pool"
    if report.budget is None:
        return f"{pool} held live KV in the mean."
    return f"{binary(live * o.pool_bytes)} of {binary(report.budget.total)} held live KV in the mean ({pool})."


def _stops(o: Outcome) -> str:
    peak = f"{o.running_peak:,} ({_few(o.running_mean)} in the mean)"
    limit = limit_of(o)
    if limit is None:
        nobody = "hardly any request waited" if binding_times(o) else "no request waited"
        return f"Concurrency reached {peak} and {nobody}: the traffic brought no more, so nothing limited it."
    cause, share = limit
    names = f"{percent(share) if share < 0.995 else 'all'} of the waiting time"
    if cause.startswith("memory"):
        kind = cause.removeprefix("memory: ")
        behind = ", requests behind such a one counted in" if "behind" in binding_times(o) else ""
        return f"Concurrency stops at {peak}: memory binds {names}, mostly {kind}{behind}.{_wasted(o)}"
    return f"Concurrency stops at {peak}, not for memory: {names} was for {LIMITS.get(cause, cause)}."


def _wasted(o: Outcome) -> str:
    """What the memory that is "full" held instead of tokens, where it is much."""
    parts = sorted(((o.kv_mean.get(line, 0.0), line) for line in WASTE), reverse=True)
    words = [f"{percent(share)} {LINE_NAMES[line]}" for share, line in parts if share >= MUCH]
    return f" Yet the pool was {' and '.join(words)}." if words else ""


def _refused(o: Outcome) -> str:
    if not o.refused:
        return ""
    return f"{o.refused:,} of {o.requests:,} requests were refused because they could never be served."


def _unfinished(o: Outcome) -> str:
    return f"The time limit ended the replay with {o.unfinished:,} unfinished." if o.unfinished else ""


def _slo(report: ReplayReport, o: Outcome) -> str:
    """Whether the objective was kept and, where nobody waited, that it is the device which is too slow for it."""
    if o.attained is None:
        return ""
    named = f"the SLO ({report.slo})" if report.slo else "the SLO"
    words = f"{percent(o.attained)} of the requests were within {named}"
    if o.goodput is not None:
        words += f": {o.goodput:.2f} a second"
    if o.attained < GOOD and limit_of(o) is None:
        words += "; since nobody waited, the device is too slow for it with these requests"
    return words + "."


def _others(report: ReplayReport, o: Outcome) -> str:
    """The other strategies in the same bytes, and what none could beat."""
    rest = [other for other in report.outcomes if other is not o and other.strategy != REPLAY_ONLY]
    parts = []
    if rest:
        same = all(abs(other.pool_bytes - o.pool_bytes) <= 0.01 * o.pool_bytes for other in rest)
        where = "In the same bytes" if same else "Under other strategies"
        listed = ", ".join(f"{other.strategy} {_few(other.running_mean)}" for other in rest)
        parts.append(f"{where}, running in the mean: {listed}.")
    if o.bounds is not None and limit_of(o):
        parts.append(f"A scheduler that knew every length could run {_few(o.bounds.running_mean)} in the mean.")
    return " ".join(parts)
