"""One self-contained HTML page for a comparison: readable without JavaScript, drawn by a few hundred lines of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from octavo.report.comparison import VERSION, Comparison, StrategyRun, write_json
from octavo.report.summary import KV_LINES, RunSummary
from octavo.report.wording import LINE_MEANINGS, LINE_NAMES, percent, rate, seconds, size

SCRIPTS = ("frame.js", "charts.js", "map.js")
AXIS = '<p class="js switch"><button type="button" class="axis" aria-pressed="false"></button></p>'
ADVICE = ("Change ", "Raise ", "Run ", "To find ", "Memory is really full")


def write_page(path: Path, comparison: Comparison) -> None:
    """Write the page to `path` and its data, which the page links to, beside it with the suffix .json."""
    data = path.with_suffix(".json")
    path.write_text(render_page(comparison, data.name), encoding="utf-8")
    write_json(data, comparison)


def render_page(comparison: Comparison, json_name: str) -> str:
    """The page as text; `json_name`: file name of the JSON beside it."""
    parts = {
        "title": escape(comparison.title),
        "style": asset("style.css"),
        "axis": AXIS,
        "script": '(() => {\n"use strict";\n' + "\n".join(asset(name) for name in SCRIPTS) + "\n})();",
        "subtitle": _subtitle(comparison),
        "verdict": _verdict(comparison.verdict),
        "summary_table": _summary_table(comparison.summaries),
        "ledger_table": _ledger_table(comparison.summaries),
        "waiting_table": _waiting_table(comparison.summaries),
        "facts": _facts(comparison, json_name),
        "data": json_for_html(pack(comparison)),
    }
    return fill("template.html", parts)


def fill(template: str, parts: Mapping[str, str]) -> str:
    """A page from its template: each {{name}} becomes the part of that name."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found.group(1)], asset(template))


def asset(name: str) -> str:
    """The text of a file that the pages are made of."""
    return resources.files("octavo.report").joinpath("page", name).read_text(encoding="utf-8")


def json_for_html(value: object) -> str:
    """JSON that can stand inside a script element whatever its strings hold."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# -- data for the plots ------------------------------------------------------------------------------------------------


def pack(comparison: Comparison) -> dict[str, object]:
    """What the scripts draw: times from the run's beginning, the block map in runs of equal cells."""
    return {
        "block": comparison.block_size,
        "lines": [{"key": key, "name": LINE_NAMES[key], "meaning": LINE_MEANINGS[key]} for key in KV_LINES],
        "runs": [_pack_run(run) for run in comparison.runs],
    }


def _pack_run(run: StrategyRun) -> dict[str, object]:
    seconds_run = run.summary.seconds or 1.0
    times: list[float] = list(run.timeline["t"])  # type: ignore[arg-type]
    arrivals: list[float] = [row["arrival"] for row in run.requests]  # type: ignore[misc]
    zero = min([*arrivals, *times], default=0.0)
    figures = run.summary
    return {
        "name": figures.strategy,
        "pool": figures.pool_tokens,
        "peak": figures.peak_running,
        "mean": round(figures.mean_running, 3),
        "kv_mean": {name: round(value, 5) for name, value in figures.kv_mean.items()},
        "waited": {cause: round(spent / seconds_run, 3) for cause, spent in figures.waited_by_cause.items()},
        "preempted": figures.preemptions,
        "seconds": round(figures.seconds, 3),
        "timeline": {**run.timeline, "t": _shifted(times, zero)},
        "map": _pack_map(run.block_map, zero),
        "requests": [_pack_request(row, zero) for row in run.requests],
    }


def _shifted(times: Iterable[object], zero: float) -> list[float | None]:
    return [None if time is None else round(time - zero, 3) for time in times]  # type: ignore[operator]


def _pack_request(row: Mapping[str, object], zero: float) -> list[object]:
    """[id, arrival, admitted, first token, finished, prompt, output, cached, preemptions, reason]"""
    times = _shifted((row[name] for name in ("arrival", "admitted", "first_token", "finished")), zero)
    counts = [row[name] for name in ("prompt_tokens", "output_tokens", "cached_tokens", "preemptions")]
    return [row["id"], *times, *counts, row["reason"]]


