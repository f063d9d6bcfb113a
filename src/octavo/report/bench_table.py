"""A bench in the terminal: the single stream, the batches, and where the time of a step went."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from octavo.benching.figures import Figures, Spread
from octavo.benching.result import BenchResult, PointResult
from octavo.benching.roofline import StepKind
from octavo.report.wording import percent, rate, size


def render(result: BenchResult) -> RenderableType:
    """For `Console.print`."""
    return Group(*_parts(result))


def probed(result: BenchResult) -> str:
    """What the machine could do meanwhile, in a line."""
    limits = [limits for point in result.points for limits in (point.before, point.after)]
    reads, products = [one.bandwidth for one in limits], [one.flops / 1e9 for one in limits]
    return f"{_from_to(min(reads) / 1e9, max(reads) / 1e9)} GB/s read, {_from_to(min(products), max(products))} GFLOP/s"


def _from_to(low: float, high: float) -> str:
    first, last = f"{low:.3g}", f"{high:.3g}"
    return first if first == last else f"{first} to {last}"


def machine_words(result: BenchResult) -> str:
    """The machine in a line."""
    m = result.machine
    isa = f", {m.isa}" if m.isa else ""
    return f"{m.device}, {m.cores} cores, {m.threads} threads{isa}, torch {m.packages.get('torch', '?')}"


def _parts(result: BenchResult) -> Iterator[RenderableType]:
    yield Text(result.title, style="bold")
    yield Text(result.model)
    yield Text(f"{machine_words(result)} · {probed(result)}")
    rounds = len(result.points[0].rounds)
    yield Text(f"{result.workload} · median of {rounds} round{'s' if rounds > 1 else ''}", style="dim")
    yield Text(result.warm_up, style="dim")
    for points, table in (([result.single] if result.single else [], _single), (result.batches, _batches)):
        if points:
            yield Padding(table(points), (1, 0, 0, 0), expand=False)
    yield Padding(_kinds(result.kinds), (1, 0, 0, 0), expand=False)
    for kind in result.detailed:
        yield Padding(_kind(kind), (1, 0, 0, 0), expand=False)
    for sentence in (*result.verdict, *result.cautions):
        yield Padding(Text(sentence), (1, 0, 0, 0), expand=False)


def spread(value: Spread | None, *names: str) -> str:
    """Percentiles in the unit of the last one: "24.1 / 38.0 ms"."""
    if value is None:
        return "–"
    values = [getattr(value, name) for name in names]
    factor, digits, unit = (1, 2, "s") if values[-1] >= 0.9995 else (1000, 1 if values[-1] < 0.1 else 0, "ms")
    return f"{' / '.join(f'{factor * v:.{digits}f}' for v in values)} {unit}"


Cell = Callable[[Figures], str]
COMMON: tuple[tuple[str, str, Cell], ...] = (
    ("TTFT", "p50 / p99", lambda f: spread(f.ttft, "p50", "p99")),
    ("ITL", "p50 / p90 / p99", lambda f: spread(f.itl, "p50", "p90", "p99")),
    ("TPOT", "p50", lambda f: spread(f.tpot, "p50")),
    ("e2e", "p50 / p99", lambda f: spread(f.e2e, "p50", "p99")),
)
SINGLE: tuple[tuple[str, str, Cell], ...] = (
    ("prefill", "tok/s", lambda f: "–" if f.prefill_tokens_per_second is None else rate(f.prefill_tokens_per_second)),
    ("decode", "tok/s", lambda f: "–" if f.decode_tokens_per_second is None else f"{f.decode_tokens_per_second:.1f}"),
    ("TTFT", "", lambda f: spread(f.ttft, "p50")),
    ("ITL", "p50 / p90 / p99", lambda f: spread(f.itl, "p50", "p90", "p99")),
    ("TPOT", "", lambda f: spread(f.tpot, "p50")),
    ("e2e", "", lambda f: spread(f.e2e, "p50")),
)
BATCH: tuple[tuple[str, str, Cell], ...] = (
    ("requests", "", lambda f: f"{f.requests:,}"),
    ("output", "tok/s", lambda f: rate(f.output_tokens_per_second)),
    ("total", "tok/s", lambda f: rate(f.total_tokens_per_second)),
    *COMMON,
    ("running", "mean / peak", lambda f: f"{f.mean_running:.1f} / {f.peak_running:,}"),
    ("KV used", "mean / peak", lambda f: f"{percent(f.mean_kv_utilisation)} / {percent(f.peak_kv_utilisation)}"),
    ("preempted", "", lambda f: f"{f.preemptions:,.0f}"),
)


def shown(columns: Sequence[tuple[str, str, Cell]], figures: Sequence[Figures]) -> list[tuple[str, str, Cell]]:
    """With what the prefix cache and speculation did, if they did anything."""
    more: list[tuple[str, str, Cell]] = []
    if any(f.cached_tokens for f in figures):
        more.append(("from cache", "prompt tokens", lambda f: f"{f.cached_tokens:,.0f}"))
    if any(f.drafted_tokens for f in figures):
        more.append(("drafts", "right / made", lambda f: f"{f.accepted_tokens:,.0f} / {f.drafted_tokens:,.0f}"))
    return [*columns, *more]


@dataclass(frozen=True, slots=True)
class _Fitting:
    """The wide table where the terminal has room for it, else the narrow one."""

    wide: Table
    narrow: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = Measurement.get(console, options.update(max_width=10_000), self.wide).maximum
        yield self.wide if room <= options.max_width else self.narrow


def _single(points: Sequence[PointResult]) -> RenderableType:
    return _figures(SINGLE, points, [point.name for point in points], "")


def _batches(points: Sequence[PointResult]) -> RenderableType:
    return _figures(BATCH, points, [f"{point.concurrency:,}" for point in points], "at once")


def _figures(
    columns: Sequence[tuple[str, str, Cell]], points: Sequence[PointResult], names: Sequence[str], first: str
) -> RenderableType:
    """A row for each point; in a narrow terminal a column for each."""
    medians = [point.median for point in points]
    columns = shown(columns, medians)
    wide = _table(first, *(f"{name}\n{unit}" for name, unit, _ in columns))
    for name, figures in zip(names, medians, strict=True):
        wide.add_row(name, *(cell(figures) for _, _, cell in columns))
    narrow = _table(first, *names, wrap=True)
    for name, unit, cell in columns:
        narrow.add_row(f"{name} {unit}".strip(), *(cell(figures) for figures in medians))
    return _Fitting(wide, narrow)


def _table(first: str, *columns: str, wrap: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column(first, no_wrap=True, style="bold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=not wrap, overflow="fold")
    return table


def ms(value: float) -> str:
    """Milliseconds with three digits."""
    return f"{1000 * value:,.3f}" if value < 1e-3 else f"{1000 * value:,.2f}" if value < 0.1 else f"{1000 * value:,.0f}"


def _kinds(kinds: Sequence[StepKind]) -> RenderableType:
    columns = ("steps", "KV tokens\nseen", "bytes\nto read", "GFLOP", "floor\nms", "took\nms", "ratio", "bound by")
    wide, narrow = _table("kind of step", *columns), _table("kind of step", *columns[-4:])
    for kind in kinds:
        cells = kind_cells(kind)
        wide.add_row(kind.name, *cells)
        narrow.add_row(kind.name, *cells[-4:])
    return _Fitting(wide, narrow)


def kind_cells(kind: StepKind) -> tuple[str, ...]:
    """A kind of step in a row, behind its name."""
    return (
        f"{kind.steps:,}",
        f"{kind.context:,.0f}",
        size(kind.bytes),
        f"{kind.flops / 1e9:.3g}" if kind.flops else "–",
        ms(kind.floor),
        ms(kind.seconds),
        f"{kind.ratio:.2f}",
        kind.bound,
    )


def _kind(kind: StepKind) -> Table:
    table = _table(kind.name, "ms", "share", "floor ms", "ratio")
    for name, *cells in part_rows(kind):
        table.add_row(name, *cells)
    return table


def part_rows(kind: StepKind) -> list[tuple[str, ...]]:
    """Name, ms, share of the step, floor, ratio of every part and of the whole step."""
    rows = [
        _part_row(part.name, part.seconds, kind.seconds, kind.floor_of(part)) for part in kind.parts if part.seconds > 0
    ]
    return [*rows, _part_row("whole step", kind.seconds, kind.seconds, kind.floor)]


def _part_row(name: str, took: float, whole: float, floor: float) -> tuple[str, ...]:
    if floor <= 0:
        return name, ms(took), percent(took / whole), "–", "–"
    return name, ms(took), percent(took / whole), ms(floor), f"{took / floor:,.{0 if took / floor >= 100 else 2}f}"
