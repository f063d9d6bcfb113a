"""Run by test_memory.py: attention over a cache that lies between pages nobody may read.

Each case runs in a child, which a stray read ends; the cases whose child did not come back well are printed.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from octavo.native import calls
from octavo.runner.store import SPARE

GUARD = 1 << 20
TYPES = {"float32": calls.F32, "bfloat16": calls.BF16, "float16": calls.F16, "int8": calls.I8, "fp8": calls.FP8}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
LENGTH = 90
CASES = (  # dtypes of queries and cache, head size, block size, window (0: none), heads
    ("float32", "float32", 16, 16, 0, 1),  # a head of half a panel, at the very end
    ("float32", "float32", 48, 16, 0, 2),
    ("float32", "float32", 80, 32, 0, 12),
    ("bfloat16", "bfloat16", 96, 16, 0, 2),
    ("bfloat16", "bfloat16", 32, 16, 0, 12),
    ("float32", "float32", 32, 8, 20, 1),  # blocks before the window are given back
    ("bfloat16", "bfloat16", 32, 4, 30, 2),
    ("bfloat16", "int8", 32, 24, 25, 2),
    ("float32", "fp8", 16, 8, 9, 12),
    ("float32", "float16", 48, 24, 0, 2),
    ("bfloat16", "float32", 64, 1, 10, 1),
)


def guarded(size: int) -> tuple[int, mmap.mmap]:
    """`size` bytes of zeros that end at a forbidden page; what is before them is forbidden as far as whole pages go."""
    page = mmap.PAGESIZE
    whole = -(-size // page) * page
    area = mmap.mmap(-1, whole + 2 * GUARD)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    for at in (start, start + GUARD + whole):
        assert libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(GUARD), 0) == 0
    return start + GUARD + whole - size, area


def attend(dtype: str, kv: str, dim: int, block: int, window: int, heads: int) -> None:
    kernels = calls.kernels()
    assert kernels is not None
    handle = kernels.handle
    blocks = -(-LENGTH // block)
    element = BYTES[kv]
    scales = 2 * 2 * block if element == 1 else 0
    page_bytes = 2 * block * dim * element + scales
    base, _keep = guarded(blocks * page_bytes + SPARE)
    for count in (1, 5, 40):
        start = LENGTH - count
        table = np.arange(blocks, dtype=np.int32)
        if window:
            table[: max(0, start + 1 - window) // block] = -1
        starts, offsets = np.array([start], np.int32), np.array([0, count], np.int32)
        q = np.zeros(count * heads * dim, np.float32)
        out = np.zeros(count * heads * dim, np.float32)
        order = calls.Attend(heads=heads, kv_heads=1, k_dim=dim, v_dim=dim, window=window, scale=1.0, threads=2)
        order.type, order.kv_type = TYPES[dtype], TYPES[kv]
        order.v_at = block * dim * element
        order.k_scale_at = 2 * block * dim * element
        order.v_scale_at = order.k_scale_at + 2 * block
        order.q, order.out = q.ctypes.data, out.ctypes.data
        batch = order.batch
        batch.kv, batch.page_bytes, batch.block_size, batch.n_seqs = base, page_bytes, block, 1
        batch.n_tokens, batch.n_groups, batch.table_width = count, 1, blocks
        batch.starts, batch.offsets, batch.tables = starts.ctypes.data, offsets.ctypes.data, table.ctypes.data
        scratch = np.zeros(handle.octavo_attend_bytes(count, 1, 1, 2), np.uint8)
        order.scratch, order.scratch_bytes = scratch.ctypes.data, len(scratch)
        assert handle.octavo_attend(ctypes.byref(order)) == 0
        assert not out.any()


def survives(case: tuple[str, str, int, int, int, int]) -> bool:
    child = os.fork()
    if child == 0:
        attend(*case)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    calls.kernels()
    print(*(case for case in CASES if not survives(case)), sep="\n")
