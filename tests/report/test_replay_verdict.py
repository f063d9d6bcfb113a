"""A replay's verdict says what the figures show in every case, and no number that is not in them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kv.budget import GIB
from octavo.planner.outcome import KV_LINES
from octavo.report.replay_data import Figures
from octavo.report.replay_verdict import (
    binary,
    change_words,
    changes_sentence,
    fidelity_line,
    gain,
    helps,
    limit_of,
    verdict,
)
from octavo.report.wording import percent, seconds
from tests.report.replaying import CHANGES, change, outcome, replayed, report


def said(**changes: object) -> str:
    """The verdict on one outcome with no changes tried."""
    return verdict(report(outcomes=(outcome(**changes),), changes=None))


def test_memory_binds():
    text = verdict(report())
    assert text.startswith("3.7 GiB of 24 GiB held live KV in the mean (61 % of the 6 GiB KV pool).")
    assert "Concurrency stops at 38 (31 in the mean): memory binds 81 % of the waiting time, mostly full." in text
    assert "4 of 101 requests were refused because they could never be served." in text
    assert "73 % of the requests were within the SLO (ttft<1s@p99,itl<50ms@p95): 7.30 a second." in text
    assert "In the same bytes, running in the mean: reserve-max 2.9." in text
    assert "A scheduler that knew every length could run 37 in the mean." in text
    assert text.endswith(
        "fp8 KV: 31 → 71 running in the mean, goodput 7.30 → 13.70 requests/s, p99 TTFT 12.1 s → 2.30 s "
        "(± 9 % in goodput)."
    )


@pytest.mark.parametrize(
    ("waited", "words"),
    [
        ({}, "no request waited: the traffic brought no more, so nothing limited it."),
        ({"next step": 900.0}, "no request waited"),
        ({"memory: full": 0.3}, "hardly any request waited"),
        (
            {"slots": 90.0, "memory: full": 10.0},
            "not for memory: 90 % of the waiting time was for the places among the",
        ),
        ({"step budget": 90.0}, "not for memory: all of the waiting time was for the token budget of a step"),
        ({"quota": 90.0}, "their tenant's quota"),
        ({"behind": 90.0}, "other requests in front of them"),
        ({"memory: fragmented": 60.0, "slots": 40.0}, "memory binds 60 % of the waiting time, mostly fragmented."),
        ({"memory: held": 60.0, "behind": 40.0}, "memory binds all of the waiting time, mostly held, requests"),
        ({"memory: full": 20.0, "memory: held": 30.0, "slots": 40.0}, "memory binds 56 % of the waiting time, mostly"),
    ],
)
def test_each_limit_is_named(waited, words):
    assert words in said(waited=waited)


def test_waste_in_a_full_pool_is_named():
    shares = dict.fromkeys(KV_LINES, 0.0) | {"live": 0.1, "reserved_never_used": 0.8, "fragmented": 0.1}
    assert "Yet the pool was 80 % reserved, never used and 10 % fragmented." in said(kv_mean=shares)
    assert "Yet the pool" not in said(kv_mean=shares, waited={"slots": 90.0})


def test_a_slow_device_is_not_blamed_on_memory():
    slow = "since nobody waited, the device is too slow for it"
    assert slow in said(waited={}, attained=0.4)
    assert slow not in said(waited={}, attained=1.0)
    assert slow not in said(attained=0.4)


def test_no_slo_no_word_of_it():
    text = verdict(report(slo=None, outcomes=(outcome(attained=None, goodput=None),), changes=None))
    assert "SLO" not in text
    assert "goodput" not in text


def test_nothing_ran_says_what_was_refused():
    text = said(running_peak=0, running_mean=0.0, refused=101, finished=0)
    assert text == "Under paged nothing ran in 6 GiB of KV memory: all 101 requests were refused. The first: too long"
    assert said(running_peak=0, refused=0, refusals=()) == "Under paged nothing ran: no request was taken up."
    assert "nothing to answer from" in verdict(report(outcomes=()))


def test_a_time_limit_is_told():
    assert "The time limit ended the replay with 7 unfinished." in said(unfinished=7)


def test_strategies_in_other_bytes_are_not_compared_as_if_in_the_same():
    other = outcome("reserve-max", pool_bytes=3 * GIB)
    assert "Under other strategies, running" in verdict(report(outcomes=(other, outcome())))
    oracle = outcome("reserve-oracle", running_mean=777.0)
    assert "777" not in verdict(report(outcomes=(oracle, outcome())))


def test_a_change_within_its_error_bar_is_not_advised():
    weak = change("blocks of 8", Figures(31.6, 7.8, 12.0, 9.8))
    assert not helps(weak)
    assert (
        changes_sentence((weak,))
        == "blocks of 8, the change tried, does not better goodput by more than its error bar."
    )
    assert changes_sentence((weak, weak)).startswith("None of the 2 changes tried betters goodput")
    assert helps(replace(weak, error=0.03))
    assert changes_sentence(CHANGES[3:]) == "The change cannot run."
    assert changes_sentence(()) == changes_sentence(None) == ""


def test_without_an_slo_the_time_of_a_request_ranks():
    before = Figures(10.0, None, 1.0, 8.0)
    faster = replace(change("x", Figures(9.0, None, 1.0, 4.0)), before=before)
    assert gain(faster) == 2.0
    assert helps(faster)
    assert change_words(faster).endswith("a request takes 8.00 s → 4.00 s (± 9 % in the time of a request)")
    assert not helps(replace(faster, after=Figures(90.0, None, 0.1, 8.1)))


def test_the_fidelity_line_is_there_in_every_case():
    assert fidelity_line(report()) == (
        "Fidelity: bundled fit; held-out error 5 %; a step's time is off by 5 % in the median."
    )
    made = report()
    once = report(fidelity=replace(made.fidelity, statement="bundled fit: kernel times of vLLM 0.19."))
    assert fidelity_line(once).startswith("Fidelity: bundled fit: kernel times of vLLM 0.19; a step's")
    assert "not stated" in fidelity_line(report(fidelity=None))


def test_a_real_replay_is_bound_by_memory_under_reservation():
    made = replayed(("reserve-max",))
    limit = limit_of(made.outcomes[0])
    assert limit is not None
    assert limit[0].startswith("memory")
    assert f"Concurrency stops at {made.outcomes[0].running_peak} (" in verdict(made)


@pytest.mark.parametrize(
    ("amount", "words"), [(24 * GIB, "24 GiB"), (7.4 * GIB, "7.4 GiB"), (3 << 19, "1.5 MiB"), (12, "12 B"), (0, "0 B")]
)
def test_bytes_are_binary(amount, words):
    assert binary(amount) == words


COUNT = st.integers(0, 10**6)
SHARE = st.floats(0, 1, allow_nan=False)
TIMES = st.floats(0, 1e5, allow_nan=False)
CAUSES = ("memory: full", "memory: fragmented", "memory: held", "behind", "slots", "step budget", "quota", "next step")


@st.composite
def outcomes(draw):
    live = draw(SHARE)
    return outcome(
        running_peak=draw(COUNT),
        running_mean=draw(TIMES),
        requests=draw(COUNT),
        refused=draw(COUNT),
        unfinished=draw(COUNT),
        seconds=draw(TIMES),
        attained=draw(st.none() | SHARE),
        goodput=draw(st.none() | TIMES),
        pool_bytes=draw(st.integers(1, 1 << 42)),
        kv_mean=dict.fromkeys(KV_LINES, 0.0) | {"live": live, "free": 1 - live},
        waited=draw(st.dictionaries(st.sampled_from(CAUSES), TIMES)),
        bounds=None,
        refusals=(),
    )


@settings(max_examples=300, deadline=None)
@given(outcomes(), st.none() | st.tuples(TIMES, TIMES, TIMES, TIMES, SHARE))
def test_every_number_is_one_of_the_inputs(o, after):
    made = None if after is None else (change("it", Figures(*after[:4]), after[4]),)
    r = report(outcomes=(o,), changes=made)
    words = re.sub(r"\(ttft<[^)]*\)", "", verdict(r)).replace("p99", "")
    amounts = [o.pool_bytes, r.budget.total, o.kv_mean["live"] * o.pool_bytes]
    limit = limit_of(o)
    shares = [o.kv_mean["live"], o.attained or 0.0, limit[1] if limit else 0.0, after[4] if after else 0.0]
    counts = [f"{n:,}" for n in (o.running_peak, o.refused, o.requests, o.unfinished)]
    means = [o.running_mean, *((after[0], 31.4) if after else ())]
    known = {binary(value) for value in amounts} | {percent(value) for value in shares} | set(counts)
    known |= {f"{value:,.0f}" for value in means} | {f"{value:,.1f}" for value in means}
    known |= {f"{value:.2f}" for value in (o.goodput or 0.0, *((7.3, after[1]) if after else ()))}
    known |= {seconds(value) for value in ((12.1, 9.9, after[2], after[3]) if after else ())}
    numbers = {number for text in known for number in re.findall(r"[\d.,]*\d", text)}
    assert set(re.findall(r"[\d.,]*\d", words)) <= numbers
