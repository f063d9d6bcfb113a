"""`explain` says of a log what the scheduler itself says at every moment, and its seconds add up."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from tests.planner.explained_logs import CASES, PROMPT, busy, full, probed, recorded, scenario, slots
from tests.report.replaying import outcome
from tests.simulation import Bench

from octavo import events as ev
from octavo.kv.strategies import STRATEGIES
from octavo.log import LogError
from octavo.planner.explain.explained import Explanation, Question, Story, innermost, root_of
from octavo.planner.explain.explaining import ExplainError, explain, explain_log, to_json
from octavo.planner.explain.seconds import BUCKETS, Seconds
from octavo.planner.explain.words import change_sentence, report, verdict
from octavo.report.replay_data import ReplayReport, Setting, write_json


def about(path: Path, **question) -> Explanation:
    return explain_log(path, Question(**{"worst": 10_000, **question}))


def told(explanation: Explanation) -> list:
    """Everything that claims to be what the scheduler said."""
    seen = [seen for part in explanation.stretches for seen in part.seen.values()]
    return seen + [seen for story in explanation.stories for seen in story.seen.values()]


# -- the causes and their numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cause", "strategy"), CASES)
def test_each_cause_is_told_with_the_numbers_of_the_scheduler_at_that_moment(
    tmp_path: Path, cause: str, strategy: str
) -> None:
    path = tmp_path / "log.jsonl"
    scenario(path, cause, strategy)
    explanation, probe = about(path), probed(path)
    assert explanation.waited[cause] > 0
    with_numbers = told(explanation)
    assert cause in {label for part in explanation.stretches for label in part.seen}
    for seen in with_numbers:
        wait = probe.waits[seen.at, seen.request]
        last = innermost(wait)
        assert seen.sentence == wait.sentence()
        assert (seen.need, seen.have, seen.short, seen.unit) == (last.need, last.have, last.short, last.unit)
        assert seen.behind == wait.behind
        assert list(seen.holders) == [(h.request, h.amount) for h in last.holders[:3]]
    shown = report(about(path, worst=3))
    assert root_of(cause) in shown
    assert any(seen.sentence in shown for seen in with_numbers)


@pytest.mark.parametrize("admission", ["prompt", "ceiling", "peak"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_numbers_are_the_schedulers_in_a_busy_life_under_every_admission(
    tmp_path: Path, strategy: str, admission: str
) -> None:
    path = tmp_path / "log.msgpack"
    recorded(path, strategy, 30, dict(admission=admission, max_num_batched_tokens=32, max_model_len=96), busy)
    explanation, probe = about(path), probed(path)
    assert len(told(explanation)) > 50
    for seen in told(explanation):
        assert seen.sentence == probe.waits[seen.at, seen.request].sentence()


def test_behind_somebody_comes_down_to_what_that_one_waits_for(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    scenario(path, "behind (memory: full)", "paged")
    explanation = about(path)
    assert set(explanation.limits) == {"memory: full"}
    both = explanation.waited["memory: full"] + explanation.waited["behind (memory: full)"]
    assert explanation.limits["memory: full"] == pytest.approx(both)
    assert "of that behind a request that waited for it" in verdict(explanation)


def test_one_that_waits_for_a_shared_prefix_is_no_victim_of_memory(tmp_path: Path) -> None:
    def live(b: Bench) -> None:
        prompt = list(range(5, 65))
        b.add(prompt, 4)
        b.step()
        b.add(prompt, 4)
        b.run()

    path = tmp_path / "log.jsonl"
    recorded(
        path, "paged", 256, {**PROMPT, "max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 256}, live
    )
    explanation = about(path)
    assert not any(cause.startswith("memory") for cause in explanation.limits)


# -- the seconds add up -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_waiting_seconds_of_a_request_sum_to_its_time_without_memory(tmp_path: Path, strategy: str) -> None:
    path = tmp_path / "log.jsonl"
    config = dict(admission="prompt", max_num_batched_tokens=32, max_model_len=96)
    bench = recorded(path, strategy, 30, config, busy)
    stories = {story.id: story for story in about(path).stories}
    checked = 0
    for request, seqs in bench.all.items():
        story = stories.get(request)
        if story is None or len(seqs) > 1:
            continue
        assert story.arrival == seqs[0].request.arrival
        assert story.admitted == seqs[0].admitted_at
        assert story.finished is not None
        out = (story.admitted if story.admitted is not None else story.finished) - story.arrival
        lost = sum((lost.until if lost.until is not None else story.finished) - lost.at for lost in story.lost)
        assert story.total_waited == pytest.approx(out + lost)
        checked += 1
    assert checked > 15


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_seconds_and_requests_tell_the_same_waiting_and_the_counts_are_the_schedulers(
    tmp_path: Path, strategy: str
) -> None:
    path = tmp_path / "log.jsonl"
    config = dict(admission="prompt", max_num_batched_tokens=32, max_model_len=96)
    bench = recorded(path, strategy, 30, config, busy)
    explanation, probe = about(path, interval=0.05), probed(path)
    by_requests: Counter[str] = Counter()
    for story in explanation.stories:
        by_requests.update(story.waited)
    over_time: Counter[str] = Counter()
    for part in explanation.stretches:
        over_time.update({cause: amount * part.seconds for cause, amount in part.waiting.items()})
    assert dict(by_requests) == pytest.approx({k: v for k, v in over_time.items() if v})
    assert explanation.waited == pytest.approx({k: v for k, v in over_time.items() if v})
    totals, parts = bench.scheduler.totals, explanation.stretches
    assert sum(part.running * part.seconds for part in parts) == pytest.approx(probe.running_seconds)
    assert explanation.preemptions == totals.preemptions == sum(len(story.lost) for story in explanation.stories)
    assert explanation.discarded == totals.discarded
    assert explanation.recomputed == totals.recomputed == sum(story.recomputed for story in explanation.stories)
    assert sum(part.prefill_tokens + part.decode_tokens for part in parts) == totals.computed
    assert explanation.finished == explanation.requests == sum(part.finished for part in parts)
    assert sum(part.steps for part in parts) == len([event for event in probe.events if isinstance(event, ev.Planned)])


def test_two_windows_tell_what_the_whole_tells(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    recorded(path, "paged", 30, dict(admission="prompt", max_num_batched_tokens=32, max_model_len=96), busy)
    whole = about(path)
    middle = (whole.start + whole.end) / 2
    first, second = about(path, end=middle), about(path, start=middle)
    added = Counter(first.waited)
    added.update(second.waited)
    assert dict(added) == pytest.approx(dict(whole.waited))
    assert first.end == pytest.approx(middle) == pytest.approx(second.start)
    assert first.preemptions + second.preemptions == whole.preemptions


def test_a_long_run_needs_no_more_memory_and_loses_no_second() -> None:
    seconds = Seconds(Question())
    for i in range(20_000):
        seconds.add(i * 3.0, i * 3.0 + 2.0, 2, {"slots": 1})
    seconds.add(70_000.0, 170_000.0, 1, {})
    parts = seconds.stretches()
    assert len(parts) <= 2 * BUCKETS
    assert sum(part.running * part.seconds for part in parts) == pytest.approx(20_000 * 4.0 + 100_000.0)
    assert sum(part.waiting.get("slots", 0.0) * part.seconds for part in parts) == pytest.approx(40_000.0)
    assert all(one.end == pytest.approx(other.start) for one, other in pairwise(parts))


def test_a_long_log_is_told_in_at_most_sixty_lines_of_seconds(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    recorded(path, "paged", 30, dict(admission="prompt", max_num_batched_tokens=32, max_model_len=96), busy)
    explanation = about(path, interval=0.01)
    assert len(explanation.stretches) > 60
    lines = report(explanation).split("Second by second")[1].split("The longest waits")[0].strip().splitlines()
    assert 10 < len(lines) - 1 <= 60


# -- one request ------------------------------------------------------------------------------------------------------


def asked(path: Path, request: str) -> Story:
    story = explain_log(path, Question(request=request)).asked
    assert story is not None
    return story


def test_the_periods_of_a_request_follow_each_other_from_arrival_to_admission(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    config = dict(admission="prompt", max_num_batched_tokens=32, max_model_len=96)
    recorded(path, "paged", 30, config, busy)
    probe = probed(path)
    worst = max(about(path).stories, key=lambda story: story.total_waited)
    story = asked(path, worst.id)
    assert story.waited == pytest.approx(dict(worst.waited))
    by_cause: Counter[str] = Counter()
    for period in story.periods:
        by_cause[period.cause] += period.end - period.start
        if period.seen is not None:
            assert period.seen.sentence == probe.waits[period.seen.at, story.id].sentence()
            assert period.start <= period.seen.at < period.end
    assert dict(by_cause) == pytest.approx(dict(story.waited))
    assert story.periods[0].start == story.arrival


def test_a_preempted_request_says_for_whom_and_how_many_tokens_were_lost(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    bench = recorded(path, "paged", 16, PROMPT, lambda b: ([b.add(16, 40) for _ in range(3)], b.run()))
    names = {seqs[0].id: request for request, seqs in bench.all.items()}
    for request, seqs in bench.all.items():
        events = [event for event in bench.of(ev.Preempted) if event.seq == seqs[0].id]
        lost = asked(path, request).lost
        assert [(entry.by, entry.discarded) for entry in lost] == [(names[e.by], e.discarded) for e in events]
    assert bench.of(ev.Preempted)
    victim = next(names[event.seq] for event in bench.of(ev.Preempted))
    entry = asked(path, victim).lost[0]
    assert f"{entry.discarded:,} tokens of KV lost" in report(explain_log(path, Question(request=victim)))


def test_a_preemption_from_outside_is_told_apart(tmp_path: Path) -> None:
    def live(b: Bench) -> None:
        request = b.add(16, 10)
        b.steps(3)
        b.scheduler.preempt(request, b.clock.now())
        b.run()

    path = tmp_path / "log.jsonl"
    recorded(path, "paged", 64, PROMPT, live)
    (lost,) = asked(path, "r1").lost
    assert lost.by is None
    assert lost.why.startswith("from outside")


def test_why_the_prompt_missed_the_cache_is_told_with_the_position(tmp_path: Path) -> None:
    def live(b: Bench) -> None:
        b.add(list(range(100, 120)), 4)
        b.run()
        b.add([*range(100, 110), 7, *range(111, 120)], 4)
        b.run()

    path = tmp_path / "log.jsonl"
    recorded(path, "paged", 64, PROMPT, live)
    story = asked(path, "r2")
    assert story.cached_tokens == 8
    assert story.missed is not None
    assert "served 8 of its 20 prompt tokens" in story.missed
    assert "at position 10 has token 110 where this one has 7" in story.missed


def test_a_strategy_without_a_cache_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    recorded(path, "reserve-max", 64, PROMPT, slots)
    assert "keeps no prefix cache" in (asked(path, "r1").missed or "")


def test_an_engine_that_is_not_stepped_is_the_reason_for_that_long(tmp_path: Path) -> None:
    def live(b: Bench) -> None:
        b.add(8, 4)
        b.clock.advance(7.0)
        b.run()

    path = tmp_path / "log.jsonl"
    recorded(path, "paged", 64, PROMPT, live)
    explanation = about(path)
    assert explanation.waited == {"no step": pytest.approx(7.0)}
    assert "was not being stepped" in verdict(explanation)


def test_an_idle_hour_is_no_waiting_and_no_memory(tmp_path: Path) -> None:
    def live(b: Bench) -> None:
        b.add(8, 4)
        b.run()
        b.clock.advance(3600.0)
        b.add(8, 4)
        b.run()

    path = tmp_path / "log.jsonl"
    recorded(path, "paged", 64, PROMPT, live)
    explanation = about(path)
    assert sum(explanation.waited.values()) == 0
    assert any(part.seconds > 3590 and not part.running for part in explanation.stretches)
    assert "idle" in report(explanation)


# -- the verdict ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "strategy", "words"),
    [
        ("slots", "paged", "raise max_num_seqs (now 2): "),
        ("step budget", "paged", "raise max_num_batched_tokens (now 16)"),
        ("memory: full", "reserve-max", "set kv_strategy to paged"),
        ("memory: full", "paged", "give the cache more memory (kv_memory)"),
        ("memory: fragmented", "reserve-oracle", "which needs no run of blocks"),
        ("memory: held", "paged", "admission peak keeps"),
        ("quota", "paged", "raise the quotas of the tenants that wait"),
    ],
)
def test_the_verdict_names_the_limit_and_what_to_change(tmp_path: Path, cause: str, strategy: str, words: str) -> None:
    path = tmp_path / "log.jsonl"
    scenario(path, cause, strategy)
    explanation = about(path)
    assert next(iter(explanation.limits)) == cause
    assert " binds: it took " in verdict(explanation)
    assert words in (change_sentence(explanation) or "")


def test_where_nobody_waits_no_limit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    recorded(path, "paged", 64, PROMPT, lambda b: (b.add(8, 4), b.run()))
    explanation = about(path)
    assert verdict(explanation).startswith("No limit bound")
    assert change_sentence(explanation) is None


# -- logs that are not whole ------------------------------------------------------------------------------------------


def test_a_log_that_breaks_off_is_told_up_to_its_last_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    recorded(path, "paged", 20, PROMPT, full)
    lines = path.read_text().splitlines(keepends=True)
    keep = len(lines) * 2 // 3
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(lines[:keep]) + lines[keep][: len(lines[keep]) // 2])
    explanation = about(cut)
    assert f"its {keep - 1:,} whole records" in explanation.cut
    assert report(explanation).startswith("Not the whole story: ")
    last = [json.loads(line) for line in lines[1:keep]]
    assert explanation.end == pytest.approx(max(record["now"] for record in last if "now" in record))
    assert explanation.requests == sum(record["event"] == "Submitted" for record in last)


def test_a_msgpack_log_that_breaks_off_is_told_up_to_its_last_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "log.msgpack"
    recorded(path, "paged", 20, PROMPT, full)
    path.write_bytes(path.read_bytes()[:-3])
    assert "breaks off inside a record" in about(path).cut


@pytest.mark.parametrize("keep", range(2, 14))
def test_a_log_that_ends_after_any_record_is_told(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "log.jsonl"
    recorded(path, "paged", 20, PROMPT, full)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:keep]))
    explanation = about(path)
    last = json.loads(lines[keep - 1])["event"]
    assert bool(explanation.cut) == (last not in ("Submitted", "Settled", "Finished", "Planned"))
    assert report(explanation)


def test_a_broken_record_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    recorded(path, "paged", 20, PROMPT, full)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:20], lines[20][:10] + "\n", *lines[21:]]))
    with pytest.raises(LogError, match="line 21: not JSON"):
        about(path)


def test_a_log_of_other_decisions_is_not_explained(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    recorded(path, "paged", 20, PROMPT, full)
    lines = path.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if '"event":"Blocked"' in line)
    record = json.loads(lines[at])
    lines[at] = json.dumps({**record, "short": record["short"] + 1}) + "\n"
    path.write_text("".join(lines))
    with pytest.raises(LogError, match=f"record {at}: .* this Octavo decides"):
        about(path)


def test_an_empty_log_says_that_nothing_ran(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    recorded(path, "paged", 20, PROMPT, lambda b: None)
    assert "no accepted request" in verdict(about(path))
    assert report(about(path))
    assert to_json(about(path))["requests"] == 0


def test_an_unknown_request_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    recorded(path, "paged", 256, PROMPT, lambda b: ([b.add(4, 2, id=f"chat-{i}") for i in range(8)], b.run()))
    with pytest.raises(ExplainError, match=r"no request 'chta-3' among its 8; the ids most like it are chat-3, "):
        explain(path, Question(request="chta-3"))


def test_the_story_of_a_refused_request_is_its_refusal(tmp_path: Path) -> None:
    from octavo.types import RequestError

    def live(b: Bench) -> None:
        with pytest.raises(RequestError):
            b.add(100, 2, id="big")

    path = tmp_path / "log.jsonl"
    recorded(path, "paged", 16, PROMPT, live)
    explanation = explain(path, Question(request="big"))
    assert explanation.refused == 1
    assert (explanation.asked.reason or "").startswith("refused: ")
    assert "refused: " in report(explanation)


# -- a replay's report ------------------------------------------------------------------------------------------------


@pytest.fixture
def run_json(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    settings = (Setting("max_num_seqs", "1,024"), Setting("max_model_len", "4,096"), Setting("admission", "peak"))
    made = ReplayReport("title", "command", "trace", "model", "device", "paged", (outcome(),), settings=settings)
    write_json(path, made)
    return path


def test_a_report_is_explained_from_its_timeline_and_lives(run_json: Path) -> None:
    explanation, made = about_run(run_json), outcome()
    assert explanation.waited == made.waited
    assert sum(explanation.limits.values()) == pytest.approx(sum(made.waited.values()) - made.waited["next step"])
    assert made.timeline is not None
    assert [part.end for part in explanation.stretches] == list(made.timeline.t)
    assert [part.running for part in explanation.stretches] == list(made.timeline.running)
    assert [part.start for part in explanation.stretches] == [0.0, *made.timeline.t[:-1]]
    assert [story.id for story in explanation.stories] == ["a-2", "a-1", "a-0"]
    assert explanation.setup.max_num_seqs == 1024
    shown = report(explanation)
    assert "seconds after the trace's start" in shown
    assert "1.50 s memory: full" in shown


def test_a_life_of_a_report_is_told(run_json: Path) -> None:
    explanation = explain(run_json, Question(request="a-1"))
    text = report(explanation)
    assert "waited 2.50 s in all" in text
    assert "was preempted at 4.000 s; back at 5.000 s (1.00 s later)" in text
    assert "310 tokens were computed again for it" in text
    assert "a-3: arrived at 1.500 s with 9,000 prompt tokens; refused: too long" in report(
        explain(run_json, Question(request="a-3"))
    )


def test_a_window_of_a_report_adds_up_its_stretches(run_json: Path) -> None:
    whole = about_run(run_json)
    middle = whole.stretches[len(whole.stretches) // 2].start
    later = explain(run_json, Question(start=middle))
    expected = sum(sum(part.waiting.values()) * part.seconds for part in whole.stretches if part.end > middle)
    assert sum(later.waited.values()) == pytest.approx(expected)
    assert later.start == middle


def test_a_request_that_a_report_does_not_keep_is_an_error_that_says_how_many_it_keeps(run_json: Path) -> None:
    with pytest.raises(ExplainError, match=r"no request 'a-9' .* Of 101 requests the report keeps the lives of 4\."):
        explain(run_json, Question(request="a-9"))


def about_run(path: Path) -> Explanation:
    return explain(path, Question(worst=10_000))
