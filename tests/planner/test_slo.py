"""Service level objectives: how they are read, and whom they judge how."""

from __future__ import annotations

import dataclasses

import pytest

from octavo.planner.outcome import Distribution, Outcome
from octavo.planner.slo import SLO, Bound, SLOError, parse_slo


def outcome(**changes: object) -> Outcome:
    """A finished run of ten requests, with figures given by the test."""
    empty = Distribution()
    numbers = {f.name: 0 for f in dataclasses.fields(Outcome) if f.default is dataclasses.MISSING}
    numbers |= dict.fromkeys(("ttft", "itl", "tpot", "e2e", "queue"), empty)
    numbers |= {"strategy": "paged", "requests": 10, "finished": 10, "kv_mean": {}, "kv_peak": {}, "waited": {}}
    return Outcome(**{**numbers, **changes})  # type: ignore[arg-type]


def test_reads_metrics_units_and_both_ways_to_write_a_share() -> None:
    slo = parse_slo("ttft<1s@p99, ITL < 50ms@95%,e2e<1.5min@p50,queue<=250us@p99.9,tpot<.02s")
    assert slo.bounds == (
        Bound("ttft", 1.0, 0.99),
        Bound("itl", 0.05, 0.95),
        Bound("e2e", 90.0, 0.50),
        Bound("queue", pytest.approx(250e-6), pytest.approx(0.999)),
        Bound("tpot", 0.02, 0.99),
    )


def test_is_written_as_it_is_read() -> None:
    slo = parse_slo("ttft<1.5s@p99,itl<50ms@p95,e2e<2min@p50,queue<250us@p99.9")
    assert parse_slo(str(slo)) == slo
    assert str(parse_slo("ttft<1500ms@99%")) == "ttft<1.5s@p99"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("ttft<1s,", "no bound"),
        ("ttft>1s", "no bound"),
        ("latency<1s", "choose from ttft, itl, tpot, e2e, queue"),
        ("ttft<1", "us, ms, s or min"),
        ("ttft<1h", "us, ms, s or min"),
        ("ttft<fast", "'fast' is no time"),
        ("ttft<-1s", "no time"),
        ("ttft<0ms", "above 0"),
        ("ttft<1s@99", "@p99 or @99%"),
        ("ttft<1s@", "@p99 or @99%"),
        ("ttft<1s@p0", "above 0 and at most 100"),
        ("ttft<1s@p101", "at most 100"),
        ("ttft<1s@p99,ttft<1s", "twice"),
    ],
)
def test_says_what_cannot_be_read(text: str, says: str) -> None:
    with pytest.raises(SLOError, match="slo") as error:
        parse_slo(text)
    assert says in str(error.value)


def test_a_request_is_within_when_it_keeps_every_bound_whatever_the_share() -> None:
    slo = parse_slo("ttft<1s@p50,itl<50ms@p95")
    assert slo.request_within(ttft=1.0, itl=0.05)
    assert not slo.request_within(ttft=1.001, itl=0.05)
    assert not slo.request_within(ttft=0.5, itl=0.051)
    assert slo.request_within(ttft=0.5, itl=None), "an answer of one token has no gap to judge"


@pytest.mark.parametrize("metric", ["ttft", "itl", "tpot", "e2e", "queue"])
def test_every_metric_can_fail_a_request(metric: str) -> None:
    slo = SLO((Bound(metric, 1.0),))
    assert slo.request_within(**{metric: 0.9})
    assert not slo.request_within(**{metric: 1.1})


def test_a_run_meets_an_slo_by_its_percentiles() -> None:
    ttft = Distribution(10, 0.3, p50=0.2, p90=0.5, p95=0.8, p99=1.2, highest=3.0)
    assert parse_slo("ttft<0.8s@p95").met(outcome(ttft=ttft))
    assert not parse_slo("ttft<1s@p99").met(outcome(ttft=ttft))
    assert not parse_slo("ttft<0.8s@p95,ttft<2s@p100").met(outcome(ttft=ttft))


def test_a_share_between_reported_percentiles_is_judged_by_the_next_higher_one() -> None:
    ttft = Distribution(10, 0.3, p50=0.2, p90=0.5, p95=0.8, p99=1.2, highest=3.0)
    slo = parse_slo("ttft<1s@p75,ttft<1s@p99.9")
    assert dict(slo.reached(outcome(ttft=ttft))) == {slo.bounds[0]: 0.5, slo.bounds[1]: 3.0}


def test_a_run_that_was_cut_short_or_served_nobody_meets_nothing() -> None:
    slo = parse_slo("ttft<1s")
    assert slo.met(outcome())
    assert not slo.met(outcome(finished=9, unfinished=1))
    assert not slo.met(outcome(finished=0, refused=10))
