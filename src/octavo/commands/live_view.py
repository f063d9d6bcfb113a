"""What a running server says of itself, for the terminal: its ledger, its requests and why they wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Json = Mapping[str, Any]
MIB = 1024**2
_COLOURS = {
    "weights": "blue",
    "activations": "cyan",
    "workspace": "bright_cyan",
    "live": "green",
    "reserved": "yellow",
    "slack": "bright_yellow",
    "lookahead": "magenta",
    "quarantined": "bright_magenta",
    "cached": "bright_blue",
    "fragmented": "red",
    "held back": "bright_red",
}
BAR = 72  # characters


def plain(value: object) -> str:
    """Text from elsewhere, without what would steer the terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(value))


def verdict(ledger: Json) -> Text:
    """The sentence that matters, and how many there are."""
    limiting = ledger["limiting"]
    style = "bold green" if limiting["resource"] == "none" else "bold yellow"
    counts = f"{ledger['running']} running, {ledger['waiting']} waiting, step {ledger['step']:,}"
    return Text(plain(limiting["sentence"]), style=style) + Text(f"\n{counts}, {ledger['strategy']}", style="dim")


def ledger_table(ledger: Json) -> Table:
    """Every line with its bytes and its share of the budget."""
    table = Table("memory", box=None, pad_edge=False, header_style="dim")
    table.add_column("MiB", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    budget = ledger["budget"]
    for name, size in ledger["lines"].items():
        if size:
            share = size / budget
            bar = Bar(1.0, 0.0, share, width=30, color=_COLOURS.get(name, "white"))
            table.add_row(name, f"{size / MIB:,.1f}", f"{share:.1%}", bar)
    table.add_row(Text("budget", style="bold"), f"{budget / MIB:,.1f}", "100.0%", "")
    return table


def ledger_bar(ledger: Json) -> Text:
    """All lines as one bar of `BAR` characters, and what its colours mean."""
    bar, legend, used, before = Text(), Text(), 0, 0
    for name, size in ledger["lines"].items():
        used += size
        cells = round(BAR * used / ledger["budget"]) - before
        before += cells
        colour = _COLOURS.get(name, "bright_black")
        bar.append(("█" if name in _COLOURS else "░") * cells, style=colour)
        if size:
            legend.append(f"■ {name} {size / MIB:,.1f}  ", style=colour)
    return bar + Text("\n") + legend + Text("MiB", style="dim")


def waiting(rows: Sequence[Json]) -> RenderableType:
    """Who waits, by cause, each with the sentence."""
    groups: dict[str, list[Json]] = {}
    for row in rows:
        if row["wait"] is not None:
            groups.setdefault(row["wait"]["cause"], []).append(row)
    if not groups:
        return Text("Nobody waits.")
    parts: list[RenderableType] = []
    for cause, members in groups.items():
        parts.append(Text(f"\n{plain(cause)}: {len(members)} waiting", style="bold"))
        parts += [Text(f"  {name_of(row)}: {sentence_of(row)}") for row in members[:3]]
        if len(members) > 3:
            parts.append(Text(f"  and {len(members) - 3} more", style="dim"))
    return Group(*parts)


def name_of(row: Json) -> str:
    return plain(row["id"] if row["label"] is None else f"{row['id']} ({row['label']})")


def sentence_of(row: Json) -> str:
    wait = row["wait"]
    return plain(f"{wait['sentence']}. Unblocks it: {wait['unblocks']}.")


def requests_table(rows: Sequence[Json], most: int) -> RenderableType:
    """One line each, with the reason of those that wait."""
    table = Table("request", "phase", box=None, pad_edge=False, header_style="dim", expand=True)
    for title in ("prompt", "answer", "blocks", "age s"):
        table.add_column(title, justify="right")
    table.add_column("waits for", ratio=1, no_wrap=True, overflow="ellipsis")
    for row in rows[:most]:
        wait = row["wait"]
        table.add_row(
            Text(plain(row["label"] or row["id"])[:24]),
            plain(row["phase"]),
            f"{row['computed_tokens']}/{row['prompt_tokens']}",
            f"{row['generated_tokens']}/{row['max_tokens']}",
            f"{row['blocks']}" + (f" ({row['shared_blocks']} shared)" if row["shared_blocks"] else ""),
            f"{row['age_s']:.1f}",
            Text("" if wait is None else plain(wait["sentence"])),
        )
    if len(rows) > most:
        return Group(table, Text(f"and {len(rows) - most} more", style="dim"))
    return table


def latencies(samples: Sequence[Json]) -> Text:
    """Those of the latest second in which anything came."""
    found = next((one for one in reversed(samples) if one["tokens_per_s"] is not None), None)
    if found is None:
        return Text("No token has come in the last ten minutes.", style="dim")
    parts = [f"{found['tokens_per_s']:,.0f} tokens/s"]
    for name in ("ttft", "itl"):
        if found[f"{name}_p50"] is not None:
            parts.append(
                f"{name.upper()} p50 {1000 * found[f'{name}_p50']:,.1f} ms, p99 {1000 * found[f'{name}_p99']:,.1f} ms"
            )
    ago = samples[-1]["at"] - found["at"]
    return Text(" | ".join(parts) + (f" ({ago:.0f} s ago)" if ago else ""))


def one_request(found: Json) -> RenderableType:
    """Everything of one request."""
    head = Text(f"{name_of(found)}: {plain(found['phase'])}", style="bold")
    facts = (
        f"{found['prompt_tokens']:,} prompt tokens ({found['cached_tokens']:,} from the prefix cache), "
        f"{found['computed_tokens']:,} computed; {found['generated_tokens']:,} generated, "
        f"{found['max_tokens']:,} at most\n"
        f"{found['blocks']} blocks ({found['shared_blocks']} shared), {found['slack_tokens']} tokens slack, "
        f"{found['reserved_tokens']} reserved, preempted {found['preemptions']} times; "
        f"{found['age_s']:.2f} s old, {found['waited_s']:.2f} s of it in the line"
    )
    parts: list[RenderableType] = [head, Text(facts)]
    if found["wait"] is not None:
        parts.append(Text(f"Waits: {sentence_of(found)}", style="yellow"))
        holders = found["wait"]["holders"]
        if holders:
            unit = "slots" if found["wait"]["unit"] == "slots" else "blocks"
            listed = ", ".join(f"{plain(one['request'])} ({one['amount']})" for one in holders)
            parts.append(Text(f"Held by, in {unit}: {listed}", style="dim"))
    if found["miss"] is not None:
        parts.append(Text(f"Prefix cache: {plain(found['miss']['sentence'])}."))
    if found["finish_reason"] is not None:
        parts.append(Text(plain(f"Ended: {found['finish_reason']}{_error(found)}")))
    for moment in found["history"]:
        parts.append(
            Text(plain(f"  step {moment['step']:>7,}  {moment['at']:>10.3f} s  {moment['text']}"), style="dim")
        )
    return Group(*parts)


def _error(found: Json) -> str:
    return "" if found["error"] is None else f" ({found['error']})"
