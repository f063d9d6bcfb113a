"""Numbers as a reader wants them, and the ledger's lines in plain words: shared by page, table and verdict."""

from __future__ import annotations

LINE_NAMES = {
    "live": "live",
    "cached": "cached prefixes",
    "slack": "slack in tail blocks",
    "reserved_used_later": "reserved, used later",
    "reserved_never_used": "reserved, never used",
    "quarantined": "quarantined",
    "fragmented": "fragmented",
    "held": "held back",
    "free": "free",
}
LINE_MEANINGS = {
    "live": "token states of requests that run",
    "cached": "token states of earlier requests, kept for reuse",
    "slack": "unwritten slots of blocks that hold at least one token",
    "reserved_used_later": "allocated, still empty, and filled later in the request's life",
    "reserved_never_used": "allocated and empty until the request ended",
    "quarantined": "source blocks of copies that have not run yet",
    "fragmented": "free, but in no run long enough for the request that waits first",
    "held": "kept free by admission for requests that already run",
    "free": "free for anyone",
}
HOLDING = ("live", "cached")  # the lines that hold token states


def percent(share: float) -> str:
    """0.934 -> "93 %"; one decimal where rounding would say 0 or 100."""
    value = 100 * share
    if 0 < value < 0.05:
        return "<0.1 %"
    if 0 < value < 1 or 99 < value < 100:
        return f"{min(value, 99.9):.1f} %"
    return f"{value:.0f} %"


def size(count: float) -> str:
    """Bytes in decimal units: "378 MB", "12.9 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def seconds(value: float) -> str:
    """As in "850 ms", "12.4 s", "208 s"."""
    if value < 0.9995:
        ms = value * 1000
        return f"{ms:.0f} ms" if ms >= 9.95 or ms == 0 else f"{ms:.1f} ms"
    return f"{value:.0f} s" if value >= 99.5 else f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"


def count(value: float) -> str:
    """As in "27" or "8,192" for whole numbers, "1.9" otherwise."""
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.1f}"


def rate(value: float) -> str:
    """Tokens a second: one decimal below ten."""
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}"
