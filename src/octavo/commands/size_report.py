"""How `octavo size` shows its answer: tables for people, JSON with stable keys for programs."""

from __future__ import annotations

import sys
from typing import Any

from octavo.kv.budget import Amount, Pool
from octavo.kv.spec import KVSpec, LayerGroup, LayerKind
from octavo.planner.sizing import SizeResult


def human(value: int) -> str:
    """Bytes as an engineer reads them: exact below 1 MiB, else with two decimals of GiB or MiB."""
    if value < 1 << 20:
        return f"{value:,} B"
    return f"{value / (1 << 30):,.2f} GiB" if value >= 1 << 30 else f"{value / (1 << 20):,.2f} MiB"


def interval(amount: Amount) -> str:
    """An amount, or its two ends."""
    return human(amount.low) if amount.low == amount.high else f"{human(amount.low)} – {human(amount.high)}"


def as_json(result: SizeResult) -> dict[str, Any]:
    """The answer as plain data.

    Stable keys: bytes_per_token.growing, bytes_per_token.windowed, window_tokens, fixed_bytes_per_sequence, groups[].
    """
    spec = result.spec
    return {
        "model": result.request.model,
        "source": result.source.where,
        "model_type": spec.model_type,
        "kv_dtype": spec.dtype,
        "tp": spec.tp,
        "bytes_per_token": {
            "growing": spec.growing,
            "windowed": spec.windowed,
            "total": spec.bytes_per_token,
        },
        "window_tokens": spec.window_tokens,
        "windowed_cap_bytes_per_sequence": spec.windowed_cap,
        "fixed_bytes_per_sequence": spec.fixed_bytes,
        "groups": [_group_json(group) for group in spec.groups],
        "layers": {
            "total": spec.num_layers,
            "own_a_cache": spec.owners,
            "shared": {str(layer): reads for layer, reads in spec.shared.items()},
            "without_cache": list(spec.uncached),
        },
        "mla": None if spec.mla is None else _mla_json(spec),
        "max_positions": spec.max_positions,
        "num_attention_heads": spec.num_attention_heads,
        "values": dict(spec.values),
        "sources": dict(spec.sources),
        "notes": list(result.notes),
        "sequence_bytes": [
            {
                "length": length,
                "windows_freed": spec.bytes_at(length),
                "pages_shared": spec.bytes_unwindowed(length),
            }
            for length in result.lengths()
        ],
        "memory": _memory_json(result),
        "inverse": _inverse_json(result),
    }


def _group_json(group: LayerGroup) -> dict[str, Any]:
    return {
        "kind": group.kind.value,
        "layers": list(group.layers),
        "kv_heads": group.kv_heads,
        "k_dim": group.k_dim,
        "v_dim": group.v_dim,
        "window": group.window,
        "bytes_per_token": group.bytes_per_token,
        "fixed_bytes": group.fixed_bytes,
        "cap_bytes": group.cap_bytes,
        "formula": group.formula,
    }


def _mla_json(spec: KVSpec) -> dict[str, Any]:
    assert spec.mla is not None
    return {
        "form": spec.mla.form,
        "latent": spec.mla.latent,
        "expanded": spec.mla.expanded,
        "formula_latent": spec.mla.formula_latent,
        "formula_expanded": spec.mla.formula_expanded,
    }


def _amount_json(amount: Amount) -> dict[str, Any]:
    return {"low": amount.low, "high": amount.high, "source": amount.source}


