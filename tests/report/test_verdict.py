"""The verdict says what the figures show, for every combination of figures, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from octavo.kv.strategies import STRATEGIES
from octavo.report.summary import KV_LINES, Percentiles, RunSummary
from octavo.report.verdict import Limit, limit_of, verdict
from tests.report.simulated import simulate, simulated


def figures(strategy: str = "reserve-max", **changes) -> RunSummary:
    """reserve-max as it usually is: two at once, memory full and empty at the same time."""
    shares = dict.fromkeys(KV_LINES, 0.0) | {"live": 0.04, "reserved_never_used": 0.91, "free": 0.05}
    fields = dict(
        strategy=strategy,
        pool_tokens=16_384,
        pool_bytes=377_487_360,
        requests=36,
        refused=0,
        waited=34,
        mean_running=1.9,
        peak_running=2,
        kv_mean=shares,
        kv_peak=shares,
        preemptions=0,
        ttft=Percentiles(8.0, 30.0),
        itl=Percentiles(0.03, 0.05),
        output_tokens=4000,
        tokens_per_second=100.0,
        seconds=40.0,
        waited_by_cause={"memory: full": 300.0, "behind": 500.0},
    )
    return RunSummary(**{**fields, **changes})


def paged(**changes) -> RunSummary:
    shares = dict.fromkeys(KV_LINES, 0.0) | {"live": 0.95, "cached": 0.01, "slack": 0.03, "free": 0.01}
    fields = dict(
        mean_running=20.0,
        peak_running=27,
        kv_mean=shares,
        kv_peak=shares,
        ttft=Percentiles(1.0, 4.0),
        tokens_per_second=320.0,
        seconds=12.5,
        waited_by_cause={"memory: full": 20.0},
    )
    return figures("paged", **{**fields, **changes})


def test_the_usual_answer_has_the_measured_numbers_and_the_change():
    text = verdict([figures(), paged()], max_model_len=8192)
    for part in (
        "In 377 MB of KV memory reserve-max ran at most 2 requests at once while 34 of 36 had to wait "
        "(20 at a time on average)",
        "all of the waiting was for full memory or behind a request that waited for it",
        "only 4 % of the pool held token states over time: each request reserves 8,192 tokens; 91 % was reserved for "
        "tokens that never came",
        "paged ran 27 in the same bytes with 96 % of the pool holding token states at the peak",
        "finished 3.2 times sooner (12.5 s instead of 40.0 s)",
        "Half of the first tokens came within 1.00 s instead of 8.00 s",
        "Change kv_strategy to paged.",
        "more KV memory or fewer KV bytes a token",
    ):
        assert part in text


def test_no_run_and_nothing_run():
    assert "No run was recorded" in verdict([])
    none = figures(peak_running=0, mean_running=0.0, requests=0, refused=36, seconds=0.0, waited_by_cause={})
    assert "36 requests were refused" in verdict([none])
    assert "Change" not in verdict([none])


def test_a_strategy_that_refuses_everything_is_named():
    none = figures(peak_running=0, mean_running=0.0, requests=0, refused=36, seconds=0.0, waited_by_cause={})
    text = verdict([none, paged()])
    assert "reserve-max ran nothing: it refused 36 requests" in text
    assert "Change kv_strategy to paged." in text
    assert "sooner" not in text


def test_without_waiting_memory_is_not_blamed():
    text = verdict([figures(waited_by_cause={}), paged(waited_by_cause={}, peak_running=2)])
    assert "no request waited, so memory did not limit concurrency" in text
    assert "Change kv_strategy" not in text
    brief = verdict([figures(waited_by_cause={"memory: full": 0.4})])
    assert "hardly any request waited" in brief


@pytest.mark.parametrize(
    ("cause", "advice"),
    [("slots", "Raise max_num_seqs."), ("step budget", "Raise max_num_batched_tokens."), ("quota", "Raise the quota")],
)
def test_waiting_for_something_else_is_answered_with_that(cause, advice):
    text = verdict([figures(waited_by_cause={cause: 500.0, "memory: full": 3.0}), paged()])
    assert "not for memory" in text
    assert advice in text
    assert "Change kv_strategy" not in text


def test_paged_not_better():
    text = verdict([figures(), paged(peak_running=2)])
    assert "paged did not run more at once" in text
    assert "Change kv_strategy" not in text
    assert "sooner" not in text


def test_more_at_once_but_slower_is_not_sold_as_a_gain():
    text = verdict([figures(), paged(seconds=60.0, preemptions=3)])
    assert "took longer (60.0 s instead of 40.0 s)" in text
    assert "only if running more at once matters more" in text
    assert "the price: requests were preempted 3 times" in text


def test_different_work_is_compared_by_rate_not_by_the_clock():
    text = verdict([figures(requests=18, refused=18, output_tokens=2000), paged()])
    assert "made 3.2 times the tokens a second (320 to 100)" in text
    assert "refused 18 of 36 requests" in text
    assert "sooner" not in text


def test_single_strategies():
    assert "Run paged on the same bytes to see what it changes." in verdict([figures()])
    full = verdict([paged()])
    assert "Memory is really full (at the peak 95 % of the pool held token states of running requests)" in full
    assert "Change kv_strategy" not in full
    loose = dict.fromkeys(KV_LINES, 0.0) | {"live": 0.4, "held": 0.6}
    assert "Run it with more KV memory" in verdict([paged(kv_peak=loose, waited_by_cause={"memory: held": 50.0})])


def test_the_oracle_is_never_advised():
    oracle = paged(seconds=5.0, peak_running=40)
    oracle = replace(oracle, strategy="reserve-oracle")
    assert "Change kv_strategy to paged." in verdict([figures(), oracle, paged()])
    text = verdict([oracle, paged()])
    assert "reserve-oracle, which knows every length in advance and is no setting, ran 40." in text
    assert "Change kv_strategy" not in text


def test_equals_are_named_and_paged_is_preferred():
    text = verdict([figures(), paged(), figures("growing", **{**_moved(paged()), "seconds": 12.2})])
    assert "Change kv_strategy to paged (growing ran 27 and took 12.2 s)." in text


def _moved(s: RunSummary) -> dict[str, object]:
    return {name: getattr(s, name) for name in ("mean_running", "peak_running", "kv_mean", "kv_peak", "ttft")}


def test_behind_counts_as_memory_only_where_somebody_waits_for_memory():
    assert limit_of(figures(waited_by_cause={"behind": 10.0})) is Limit.OTHER
    assert limit_of(figures(waited_by_cause={"behind": 10.0, "memory: held": 1.0, "slots": 5.0})) is Limit.MEMORY
    assert limit_of(figures(waited_by_cause={"next step": 100.0})) is Limit.NONE


@pytest.mark.parametrize("pages", [33, 64, 400])
def test_every_combination_of_strategies_has_an_answer(pages):
    runs = {name: simulate(name, pages=pages).summary for name in STRATEGIES}
    for many in range(1, len(runs) + 1):
        for names in combinations(runs, many):
            text = verdict([runs[name] for name in names], max_model_len=512)
            assert text.endswith(".")
            assert "nan" not in text
            assert "  " not in text
            for name in STRATEGIES:
                assert f"kv_strategy to {name}" not in text or (name in names and name != "reserve-oracle")


def test_the_simulated_comparison_ends_in_paged():
    comparison = simulated()
    assert "Change kv_strategy to paged" in comparison.verdict
