"""The page stands alone, carries the summaries' numbers, and shows hostile text as text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from octavo.kv.strategies import STRATEGIES
from octavo.report.comparison import Comparison, ComparisonError
from octavo.report.page import pack, render_page, write_page
from octavo.report.summary import KV_LINES
from octavo.report.table import bar, render
from octavo.report.wording import count, percent, rate, seconds, size
from tests.report.simulated import LENGTHS, simulate, simulated

HOSTILE = """</script><script>alert(1)</script><img src=x onerror=alert(1)>"'{{data}}&amp;"""
VOID = {"meta", "link", "img", "br", "hr", "input"}


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return simulated()


@pytest.fixture(scope="module")
def page(comparison) -> str:
    return render_page(comparison, "report.json")


class Reader(HTMLParser):
    """Collects elements, attributes and text; fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())


def embedded(text: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found.group(1))


def test_the_page_parses_and_loads_nothing(page):
    reader = Reader(page)
    for tag, attributes in reader.tags:
        assert tag not in ("link", "iframe", "object", "embed", "img", "base")
        assert "src" not in attributes
        for name, value in attributes.items():
            assert not name.startswith("on"), "no handlers in attributes"
            if name == "href":
                assert value == "./report.json"
    assert not re.search(r"@import|url\(\s*['\"]?(?!#|\$)", page.replace("`url(#${id})`", ""))
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|importScripts|innerHTML|eval)\b", page)
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "the SVG namespace is a name and is not fetched"
    assert "default-src 'none'" in page


def test_plain_html_carries_the_figures_of_every_strategy(comparison, page):
    words = Reader(page).words
    assert comparison.verdict in words
    for s in comparison.summaries:
        row = re.search(rf'<tr><th scope="row">{s.strategy}.*?</tr>', page, re.DOTALL)
        assert row
        cells = re.findall(r"<td>(.*?)</td>", row.group(0))
        plain = [re.sub(r"<[^>]+>", "", cell) for cell in cells]
        assert plain[:4] == [
            f"{s.mean_running:.1f}",
            f"{s.peak_running:,}",
            percent(s.holding_mean),
            percent(s.holding_peak),
        ]
        assert plain[5:] == [
            f"{s.preemptions:,}",
            seconds(s.ttft.p50),
            seconds(s.ttft.p99),
            seconds(s.itl.p50),
            seconds(s.itl.p99),
            rate(s.tokens_per_second),
            seconds(s.seconds),
        ]
        widths = re.findall(r'<i class="(\w+)" style="width:([\d.]+)%"', cells[4])
        assert {key: float(width) for key, width in widths} == pytest.approx(
            {key: 100 * share for key, share in s.kv_mean.items() if share > 0}, abs=0.006
        )


def test_the_plots_data_equals_the_summaries(comparison, page):
    data = embedded(page)
    assert data == json.loads(json.dumps(pack(comparison)))
    assert [line["key"] for line in data["lines"]] == list(KV_LINES)
    for run, packed in zip(comparison.runs, data["runs"], strict=True):
        s = run.summary
        assert (packed["name"], packed["peak"], packed["preempted"]) == (s.strategy, s.peak_running, s.preemptions)
        assert packed["kv_mean"] == pytest.approx(s.kv_mean, abs=1e-5)
        assert len(packed["requests"]) == s.requests
        for at in range(len(packed["timeline"]["t"])):
            assert sum(packed["timeline"][key][at] for key in KV_LINES) == pytest.approx(1, abs=1e-3)


def test_the_packed_map_is_the_recorded_map(comparison):
    for run, packed in zip(comparison.runs, pack(comparison)["runs"], strict=True):
        owners, written = [], []
        for column in packed["map"]["columns"]:
            codes = [code for code, cells in zip(column[::2], column[1::2], strict=True) for _ in range(cells)]
            owners.append([-1 if code < 0 else code >> 1 for code in codes])
            written.append([0 if code < 0 else code & 1 for code in codes])
        assert owners == run.block_map["owner"]
        assert written == run.block_map["written"]


def test_times_begin_at_the_first_arrival_whatever_the_clock_said():
    late = simulate("paged", lengths=[(at + 1e6, prompt, output) for at, prompt, output in LENGTHS[:6]])
    packed = pack(replace(simulated(["paged"]), runs=(late,)))["runs"][0]
    assert packed["requests"][0][1] == 0
    assert 0 < packed["timeline"]["t"][-1] < 100


def test_hostile_text_stays_text():
    ids = [f"{HOSTILE}{i}" for i in range(6)]
    run = simulate("paged", lengths=LENGTHS[:6], ids=ids)
    plain = simulated(["paged"])
    bad = replace(
        plain,
        title=HOSTILE,
        model=HOSTILE,
        machine=HOSTILE,
        command=HOSTILE,
        workload=HOSTILE,
        verdict=HOSTILE,
        notes=(HOSTILE,),
        runs=(replace(run, summary=replace(run.summary, strategy=HOSTILE, waited_by_cause={HOSTILE: 1.0})),),
    )
    text = render_page(bad, 'javascript:alert(1)".json')
    reader = Reader(text)
    assert [tag for tag, _ in reader.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in reader.tags]
    assert HOSTILE in "".join(reader.text)
    links = [attributes["href"] for tag, attributes in reader.tags if tag == "a"]
    assert links == ["./javascript%3Aalert%281%29%22.json"]
    assert [row[0] for row in embedded(text)["runs"][0]["requests"]] == ids


def test_the_page_without_data_is_small(comparison, page):
    assert len(render_page(replace(comparison, runs=()), "report.json").encode()) < 60_000
    assert len(page.encode()) < 500_000


def test_files_are_written_side_by_side(comparison, tmp_path: Path):
    write_page(tmp_path / "out.html", comparison)
    data = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert Comparison.from_json(data).to_json() == comparison.to_json()
    assert 'href="./out.json"' in (tmp_path / "out.html").read_text(encoding="utf-8")


def test_the_json_goes_there_and_back(comparison):
    data = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    back = Comparison.from_json(data)
    assert back.to_json() == comparison.to_json()
    assert back.summaries == comparison.summaries
    assert (data["schema"], data["version"]) == ("octavo.comparison", 1)
    assert set(data) == {
        *("schema", "version", "title", "model", "machine", "command", "workload", "verdict", "kv_bytes"),
        *("block_size", "max_model_len", "simulated", "notes", "runs"),
    }
    assert set(data["runs"][0]) == {"summary", "timeline", "block_map", "requests"}


def test_json_of_another_kind_is_refused_with_the_reason(comparison):
    data = comparison.to_json()
    with pytest.raises(ComparisonError, match="version 99"):
        Comparison.from_json(data | {"version": 99})
    with pytest.raises(ComparisonError, match="machine"):
        Comparison.from_json({name: value for name, value in data.items() if name != "machine"})


@pytest.mark.parametrize("width", [120, 118, 80])
def test_the_terminal_table_fits(comparison, width):
    console = Console(width=width, color_system=None, record=True, file=StringIO())
    console.print(render(comparison))
    text = console.export_text()
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    joined = " ".join(text.split())
    assert comparison.verdict in joined
    for s in comparison.summaries:
        assert s.strategy in joined
        assert rate(s.tokens_per_second) in joined
        assert percent(s.holding_peak) in joined
    assert "live" in joined


def test_the_bar_is_full_and_in_proportion(comparison):
    for name, s in zip(STRATEGIES, comparison.summaries, strict=True):
        assert s.strategy == name
        text = bar(s.kv_mean, 40).plain
        assert len(text) == 40
        assert text.count("█") == pytest.approx(40 * s.kv_mean["live"], abs=1)
        assert bar(s.kv_mean, 40, ascii_only=True).plain.isascii()


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (percent(0), "0 %"),
        (percent(0.0004), "<0.1 %"),
        (percent(0.004), "0.4 %"),
        (percent(0.934), "93 %"),
        (percent(0.9999), "99.9 %"),
        (percent(1), "100 %"),
        (size(512), "512 B"),
        (size(377_487_360), "377 MB"),
        (size(12.88e9), "12.9 GB"),
        (size(999.9e6), "1 GB"),
        (seconds(0), "0 ms"),
        (seconds(0.0012), "1.2 ms"),
        (seconds(0.9999), "1.00 s"),
        (seconds(12.34), "12.3 s"),
        (seconds(208.4), "208 s"),
        (count(8192), "8,192"),
        (count(1.94), "1.9"),
        (rate(3.21), "3.2"),
        (rate(12345.6), "12,346"),
    ],
)
def test_numbers_in_words(made, words):
    assert made == words