def _memory_json(result: SizeResult) -> dict[str, Any] | None:
    if result.kv is None:
        return None
    plan = result.plan
    parts = (
        {}
        if plan is None
        else {
            "total": _amount_json(plan.total),
            "utilization": float(plan.utilization),
            "weights": _amount_json(plan.weights),
            "activations": _amount_json(plan.activations),
            "workspace": _amount_json(plan.workspace),
            "graphs": _amount_json(plan.graphs),
        }
    )
    low, high = result.pools[0], result.pools[-1]
    return {
        **parts,
        "kv": _amount_json(result.kv),
        "block_size": result.request.block_size,
        "chunk": result.limits.max_batched_tokens,
        "blocks": _ends(low.blocks, high.blocks),
        "slots": _ends(low.slots, high.slots),
        "longest": _ends(_reachable(result, low), _reachable(result, high)),
        "longest_by_memory": _ends(low.longest(), high.longest()),
        "concurrency": [
            {
                "length": length,
                "sequence_bytes": high.sequence_bytes(length),
                "users": _ends(low.users(length), high.users(length)),
                "ratio": _ends(round(low.concurrency(length), 2), round(high.concurrency(length), 2)),
            }
            for length in result.lengths()
        ],
    }


def _ends(low: Any, high: Any) -> dict[str, Any]:
    return {"low": low, "high": high}


def _inverse_json(result: SizeResult) -> dict[str, Any] | None:
    inverse = result.inverse
    if inverse is None:
        return None
    return {
        "users": inverse.users,
        "length": inverse.length,
        "kv_bytes": inverse.kv_bytes,
        "device": None if inverse.device is None else _amount_json(inverse.device),
    }


def print_report(result: SizeResult) -> None:
    """Print the answer as text and tables."""
    from rich.console import Console
    from rich.markup import escape

    # A pipe has no width of its own; 80 columns would break every formula.
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=120)
    spec = result.spec
    ranks = "" if spec.tp == 1 else f" · TP {spec.tp}, bytes of one device"
    kind = escape(spec.model_type or "no model_type")
    console.print(f"[bold]{escape(result.request.model)}[/] · {kind} · KV {spec.dtype}{ranks}")
    console.print(f"[dim]from {escape(result.source.where)}[/]")
    console.print()
    _print_groups(console, spec)
    _print_sequence(console, result)
    if result.kv is not None:
        _print_memory(console, result)
    if result.inverse is not None:
        _print_inverse(console, result)
    _print_sources(console, result)


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, column in enumerate(columns):
        left = i == 0 or column in ("formula", "where it comes from")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    return table


def _print_groups(console: Any, spec: KVSpec) -> None:
    console.print(f"[bold]KV of one token: {spec.bytes_per_token:,} B[/]", end="")
    if spec.windowed:
        console.print(f" ({spec.growing:,} B grow for ever, {spec.windowed:,} B stop at their window)", end="")
    console.print(f" · {_owners(spec)}")
    table = _table("layers", "KV heads", "K + V", "window", "B/token", "formula")
    for group in spec.groups:
        if group.kind is LayerKind.STATE:
            cells = ("-", "-", "-", "fixed")
        else:
            window = "-" if group.window is None else f"{group.window:,}"
            cells = (str(group.kv_heads), f"{group.k_dim} + {group.v_dim}", window, f"{group.bytes_per_token:,}")
        table.add_row(f"{len(group.layers)} {group.kind.value}", *cells, group.formula)
    console.print(table)
    if spec.mla is not None:
        other = "expanded" if spec.mla.form == "latent" else "latent"
        console.print(f"MLA: the [bold]{spec.mla.form}[/] form is assumed (--mla {other} for the other):")
        console.print(f"  latent    {spec.mla.formula_latent} B/token, held whole by every rank")
        console.print(f"  expanded  {spec.mla.formula_expanded} B/token")
    console.print()


def _owners(spec: KVSpec) -> str:
    text = f"{spec.owners} of {spec.num_layers} layers own a cache"
    if spec.shared:
        text += f"; {len(spec.shared)} read another layer's KV"
    if spec.uncached:
        text += f"; {len(spec.uncached)} keep nothing"
    return text


def _print_sequence(console: Any, result: SizeResult) -> None:
    spec = result.spec
    if spec.windowed:
        table = _table("one sequence of", "windows freed", "all layers share pages")
        for length in [1, *result.lengths()]:
            table.add_row(_tokens(length), human(spec.bytes_at(length)), human(spec.bytes_unwindowed(length)))
    else:
        table = _table("one sequence of", "KV" + (" and state" if spec.fixed_bytes else ""))
        for length in [1, *result.lengths()]:
            table.add_row(_tokens(length), human(spec.bytes_at(length)))
    console.print(table)
    console.print()


