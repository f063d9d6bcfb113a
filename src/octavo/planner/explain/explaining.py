"""Which limit bound, second by second and request by request: from a decision log or from a replay's report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from octavo.errors import OctavoError
from octavo.planner.explain.explained import SCHEMA, Explanation, Lost, Question, Setup, Story, Stretch
from octavo.planner.explain.lives import NEAREST, likeness
from octavo.planner.explain.log import Followed, follow
from octavo.planner.explain.watch import LogWatch
from octavo.planner.explain.words import change_sentence, verdict
from octavo.planner.outcome import Life, Outcome, Timeline
from octavo.report.replay_data import ReplayReport, read_json
from octavo.report.replay_json import to_plain

WHOLE = Question()
HEAD = 4096  # characters in which a file says what it is


class ExplainError(OctavoError, ValueError):
    """The question cannot be answered from this file: what is wrong with which of the two, and what to ask instead."""


def explain(path: str | Path, question: Question = WHOLE) -> Explanation:
    """Explain a decision log, or the JSON that a replay's report was written to. Raises OctavoError."""
    check(question)
    path = Path(path)
    return explain_run(path, question) if _is_report(path) else explain_log(path, question)


def check(question: Question) -> None:
    """Raise ExplainError for a window or an interval that means nothing."""
    for name, value in (("from", question.start), ("to", question.end), ("interval", question.interval)):
        if value is not None and not math.isfinite(value):
            raise ExplainError(f"{name} is {value}; it must be a finite number of seconds.")
    if question.interval is not None and question.interval <= 0:
        raise ExplainError(f"interval is {question.interval:g} seconds; it must be above 0.")
    if question.start is not None and question.end is not None and question.start >= question.end:
        raise ExplainError(f"from is {question.start:g} s and to is {question.end:g} s; from must come first.")
    if question.worst < 0:
        raise ExplainError(f"worst is {question.worst}; it must be 0 or more requests.")


def to_json(explanation: Explanation) -> dict[str, Any]:
    """For machines: "schema" = "octavo.explain/1", the verdict and the change as sentences, limit -> request-seconds,
    and every field of `Explanation` under its name. Keys are only ever added under this schema."""
    return {
        "schema": SCHEMA,
        "verdict": verdict(explanation),
        "change": change_sentence(explanation),
        "limits": explanation.limits,
        **to_plain(explanation),
    }


def _is_report(path: Path) -> bool:
    """Whether the file is a JSON object that is no decision log; what it is exactly, its reader says."""
    if path.suffix == ".msgpack" or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(HEAD)
    if '"octavo_log"' in head.split("\n", 1)[0]:
        return False
    if '"schema"' in head:
        return True
    if '"runs"' in head and '"summary"' in head:
        raise ExplainError(
            f"{path} is the report of `octavo compare`, which keeps no reasons; give `octavo compare` --log FOLDER "
            "and explain one of the logs in it."
        )
    return False


# -- a decision log ---------------------------------------------------------------------------------------------------


def explain_log(path: str | Path, question: Question = WHOLE) -> Explanation:
    """Decide the log again and say why whoever waited did. Times are the engine's. Raises LogError, ExplainError."""
    watch = LogWatch(question)
    followed = follow(path, watch)
    watch.close()
    start, end = watch.seconds.span
    asked = watch.lives.asked or watch.refused_asked
    if question.request is not None and asked is None:
        raise _unknown(str(path), question.request, watch.lives.nearest(), watch.lives.requests)
    stretches = watch.seconds.stretches()
    _require_some(path, question, stretches)
    return Explanation(
        source=str(path),
        kind="log",
        setup=_setup_of_log(followed),
        start=start,
        end=end,
        requests=watch.lives.requests,
        finished=watch.lives.finished,
        refused=watch.refused,
        preemptions=sum(part.preemptions for part in stretches),
        discarded=sum(part.discarded or 0 for part in stretches),
        recomputed=sum(part.recomputed or 0 for part in stretches),
        waited=dict(watch.seconds.waited),
        stretches=stretches,
        stories=watch.lives.worst(),
        asked=asked,
        refusals=tuple(watch.refusals),
        cut=followed.cut,
    )


def _setup_of_log(followed: Followed) -> Setup:
    header, config = followed.header, followed.header.scheduler
    return Setup(
        strategy=header.strategy,
        pool_tokens=header.pages * header.block_size,
        block_size=header.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        admission=config.admission,
    )


def _unknown(source: str, request: str, nearest: Iterable[str], known: int, hint: str = "") -> ExplainError:
    names = ", ".join(nearest)
    close = f"; the ids most like it are {names}" if names else ""
    return ExplainError(f"{source} has no request {request!r} among its {known:,}{close}.{hint}")


# -- a replay's report ------------------------------------------------------------------------------------------------


