"""Traces made from traces, synthetic ones, and how a trace is named on the command line."""

from __future__ import annotations

import math
import pickle
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from octavo.planner.traces import BadLine, Trace, TraceError, TraceRequest, open_trace
from octavo.planner.traces.synthetic import Lengths, Synthetic, alpaca_like, fitted, sharegpt_like
from octavo.planner.traces.transforms import (
    Listed,
    at_rate,
    lengths_scaled,
    limited,
    mean_rate,
    resampled,
    scaled,
    spread,
    window,
    with_arrivals,
)

HERE = Path(__file__).parent.parent / "data" / "traces"


def trace_of(*requests: tuple[float, int, int]) -> Listed:
    made = (TraceRequest(time, prompt, output, str(number)) for number, (time, prompt, output) in enumerate(requests))
    return Listed("listed", tuple(made), bad_lines=(BadLine(9, "why"),), bad_count=3)


FIVE = trace_of((0, 10, 1), (1, 20, 2), (1, 30, 3), (4, 40, 4), (8, 50, 5))


def times(trace: Trace) -> list[float]:
    return [request.arrival for request in trace]


def prompts(trace: Trace) -> list[int]:
    return [request.prompt_tokens for request in trace]


# -- arrivals, windows, lengths ---------------------------------------------------------------------------------------


def test_gaps_are_divided_by_the_factor() -> None:
    assert times(scaled(FIVE, 2)) == [0, 0.5, 0.5, 2, 4]


def test_a_mean_rate_is_met() -> None:
    assert mean_rate(FIVE) == 0.5
    assert times(at_rate(FIVE, 4)) == [0, 0.125, 0.125, 0.5, 1]
    assert mean_rate(at_rate(FIVE, 4)) == pytest.approx(4)
    with pytest.raises(TraceError, match="has 2 requests at one time, so no rate"):
        at_rate(trace_of((0, 1, 1), (0, 1, 1)), 4)


def test_a_window_holds_its_start_and_not_its_end_and_begins_at_0() -> None:
    cut = window(FIVE, 1, 8)
    assert (times(cut), prompts(cut)) == ([0, 0, 3], [20, 30, 40])


def test_limits() -> None:
    assert prompts(limited(FIVE, 2)) == [10, 20]
    assert prompts(limited(FIVE, 99)) == [10, 20, 30, 40, 50]


def test_equal_arrivals_are_spread_up_to_the_next() -> None:
    assert times(spread(FIVE)) == [0, 1, 2.5, 4, 8]


def test_steps_are_named_and_keep_what_the_trace_reports() -> None:
    derived = limited(scaled(window(FIVE, 0, 9), 2), 4)
    assert derived.name == "listed, from 0 to 9 s, 2 x its rate, first 4"
    assert (derived.bad_lines, derived.bad_count, derived.timed) == ((BadLine(9, "why"),), 3, True)
    assert list(derived) == list(derived)


def test_longer_prompts_have_longer_prefix_blocks() -> None:
    request = TraceRequest(0, 40, 20, "a", (1, 2, 3), 16, max_tokens=30, cached_tokens=32)
    (grown,) = lengths_scaled(Listed("one", (request,)), prompt=1.5, output=0.01)
    assert (grown.prompt_tokens, grown.output_tokens, grown.max_tokens, grown.cached_tokens) == (60, 1, 1, 48)
    assert (grown.hashes, grown.hash_block) == ((1, 2, 3), 24)
    with pytest.raises(TraceError, match=r"blocks of 16 tokens; times 1\.3 they are not whole"):
        list(lengths_scaled(Listed("one", (request,)), prompt=1.3))


def test_ids_of_an_answer_are_dropped_when_lengths_change() -> None:
    request = TraceRequest(0, 40, 40, "a", (1, 2, 3, 4, 5), 16)
    (grown,) = lengths_scaled(Listed("one", (request,)), prompt=2)
    assert (grown.hashes, grown.hash_block) == ((1, 2, 3), 32)


