"""The five placement strategies by name, each as a KV manager over the same bytes."""

from __future__ import annotations

from octavo.errors import OctavoError
from octavo.kv.api import KVManager
from octavo.kv.contiguous import Contiguous, as_needed, reserve_max, reserve_oracle, reserve_pow2
from octavo.kv.paged import Paged

STRATEGIES = ("reserve-max", "reserve-pow2", "reserve-oracle", "growing", "paged")


def make_manager(
    strategy: str,
    pages: int,
    block_size: int,
    *,
    max_model_len: int,
    windows: tuple[int | None, ...] = (None,),
    chunk: int = 1 << 60,
    sharing: bool = True,
) -> KVManager:
    """A KV manager over `pages` pages (see `groups.py`); contiguous strategies use one page of every group a block.

    Raises OctavoError for an unknown strategy name.
    """
    if strategy == "paged":
        return Paged(pages, block_size, windows=windows, chunk=chunk, sharing=sharing)
    sizers = {
        "reserve-max": reserve_max(max_model_len),
        "reserve-pow2": reserve_pow2(max_model_len),
        "reserve-oracle": reserve_oracle,
        "growing": as_needed,
    }
    if strategy not in sizers:
        raise OctavoError(f"kv_strategy is {strategy!r}; it must be one of {', '.join(STRATEGIES)}.")
    groups = len(windows)
    return Contiguous(pages // groups, block_size, sizers[strategy], grow=strategy == "growing", groups=groups)
