"""One self-contained HTML page for a bench: tables and plots without any script, and the whole data inside."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from octavo.benching.figures import Figures, Spread
from octavo.benching.result import SCHEMA, VERSION, BenchResult, PointResult
from octavo.benching.roofline import StepKind
from octavo.report.bench_table import BATCH, SINGLE, Cell, kind_cells, machine_words, part_rows, probed, shown
from octavo.report.page import asset, fill, json_for_html
from octavo.report.plots import Bar, Line, bar_plot, line_plot
from octavo.report.wording import percent, rate, seconds

COLOURS = {
    "linears": "--r0",
    "attention": "--r2",
    "head": "--r3",
    "norm and rope": "--r5",
    "embedding": "--r6",
    "metadata": "--r7",
    "sampling": "--r1",
    "scheduler": "--r4",
    "rest of Python": "--w-other",
    "runner": "--r0",
}
OTHER = "--r8"
KIND_COLUMNS = ("steps", "KV tokens seen", "bytes to read", "GFLOP", "floor ms", "took ms", "ratio", "bound by")
FIGURES = (
    "Times from the moment a request is sent. TTFT: to its first token. ITL: between two deliveries of a request, "
    "tokens that come together are one. TPOT: of a request, time from first to last token over its tokens but the "
    "first. Rates: tokens over the time from the first request sent to the last token. Percentiles are nearest-rank; "
    "every figure is the median of the rounds, figure by figure. Running is weighted by time. A kind of step is the "
    "mean of the middle half of its steps by duration, over all rounds."
)


def write_page(path: Path, result: BenchResult) -> None:
    """Write the page."""
    path.write_text(render_page(result), encoding="utf-8")


def render_page(result: BenchResult) -> str:
    """The page as text."""
    parts = {
        "title": escape(result.title),
        "style": asset("style.css") + asset("bench.css"),
        "subtitle": escape(f"{result.model} · {machine_words(result)}"),
        "verdict": _verdict(result),
        "single": _single(result.single),
        "batches": _batches(result.batches),
        "bars": _bars(result.kinds),
        "kinds_table": _table("Kind of step", KIND_COLUMNS, [(kind.name, *kind_cells(kind)) for kind in result.kinds]),
        "parts_tables": "".join(_parts(kind) for kind in result.detailed),
        "facts": _facts(result),
        "data": json_for_html(result.to_json()),
    }
    return fill("bench.html", parts)


def _verdict(result: BenchResult) -> str:
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in result.verdict)
    return said + "".join(f'<p class="caution">{escape(sentence)}</p>' for sentence in result.cautions)


def _single(point: PointResult | None) -> str:
    if point is None:
        return ""
    return f'<section id="single"><h2>One request alone</h2>{_figures(SINGLE, [point], "")}</section>'


def _batches(points: Sequence[PointResult]) -> str:
    if not points:
        return ""
    places = [f"{point.concurrency:,}" for point in points]
    medians = [point.median for point in points]
    plots = (
        _figure("Throughput", "output tokens a second", places, [_rate(medians)], rate),
        _figure("Time between two tokens", "ITL", places, _spreads(medians, "itl"), seconds),
        _figure("Time to the first token", "TTFT", places, _spreads(medians, "ttft"), seconds),
        _trade_off(points),
    )
    return (
        '<section id="batches"><h2>Many requests at once</h2><p class="lead">As many requests are kept in flight; the '
        f'next is sent when one ends.</p><div class="cards">{"".join(plots)}</div>{_figures(BATCH, points, "At once")}'
        "</section>"
    )


def _rate(medians: Sequence[Figures]) -> Line:
    return Line("output tokens/s", "--r0", [f.output_tokens_per_second for f in medians])


def _spreads(medians: Sequence[Figures], name: str) -> list[Line]:
    spreads: list[Spread | None] = [getattr(f, name) for f in medians]
    return [
        Line("p50", "--r0", [None if s is None else s.p50 for s in spreads]),
        Line("p99", "--r1", [None if s is None else s.p99 for s in spreads]),
    ]


def _trade_off(points: Sequence[PointResult]) -> str:
    """What one request gets of the throughput."""
    tpots = [point.median.tpot for point in points]
    line = Line("tokens/s of one request", "--r2", [1 / t.p50 if t is not None and t.p50 > 0 else None for t in tpots])
    places = [f"{point.concurrency:,}" for point in points]
    return _figure("What one request gets", "1 / TPOT p50, tokens a second", places, [line], rate)


def _figure(title: str, unit: str, places: Sequence[str], lines: Sequence[Line], show) -> str:  # type: ignore[no-untyped-def]
    return (
        f"<figure><figcaption>{title}<small>{unit}</small></figcaption>"
        f"{_legend([(line.name, line.colour) for line in lines])}"
        f"{line_plot(places, lines, 'requests at once', show)}</figure>"
    )


def _legend(entries: Sequence[tuple[str, str]], more: str = "") -> str:
    items = "".join(f'<li><i style="background:var({colour})"></i>{escape(name)}</li>' for name, colour in entries)
    return f'<ul class="legend">{items}{more}</ul>'


def _bars(kinds: Sequence[StepKind]) -> str:
    if not kinds:
        return "<p>No step was of one kind alone.</p>"
    names = list(dict.fromkeys(part.name for kind in kinds for part in kind.parts))
    floor = '<li><i class="mark"></i>floor</li>'
    legend = _legend([(name, COLOURS.get(name, OTHER)) for name in names], floor)
    groups = [[kind for kind in kinds if kind.decode is decode] for decode in (True, False)]  # each on its own scale
    plots = (bar_plot([_bar(kind) for kind in group], seconds) for group in groups if group)
    return legend + "".join(f"<figure>{plot}</figure>" for plot in plots)


def _bar(kind: StepKind) -> Bar:
    parts = [(part.name, COLOURS.get(part.name, OTHER), part.seconds) for part in kind.parts]
    return Bar(kind.name, parts, kind.floor, f"{seconds(kind.seconds)} · {kind.ratio:.2f}x")


def _parts(kind: StepKind) -> str:
    rows = part_rows(kind)
    title = kind.name[0].upper() + kind.name[1:]
    table = _table("Part", ("ms", "share of the step", "floor ms", "ratio"), rows, last="sum")
    return f'<h3>{escape(title)}</h3><div class="scroll">{table}</div>'


def _figures(columns: Sequence[tuple[str, str, Cell]], points: Sequence[PointResult], first: str) -> str:
    columns = shown(columns, [point.median for point in points])
    rows = [
        (f"{point.concurrency:,}" if first else point.name, *(cell(point.median) for _, _, cell in columns))
        for point in points
    ]
    heads = [f"{name} {unit}".strip() for name, unit, _ in columns]
    return f'<div class="scroll">{_table(first, heads, rows)}</div>'


def _table(first: str, columns: Sequence[str], rows: Sequence[Sequence[str]], last: str = "") -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in (first, *columns))
    body = []
    for i, (name, *cells) in enumerate(rows):
        kind = f' class="{last}"' if last and i == len(rows) - 1 else ""
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body.append(f'<tr{kind}><th scope="row">{escape(name)}</th>{values}</tr>')
    return f'<table class="plain"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'


def _facts(result: BenchResult) -> str:
    m = result.machine
    packages = ", ".join(f"{name} {version}" for name, version in m.packages.items())
    foreign = [point.foreign_share for point in result.points if point.foreign_share is not None]
    items = [
        ("Model", result.model),
        ("Requests", result.workload),
        ("Warm-up", result.warm_up),
        ("Rounds", f"{len(result.points[0].rounds)} of each point"),
        ("Machine", f"{machine_words(result)}, {m.memory_bytes / 2**30:.1f} GiB, {m.system}"),
        ("Software", f"Python {m.python}, {packages}"),
        ("Rates", f"{probed(result)}, right before and after each point: {m.bandwidth_by}; {m.flops_by}"),
        ("Other load", f"up to {percent(max(foreign))} of the CPU time was others'" if foreign else "not known"),
        ("Loading", ", ".join(f"{name} {seconds(value)}" for name, value in result.load.items())),
        ("Figures", FIGURES),
        ("Again", result.command),
        ("Data", f"inside this page, in the element #data: schema {SCHEMA}, version {VERSION}"),
    ]
    return "".join(f"<dt>{name}</dt><dd>{_code(name, text)}</dd>" for name, text in items)


def _code(name: str, text: str) -> str:
    return f"<code>{escape(text)}</code>" if name == "Again" else escape(text)