@pytest.mark.parametrize(
    ("process", "cv", "wanted"),
    [("poisson", 1.0, 1.0), ("gamma", 3.0, 3.0), ("gamma", 0.5, 0.5), ("constant", 1.0, 0.0)],
)
def test_drawn_arrivals_have_the_rate_and_the_spread_asked_for(process: str, cv: float, wanted: float) -> None:
    table = Listed("table", tuple(TraceRequest(0.0, 5, 5, str(number)) for number in range(20_000)), timed=False)
    drawn = with_arrivals(table, 8.0, seed=3, process=process, cv=cv)  # type: ignore[arg-type]
    found = times(drawn)
    gaps = [after - before for before, after in pairwise(found)]
    assert drawn.timed
    assert found[0] == 0
    assert found == times(drawn)
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.06)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(wanted, rel=0.06, abs=1e-9)
    if process != "constant":
        assert found != times(with_arrivals(table, 8.0, seed=4, process=process, cv=cv))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: scaled(FIVE, 0), "the factor on the rate (scale, speed) is 0; it must be above 0"),
        (lambda: scaled(FIVE, math.nan), "(scale, speed) is nan"),
        (lambda: at_rate(FIVE, -1), "rate is -1; it must be requests per second"),
        (lambda: window(FIVE, 5, 5), "the window from 5 to 5 s holds nothing"),
        (lambda: window(FIVE, -1, 5), "the window from -1"),
        (lambda: limited(FIVE, 0), "requests is 0; it must be at least 1"),
        (lambda: lengths_scaled(FIVE, prompt=0), "length factor prompt is 0"),
        (lambda: with_arrivals(FIVE, math.inf), "rate is inf"),
        (lambda: with_arrivals(FIVE, 1, process="weekly"), "process is weekly; choose poisson, gamma or constant"),  # type: ignore[arg-type]
        (lambda: with_arrivals(FIVE, 1, process="gamma", cv=0), "cv is 0"),
    ],
)
def test_steps_that_make_no_trace_are_refused_at_once(make: object, sentence: str) -> None:
    with pytest.raises(TraceError) as caught:
        make()  # type: ignore[operator]
    assert sentence in str(caught.value)


# -- another draw -----------------------------------------------------------------------------------------------------


def test_resampling_keeps_gaps_and_lengths_together_and_their_means() -> None:
    source = Listed(
        "s", tuple(TraceRequest(float(n * n % 997 + 1000 * n), n % 50 + 1, n % 50 + 101, str(n)) for n in range(5000))
    )
    drawn = resampled(source, 1)
    requests = list(drawn)
    assert requests == list(drawn)
    assert requests != list(resampled(source, 2))
    assert len({request.id for request in requests}) == len(requests) == 5000
    assert all(request.output_tokens == request.prompt_tokens + 100 for request in requests)
    assert statistics.mean(prompts(drawn)) == pytest.approx(25.5, rel=0.05)
    assert mean_rate(drawn) == pytest.approx(mean_rate(source), rel=0.05)
    neighbours = sum(b.prompt_tokens == a.prompt_tokens % 50 + 1 for a, b in pairwise(requests))
    assert neighbours > 4000, "stretches of consecutive requests stay together"


def test_resampling_keeps_the_order_where_prefixes_give_it_a_meaning() -> None:
    source = Listed(
        "s", tuple(TraceRequest(float(n * n), 16 * n + 16, 1, str(n), tuple(range(n + 1)), 16) for n in range(40))
    )
    drawn = list(resampled(source, 1))
    assert [request.hashes for request in drawn] == [request.hashes for request in source]
    assert [request.arrival for request in drawn] != [request.arrival for request in source]
    assert [request.arrival for request in drawn] == sorted(request.arrival for request in drawn)


# -- synthetic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "prompt", "output"), [(sharegpt_like, 161.31, 337.99), (alpaca_like, 19.31, 58.45)])
def test_the_papers_means_hold_under_its_limit(make: type[Synthetic], prompt: float, output: float) -> None:
    requests = list(make(requests=60_000, rate=2.0, seed=11))
    assert statistics.mean(request.prompt_tokens for request in requests) == pytest.approx(prompt, rel=0.025)
    assert statistics.mean(request.output_tokens for request in requests) == pytest.approx(output, rel=0.025)
    assert max(request.prompt_tokens + request.output_tokens for request in requests) <= 2048
    assert min(min(request.prompt_tokens, request.output_tokens) for request in requests) >= 1
    assert len(requests) / requests[-1].arrival == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize("shape", ["lognormal", "gamma", "uniform", "constant"])
def test_lengths_have_the_moments_asked_for(shape: str) -> None:
    cv = 0.0 if shape == "constant" else 0.5
    lengths = Lengths(400, cv, shape)  # type: ignore[arg-type]
    drawn = prompts(Synthetic("drawn", lengths, lengths, requests=20_000))
    assert statistics.mean(drawn) == pytest.approx(400, rel=0.02)
    assert statistics.pstdev(drawn) / 400 == pytest.approx(cv, rel=0.05, abs=0.001)


def test_requests_of_a_group_share_their_prefix_and_others_do_not() -> None:
    ten = Lengths(10, 0, "constant")
    requests = list(Synthetic("drawn", ten, ten, requests=100, prefix=40, prefix_groups=3))
    assert {request.prompt_tokens for request in requests} == {50}
    assert {request.hashes for request in requests} == {(0, 1), (2, 3), (4, 5)}
    assert {request.hash_block for request in requests} == {16}


