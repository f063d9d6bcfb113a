"""What the inspector remembers: lives, decisions, seconds and traffic, all within bounds."""

from __future__ import annotations

import itertools

import pytest

from octavo.server import lives, timeline, traffic
from octavo.server.inspector import RING
from octavo.types import RequestError
from tests.server.looking import Looked


def history(one: Looked, name: str) -> list[str]:
    life = one.inspector.lives.find(name, one.labels)
    assert life is not None
    return [moment.event for moment in life.history()]


def texts(one: Looked, name: str) -> str:
    life = one.inspector.lives.find(name, one.labels)
    assert life is not None
    return " | ".join(moment.text for moment in life.history())


# -- lives ------------------------------------------------------------------------------------------------------------


def test_a_life_is_told_from_its_beginning_to_its_end() -> None:
    one = Looked(max_num_seqs=1)
    one.add(8, 6)
    name = one.add(8, 2)
    one.run()
    assert history(one, name) == ["Submitted", "Blocked", "Admitted", "Finished"]
    said = texts(one, name)
    assert "8 prompt tokens" in said
    assert "slots: needs 1, 0 available, 1 short" in said
    assert "ended (length) with 10 tokens" in said


def test_what_is_told_of_an_ended_request_is_how_it_ended() -> None:
    one = Looked(max_num_seqs=1)
    one.add(8, 6)
    name = one.add(9, 3)
    one.labels[name] = "mine"
    one.run()
    life = one.inspector.lives.find(name, {})
    assert life is not None
    assert life.row is not None
    row = life.row
    assert (row.state, row.phase, row.blocks, row.wait) == ("finished", "ended", 0, None)
    assert (row.prompt_tokens, row.generated_tokens, row.max_tokens, row.label) == (9, 3, 3, "mine")
    assert life.reason == "length"
    assert 0 < row.waited_s < row.age_s
    assert one.inspector.lives.find("mine", {}) is life


@pytest.mark.parametrize(
    ("steps", "phase"),
    [(0, "queued"), (1, "prefill"), (5, "decode")],
)
def test_an_abort_says_in_which_phase_it_came(steps: int, phase: str) -> None:
    """D1: one line with the phase."""
    one = Looked(max_num_batched_tokens=16)
    name = one.add(40, 20)
    one.step(steps)
    one.engine.abort(name)
    one.engine.abort(name)
    assert history(one, name).count("Stopped") == 1
    assert f"ended from outside (abort) while in {phase}" in texts(one, name)
    life = one.inspector.lives.find(name, {})
    assert life is not None
    assert life.reason == "abort"


def test_an_abort_of_a_preempted_request_says_so() -> None:
    one = Looked(pages=16, admission="prompt", max_num_batched_tokens=256)
    for _ in range(3):
        one.add(16, 40)
    while not (lost := [row for row in one.snapshot().rows if row.phase == "preempted"]):
        one.step()
    one.engine.abort(lost[0].id)
    assert "blocks taken back" in texts(one, lost[0].id)
    assert "while in preempted" in texts(one, lost[0].id)


def test_time_in_the_line_counts_again_after_a_preemption() -> None:
    one = Looked(pages=16, admission="prompt", max_num_batched_tokens=256)
    ids = [one.add(16, 40) for _ in range(3)]
    one.run()
    lived = [one.inspector.lives.find(name, {}) for name in ids]
    preempted = [life.row for life in lived if life is not None and life.row is not None and life.row.preemptions]
    assert preempted
    assert all(row.waited_s > 0 for row in preempted)


def test_a_failed_step_is_told_to_its_requests() -> None:
    one = Looked()
    name = one.add(8, 6)

    def fails(plan: object) -> None:
        raise RuntimeError("boom")

    one.engine.runner.run = fails  # type: ignore[assignment, method-assign]
    one.step()
    life = one.inspector.lives.find(name, {})
    assert life is not None
    assert life.reason == "error"
    assert life.error == "the step that computed it failed"


def test_only_the_latest_thousand_ended_requests_are_remembered() -> None:
    one = Looked()
    ids = []
    for _ in range(lives.ENDED + 5):
        ids.append(one.add(4, 1))
        one.run()
    assert one.inspector.lives.find(ids[4], {}) is None
    assert one.inspector.lives.find(ids[5], {}) is not None


