"""One self-contained HTML page for a replay: verdict, memory, time, requests, load, changes, fidelity."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from octavo.planner.outcome import SCHEMA
from octavo.report.page import AXIS, asset, fill, json_for_html
from octavo.report.replay_bars import pools, tornado, waterfall
from octavo.report.replay_data import ReplayReport, write_json
from octavo.report.replay_figures import rows
from octavo.report.replay_pack import pack
from octavo.report.replay_verdict import changes_sentence, fidelity_line, judged_by, verdict
from octavo.report.wording import percent, seconds

SCRIPTS = ("frame.js", "charts.js", "replay_map.js", "replay_lives.js", "replay_rates.js", "replay.js")
STYLES = ("style.css", "bench.css", "replay.css")
SHOWN_BAD_LINES = 10


def write_page(path: Path, report: ReplayReport) -> None:
    """Write the page to `path` and its data, which the page links to, beside it with the suffix .json."""
    data = path.with_suffix(".json")
    path.write_text(render_page(report, data.name), encoding="utf-8")
    write_json(data, report)


def render_page(report: ReplayReport, json_name: str) -> str:
    """The page as text; `json_name`: file name of the JSON beside it. What the report does not have is left out."""
    parts = {
        "title": escape(report.title),
        "style": "\n".join(asset(name) for name in STYLES),
        "script": '(() => {\n"use strict";\n' + "\n".join(asset(name) for name in SCRIPTS) + "\n})();",
        "subtitle": " · ".join(escape(part) for part in (report.trace, report.model, report.device) if part),
        "verdict": _verdict(report),
        "fidelity": escape(fidelity_line(report)),
        "budget": _budget(report),
        "map": _map(report),
        "timeline": _timeline(report),
        "requests": _requests(report),
        "figures": _figures(report),
        "rates": _rates(report),
        "changes": _changes(report),
        "facts": _facts(report, json_name),
        "data": json_for_html(pack(report)),
    }
    return fill("replay.html", parts)


def section(name: str, parts: Mapping[str, str]) -> str:
    """A section of replay_sections.html, filled."""
    text = asset("replay_sections.html")
    found = re.search(rf"<!-- {name} -->\n(.*?)(?=<!-- |\Z)", text, re.DOTALL)
    assert found is not None, f"replay_sections.html has no section {name}"
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match.group(1)], found.group(1))


def _verdict(report: ReplayReport) -> str:
    """The change to make stands out."""
    text, change = verdict(report), changes_sentence(report.changes)
    if not change or not text.endswith(change):
        return escape(text)
    return f"{escape(text.removesuffix(change))}<strong>{escape(change)}</strong>"


# -- sections ----------------------------------------------------------------------------------------------------------


def _budget(report: ReplayReport) -> str:
    outcome = report.main
    if outcome is None:
        return ""
    parts = [
        '<section id="budget"><h2>Where the memory goes</h2>',
        '<p class="lead">Every byte is in exactly one line. Inside the pool: means over the busy time under '
        f"{escape(outcome.strategy)}. Hatched: what an estimate leaves open.</p>",
        waterfall(report.budget, outcome),
    ]
    if len(report.outcomes) > 1:
        parts += ["<h3>The pool under each strategy</h3>", pools(report.outcomes)]
    return "".join([*parts, "</section>"])


def _map(report: ReplayReport) -> str:
    return section("map", {"axis": AXIS}) if any(o.map and o.map.t for o in report.outcomes) else ""


def _timeline(report: ReplayReport) -> str:
    if not any(o.timeline and o.timeline.t for o in report.outcomes):
        return ""
    return section("timeline", {"axis": AXIS, "waiting_table": _waiting(report)})


def _waiting(report: ReplayReport) -> str:
    """The plots' numbers for readers without scripts."""
    lines = [row for row in rows(report) if row.group == "waiting"]
    if not lines:
        return "<p>No request waited under any strategy.</p>"
    body = [(row.name, *(row.cell(o) for o in report.outcomes)) for row in lines]
    return table("Waiting in the mean, by cause", [o.strategy for o in report.outcomes], body)


def _requests(report: ReplayReport) -> str:
    return section("requests", {"axis": AXIS}) if any(o.lives for o in report.outcomes) else ""


def _figures(report: ReplayReport) -> str:
    """Every figure of every strategy; the deployed one is marked."""
    if not report.outcomes:
        return ""
    main, body, before = report.main, [], None
    for row in rows(report):
        group = "" if row.group == before else escape(row.group)
        name = f"{group}<small>{escape(row.name)}</small>"
        same = ' class="same"' if row.group == before else ""
        cells = "".join(
            f"<td{' class=chosen' if o is main and len(report.outcomes) > 1 else ''}>{escape(row.cell(o))}</td>"
            for o in report.outcomes
        )
        body.append(
            f'<tr{same}><th scope="row" aria-label="{escape(f"{row.group} {row.name}")}">{name}</th>{cells}</tr>'
        )
        before = row.group
    head = "".join(f'<th scope="col">{escape(o.strategy)}</th>' for o in report.outcomes)
    return (
        '<section id="summary"><h2>All figures by strategy</h2><div class="scroll"><table class="plain figures"><thead>'
        f'<tr><th scope="col">Figure</th>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div></section>'
    )