def _pack_map(block_map: Mapping[str, object], zero: float) -> dict[str, object]:
    """A column is [code, cells, code, cells, …]; code -1: nobody, else 2 x owner + (1 if written)."""
    columns = []
    for owners, written in zip(block_map["owner"], block_map["written"], strict=True):  # type: ignore[call-overload]
        column: list[int] = []
        for owner, full in zip(owners, written, strict=True):
            code = 2 * owner + full if owner >= 0 else -1
            if column and column[-2] == code:
                column[-1] += 1
            else:
                column += [code, 1]
        columns.append(column)
    rows = len(block_map["owner"][0]) if columns else 0  # type: ignore[index]
    return {"t": _shifted(block_map["t"], zero), "rows": rows, "columns": columns}  # type: ignore[arg-type]


# -- plain HTML --------------------------------------------------------------------------------------------------------


def _subtitle(c: Comparison) -> str:
    blocks = max((s.pool_tokens for s in c.summaries), default=0) // c.block_size
    facts = [
        escape(c.model),
        f"{size(_kv_bytes(c))} of KV memory",
        f"{blocks:,} blocks of {c.block_size} tokens",
        f"sequences of up to {c.max_model_len:,} tokens",
    ]
    if c.simulated:
        facts.append("<em>simulated</em>")
    return " · ".join(facts)


def _kv_bytes(c: Comparison) -> int:
    """As asked for, or what the pools came to when the engine chose."""
    return c.kv_bytes or max((s.pool_bytes for s in c.summaries), default=0)


def _verdict(text: str) -> str:
    """The sentence that says what to do stands out."""
    sentences = re.split(r"(?<=[.!?]) (?=[A-Za-z])", text)
    marked = [f"<strong>{escape(s)}</strong>" if s.startswith(ADVICE) else escape(s) for s in sentences]
    return " ".join(marked)


def _bar(shares: Mapping[str, float]) -> str:
    there = [(key, shares[key]) for key in KV_LINES if shares[key] > 0]
    spans = (
        f'<i class="{key}" style="width:{100 * share:.2f}%" title="{LINE_NAMES[key]}: {percent(share)}"></i>'
        for key, share in there
    )
    return f'<span class="bar">{"".join(spans)}</span>'


def _rest(shares: Mapping[str, float]) -> str:
    """Where the part that holds no token states is, largest first."""
    rest = sorted(((v, k) for k, v in shares.items() if k not in ("live", "cached") and v >= 0.01), reverse=True)
    return " · ".join(f"<span>{percent(v)} {LINE_NAMES[k]}</span>" for v, k in rest[:2])


def _time(s: RunSummary, value: float) -> str:
    """A duration; a dash where nothing ran."""
    return seconds(value) if s.peak_running else "–"


Cell = Callable[[RunSummary], str]
COLUMNS: tuple[tuple[str, str, Cell], ...] = (
    ("Running", "mean", lambda s: f"{s.mean_running:.1f}"),
    ("", "peak", lambda s: f"<b>{s.peak_running:,}</b>"),
    ("Holding tokens", "mean", lambda s: percent(s.holding_mean)),
    ("", "peak", lambda s: f"<b>{percent(s.holding_peak)}</b>"),
    ("Where the pool was, over time", "", lambda s: f"{_bar(s.kv_mean)}<small>{_rest(s.kv_mean)}</small>"),
    ("Preempted", "times", lambda s: f"{s.preemptions:,}"),
    ("First token", "p50", lambda s: _time(s, s.ttft.p50)),
    ("", "p99", lambda s: _time(s, s.ttft.p99)),
    ("Between tokens", "p50", lambda s: _time(s, s.itl.p50)),
    ("", "p99", lambda s: _time(s, s.itl.p99)),
    ("Output", "tokens/s", lambda s: rate(s.tokens_per_second)),
    ("Total", "time", lambda s: _time(s, s.seconds)),
)