def test_a_long_life_keeps_its_beginning_and_its_latest_moments() -> None:
    one = Looked(max_model_len=4096)
    name = one.add(4, 30)
    one.step()
    for _ in range(100):
        one.engine.scheduler.preempt(name, one.engine.clock.now())
        one.step(2)
    assert len(history(one, name)) <= lives.MOMENTS
    assert history(one, name)[0] == "Submitted"


def test_a_label_that_is_forgotten_before_the_end_is_told_all_the_same() -> None:
    """A client that disconnects takes its label with it, and the engine aborts the request afterwards."""
    one = Looked()
    one.labels["mine"] = "label"
    one.add(8, 20, request_id="mine")
    one.step(2)
    del one.labels["mine"]
    one.engine.abort("mine")
    life = one.inspector.lives.find("label", one.labels)
    assert life is not None
    assert life.reason == "abort"


def test_a_label_finds_the_live_request_before_an_ended_one() -> None:
    one = Looked()
    old = one.add(4, 1)
    one.labels[old] = "same"
    one.run()
    new = one.add(4, 8)
    one.labels[new] = "same"
    one.step()
    life = one.inspector.lives.find("same", one.labels)
    assert life is not None
    assert life.recorded.id == new


# -- why the cache did not help ---------------------------------------------------------------------------------------


def test_a_miss_names_the_first_token_that_differs_and_its_position() -> None:
    """C8c: a template that drops a marker is seen at its place, even when the request has ended."""
    one = Looked()
    one.add([5] * 8 + [71, 72, 73, 74], 4)
    one.run()
    name = one.add([5] * 8 + [71, 99, 73, 74], 4)
    one.run()
    life = one.inspector.lives.find(name, {})
    assert life is not None
    found = life.detail()["miss"]
    assert (found["matched"], found["partial"], found["position"]) == (8, 1, 9)
    assert (found["here"], found["there"]) == (99, 72)
    assert "at position 9 has token 72 where this one has 99" in found["sentence"]


def test_an_engine_that_shares_nothing_says_so() -> None:
    one = Looked(strategy="growing")
    name = one.add(8, 2)
    one.run()
    life = one.inspector.lives.find(name, {})
    assert life is not None
    assert "keeps no prefix cache" in life.detail()["miss"]["sentence"]


# -- decisions --------------------------------------------------------------------------------------------------------


def test_decisions_come_in_order_and_once() -> None:
    one = Looked()
    name = one.add(8, 6)
    one.step()
    first = one.inspector.decisions(0)
    assert [entry.name for entry in first.entries][:3] == ["Submitted", "Granted", "Admitted"]
    assert {entry.request for entry in first.entries} == {name}
    assert first.lost == 0
    one.run()
    second = one.inspector.decisions(first.after)
    numbers = [entry.number for entry in (*first.entries, *second.entries)]
    assert numbers == list(range(len(numbers)))
    assert second.entries[-1].name == "Finished"
    assert one.inspector.decisions(second.after).entries == ()


def test_a_reader_that_is_too_slow_is_told_how_many_it_lost() -> None:
    one = Looked()
    while one.inspector.decided < RING + 100:
        one.add(4, 1)
        one.run()
    found = one.inspector.decisions(0)
    assert found.lost == one.inspector.decided - RING
    assert len(found.entries) == RING
    assert found.entries[0].number == found.lost


def test_decisions_hold_no_prompts() -> None:
    one = Looked(max_model_len=64)
    one.add(8, 6)
    with pytest.raises(RequestError):
        one.add(100, 6)
    for entry in one.inspector.decisions(0).entries:
        assert "prompt" not in entry.json()
        assert not isinstance(entry.json()["request"], dict)


# -- the timeline -----------------------------------------------------------------------------------------------------


def test_a_second_has_the_ledger_and_the_latencies_of_its_steps() -> None:
    one = Looked(max_num_seqs=1)
    for _ in range(3):
        one.add(8, 200)
    while one.engine.clock.now() < 0.5:
        one.step()
    now = one.engine.clock.now()
    (sample,) = one.inspector.timeline.samples(one.built, now)
    assert sample.at == 1.0
    assert sample.lines == one.head().ledger.lines
    assert (sample.running, sample.waiting, sample.waiting_by_cause["slots"]) == (1, 2, 2)
    assert sample.itl_p50 == pytest.approx(0.005, rel=0.1)
    assert sample.ttft_p99 is not None
    assert sample.ttft_p50 is not None
    assert sample.ttft_p50 <= sample.ttft_p99
    assert sample.tokens_per_s == one.engine.scheduler.totals.generated