def test_a_fit_takes_over_moments_of_lengths_and_gaps() -> None:
    source = Synthetic("s", Lengths(300, 1.5), Lengths(80, 0.7, "gamma"), 20_000, rate=5, process="gamma", cv=2)
    found = fitted(source, seed=1)
    assert (found.prompt.mean, found.output.mean) == pytest.approx((300, 80), rel=0.04)
    assert (found.prompt.cv, found.output.cv) == pytest.approx((1.5, 0.7), rel=0.1)
    assert (found.rate, found.cv, found.process, found.requests) == (
        pytest.approx(5, rel=0.06),
        pytest.approx(2, rel=0.1),
        "gamma",
        20_000,
    )
    with pytest.raises(TraceError, match="has no arrival times, so no rate; give one"):
        fitted(open_trace(HERE / "vidur_arxiv.csv"))
    assert fitted(open_trace(HERE / "vidur_arxiv.csv"), rate=3).process == "poisson"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"requests": 0}, "requests is 0; it must be at least 1."),
        ({"rate": 0.0}, "rate is 0.0; it must be requests per second"),
        ({"process": "weekly"}, "process is weekly"),
        (
            {"limit": 90},
            "prompts of 100 and answers of 100 tokens on average do not fit under a limit that leaves 90 tokens",
        ),
        ({"prefix": -1}, "prefix is -1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_synthetic_traces_that_cannot_be(options: dict[str, object], sentence: str) -> None:
    hundred = Lengths(100, 0.1)
    with pytest.raises(TraceError) as caught:
        Synthetic("drawn", hundred, hundred, **options)  # type: ignore[arg-type]
    assert sentence in str(caught.value)


# -- on the command line ----------------------------------------------------------------------------------------------


def test_options_stand_behind_the_file() -> None:
    conv = HERE / "azure_conv.csv"
    assert len(list(open_trace(f"{conv}?requests=3"))) == 3
    assert mean_rate(open_trace(f"{conv}?rate=7")) == pytest.approx(7)
    assert times(open_trace(f"{conv}?speed=2&lengths=0.5"))[1] == pytest.approx(4.314579 / 2)
    assert prompts(open_trace(f"{conv}?speed=2&lengths=0.5"))[0] == 187
    assert len(list(open_trace(f"{conv}?start=4&end=6"))) == sum(4 <= time < 6 for time in times(open_trace(conv)))
    assert "resampled (seed 3)" in open_trace(f"{conv}?resample=3").name


def test_a_rate_draws_arrivals_where_there_are_none_or_where_a_process_is_named() -> None:
    table, conv = HERE / "vidur_arxiv.csv", HERE / "azure_conv.csv"
    assert times(open_trace(table)) == [0.0] * 5
    drawn = open_trace(f"{table}?rate=2&seed=4")
    assert drawn.timed
    assert times(drawn) == times(with_arrivals(open_trace(table), 2, 4))
    assert times(open_trace(f"{conv}?rate=4&process=constant")) == [0, 0.25, 0.5, 0.75, 1]


def test_a_file_whose_name_has_a_question_mark_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "what?.csv"
    path.write_bytes((HERE / "azure_conv.csv").read_bytes())
    assert len(list(open_trace(path))) == 5


def test_synthetic_traces_by_name() -> None:
    trace = open_trace("synthetic:sharegpt?rate=2&requests=50&seed=1")
    assert list(trace) == list(sharegpt_like(rate=2.0, requests=50, seed=1))
    (one,) = open_trace("synthetic:constant?prompt=100&output=20&requests=1&prefix=32")
    assert (one.prompt_tokens, one.output_tokens, one.hashes) == (132, 20, (0, 1))
    assert open_trace("synthetic:lognormal?prompt=64&prompt_cv=0.2&output=8").name.startswith(
        "lognormal: 1,000 requests"
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("synthetic:poem", "synthetic:poem is unknown; choose from sharegpt, alpaca, lognormal, gamma"),
        ("synthetic:alpaca?colour=red", "option colour is unknown for synthetic:alpaca; choose from cv, limit"),
        ("synthetic:alpaca?rate=fast", "option rate of synthetic:alpaca is 'fast'; it must be a number."),
        ("synthetic:alpaca?requests=1.5", "option requests of synthetic:alpaca is '1.5'; it must be a whole number."),
        ("synthetic:alpaca?rate=nan", "option rate of synthetic:alpaca is nan; it must be a number below 1e15."),
        ("synthetic:alpaca?rate", "options 'rate' of synthetic:alpaca cannot be read; write NAME=VALUE&NAME=VALUE."),
        ("FILE?seed=3", "option seed is for arrivals that are drawn; give rate, too."),
        ("FILE?hash_block=16", "option hash_block is unknown for"),
        ("FILE?spread=maybe", "it must be 0 or 1."),
        ("FILE?resample=-1", "is negative; it must be 0 or above."),
    ],
)
def test_options_that_make_no_trace(text: str, sentence: str) -> None:
    with pytest.raises(TraceError) as caught:
        open_trace(text.replace("FILE", str(HERE / "azure_conv.csv")))
    assert sentence in str(caught.value)


def test_traces_travel_to_worker_processes() -> None:
    for text in ("azure_conv.csv?rate=3&resample=1", "mooncake_conversation.jsonl", "sessions?session_rate=1"):
        trace = open_trace(f"{HERE / text}")
        assert list(pickle.loads(pickle.dumps(trace))) == list(trace)
    synthetic = open_trace("synthetic:alpaca?requests=5")
    assert list(pickle.loads(pickle.dumps(synthetic))) == list(synthetic)