def _print_memory(console: Any, result: SizeResult) -> None:
    from rich.markup import escape

    plan, low, high = result.plan, result.pools[0], result.pools[-1]
    table = _table("memory of one device", "bytes", "where it comes from")
    if plan is not None:
        table.add_row("total", interval(plan.total), plan.total.source)
        engine = f"default of {result.limits.profile.name}"
        source = engine if result.request.utilization is None else "--utilization"
        table.add_row("utilization", f"{float(plan.utilization):g}", source)
        for name in ("weights", "activations", "workspace", "graphs"):
            amount = getattr(plan, name)
            if not amount.high:
                continue
            table.add_row(f"- {name}", interval(amount), escape(amount.source))
    assert result.kv is not None
    kv = Amount(low.kv_bytes, high.kv_bytes, result.kv.source)
    table.add_row("[bold]= KV[/]", f"[bold]{interval(kv)}[/]", kv.source)
    console.print(table)
    size = result.request.block_size
    if high.blocks is not None and low.blocks is not None:
        blocks, slots = _span(low.blocks, high.blocks), _span(low.slots, high.slots)
        console.print(f"\n{blocks} blocks of {size} tokens = {slots} token slots")
    longest = f"{_span(_reachable(result, low), _reachable(result, high))} tokens"
    if _reachable(result, low) is None:
        longest = "no limit"
    console.print(f"Longest sequence that fits alone: [bold]{longest}[/]{_beyond(result, low)}\n")
    table = _table("sequences of", "run together", "before rounding", "KV of one")
    for length in result.lengths():
        ratio = (f"{low.concurrency(length):,.2f}", f"{high.concurrency(length):,.2f}")
        table.add_row(
            _tokens(length),
            f"[bold]{_span(low.users(length), high.users(length))}[/]",
            ratio[0] if ratio[0] == ratio[1] else " – ".join(ratio),
            human(high.sequence_bytes(length)),
        )
    console.print(table)
    console.print()


def _tokens(number: int) -> str:
    return f"{number:,} token{'' if number == 1 else 's'}"


def _span(low: int | None, high: int | None) -> str:
    ends = ["unlimited" if end is None else f"{end:,}" for end in (low, high)]
    return ends[0] if ends[0] == ends[1] else " – ".join(ends)


def _reachable(result: SizeResult, pool: Pool) -> int | None:
    """The longest sequence that memory and the model's positions allow; it does not depend on --max-model-len."""
    longest, positions = pool.longest(), result.spec.max_positions
    return positions if longest is None else min(longest, positions or longest)


def _beyond(result: SizeResult, pool: Pool) -> str:
    longest, positions = pool.longest(), result.spec.max_positions
    if positions is None or (longest is not None and longest <= positions):
        return ""
    held = "more" if longest is None else f"{longest:,}"
    return f" (all that the model takes; the memory would hold {held})"


def _print_inverse(console: Any, result: SizeResult) -> None:
    inverse = result.inverse
    assert inverse is not None
    what = f"{inverse.users:,} sequence{'s' if inverse.users > 1 else ''} of {inverse.length:,} tokens"
    console.print(f"[bold]{what}[/] need {inverse.kv_bytes:,} B of KV memory ({human(inverse.kv_bytes)})", end="")
    if inverse.device is not None:
        share = result.limits.utilization
        console.print(f" and a device of {interval(inverse.device)} in total at utilization {share}", end="")
    console.print(".\n")


def _print_sources(console: Any, result: SizeResult) -> None:
    from rich.markup import escape

    table = _table("value", "is", "where it comes from")
    for name, source in result.spec.sources.items():
        table.add_row(name, escape(str(result.spec.values.get(name, ""))), escape(source))
    console.print(table)
    for note in result.notes:
        console.print(f"Note: {escape(note)}", soft_wrap=True)
