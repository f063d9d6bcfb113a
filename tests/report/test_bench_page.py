"""The page of a bench stands alone, needs no script, and carries the result's numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from octavo.benching.figures import Figures, Spread
from octavo.benching.probe import CpuTime, Machine
from octavo.benching.result import BenchResult, PointResult
from octavo.benching.roofline import Limits, Part, StepKind, verdict
from octavo.report.bench_page import render_page
from octavo.report.bench_table import render
from octavo.report.plots import Bar, Line, bar_plot, line_plot, ticks
from tests.report.test_page import HOSTILE, Reader

LIMITS = Limits(bandwidth=20e9, flops=200e9)


def spread(value: float) -> Spread:
    return Spread(value, value, 1.5 * value, 2 * value)


def figures(many: int, rate: float) -> Figures:
    return Figures(
        seconds=many * 100 / rate,
        requests=many,
        prompt_tokens=200 * many,
        output_tokens=100 * many,
        requests_per_second=rate / 100,
        output_tokens_per_second=rate,
        total_tokens_per_second=3 * rate,
        prefill_tokens_per_second=812.0 if many == 1 else None,
        decode_tokens_per_second=rate if many == 1 else None,
        ttft=spread(0.05 * many),
        itl=spread(0.02),
        tpot=spread(0.021),
        e2e=spread(2.5),
        steps=100,
        mean_running=0.9 * many,
        peak_running=many,
        mean_kv_utilisation=0.1,
        peak_kv_utilisation=0.2,
        preemptions=0,
        cached_tokens=0,
        drafted_tokens=0,
        accepted_tokens=0,
    )


def kind(batch: int, *, decode: bool = True, tokens: float = 0) -> StepKind:
    parts = (
        Part("linears", 0.012, 220e6, 0.2e9 * (tokens or batch)),
        Part("attention", 0.003 * batch, 10e6 * batch, 1e6),
        Part("scheduler", 0.0001, 0, 0),
    )
    return StepKind(decode, 30, batch, tokens or batch, 500.0 * batch, parts, LIMITS, True)


def point(many: int, rate: float, mode: str = "sweep", kinds: tuple[StepKind, ...] = ()) -> PointResult:
    name = "single stream" if mode == "latency" else f"{many} at once"
    return PointResult(name, mode, many, (figures(many, rate),) * 3, kinds or (kind(many),), LIMITS, LIMITS, 0.01)


MACHINE = Machine("CPU", 2, 2, "avx512", 1 << 34, "Linux", "3.12", {"torch": "2.13"}, "reading", "multiplying")
RESULT = BenchResult(
    title="How fast demo runs here",
    model="demo, bfloat16",
    command="octavo bench demo",
    workload="single stream; 64 requests",
    warm_up="some requests first",
    facts={"rounds": 3},
    load={"model": 1.5, "engine": 0.2},
    machine=MACHINE,
    points=(
        point(1, 40.0, "latency", (kind(1), kind(1, decode=False, tokens=512.0))),
        point(2, 70.0),
        point(8, 200.0),
    ),
)


def printed(result: BenchResult, width: int = 140) -> str:
    out = StringIO()
    Console(file=out, width=width, color_system=None).print(render(result))
    return out.getvalue()


def test_the_page_parses_and_loads_nothing() -> None:
    page = render_page(RESULT)
    reader = Reader(page)
    for tag, attributes in reader.tags:
        assert tag not in ("link", "iframe", "object", "embed", "img", "base", "a")
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert tag != "script" or attributes == {"type": "application/json", "id": "data"}
    assert not re.search(r"@import|url\(|https?://", page)
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    assert len(page) < 200_000


def test_the_page_carries_figures_verdict_and_data() -> None:
    page = render_page(RESULT)
    words = Reader(page).words
    for sentence in RESULT.verdict:
        assert " ".join(sentence.split()) in words
    for figure in ("812", "200", "decode at batch 8", "A prompt chunk of 512 tokens", "octavo bench demo"):
        assert figure in words
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    assert json.loads(found.group(1)) == json.loads(json.dumps(RESULT.to_json()))


def test_hostile_text_stays_text() -> None:
    bad = replace(RESULT, title=HOSTILE, model=HOSTILE, command=HOSTILE, workload=HOSTILE, warm_up=HOSTILE)
    page = render_page(bad)
    reader = Reader(page)
    assert [tag for tag, _ in reader.tags].count("script") == 1
    assert "img" not in [tag for tag, _ in reader.tags]
    assert HOSTILE in "".join(reader.text)
    assert HOSTILE.split("'")[0] in printed(bad).replace("\n", "")


def test_bars_and_lines_stand_where_their_values_are() -> None:
    bar = Bar("step", [("a", "--r0", 3.0), ("b", "--r1", 1.0)], 2.0, "note")
    svg = bar_plot([bar], str)
    widths = [float(width) for width in re.findall(r'<rect x="[\d.]+" y="\d+" width="([\d.]+)"', svg)]
    assert widths[0] == pytest.approx(3 * widths[1], rel=1e-3)
    line = line_plot(["1", "2", "4"], [Line("p50", "--r0", [0.0, None, 1.0])], "at once", str)
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', line)]
    assert len(heights) == 2
    assert heights[0] > heights[1]


@pytest.mark.parametrize("most", [1e-4, 0.7, 1.0, 3.0, 99.0, 12345.0])
def test_ticks_are_few_and_cover_everything(most: float) -> None:
    values = ticks(most)
    assert values[0] == 0
    assert most <= values[-1] * 1.00001
    assert len(values) <= 12


def test_the_verdict_names_what_the_time_above_the_floor_is_spent_on() -> None:
    text = verdict(kind(1))
    assert text.startswith("Decode at batch 1 takes 1.31x the time of reading its bytes once (15 ms; 230 MB at 20")
    assert "attention 2.5 ms, linears 1.0 ms" in text
    prompt = verdict(kind(1, decode=False, tokens=512.0))
    assert prompt.startswith("A prompt chunk of 512 tokens takes 0.03x the time of its arithmetic")


def test_what_spoils_a_measurement_is_said() -> None:
    assert RESULT.cautions == ()
    slower = replace(RESULT.points[0], after=Limits(10e9, 200e9), foreign_share=0.4)
    said = " ".join(replace(RESULT, points=(slower,)).cautions)
    assert "Others took up to 40 % of the CPU time" in said
    assert "bandwidth changed by more than 15 %" in said


def test_the_share_of_others_is_busy_time_that_is_not_our_own() -> None:
    begin, end = CpuTime(100.0, 50.0, 10.0), CpuTime(120.0, 65.0, 19.0)
    assert begin.foreign_share(end) == pytest.approx((15 - 9) / 20)
    assert begin.foreign_share(begin) is None
    assert begin.foreign_share(None) is None


@pytest.mark.parametrize("width", [140, 80])
def test_the_terminal_shows_the_same_figures_whatever_its_width(width: int) -> None:
    text = printed(RESULT, width)
    assert "…" not in text
    for words in ("single stream", "812", "whole step", "decode at batch 8", "bound by", "Output goes from"):
        assert words in text
