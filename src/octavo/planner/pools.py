"""The simulated KV pool: bytes, measured blocks or a memory plan in; pages and the longest sequence out.

The rules are those of `octavo.build`, so that the same bytes give the same pool as in the real engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.errors import OctavoError
from octavo.kv.api import longest_length
from octavo.kv.budget import GIB, BudgetError, MemoryPlan
from octavo.kv.spec import KVSpec
from octavo.planner.engines import EngineProfile
from octavo.planner.paging import Pages


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """
    length        max_model_len as asked (`length_given`) or the model's own; max_num_seqs likewise
    chunk         most tokens that a step computes of one sequence
    num_blocks    measured blocks; beats kv_memory (bytes), which beats the memory plan
    """

    strategy: str
    length: int
    length_given: bool
    max_num_seqs: int
    seqs_given: bool
    chunk: int
    num_blocks: int | None = None
    kv_memory: int | None = None


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """The pool, the longest sequence that the engine promises, and how many may run at once."""

    layout: Pages
    pages: int
    max_model_len: int
    max_num_seqs: int
    notes: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)


def simulated_pool(
    wanted: PoolRequest, spec: KVSpec, layout: Pages, profile: EngineProfile, plan: MemoryPlan | None
) -> SimulatedPool:
    """Raises BudgetError with needed and possible, the shortfall in bytes and the remedies when it cannot work."""
    notes: list[str] = []
    kv, origin = _kv_bytes(wanted, layout, profile, plan, notes)
    seqs = wanted.max_num_seqs
    if wanted.num_blocks is None and spec.fixed_bytes:
        seqs = _stateful(wanted, spec, kv, notes)
        kv -= seqs * spec.fixed_bytes
    pages = kv // layout.page_bytes
    if pages < len(layout.windows):
        need, there = layout.block_bytes_of_all(), pages * layout.page_bytes
        raise BudgetError(
            f"The KV pool is {there} bytes ({origin}), less than one block: {layout.block_size} tokens need {need} "
            f"bytes, {need - there} bytes short. Remedies: more memory or utilization, a larger tp, a smaller weight "
            "dtype, or a smaller block_size."
        )
    length, shortened = _promise(wanted, layout, profile, pages, origin)
    sources = {"kv pool": origin}
    if seqs < wanted.max_num_seqs:
        sources["max_num_seqs"] = "recurrent states that half of the KV memory holds"
    if shortened:
        sources["max_model_len"] = f"what the pool holds; the model takes {wanted.length}"
        notes.append(
            f"max_model_len is {length}, the longest that fits the pool; the model would take {wanted.length}."
        )
    if layout.padding:
        share = layout.padding / layout.block_bytes_of_all()
        notes.append(f"{share:.1%} of every page is padding: layer groups of equal bytes do not come out even.")
    return SimulatedPool(layout, pages, length, seqs, tuple(notes), sources)


def _kv_bytes(
    wanted: PoolRequest, layout: Pages, profile: EngineProfile, plan: MemoryPlan | None, notes: list[str]
) -> tuple[int, str]:
    """Bytes for KV and states, and where the number comes from."""
    for name in ("num_blocks", "kv_memory"):
        value = getattr(wanted, name)
        if value is not None and value < 1:
            raise BudgetError(f"{name} is {value}; it must be at least 1.")
    if wanted.num_blocks is not None:
        return wanted.num_blocks * layout.page_bytes, _measured(wanted.num_blocks, wanted, layout, plan, notes)
    if wanted.kv_memory is not None:
        if plan is not None:
            _require_room(wanted.kv_memory, plan, notes)
        return wanted.kv_memory, f"flag: kv_memory {wanted.kv_memory}"
    if plan is not None:
        return _planned(wanted, layout, profile, plan, notes), f"memory plan of {profile.name}"
    raise OctavoError(
        "The size of the KV pool is unknown: give gpu or memory for a memory plan, or kv_memory in bytes, or the "
        "measured num_blocks."
    )


def _stateful(wanted: PoolRequest, spec: KVSpec, kv: int, notes: list[str]) -> int:
    """Sequences whose recurrent state is set aside: max_num_seqs as asked; as a default, at most what half of `kv`
    holds. (vLLM takes states from the pool as sequences come, which no number of equal pages can say.)"""
    seqs = wanted.max_num_seqs
    if not wanted.seqs_given:
        seqs = max(1, min(seqs, kv // 2 // spec.fixed_bytes))
    states = seqs * spec.fixed_bytes
    if states >= kv:
        raise BudgetError(
            f"The recurrent state of {seqs} sequences needs {states} bytes, there are {kv}: {states - kv + 1} bytes "
            "short of a first byte of KV. Remedies: lower max_num_seqs, or more memory."
        )
    notes.append(
        f"{states} bytes are set aside for the recurrent state of {seqs} sequences ({spec.fixed_bytes} bytes each)."
    )
    return seqs


def _measured(blocks: int, wanted: PoolRequest, layout: Pages, plan: MemoryPlan | None, notes: list[str]) -> str:
    """Measured blocks win; say what else was there."""
    tokens = blocks // len(layout.windows) * layout.block_size
    origin = f"flag: num_blocks {blocks} x {layout.block_size} = {tokens} tokens"
    if len(layout.windows) > 1:
        origin = f"flag: num_blocks {blocks} of {layout.block_size} tokens over {len(layout.windows)} layer groups"
    if wanted.kv_memory is not None and wanted.kv_memory // layout.page_bytes != blocks:
        other = wanted.kv_memory // layout.page_bytes
        notes.append(f"num_blocks {blocks} is used; kv_memory {wanted.kv_memory} would be {other} blocks.")
    if plan is not None:
        try:
            kv = plan.kv()
        except BudgetError as error:
            notes.append(f"num_blocks {blocks} is used; the memory plan itself says: {error}")
        else:
            low, high = (max(0, end) // layout.page_bytes for end in (kv.low, kv.high))
            notes.append(f"num_blocks {blocks} is used, as measured; the memory plan would give {low} to {high}.")
    return origin


def _require_room(kv: int, plan: MemoryPlan, notes: list[str]) -> None:
    """Given KV bytes need not keep to the utilization, but weights and KV must lie on the device."""
    needed = plan.weights.low + kv
    if needed > plan.total.high:
        raise BudgetError(
            f"Weights ({plan.weights.low} bytes) and kv_memory ({kv} bytes) need {needed} bytes, the device has "
            f"{plan.total.high}: {needed - plan.total.high} bytes short. Remedies: lower kv_memory, a larger tp, or a "
            "smaller weight dtype."
        )
    try:
        planned = plan.kv()
    except BudgetError as error:
        notes.append(f"kv_memory {kv} is used; the memory plan itself says: {error}")
        return
    if not planned.low <= kv <= planned.high:
        notes.append(f"kv_memory {kv} is used; the memory plan would leave {planned.low} to {planned.high} bytes.")


def _planned(wanted: PoolRequest, layout: Pages, profile: EngineProfile, plan: MemoryPlan, notes: list[str]) -> int:
    """KV bytes of the plan: the low end, as the high end of a cost may come true."""
    kv = plan.kv()
    if kv.low <= 0:
        raise BudgetError(
            f"At the high end of the costs {-kv.low} bytes are missing before a first byte of KV, at the low end "
            f"{kv.high} are left: too uncertain to simulate. Remedies: give kv_memory or num_blocks as measured, more "
            "memory or utilization, a larger tp, a smaller weight dtype, or fewer sequences or tokens in a step."
        )
    if kv.low < kv.high:
        notes.append(
            f"The KV memory is an interval, {kv.low / GIB:.2f} to {kv.high / GIB:.2f} GiB "
            f"({kv.low // layout.page_bytes:,} to {kv.high // layout.page_bytes:,} pages): the low end is used; give "
            "num_blocks as your engine logs it."
        )
    if profile.caps_pool:
        blocks = -(-wanted.length // layout.block_size)
        return min(kv.low, wanted.max_num_seqs * blocks * layout.block_bytes_of_all())
    return kv.low


def _promise(wanted: PoolRequest, layout: Pages, profile: EngineProfile, pages: int, origin: str) -> tuple[int, bool]:
    """(max_model_len, whether the pool shortened it)."""
    # A reserving strategy serves any sequence that fits alone: its own region is cut to the length that comes out here.
    strategy = "growing" if wanted.strategy.startswith("reserve") else wanted.strategy
    kv = layout.manager(strategy, pages, max_model_len=wanted.length, chunk=wanted.chunk)
    possible = longest_length(kv)
    if wanted.length <= possible:
        return wanted.length, False
    if profile.shrinks_length and not wanted.length_given:
        return possible, True
    need = kv.ceiling_blocks(wanted.length, wanted.length) * kv.pages_per_block * layout.page_bytes
    there = pages * layout.page_bytes
    raise BudgetError(
        f"One sequence of max_model_len {wanted.length} tokens needs {need} bytes of KV, the pool has {there} "
        f"({origin}): {need - there} bytes short; the longest possible length is {possible}. Remedies: set "
        f"max_model_len to {possible} or less; or give the pool {need} bytes (more memory or utilization, a larger tp, "
        "a smaller KV or weight dtype)."
    )
