"""Large anonymous memory in huge pages: weights and KV are read in long strides, and 2 MiB pages spare the walks."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE = 1 << 21


def huge_pages(size: int) -> NDArray[np.uint8]:
    """`size` zero bytes, aligned to a huge page. Nothing is touched: pages appear when they are first used."""
    memory = mmap.mmap(-1, size + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = np.frombuffer(memory, dtype=np.uint8)  # keeps the mapping alive
    return view[-view.ctypes.data % HUGE_PAGE :][:size]