def explain_run(path: str | Path, question: Question = WHOLE) -> Explanation:
    """Read the causes from a replay's report. It keeps no numbers of blocks for them; a decision log does. Raises
    ReportError, ExplainError."""
    report = read_json(Path(path))
    outcome = _outcome(path, report, question.strategy)
    stretches = _windowed(_stretches(outcome.timeline), question)
    stories = _stories(outcome, question)
    asked = None
    if question.request is not None:
        asked = next((_story(life) for life in outcome.lives if life.id == question.request), None)
        if asked is None:
            ids = sorted((life.id for life in outcome.lives), key=lambda name: -likeness(name, question.request or ""))
            hint = f" Of {outcome.requests:,} requests the report keeps the lives of {len(ids):,}."
            raise _unknown(str(path), question.request, ids[:NEAREST], len(ids), hint)
    whole = question.start is None and question.end is None
    _require_some(path, question, stretches)
    return Explanation(
        source=str(path),
        kind="run",
        setup=_setup_of_run(report, outcome),
        start=stretches[0].start if stretches else 0.0,
        end=stretches[-1].end if stretches else outcome.seconds,
        requests=outcome.requests - outcome.refused,
        finished=outcome.finished,
        refused=outcome.refused,
        preemptions=outcome.preemptions if whole else sum(part.preemptions for part in stretches),
        discarded=outcome.discarded if whole else None,
        recomputed=outcome.recomputed if whole else None,
        waited=dict(outcome.waited) if whole else _waited(stretches),
        stretches=stretches,
        stories=stories,
        asked=asked,
        refusals=outcome.refusals,
        others=tuple(other.strategy for other in report.outcomes if other is not outcome),
    )


def _outcome(path: str | Path, report: ReplayReport, strategy: str | None) -> Outcome:
    names = [outcome.strategy for outcome in report.outcomes]
    if strategy is not None and strategy not in names:
        raise ExplainError(f"strategy is {strategy!r}; {path} has {', '.join(names) or 'no outcome at all'}.")
    chosen = report.main if strategy is None else report.outcomes[names.index(strategy)]
    if chosen is None:
        raise ExplainError(f"{path} has no outcome: nothing was replayed, so there is nothing to explain.")
    return chosen


def _stretches(timeline: Timeline | None) -> tuple[Stretch, ...]:
    if timeline is None:
        return ()
    edges = pairwise((0.0, *timeline.t))
    return tuple(
        Stretch(
            start=start,
            end=end,
            running=timeline.running[i],
            waiting={cause: values[i] for cause, values in timeline.waiting.items() if values[i]},
            kv={line: values[i] for line, values in timeline.kv.items()},
            steps=None,
            step_seconds=timeline.step[i],
            preemptions=timeline.preemptions[i],
            finished=timeline.finished[i],
        )
        for i, (start, end) in enumerate(edges)
    )


def _require_some(path: str | Path, question: Question, stretches: tuple[Stretch, ...]) -> None:
    """Nothing can be said about a window in which nothing happened."""
    if not stretches and (question.start is not None or question.end is not None):
        start = "the start" if question.start is None else f"{question.start:g} s"
        end = "the end" if question.end is None else f"{question.end:g} s"
        raise ExplainError(f"{path} has nothing from {start} to {end}; choose another --from and --to.")


def _windowed(stretches: tuple[Stretch, ...], question: Question) -> tuple[Stretch, ...]:
    """Those that lie in the window at least in part: a report's stretches are not cut."""
    start = float("-inf") if question.start is None else question.start
    end = float("inf") if question.end is None else question.end
    return tuple(part for part in stretches if part.end > start and part.start < end)


def _waited(stretches: tuple[Stretch, ...]) -> dict[str, float]:
    waited: dict[str, float] = {}
    for part in stretches:
        for cause, count in part.waiting.items():
            waited[cause] = waited.get(cause, 0.0) + count * part.seconds
    return waited


def _stories(outcome: Outcome, question: Question) -> tuple[Story, ...]:
    start = float("-inf") if question.start is None else question.start
    end = float("inf") if question.end is None else question.end
    stories = [
        _story(life)
        for life in outcome.lives
        if life.arrival <= end and (life.finished is None or life.finished >= start)
    ]
    waited = sorted((story for story in stories if story.total_waited), key=lambda story: -story.total_waited)
    return tuple(waited[: question.worst])


def _story(life: Life) -> Story:
    return Story(
        id=life.id,
        arrival=life.arrival,
        prompt_tokens=life.prompt_tokens,
        output_tokens=life.output_tokens,
        admitted=life.admitted,
        first_token=life.first_token,
        finished=life.finished,
        reason=life.reason,
        cached_tokens=life.cached_tokens,
        recomputed=life.recomputed,
        waited=dict(life.waited or {}),
        lost=tuple(Lost(at, until) for at, until in life.preempted),
    )


def _setup_of_run(report: ReplayReport, outcome: Outcome) -> Setup:
    settings: Mapping[str, str] = {setting.name: setting.value for setting in report.settings}
    return Setup(
        strategy=outcome.strategy,
        pool_tokens=outcome.pool_tokens,
        block_size=outcome.block_size,
        max_num_seqs=_whole(settings.get("max_num_seqs")),
        max_num_batched_tokens=_whole(settings.get("max_num_batched_tokens")),
        max_model_len=_whole(settings.get("max_model_len")),
        admission=settings.get("admission"),
    )


def _whole(text: str | None) -> int | None:
    digits = (text or "").replace(",", "")
    return int(digits) if digits.isdigit() else None
