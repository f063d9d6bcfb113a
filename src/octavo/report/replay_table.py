"""A replay in the terminal: figures as rows, strategies as columns, then bars, the verdict and the fidelity line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from octavo.planner.outcome import KV_LINES, Outcome
from octavo.report.replay_data import ReplayReport
from octavo.report.replay_figures import Row, rows
from octavo.report.replay_verdict import fidelity_line, verdict
from octavo.report.table import MARKS, bar
from octavo.report.wording import LINE_NAMES

BAR = 40
COLUMN = 19  # of a strategy: as wide as its longest cause


def render(report: ReplayReport) -> RenderableType:
    """For `rich.print`."""
    return _Rendered(report)


@dataclass(frozen=True, slots=True)
class _Rendered:
    report: ReplayReport

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        r, plain = self.report, options.ascii_only
        yield Text(r.title, style="bold")
        yield Text(" · ".join(part for part in (r.trace, r.model, r.device) if part), style="dim")
        if r.outcomes:
            lines = rows(r)
            labels = _labels(lines)
            for some in _groups(r.outcomes, options.max_width - max(map(len, labels)) - 1):
                yield _table(some, lines, labels)
                yield Text()
            yield _bars(r.outcomes, plain)
            yield _legend(r.outcomes, plain)
        yield Padding(Text(verdict(r)), (1, 0, 0, 0))
        yield Text(fidelity_line(r), style="dim")
        if r.bad_lines:
            first, many = r.bad_lines[0], len(r.bad_lines)
            left = f"{many} {'line' if many == 1 else 'lines'} of the trace left out"
            yield Text(f"{left}; line {first.line}: {first.reason}", style="yellow")


def _groups(outcomes: Sequence[Outcome], room: int) -> Iterator[Sequence[Outcome]]:
    """As many strategies side by side as there is room for beside the labels."""
    each = max(1, room // COLUMN)
    for start in range(0, len(outcomes), each):
        yield outcomes[start : start + each]


def _labels(lines: Sequence[Row]) -> list[str]:
    """Group and name; only the name, indented, where the group is that of the row above."""
    labels, before = [], None
    for row in lines:
        again = row.group == before
        labels.append(f"  {row.name}" if again else ", ".join(part for part in (row.group, row.name) if part))
        before = row.group
    return labels


def _table(outcomes: Sequence[Outcome], lines: Sequence[Row], labels: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)  # the box sets columns apart
    table.add_column("", no_wrap=True)
    for outcome in outcomes:
        table.add_column(Text(outcome.strategy), justify="right", header_style="bold", min_width=COLUMN - 1)
    for row, label in zip(lines, labels, strict=True):
        table.add_row(Text(label), *(Text(row.cell(outcome)) for outcome in outcomes))
    return table


def _bars(outcomes: Sequence[Outcome], plain: bool) -> Table:
    bars = Table.grid(padding=(0, 1))
    bars.add_column(no_wrap=True)
    bars.add_column(no_wrap=True)
    for o in outcomes:
        bars.add_row(o.strategy, bar(dict.fromkeys(KV_LINES, 0.0) | dict(o.kv_mean), BAR, ascii_only=plain))
    return bars


def _legend(outcomes: Sequence[Outcome], plain: bool) -> Text:
    text = Text("KV memory over time: ", style="dim")
    for key in KV_LINES:
        if any(o.kv_mean.get(key, 0.0) >= 0.005 for o in outcomes):
            glyph, letter, style = MARKS[key]
            text.append((letter if plain else glyph) * 2, style=style)
            text.append(f" {LINE_NAMES[key]}  ")
    return text
