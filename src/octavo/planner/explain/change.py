"""What to change against the limit that binds: one sentence, from the figures of the time while it bound."""

from __future__ import annotations

from octavo.planner.explain.explained import SHARED_PREFIX, Explanation, by_limit
from octavo.report.wording import percent

ROOM = 0.1  # share of the pool that must be available before more requests at once make sense
FULL = 0.85  # a pool with this share of token states has nothing to gain from other placement
AVAILABLE = ("free", "cached", "held", "fragmented")
MORE = "give the cache more memory (kv_memory), or store KV in fewer bytes (kv_dtype fp8)"
RESERVED = ("reserved", "reserved_used_later", "reserved_never_used")


def change(e: Explanation, limit: str) -> str:
    """What to set otherwise, when `limit` binds; numbers are means over the time while requests waited for it."""
    shares = _while_bound(e, limit)
    match limit:
        case "slots":
            return _slots(e, shares)
        case "step budget":
            now = _now(e.setup.max_num_batched_tokens)
            return f"raise max_num_batched_tokens{now}; steps become longer, so look at the gaps between tokens, too."
        case "memory: full":
            return _full(e, shares)
        case "memory: fragmented":
            free = sum(shares.get(line, 0.0) for line in AVAILABLE)
            return f"set kv_strategy to paged, which needs no run of blocks ({percent(free)} of the pool was free)."
        case "memory: held":
            return _held(e, shares)
        case "quota":
            return "raise the quotas of the tenants that wait, or spread their requests over time."
        case "no step":
            return "find out what kept the process from stepping the engine; no setting of the cache matters."
        case _ if limit == SHARED_PREFIX:
            return "nothing: computing that prefix twice would take longer than to wait for it."
        case _:
            return "read the lines below; no single setting follows from this cause."


def _while_bound(e: Explanation, limit: str) -> dict[str, float]:
    """Line of the pool -> share, weighted by the requests that waited for `limit`."""
    total = 0.0
    shares: dict[str, float] = {}
    for part in e.stretches:
        weight = by_limit(part.waiting).get(limit, 0.0) * part.seconds
        if part.kv and weight:
            total += weight
            for line, share in part.kv.items():
                shares[line] = shares.get(line, 0.0) + weight * share
    return {line: share / total for line, share in shares.items()}


def _now(value: int | None) -> str:
    return "" if value is None else f" (now {value:,})"


def _slots(e: Explanation, shares: dict[str, float]) -> str:
    raise_it = f"raise max_num_seqs{_now(e.setup.max_num_seqs)}"
    if not shares:
        return f"{raise_it}."
    room = sum(shares.get(line, 0.0) for line in AVAILABLE)
    if room >= ROOM:
        return f"{raise_it}: {percent(room)} of the KV pool was free or evictable meanwhile."
    return f"{raise_it} and the KV memory with it: only {percent(room)} of the pool was free or evictable meanwhile."


def _full(e: Explanation, shares: dict[str, float]) -> str:
    live, reserved = shares.get("live", 0.0), sum(shares.get(line, 0.0) for line in RESERVED)
    strategy = e.setup.strategy
    if strategy == "paged" or live >= FULL:
        held = f": {percent(live)} of the pool held token states of running requests" if shares else ""
        return f"{MORE}{held}."
    length = ""
    if strategy == "reserve-max":
        length = f", or lower max_model_len{_now(e.setup.max_model_len)}, which every request reserves in full"
    held = (
        f" ({percent(reserved)} of the pool was reserved and empty, {percent(live)} held token states)"
        if shares
        else ""
    )
    return f"set kv_strategy to paged{held}{length}; else {MORE}."


def _held(e: Explanation, shares: dict[str, float]) -> str:
    """Held back for the growth of running requests: little of the pool means that it is full, much that it is kept."""
    kept = sum(shares.get(line, 0.0) for line in AVAILABLE)
    admission = f"admission {e.setup.admission}" if e.setup.admission else "admission"
    if shares and kept < ROOM:
        full = percent(shares.get("live", 0.0))
        return (
            f"{MORE}: {full} of the pool held token states, and {admission} keeps the rest for what runs to grow into."
        )
    room = f" ({percent(kept)} of the pool was available)" if shares else ""
    return (
        f"send smaller max_tokens, or set admission to prompt, at the price of preemptions: {admission} keeps room for "
        f"what running requests may still write{room}; else {MORE}."
    )
