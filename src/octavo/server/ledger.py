"""The ledger of the device in bytes: every line of memory, exclusive, summing to the budget exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from octavo.build import BuiltEngine
from octavo.kv.api import Ledger

#: Lines of the KV pool, as a `Ledger` of the KV manager has them; "held back" is its `held`.
POOL_LINES = ("live", "reserved", "slack", "lookahead", "quarantined", "cached", "free", "fragmented", "held back")
#: All lines. padding: pool memory too small for a block; outside: memory of the device that the engine leaves alone
#: (above memory_utilization, or more than max_num_seqs sequences can use).
LINES = ("weights", "activations", "workspace", *POOL_LINES, "padding", "outside")


@dataclass(frozen=True, slots=True)
class ByteLedger:
    """Bytes by line, in the order of `LINES`; `sum(lines.values()) == budget`, always."""

    budget: int
    lines: Mapping[str, int]


def ledger_bytes(built: BuiltEngine, pool: Ledger | None = None) -> ByteLedger:
    """Where every byte of the budget is now. To be called between two steps, on the engine's thread.

    The budget is what the process may come to hold on its device; where `kv_memory` was given and nothing was
    measured, it is the weights and that memory. `pool`: the scheduler's ledger, if the caller has it already.
    """
    pool = pool or built.engine.ledger()
    slot = built.layout.page_bytes // built.layout.block_size * built.engine.scheduler.kv.pages_per_block
    inside = {name: getattr(pool, _FIELD.get(name, name)) * slot for name in POOL_LINES}
    given, fixed, budget = _given(built)
    padding = given - sum(inside.values())
    outside = budget - given - sum(fixed.values())
    return ByteLedger(budget, MappingProxyType({**fixed, **inside, "padding": padding, "outside": outside}))


_FIELD = {"held back": "held"}


def _given(built: BuiltEngine) -> tuple[int, dict[str, int], int]:
    """(bytes given to the pool, bytes of what lies beside it, the budget)."""
    measured, memory = built.budget, built.config.kv_memory
    if measured is None:
        assert memory is not None  # nothing is measured only when it was given
        return (
            memory,
            {"weights": built.loaded.weight_bytes, "activations": 0, "workspace": 0},
            (built.loaded.weight_bytes + memory),
        )
    fixed = {"weights": measured.weights, "activations": measured.activations, "workspace": measured.workspace}
    usable = int(measured.total * built.config.memory_utilization) - sum(fixed.values())
    unused = usable - built.kv_bytes
    # Less than a page is the rounding of the pool; more is memory that max_num_seqs sequences could never fill.
    given = usable if unused < built.layout.page_bytes else built.kv_bytes
    return given, fixed, measured.total
