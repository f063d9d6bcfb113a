"""What the server says before it serves: settings and where they came from, memory line by line, and what fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

from octavo.build import BuiltEngine
from octavo.server.config import ServerConfig
from octavo.server.ledger import ledger_bytes
from octavo.server.settings import DEFAULT, Settings
from octavo.server.tenants import shown
from octavo.server.values import SIZES, all_settings

LENGTHS = (128, 512, 2048, 8192, 32768, 131072)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Line:
    """A setting as the report shows it; a secret is counted, not shown."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many requests of `length` tokens, prompt and answer, fit together, and what keeps it from being more."""

    length: int
    requests: int
    limit: str


@dataclass(frozen=True, slots=True)
class StartUp:
    """Everything the report says. `memory`: bytes by line; they sum to `budget`. `longest`: tokens of one request."""

    model: str
    settings: tuple[Line, ...]
    memory: Mapping[str, int]
    budget: int
    measured: bool  # False: `kv_memory` was given, so nobody looked at what activations and workspace take
    blocks: int
    block_size: int
    pool_bytes: int
    concurrency: tuple[Concurrency, ...]
    admission: str
    longest: int
    longest_limit: str
    endpoints: tuple[str, ...]
    keys: str
    warnings: tuple[str, ...]


def start_up(settings: Settings, built: BuiltEngine, endpoints: Seq[str]) -> StartUp:
    """Collect the report, before the engine's thread is started."""
    ledger = ledger_bytes(built)
    scheduler = built.engine.scheduler
    by_memory = built.pool_tokens <= built.max_model_len
    return StartUp(
        model=built.loaded.name,
        settings=tuple(_lines(settings)),
        memory=_on_paper(ledger.lines),
        budget=ledger.budget,
        measured=built.budget is not None,
        blocks=scheduler.kv.capacity,
        block_size=scheduler.kv.block_size,
        pool_bytes=built.kv_bytes,
        concurrency=concurrency(built),
        admission=built.config.admission,
        longest=scheduler.longest,
        longest_limit="KV memory" if by_memory else "max_model_len" if built.config.max_model_len else "the model",
        endpoints=tuple(endpoints),
        keys=shown(settings.config.api_keys) if settings.config.api_keys else "",
        warnings=(*settings.warnings, *_open(settings.config)),
    )


def _open(config: ServerConfig) -> Iterator[str]:
    """A warning if other machines can use the server without a key."""
    if not config.api_keys and config.host not in _LOOPBACK:
        yield f"host is {config.host} and there are no API keys: everybody who can reach the port can use the server."


def _lines(settings: Settings) -> Iterator[Line]:
    for name, setting in all_settings().items():
        value = settings.value(name)
        if name == "api_keys":
            text = shown(value)
        elif name in SIZES and isinstance(value, int):
            text = as_bytes(value)
        elif setting.many:
            text = ", ".join(value) or "none"
        elif isinstance(value, Mapping):
            text = ", ".join(f"{key}={number:g}" for key, number in value.items()) or "none"
        elif isinstance(value, bool):
            text = "on" if value else "off"
        else:
            text = "none" if value is None else str(value)
        yield Line(name, text, settings.sources[name])


def _on_paper(lines: Mapping[str, int]) -> dict[str, int]:
    """The ledger before anything runs: what lies beside the pool, and the pool as one line."""
    beside = ("weights", "activations", "workspace", "padding", "outside")
    pool = sum(size for name, size in lines.items() if name not in beside)
    return {name: lines[name] for name in beside[:3]} | {"KV pool": pool} | {name: lines[name] for name in beside[3:]}


def concurrency(built: BuiltEngine, lengths: Seq[int] = LENGTHS) -> tuple[Concurrency, ...]:
    """How many requests fit together, for each length that a request can have and for the longest one.

    It is what the engine charges a request that may come to so many tokens. Where `admission` is ceiling, exactly so
    many run at once. Where it is peak, a few less if all are at their longest in the same step, and more if they end
    one after another.
    """
    kv, most = built.engine.scheduler.kv, built.engine.scheduler.config.max_num_seqs
    longest = built.engine.scheduler.longest
    found = []
    for length in [*(length for length in lengths if length < longest), longest]:
        fit = kv.capacity // kv.ceiling_blocks(length, length)
        found.append(Concurrency(length, min(fit, most), "max_num_seqs" if most <= fit else "KV memory"))
    return tuple(found)


def as_bytes(value: int) -> str:
    """Bytes as an engineer reads them."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:,.2f} {unit}".replace(".00 ", " ")
    return f"{value} B"


def print_start_up(report: StartUp, console: Any, *, verbose: bool = False) -> None:
    """Write the report to a rich console; `verbose`: the defaults too."""
    from rich.markup import escape

    console.print(f"[bold]{escape(report.model)}[/]")
    for warning in report.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}")
    lines = [line for line in report.settings if verbose or line.source != DEFAULT]
    table = _table(("setting", "left"), ("value", "left"), ("from", "left"))
    for line in lines:
        table.add_row(line.name, escape(line.value), escape(line.source))
    console.print(table)
    if not verbose:
        console.print(f"[dim]{len(report.settings) - len(lines)} settings at their defaults (--verbose shows them)[/]")
    console.print()
    _print_memory(report, console)
    _print_concurrency(report, console)
    console.print(f"endpoints: {escape('  '.join(report.endpoints))}")
    key = f"API key needed ({report.keys})" if report.keys else "no API key needed"
    console.print(escape(key))


def _print_memory(report: StartUp, console: Any) -> None:
    table = _table(("memory", "left"), ("bytes", "right"), ("", "right"))
    for name, size in report.memory.items():
        if size or report.measured:
            table.add_row(name, f"{size:,}", as_bytes(size))
    table.add_row("[bold]budget[/]", f"[bold]{report.budget:,}[/]", as_bytes(report.budget))
    console.print(table)
    if not report.measured:
        console.print("activations and workspace come on top: with kv_memory given, they are not measured")
    tokens = report.blocks * report.block_size
    console.print(
        f"KV pool: {report.blocks:,} blocks of {report.block_size} tokens, {tokens:,} token slots, "
        f"{report.pool_bytes:,} bytes"
    )
    console.print(f"longest request: {report.longest:,} tokens, prompt and answer ({report.longest_limit})\n")


def _print_concurrency(report: StartUp, console: Any) -> None:
    for entry in report.concurrency:
        plural = "" if entry.requests == 1 else "s"
        console.print(f"at {entry.length:,} tokens: {entry.requests:,} request{plural} together ({entry.limit})")
    if report.admission != "ceiling":
        console.print(f"[dim]admission is {report.admission}: more run together where they end at different times[/]")
    console.print()


def _table(*columns: tuple[str, Literal["left", "right"]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title, side in columns:
        table.add_column(title, justify=side, overflow="fold")
    return table
