"""A replay's page stands alone, carries the report's numbers, leaves out what is not there; so does the table."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from octavo.planner.outcome import KV_LINES, Life
from octavo.report.replay_data import Figures, ReplayReport
from octavo.report.replay_figures import binding, rows, waste
from octavo.report.replay_pack import pack
from octavo.report.replay_page import render_page, write_page
from octavo.report.replay_table import render
from octavo.report.replay_verdict import fidelity_line, verdict
from octavo.report.wording import percent, seconds
from tests.report.replaying import change, outcome, replayed, report
from tests.report.test_page import HOSTILE, Reader, embedded

SECTIONS = ["verdict", "budget", "map", "timeline", "requests", "summary", "rates", "changes", "facts"]


@pytest.fixture(scope="module")
def real() -> ReplayReport:
    return replayed()


@pytest.fixture(scope="module")
def page() -> str:
    return render_page(report(), "report.json")


def sections(text: str) -> list[str | None]:
    return [attributes["id"] for tag, attributes in Reader(text).tags if tag == "section"]


def test_the_page_parses_and_loads_nothing(page):
    for tag, attributes in Reader(page).tags:
        assert tag not in ("link", "iframe", "object", "embed", "img", "base")
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "./report.json") == "./report.json"
    assert not re.search(r"@import|url\(\s*['\"]?(?!#|\$)", page.replace("`url(#${id})`", ""))
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|importScripts|innerHTML|eval)\b", page)
    assert set(re.findall(r"https?://[^\s\"'<>)]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page


def test_the_sections_stand_in_the_readers_order(page):
    assert sections(page) == SECTIONS


@pytest.mark.parametrize(
    ("missing", "gone"),
    [
        ({"curves": None}, {"rates"}),
        ({"changes": None}, {"changes"}),
        ({"changes": ()}, {"changes"}),
        ({"outcomes": ()}, {"budget", "map", "timeline", "requests", "summary"}),
        ({"outcomes": (outcome(map=None),)}, {"map"}),
        ({"outcomes": (outcome(timeline=None),)}, {"timeline"}),
        ({"outcomes": (outcome(lives=()),)}, {"requests"}),
        ({"budget": None, "fidelity": None, "slo": None, "settings": ()}, set()),
    ],
)
def test_what_is_not_there_is_left_out(missing, gone):
    assert sections(render_page(report(**missing), "r.json")) == [name for name in SECTIONS if name not in gone]


def test_plain_html_carries_verdict_fidelity_and_figures(real):
    for made in (report(), real):
        words = Reader(render_page(made, "r.json")).words
        assert verdict(made) in words
        assert words.count(fidelity_line(made)) == 2
        assert made.command in words
        for row in rows(made):
            for o in made.outcomes:
                assert row.cell(o) in words


def test_the_fidelity_box_holds_every_assumption_and_source(page):
    words = Reader(page).words
    for text in ("the link runs at 16 GB/s", "line 7: no number of tokens", "engine profile octavo", "Weights are an"):
        assert text in words


def test_the_plots_data_is_the_reports():
    data = embedded(render_page(report(), "r.json"))
    assert data == json.loads(json.dumps(pack(report())))
    run = data["runs"][1]
    assert run["timeline"]["t"] == [0, 3, 7, 10]
    assert run["timeline"]["running"] == [4, 38, 6, 0]
    assert run["timeline"]["causes"] == [{}, {"memory: full": 9, "slots": 2}, {"memory: full": 1}, {}]
    assert run["timeline"]["live"] == [0.2, 0.9, 0.5, 0]
    assert run["map"]["columns"][1] == [3, 1, 2, 1, 1, 1, -2, 1]
    assert run["requests"][1][:4] == ["a-1", 0.5, 2, 2.5]
    assert run["requests"][1][12] == [0, 2, 1, 2.5, 2, 4, 3, 5, 2, 9]
    assert data["ttft_bound"] == 1
    assert data["curves"][1]["knee"] == 2.6


def test_a_real_replays_map_and_lives_fit_together(real):
    for o, run in zip(real.outcomes, pack(real)["runs"], strict=True):
        assert len(run["requests"]) == o.requests
        assert set(run["map"]["requests"]) <= {row[0] for row in run["requests"]}
        for column in run["map"]["columns"]:
            assert sum(column[1::2]) == run["map"]["rows"]
        for at in range(len(run["timeline"]["t"]) - 1):
            assert sum(run["timeline"][key][at] for key in KV_LINES) == pytest.approx(1, abs=2e-3)


def test_budget_bars_are_as_wide_as_their_bytes(page):
    budget = re.search(r'<section id="budget">.*?</section>', page, re.DOTALL)
    assert budget
    bars = {
        kind: (float(left), float(width))
        for kind, left, width in re.findall(
            r'<i class="([\w ]+)" style="left:([\d.]+)%;width:([\d.]+)%"', budget.group()
        )
    }
    assert bars["weights"] == pytest.approx((10, 100 * 14 / 24), abs=0.02)
    assert bars["pool"] == pytest.approx((75, 25), abs=0.02)
    assert bars["live"] == (0, 61)
    assert bars["cached"] == (61, 20)
    assert "128 MiB logits" in budget.group()


def test_the_tornado_ranks_and_marks(page):
    text = re.search(r'<section id="changes">.*?</section>', page, re.DOTALL)
    assert text
    names = re.findall(r'<span class="name">([^<]+)<', text.group())
    assert names == ["fp8 KV", "blocks of 8", "no prefix cache", "TP 2"]
    assert [kind.strip() for kind in re.findall(r'<i class="((?:more|less)[ \w]*)"', text.group())] == [
        *("more", "more none", "less")
    ]
    assert "× 1.88" in text.group()
    assert "cannot run: one device is there" in text.group()
    assert "octavo: --octavo fp8 KV" in text.group()


def test_many_changes_are_folded():
    many = tuple(change(f"knob {i}", Figures(30.0, 7.0 + i / 10, 10.0, 9.0)) for i in range(20))
    text = render_page(report(changes=many), "r.json")
    assert "6 more, with less gain" in text
    assert all(f"knob {i}<" in text for i in range(20))


def test_a_change_without_any_difference_says_so():
    same = replace(change("no prefix cache", None, 0.0), after=change("", None).before)
    assert '<span class="says">no difference</span>' in render_page(report(changes=(same,)), "r.json")


def test_hostile_text_stays_text():
    lives = tuple(Life(f"{HOSTILE}{i}", 0.0, 1, 1, 0.0, 0.1, 1.0, HOSTILE, 0, 0, {HOSTILE: 1.0}) for i in range(2))
    bad_outcome = outcome(HOSTILE, lives=lives, waited={HOSTILE: 9.0}, refusals=((HOSTILE, HOSTILE),))
    made = report()
    bad = report(
        **dict.fromkeys(("title", "command", "trace", "model", "device", "bottleneck"), HOSTILE),
        outcomes=(bad_outcome,),
        settings=(replace(made.settings[0], name=HOSTILE, value=HOSTILE, source=HOSTILE),),
        curves=(replace(made.curves[0], strategy=HOSTILE),),
        changes=(replace(made.changes[0], name=HOSTILE, flag_vllm=HOSTILE, note=HOSTILE),),
        budget=replace(made.budget, lines=(replace(made.budget.lines[0], name=HOSTILE, source=HOSTILE),)),
        fidelity=replace(made.fidelity, statement=HOSTILE, assumptions=(HOSTILE,)),
        bad_lines=(replace(made.bad_lines[0], reason=HOSTILE),),
        notes=(HOSTILE,),
    )
    text = render_page(bad, 'javascript:alert(1)".json')
    reader = Reader(text)
    assert [tag for tag, _ in reader.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in reader.tags]
    assert [attributes["href"] for tag, attributes in reader.tags if tag == "a"] == [
        "./javascript%3Aalert%281%29%22.json"
    ]
    assert [row[0] for row in embedded(text)["runs"][0]["requests"]] == [life.id for life in lives]


def test_the_page_without_data_is_small():
    assert len(render_page(report(outcomes=(), curves=None, changes=None), "r.json").encode()) < 100_000


def test_files_are_written_side_by_side(tmp_path: Path):
    write_page(tmp_path / "out.html", report())
    assert ReplayReport.from_json(json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))) == report()
    assert 'href="./out.json"' in (tmp_path / "out.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [160, 120, 80])
def test_the_terminal_table_fits_and_says_everything(real, width):
    console = Console(width=width, color_system=None, record=True, file=StringIO())
    console.print(render(real))
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    joined = " ".join(text.split())
    assert verdict(real) in joined
    assert fidelity_line(real) in joined
    for o in real.outcomes:
        assert o.strategy in joined
        assert seconds(o.ttft.p99) in joined
        assert binding(o) in joined
        assert percent(waste(o)) in joined


def test_the_fidelity_line_is_printed_without_any_outcome():
    console = Console(width=80, color_system=None, record=True, file=StringIO())
    console.print(render(report(outcomes=())))
    text = " ".join(console.export_text().split())
    assert fidelity_line(report()) in text
    assert "1 line of the trace left out; line 7: no number of tokens" in text


def test_hits_stand_beside_ideal_and_belady():
    cells = {(row.group, row.name): row.cell(outcome()) for row in rows(report())}
    assert cells["prefix hits", ""] == "20 %"
    assert cells["prefix hits", "ideal"] == "40 %"
    assert cells["prefix hits", "Belady"] == "30 %"
    assert cells["upper bound", "mean"] == "36.6"
    assert cells["binding limit", ""] == "memory: full"
    assert cells["binding limit", "of the waiting"] == "81 %"
    assert cells["waiting", "memory: full"] == "8.10"