def _summary_table(summaries: Sequence[RunSummary]) -> str:
    groups, under = [], []
    for index, (group, unit, _) in enumerate(COLUMNS):
        if group:
            following = COLUMNS[index + 1 :]
            span = 1 + next((i for i, column in enumerate(following) if column[0]), len(following))
            groups.append(f'<th scope="colgroup" colspan="{span}">{group}</th>')
        under.append(f'<th scope="col">{unit}</th>')
    rows = []
    for s in summaries:
        cells = "".join(f"<td>{cell(s)}</td>" for _, _, cell in COLUMNS)
        refused = f"<small>{s.refused:,} of {s.requests + s.refused:,} refused</small>" if s.refused else ""
        rows.append(f'<tr><th scope="row">{escape(s.strategy)}{refused}</th>{cells}</tr>')
    return (
        f'<table class="summary"><thead><tr><th rowspan="2" scope="col">Strategy</th>{"".join(groups)}</tr>'
        f"<tr>{''.join(under)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _ledger_table(summaries: Sequence[RunSummary]) -> str:
    """Every ledger line of every strategy, which is the plots' legend too."""
    names = "".join(f'<th scope="colgroup" colspan="2">{escape(s.strategy)}</th>' for s in summaries)
    under = '<th scope="col">mean</th><th scope="col">peak</th>' * len(summaries)
    rows = []
    for key in KV_LINES:
        cells = "".join(
            f"<td{'' if share > 0 else ' class=nil'}>{percent(share)}</td>"
            for s in summaries
            for share in (s.kv_mean[key], s.kv_peak[key])
        )
        label = f'<i class="swatch {key}"></i>{LINE_NAMES[key]} <small>{LINE_MEANINGS[key]}</small>'
        rows.append(f'<tr><th scope="row">{label}</th>{cells}</tr>')
    return (
        f'<table class="lines"><thead><tr><th rowspan="2" scope="col">Line of the ledger</th>{names}</tr>'
        f"<tr>{under}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _waiting_table(summaries: Sequence[RunSummary]) -> str:
    """Mean number of waiting requests by cause: the plots' numbers for readers without JavaScript."""
    causes = sorted({cause for s in summaries for cause in s.waited_by_cause})
    if not causes:
        return "<p>No request waited under any strategy.</p>"
    head = "".join(f'<th scope="col">{escape(s.strategy)}</th>' for s in summaries)
    rows = "".join(
        f'<tr><th scope="row">{escape(cause)}</th>'
        + "".join(f"<td>{s.waited_by_cause.get(cause, 0.0) / (s.seconds or 1.0):.2f}</td>" for s in summaries)
        + "</tr>"
        for cause in causes
    )
    caption = "<caption>Requests waiting, mean over the run, by cause</caption>"
    return (
        f'<table class="waits">{caption}<thead><tr><th scope="col">Cause</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _facts(c: Comparison, json_name: str) -> str:
    if c.simulated:
        how = "Simulated: the real scheduler and the real KV managers, with a timing model in place of the device."
    else:
        how = "Measured: the same requests through the same engine under each strategy, one after the other."
    kv = (
        f"{size(_kv_bytes(c))} ({_kv_bytes(c):,} bytes) for each strategy, blocks of {c.block_size} tokens, "
        f"sequences of up to {c.max_model_len:,} tokens"
    )
    first = c.summaries[0] if c.summaries else None
    served = f" {first.requests + first.refused:,} requests for each strategy." if first else ""
    items = [
        ("What was measured", escape(how)),
        ("Model", escape(c.model)),
        ("Machine", escape(c.machine)),
        ("Requests", escape(c.workload) + served),
        ("KV memory", kv),
        ("Figures", escape(FIGURES)),
        *(("Note", escape(note)) for note in c.notes),
        ("Again", f"<code>{escape(c.command)}</code>"),
        ("Data", f'<a href="{escape(_link(json_name))}">{escape(json_name)}</a>, schema version {VERSION}'),
    ]
    return "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in items)


FIGURES = (
    "Means are weighted by time. “Peak” is the step with most running requests (the fullest of them). Percentiles are "
    "nearest-rank. First token: from arrival to the first token. Never used is known after the fact: slots reserved "
    "for a request that no token had filled when it ended."
)


def _link(name: str) -> str:
    """A file name as a relative address: nothing in it may read as a scheme or a path."""
    return "./" + quote(name)
