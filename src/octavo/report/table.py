"""A comparison in the terminal: one table, a bar for where the KV memory was, and the verdict under it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from octavo.report.comparison import Comparison
from octavo.report.summary import KV_LINES, Percentiles, RunSummary
from octavo.report.wording import LINE_NAMES, percent, rate, seconds, size

WIDE = 118  # columns from which strategies are rows; below it they are columns
BAR = 18
# line -> glyph, glyph where only ASCII can be shown, style; the glyphs differ, so no colour is needed to read the bar
MARKS = {
    "live": ("█", "#", "blue"),
    "cached": ("▓", "=", "cyan"),
    "slack": ("▪", "s", "yellow"),
    "reserved_used_later": ("▒", "+", "bright_yellow"),
    "reserved_never_used": ("░", "-", "red"),
    "quarantined": ("q", "q", "magenta"),
    "fragmented": ("x", "x", "magenta"),
    "held": ("h", "h", "bright_black"),
    "free": ("·", ".", "bright_black"),
}


def render(comparison: Comparison) -> RenderableType:
    """For `rich.print`: rows for strategies in a wide terminal, columns in a narrow one."""
    return _Rendered(comparison)


@dataclass(frozen=True, slots=True)
class _Rendered:
    comparison: Comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        c, plain = self.comparison, options.ascii_only
        summaries = c.summaries
        bytes_ = c.kv_bytes or max((s.pool_bytes for s in summaries), default=0)
        yield Text(c.title, style="bold")
        yield Text(f"{c.model} · {size(bytes_)} of KV memory · blocks of {c.block_size} tokens"[: options.max_width])
        if summaries:
            yield _rows(summaries, plain) if options.max_width >= WIDE else _columns(summaries, plain)
            yield _legend(summaries, plain)
        yield Padding(Text(c.verdict), (1, 0, 0, 0))


def bar(shares: Mapping[str, float], width: int = BAR, *, ascii_only: bool = False) -> Text:
    """The pool as `width` cells, lines of the ledger rounded by largest remainder: one under half a cell may vanish."""
    exact = {key: shares[key] * width for key in KV_LINES}
    cells = {key: int(value) for key, value in exact.items()}
    missing = max(0, round(sum(exact.values())) - sum(cells.values()))
    for key in sorted(KV_LINES, key=lambda key: cells[key] - exact[key])[:missing]:
        cells[key] += 1
    text = Text(no_wrap=True)
    for key in KV_LINES:
        glyph, letter, style = MARKS[key]
        text.append((letter if ascii_only else glyph) * cells[key], style=style)
    return text


def _legend(summaries: Sequence[RunSummary], plain: bool) -> Text:
    text = Text("KV memory over time: ", style="dim")
    for key in KV_LINES:
        if any(s.kv_mean[key] >= 0.005 for s in summaries):
            glyph, letter, style = MARKS[key]
            text.append((letter if plain else glyph) * 2, style=style)
            text.append(f" {LINE_NAMES[key]}  ")
    return text


def _times(of: Percentiles) -> str:
    """Two durations in the unit of the longer one: "0.86 / 4.92 s"."""
    first, last = seconds(of.p50), seconds(of.p99)
    if last.endswith("ms") or first.endswith(" s"):
        return f"{first.split()[0]} / {last}"
    return f"{of.p50:.2f} / {last}"


def _shares(a: float, b: float) -> str:
    return f"{percent(a).removesuffix(' %')} / {percent(b)}"


Cell = Callable[[RunSummary], str]
FIGURES: tuple[tuple[str, str, Cell], ...] = (
    ("running", "mean / peak", lambda s: f"{s.mean_running:.1f} / {s.peak_running:,}"),
    ("tokens in KV", "mean / peak", lambda s: _shares(s.holding_mean, s.holding_peak)),
    ("preempted", "", lambda s: f"{s.preemptions:,}"),
    ("first token", "p50 / p99", lambda s: _times(s.ttft) if s.peak_running else "–"),
    ("token gap", "p50 / p99", lambda s: _times(s.itl) if s.peak_running else "–"),
    ("tokens/s", "", lambda s: rate(s.tokens_per_second)),
    ("total", "", lambda s: seconds(s.seconds)),
)


def _name(s: RunSummary) -> str:
    return f"{s.strategy}\n{s.refused:,} refused" if s.refused else s.strategy


def _rows(summaries: Sequence[RunSummary], plain: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("strategy", style="bold", no_wrap=True)
    for words, unit, _ in FIGURES[:2]:
        table.add_column(f"{words}\n{unit}", justify="right", no_wrap=True)
    table.add_column("KV memory was\nmean over the run", no_wrap=True)
    for words, unit, _ in FIGURES[2:]:
        table.add_column(f"{words}\n{unit}" if unit else words, justify="right", no_wrap=True)
    for s in summaries:
        cells = [cell(s) for _, _, cell in FIGURES]
        table.add_row(Text(_name(s)), *cells[:2], bar(s.kv_mean, ascii_only=plain), *cells[2:])
    return table


def _columns(summaries: Sequence[RunSummary], plain: bool) -> Group:
    """Figures as rows, one line for the mean or p50 and one for the peak or p99, then the bars."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    table.add_column("")
    for s in summaries:
        table.add_column(Text(_name(s).replace("-", "-\n", 1)), justify="right", header_style="bold", vertical="bottom")
    for label, cell in _single_figures():
        table.add_row(label, *(cell(s) for s in summaries))
    bars = Table.grid(padding=(0, 1))
    bars.add_column(no_wrap=True)
    bars.add_column(no_wrap=True)
    for s in summaries:
        bars.add_row(s.strategy, bar(s.kv_mean, 40, ascii_only=plain))
    return Group(table, Padding(bars, (1, 0, 0, 0)))


def _single_figures() -> Iterator[tuple[str, Cell]]:
    yield "running, mean", lambda s: f"{s.mean_running:.1f}"
    yield "running, peak", lambda s: f"{s.peak_running:,}"
    yield "tokens in KV, mean", lambda s: percent(s.holding_mean)
    yield "tokens in KV, peak", lambda s: percent(s.holding_peak)
    yield "preempted", lambda s: f"{s.preemptions:,}"
    yield "first token, p50", lambda s: seconds(s.ttft.p50)
    yield "first token, p99", lambda s: seconds(s.ttft.p99)
    yield "token gap, p50", lambda s: seconds(s.itl.p50)
    yield "token gap, p99", lambda s: seconds(s.itl.p99)
    yield "tokens/s", lambda s: rate(s.tokens_per_second)
    yield "total", lambda s: seconds(s.seconds)