def test_seconds_in_which_nothing_ran_are_there_and_say_so() -> None:
    one = Looked()
    one.add(8, 4)
    one.run()
    one.engine.clock.wait_until(4.5)
    one.add(8, 4)
    one.run()
    samples = one.inspector.timeline.samples(one.built, 6.2)
    assert [sample.at for sample in samples] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert [sample.tokens_per_s for sample in samples] == [4.0, None, None, None, 4.0, None, None]
    assert all(sum(sample.lines.values()) == one.head().ledger.budget for sample in samples)
    assert samples[2].running == 0


def test_the_timeline_ends_after_ten_minutes() -> None:
    one = Looked()
    for second in range(timeline.KEPT + 50):
        one.engine.clock.wait_until(float(second))
        one.add(4, 1)
        one.run()
    samples = one.inspector.timeline.samples(one.built, one.engine.clock.now())
    assert len(samples) == timeline.KEPT


def test_percentiles_are_those_of_all_tokens() -> None:
    assert timeline.percentile([(0.1, 99), (0.9, 1)], 0.5) == 0.1
    assert timeline.percentile([(0.9, 1), (0.1, 99)], 0.99) == 0.1
    assert timeline.percentile([(0.9, 2), (0.1, 98)], 0.99) == 0.9
    assert timeline.percentile([], 0.5) is None


# -- traffic ----------------------------------------------------------------------------------------------------------


def test_traffic_is_recorded_with_lengths_times_and_prefixes() -> None:
    one = Looked()
    prompt = list(range(12))
    first, second = one.add(prompt, 5, tenant="t"), one.add([*prompt, 50, 51], 9)
    one.run()
    (a, b), refused = one.inspector.traffic.since(0.0)
    assert (a.id, a.prompt_tokens, a.output, a.max_tokens, a.tenant) == (first, 12, 5, 5, "t")
    assert (b.id, b.prompt_tokens, b.output) == (second, 14, 9)
    assert refused == 0
    assert a.hashes is not None
    assert b.hashes is not None
    same = [x == y for x, y in zip(a.hashes, b.hashes, strict=False)]
    assert same == [True] * 3 + [False] * (len(same) - 3)
    assert a.ttft is not None
    assert a.took is not None
    assert 0 < a.ttft < a.took


def test_traffic_is_bounded_in_time() -> None:
    one = Looked()
    one.add(4, 1)
    one.run()
    one.engine.clock.wait_until(traffic.SECONDS + 10)
    name = one.add(4, 1)
    one.run()
    requests, _ = one.inspector.traffic.since(0.0)
    assert [request.id for request in requests] == [name]


def test_traffic_is_bounded_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "HASHES", 10)
    one = Looked()
    for _ in range(6):
        one.add(12, 5)
        one.run()
    requests, _ = one.inspector.traffic.since(0.0)
    assert sum(len(request.hashes or ()) for request in requests) <= 10
    assert len(requests) == 2


def test_a_step_lasts_until_the_next_one_begins_where_work_is_left() -> None:
    one = Looked()
    one.add(8, 5)
    one.run()
    one.engine.clock.wait_until(100.0)
    one.add(8, 5)
    one.run()
    steps = list(one.inspector.traffic.steps)
    assert steps[0][0].chunks == ((8, 0),)
    assert all(seconds < 1.0 for _, seconds in steps)
    assert len(steps) == 9  # the very last one has no successor yet


def test_the_time_between_tokens_of_late_follows_the_engine() -> None:
    one = Looked()
    assert one.inspector.itl is None
    one.add(8, 20)
    one.run()
    assert one.inspector.itl == pytest.approx(0.00505, rel=0.01)


def test_a_stop_between_two_tokens_is_no_first_token() -> None:
    """Tokens of sequences that ended from outside are not counted as beginnings."""
    one = Looked()
    names = [one.add(8, 20) for _ in range(3)]
    one.step(3)
    for name in itertools.islice(names, 2):
        one.engine.abort(name)
    one.run()
    requests, _ = one.inspector.traffic.since(0.0)
    assert all(request.ttft is not None and request.ttft < 0.02 for request in requests)
