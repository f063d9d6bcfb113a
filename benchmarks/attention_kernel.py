"""Paged decode attention against the memory: GB/s of K and V, as a share of reading the same bytes front to back.

    python benchmarks/attention_kernel.py [--rounds 9]

Each line is the median over rounds in which the kernel and the plain read alternate, so that both see the same state of
the machine. The pool holds several layers, more than the caches; blocks lie in random order. `contiguous` is one block
per sequence. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from octavo.native import calls
from octavo.native.memory import huge_pages
from octavo.native.model import thread_count

LAYERS = 8
TYPES = {"bf16": (calls.BF16, 2), "int8": (calls.I8, 1), "fp8": (calls.FP8, 1)}


@dataclass(frozen=True)
class Shape:
    """Query heads, KV heads, head size."""

    name: str
    heads: int
    kv_heads: int
    dim: int


SHAPES = (Shape("SmolLM2-135M", 9, 3, 64), Shape("Qwen3-0.6B", 16, 8, 128))


class Case:
    """A pool of LAYERS layers with `batch` sequences of `context` tokens, and the call that attends to one layer."""

    def __init__(self, shape: Shape, batch: int, context: int, block: int, kv: str) -> None:
        kind, size = TYPES[kv]
        blocks = -(-context // block)
        self.side = shape.kv_heads * block * shape.dim * size
        self.layer = 2 * self.side + (4 * shape.kv_heads * block if size == 1 else 0)
        self.pool = huge_pages(batch * blocks * self.layer * LAYERS)
        self.pool[:] = np.random.default_rng(0).integers(58, 62, len(self.pool), np.uint8)  # plain numbers in any type
        self.read = min(len(self.pool), 2 * batch * context * shape.kv_heads * shape.dim * size * LAYERS)
        tables = np.random.default_rng(1).permutation(batch * blocks).astype(np.int32)
        starts, offsets = np.full(batch, context - 1, np.int32), np.arange(batch + 1, dtype=np.int32)
        query = torch.randn(batch, shape.heads, shape.dim).to(torch.bfloat16)
        out = torch.empty_like(query)
        call = calls.Attend(heads=shape.heads, kv_heads=shape.kv_heads, k_dim=shape.dim, v_dim=shape.dim)
        call.type, call.kv_type, call.scale, call.threads = calls.BF16, kind, shape.dim**-0.5, thread_count()
        call.q, call.out = query.data_ptr(), out.data_ptr()
        b = call.batch
        b.kv, b.page_bytes, b.block_size = self.pool.ctypes.data, self.layer * LAYERS, block
        b.n_seqs = b.n_tokens = batch
        b.n_groups, b.table_width = 1, blocks
        b.starts, b.offsets, b.tables = (a.ctypes.data for a in (starts, offsets, tables))
        library = calls.kernels()
        assert library is not None, "the native library is not built"
        self.handle = library.handle
        scratch = np.empty(self.handle.octavo_attend_bytes(batch, batch, shape.kv_heads, call.threads), np.uint8)
        call.scratch, call.scratch_bytes = scratch.ctypes.data, len(scratch)
        self.call, self.keep, self.scales = (
            call,
            (starts, offsets, tables, query, out, scratch),
            2 * shape.kv_heads * block,
        )

    def attend(self) -> float:
        """Seconds for all layers."""
        start = time.perf_counter()
        for layer in range(LAYERS):
            at = layer * self.layer
            self.call.k_at, self.call.v_at = at, at + self.side
            self.call.k_scale_at, self.call.v_scale_at = at + 2 * self.side, at + 2 * self.side + self.scales
            self.handle.octavo_attend(ctypes.byref(self.call))
        return time.perf_counter() - start

    def plain_read(self) -> float:
        start = time.perf_counter()
        self.handle.octavo_read_bytes(self.pool.ctypes.data, self.read, thread_count())
        return time.perf_counter() - start


def measure(shape: Shape, batch: int, context: int, block: int, kv: str, rounds: int) -> str:
    case = Case(shape, batch, context, block, kv)
    case.attend()
    times = [(case.attend(), case.plain_read()) for _ in range(rounds)]
    attend, read = median(t[0] for t in times), median(t[1] for t in times)
    name = "contiguous" if block >= context else f"{block}"
    return (
        f"| {shape.name} | {batch} | {context} | {name} | {kv} | {attend / LAYERS * 1e6:.0f} | "
        f"{case.read / attend / 1e9:.1f} | {case.read / read / 1e9:.1f} | {read / attend:.0%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print("| shape | batch | context | block | KV | µs a layer | GB/s | plain read GB/s | share |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for shape in SHAPES:
        for batch, context in ((1, 4096), (16, 512), (16, 1024), (64, 512)):
            print(measure(shape, batch, context, 16, "bf16", rounds), flush=True)
        for block in (32, 64, 128, 1024):
            print(measure(shape, 16, 1024, block, "bf16", rounds), flush=True)
        for kv in ("int8", "fp8"):
            print(measure(shape, 16, 1024, 16, kv, rounds), flush=True)


if __name__ == "__main__":
    main()