def _rates(report: ReplayReport) -> str:
    if not report.curves:
        return ""
    knees = [
        f"{curve.strategy} up to {curve.knee:.2f} requests/s" + (f" (± {percent(curve.error)})" if curve.error else "")
        for curve in report.curves
        if curve.knee is not None
    ]
    words = "The same trace, its arrivals scaled to each rate."
    if report.slo is not None:
        kept = ", ".join(knees) or "no strategy at any rate tried"
        words += f" The SLO ({report.slo}) is kept by {kept}: the dashed uprights. Dotted: every request within it."
    return section("rates", {"words": escape(words), "curves_table": _curves(report)})


def _curves(report: ReplayReport) -> str:
    heads = ("requests/s offered", "goodput", "within SLO", "running", "TTFT p99")
    body = [
        (
            curve.strategy,
            f"{rate:.3g}",
            "–" if curve.goodput[i] is None else f"{curve.goodput[i]:.2f}",
            "–" if curve.attained[i] is None else percent(curve.attained[i] or 0.0),
            f"{curve.running[i]:,.1f}",
            seconds(curve.ttft_p99[i]),
        )
        for curve in report.curves or ()
        for i, rate in enumerate(curve.rates)
    ]
    return table("Strategy", heads, body)


def _changes(report: ReplayReport) -> str:
    if not report.changes:
        return ""
    judged = judged_by(report.changes[0])
    scarce = f"<p>{escape(report.bottleneck)}</p>" if report.bottleneck else ""
    return (
        '<section id="changes"><h2>What to change</h2>'
        f'{scarce}<p class="lead">Each change on the same trace, the '
        f"largest gain in {judged} first; to the right of the line is better, the thin line is the error bar. Pale: no "
        f"more than its error bar.</p>{tornado(report.changes)}</section>"
    )


def table(first: str, columns: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A plain table, everything in it escaped."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in (first, *columns))
    lines = []
    for name, *cells in body:
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{values}</tr>')
    return f'<table class="plain"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


# -- fidelity ----------------------------------------------------------------------------------------------------------


def _facts(report: ReplayReport, json_name: str) -> str:
    items = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in _items(report, json_name))
    return f"<dl>{items}</dl>"


def _items(report: ReplayReport, json_name: str) -> Iterator[tuple[str, str]]:
    fidelity = report.fidelity
    yield "Times", escape(fidelity_line(report))
    if fidelity is not None and fidelity.assumptions:
        yield "Assumptions", _list(fidelity.assumptions)
    yield "Simulated", HOW
    yield "Trace", escape(report.trace) + _bad_lines(report)
    if report.slo is not None:
        yield "SLO", escape(str(report.slo))
    if report.settings:
        body = [(setting.name, setting.value, setting.source) for setting in report.settings]
        yield "Settings", f'<div class="scroll">{table("Setting", ("value", "from"), body)}</div>'
    yield "Figures", escape(FIGURES)
    refusals = [f"{o.strategy}: {name}: {reason}" for o in report.outcomes for name, reason in o.refusals[:3]]
    if refusals:
        yield "Refused", _list(refusals)
    for note in report.notes:
        yield "Note", escape(note)
    yield "Again", f"<code>{escape(report.command)}</code>"
    yield "Data", f'<a href="{escape("./" + quote(json_name))}">{escape(json_name)}</a>, schema {SCHEMA}'


HOW = (
    "The scheduler and the KV managers are those that serve, on a virtual clock; a timing model stands in for the "
    "device. No tokens are computed."
)
FIGURES = (
    "Means are weighted by time. TTFT: from arrival to the first token. ITL: between two tokens of a request. E2E: "
    "from arrival to the last token. Percentiles: within 0.5 %. Upper bound: requests at once for a scheduler that "
    "knows all lengths and packs token states without waste. Waste: slack, reserved, fragmented. Ideal, Belady: "
    "hits of an unlimited cache, and of an optimal one of the pool's size."
)


def _list(entries: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(entry)}</li>' for entry in entries)}</ul>"


def _bad_lines(report: ReplayReport) -> str:
    if not report.bad_lines:
        return ""
    many = len(report.bad_lines)
    lines = [f"line {bad.line}: {bad.reason}" for bad in report.bad_lines[:SHOWN_BAD_LINES]]
    words = f"{many} {'line' if many == 1 else 'lines'} left out"
    return f"<details><summary>{words}</summary>{_list(lines)}</details>"
