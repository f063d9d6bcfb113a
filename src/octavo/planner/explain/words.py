"""An explanation in sentences: the limit that binds, what to change, the seconds, and the lives of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from math import ceil, log10

from octavo.planner.explain.change import change
from octavo.planner.explain.explained import (
    SHARED_PREFIX,
    Explanation,
    Lost,
    Period,
    Seen,
    Story,
    Stretch,
    behind,
    chief,
    joined,
    root_of,
)
from octavo.report.wording import count, percent, seconds

HARDLY = 0.05  # requests waiting on average: below this nobody is kept from running
LINES = 30  # stretches printed, two lines each
PERIODS = 16  # lines for the reasons of one request
WORTH_SAYING = 0.1  # share of the waiting that a further limit must have to be named
LIMITS = {
    "never": "memory that can never be had",
    "quota": "a tenant's quota",
    "slots": "max_num_seqs",
    "memory: full": "full KV memory",
    "memory: fragmented": "KV memory in pieces too small",
    "memory: held": "KV memory held back for requests that already run",
    "step budget": "the token budget of a step (max_num_batched_tokens)",
    "no step": "the engine, which was not being stepped,",
    "behind": "the order of the line",
    SHARED_PREFIX: "a prefix that another request was computing",
}


def report(e: Explanation) -> str:
    """What the terminal shows."""
    if e.asked is not None:
        return "\n".join([*_cut(e), *story_lines(e.asked, e)])
    lines = [*_cut(e), verdict(e)]
    if (advice := change_sentence(e)) is not None:
        lines.append(advice)
    if e.others:
        lines.append(f"This is {e.setup.strategy}; --strategy tells about {', '.join(e.others)}.")
    lines += _refusals(e)
    if e.stretches:
        lines += ["", _heading(e), *stretch_lines(e.stretches)]
    if e.stories:
        lines += ["", "The longest waits:"]
        for story in e.stories:
            lines += story_lines(story, e)
    return "\n".join(lines)


def _cut(e: Explanation) -> list[str]:
    return [f"Not the whole story: {e.cut}."] if e.cut else []


def _heading(e: Explanation) -> str:
    zero = "the engine's clock" if e.kind == "log" else "seconds after the trace's start"
    return f"Second by second ({zero}; means over each line):"


def _refusals(e: Explanation) -> list[str]:
    if not e.refused:
        return []
    first = f" The first, {e.refusals[0][0]}: {e.refusals[0][1]}" if e.refusals else ""
    return [f"{e.refused:,} more were refused at submit.{first}"]


# -- the verdict ------------------------------------------------------------------------------------------------------


def verdict(e: Explanation) -> str:
    """Which limit binds, with its share of the waiting time."""
    if not e.requests:
        return f"{e.source} tells of no accepted request, so no limit bound."
    total = sum(e.limits.values())
    lost = _lost_words(e)
    if not e.seconds or total / e.seconds < HARDLY:
        waited = sum(e.waited.values())
        most = f"the {e.requests:,} requests waited {seconds(waited)} in all" if waited else "no request waited"
        until = f", {seconds(waited - total)} of it for the running step to end" if waited - total > total else ""
        return f"No limit bound in the {seconds(e.seconds)} looked at: {most}{until}.{lost}"
    (cause, spent), *rest = e.limits.items()
    share = "all" if spent >= 0.995 * total else percent(spent / total)
    name = LIMITS.get(cause, cause)
    others = "".join(
        f"; {LIMITS.get(other, other)} took {percent(amount / total)}"
        for other, amount in rest
        if amount >= WORTH_SAYING * total
    )
    return (
        f"{name[:1].upper()}{name[1:]} binds: it took {share} of the {total:,.1f} request-seconds of waiting in "
        f"{seconds(e.seconds)}{_queued(e, cause, spent)}{others}.{lost}"
    )


def _queued(e: Explanation, cause: str, spent: float) -> str:
    """How much of the waiting for a limit was spent behind somebody who waits for it."""
    if cause == SHARED_PREFIX:
        return ""
    queued = e.waited.get(behind(cause), 0.0)
    if e.kind == "run" and cause.startswith("memory"):
        queued = e.waited.get("behind", 0.0)
    return f" ({percent(queued / spent)} of that behind a request that waited for it)" if queued else ""


def _lost_words(e: Explanation) -> str:
    if not e.preemptions:
        return ""
    times = "One preemption" if e.preemptions == 1 else f"{e.preemptions:,} preemptions"
    if e.discarded is None or e.recomputed is None:
        return f" {times} threw KV away."
    return f" {times} threw {e.discarded:,} tokens of KV away; {e.recomputed:,} were computed again."


def change_sentence(e: Explanation) -> str | None:
    """What to change, in one line; None where no limit bound."""
    total = sum(e.limits.values())
    if not e.seconds or total / e.seconds < HARDLY:
        return None
    return f"To change it: {change(e, next(iter(e.limits)))}"


# -- seconds ----------------------------------------------------------------------------------------------------------


def stretch_lines(stretches: Iterable[Stretch]) -> list[str]:
    """Two lines for each stretch, like neighbours told as one."""
    parts = merged(tuple(stretches), LINES)
    digits = _digits(min((part.seconds for part in parts if part.seconds), default=1.0))
    lines = []
    for part in parts:
        lines.append(f"{part.start:.{digits}f}-{part.end:.{digits}f} s: {_going_on(part)}")
        reason = _reason(part, digits)
        if reason:
            lines.append(f"    {reason}")
    return lines


def merged(stretches: tuple[Stretch, ...], most: int) -> tuple[Stretch, ...]:
    """Like neighbours as one stretch; then those least unlike for the shortest time, until `most` are left."""
    parts = list(stretches)
    costs = [_cost(one, other) for one, other in pairwise(parts)]
    while costs and ((lowest := min(costs)) == 0 or len(parts) > most):
        at = costs.index(lowest)
        parts[at : at + 2] = [joined(parts[at : at + 2])]
        del costs[at]
        for i in (at - 1, at):
            if 0 <= i < len(costs):
                costs[i] = _cost(parts[i], parts[i + 1])
    return tuple(parts)


def _cost(one: Stretch, other: Stretch) -> float:
    """What telling both as one would blur: how unlike they are, for as long as the shorter one lasts."""
    return _unlike(one, other) * min(one.seconds, other.seconds)


def _unlike(one: Stretch, other: Stretch) -> float:
    """0: the same running, waiting and binding limit; another limit counts as much as twice the running, and nothing at
    all is unlike anything."""
    waiting = _difference(sum(one.waiting.values()), sum(other.waiting.values()))
    limit = 2.0 if one.binding != other.binding else 0.0
    idle = 1.0 if _idle(one) != _idle(other) else 0.0
    return _difference(one.running, other.running) + waiting + limit + idle


def _idle(part: Stretch) -> bool:
    return not part.running and not part.waiting


def _difference(a: float, b: float) -> float:
    return abs(round(a, 1) - round(b, 1)) / max(a, b, 1.0)


def _going_on(part: Stretch) -> str:
    waiting = sum(part.waiting.values())
    if _idle(part):
        return "idle"
    words = [f"{_few(part.running)} running, {_few(waiting)} waiting"]
    if part.kv:
        words.append(_memory_words(part))
    if part.steps:
        words.append(f"{part.steps:,} {'step' if part.steps == 1 else 'steps'} of {seconds(part.step_seconds)}")
    elif part.steps is None and part.step_seconds:
        words.append(f"steps of {seconds(part.step_seconds)}")
    if part.prefill_tokens or part.decode_tokens:
        words.append(f"{part.prefill_tokens or 0:,} prefill + {part.decode_tokens or 0:,} decode tokens")
    if part.preemptions:
        words.append(f"{part.preemptions:,} preempted" + _thrown(part.discarded, part.recomputed))
    return "; ".join(words)


def _thrown(discarded: int | None, recomputed: int | None) -> str:
    if discarded is None:
        return ""
    again = f", {recomputed:,} computed again" if recomputed else ""
    return f" ({discarded:,} tokens lost{again})"


def _memory_words(part: Stretch) -> str:
    """The lines of the pool that are worth a word, largest first."""
    names = {"reserved_used_later": "reserved for later", "reserved_never_used": "reserved for never"}
    lines = sorted(part.kv.items(), key=lambda item: -item[1])
    return "KV " + ", ".join(f"{percent(share)} {names.get(line, line)}" for line, share in lines if share >= 0.02)


def _reason(part: Stretch, digits: int) -> str:
    """The limit that binds, with the numbers of the first in line that it keeps waiting."""
    binding = chief(part.waiting)
    if binding is None:
        return ""
    amounts = {label: amount for label, amount in part.waiting.items() if root_of(label) == binding}
    causes = ", ".join(f"{_few(amount)} {label}" for label, amount in sorted(amounts.items(), key=lambda i: -i[1]))
    others = {label: amount for label, amount in part.waiting.items() if label not in amounts and amount >= 0.05}
    rest = "".join(f", {_few(amount)} {label}" for label, amount in sorted(others.items(), key=lambda i: -i[1]))
    seen = part.seen.get(binding) or next((part.seen[label] for label in amounts if label in part.seen), None)
    told = f"; {seen.request} at {seen.at:.{digits + 1}f} s: {seen.sentence}" if seen else ""
    return f"{binding} binds ({causes}{rest}){told}"


# -- requests ---------------------------------------------------------------------------------------------------------


def story_lines(story: Story, e: Explanation) -> list[str]:
    """A life in sentences."""
    digits = 3 if (e.seconds or 1.0) < 100 else 1
    at = f"{story.arrival:.{digits}f} s"
    samples = f", {story.samples} samples" if story.samples > 1 else ""
    head = f"{story.id}: arrived at {at} with {story.prompt_tokens:,} prompt tokens{samples}"
    if (story.reason or "").startswith("refused"):
        return [f"{head}; {story.reason}"]
    lines = [head]
    lines += _periods(story, digits) if story.periods else _waits(story, digits)
    lines += _admission(story, digits)
    lines += [_lost_line(lost, digits) for lost in story.lost]
    return [lines[0], *(f"    {line}" for line in [*lines[1:], *_end(story, digits)])]


def _waits(story: Story, digits: int) -> list[str]:
    """Seconds by cause, most first, with what was told when the cause first held."""
    if not story.total_waited:
        return ["did not wait"]
    lines = [f"waited {seconds(story.total_waited)} in all" + (" (its samples added up)" if story.samples > 1 else "")]
    for label, spent in sorted(story.waited.items(), key=lambda item: -item[1]):
        lines.append(f"  {seconds(spent)} {_cause(label, story.seen.get(label), digits)}")
    return lines


def _cause(label: str, seen: Seen | None, digits: int) -> str:
    if label == "next step":
        return "until the running step ended"
    if label == "no step":
        return "because nobody stepped the engine"
    return f"{label}" + (f"; at {seen.at:.{digits}f} s: {seen.sentence}" if seen else "")


def _periods(story: Story, digits: int) -> list[str]:
    lines = [f"waited {seconds(story.total_waited)} in all"]
    lines += [f"  {_period(group, digits)}" for group in grouped(story.periods, PERIODS)]
    if story.periods_left_out:
        lines.append(f"  and {story.periods_left_out:,} changes of cause more")
    return lines


def grouped(periods: tuple[Period, ...], most: int) -> list[list[Period]]:
    """Periods one after another with one cause together, and then the shortest neighbours until `most` are left."""
    groups: list[list[Period]] = []
    for period in periods:
        last = groups[-1][-1] if groups else None
        if last is not None and last.cause == period.cause and last.end == period.start:
            groups[-1].append(period)
        else:
            groups.append([period])
    while len(groups) > most:
        at = min(range(len(groups) - 1), key=lambda i: groups[i + 1][-1].end - groups[i][0].start)
        groups[at : at + 2] = [groups[at] + groups[at + 1]]
    return groups


def _period(group: list[Period], digits: int) -> str:
    """The cause that held longest in it, with what was told when that first held."""
    spent: Counter[str] = Counter()
    for period in group:
        spent[period.cause] += period.end - period.start
    cause = max(spent, key=lambda label: spent[label])
    seen = next((period.seen for period in group if period.cause == cause and period.seen), None)
    changes = f", {len(group) - 1} {'change' if len(group) == 2 else 'changes'} in it" if len(group) > 1 else ""
    mostly = "mostly " if len(spent) > 1 else ""
    span = f"{group[0].start:.{digits}f}-{group[-1].end:.{digits}f} s ({seconds(sum(spent.values()))}{changes})"
    return f"{span}: {mostly}{_cause(cause, seen, digits)}"


def _admission(story: Story, digits: int) -> list[str]:
    if story.admitted is None:
        return ["was never admitted"]
    lines = [f"was admitted at {story.admitted:.{digits}f} s with {story.cached_tokens:,} tokens from the cache"]
    if story.missed:
        lines.append(f"  {story.missed}")
    if story.first_token is not None:
        lines.append(
            f"had its first token at {story.first_token:.{digits}f} s "
            f"({seconds(story.first_token - story.arrival)} after it arrived)"
        )
    return lines


def _lost_line(lost: Lost, digits: int) -> str:
    by = f" {lost.why}" if lost.why else ""
    tokens = f", {lost.discarded:,} tokens of KV lost" if lost.discarded is not None else ""
    if lost.until is None:
        back = "; it did not come back"
    else:
        reused = f" with {lost.reused:,} of them from the cache" if lost.reused is not None else ""
        back = f"; back at {lost.until:.{digits}f} s ({seconds(lost.until - lost.at)} later){reused}"
    return f"was preempted at {lost.at:.{digits}f} s{by}{tokens}{back}"


def _end(story: Story, digits: int) -> list[str]:
    again = f"; {story.recomputed:,} tokens were computed again for it" if story.recomputed else ""
    if story.finished is None:
        return [f"had not ended when this does, with {story.output_tokens:,} tokens{again}"]
    return [f"ended at {story.finished:.{digits}f} s ({story.reason}) with {story.output_tokens:,} tokens{again}"]


def _few(value: float) -> str:
    """One decimal where it says something."""
    return count(round(value, 1))


def _digits(width: float) -> int:
    return max(0, ceil(-log10(width) - 1e-9))
