"""One layer's attention over a scrambled paged cache, by any backend: random rows, garbage in unused slots."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.kv.dtypes import kv_dtype
from octavo.kv.groups import LayerKV, page_layout
from octavo.runner.attention import Backend, Batch, Current, LayerCache, Row, Scoring
from octavo.runner.quantise import stored_dtype
from octavo.runner.store import KVStore

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """`rows`: (start, count) of each sequence; `kv`: name of the cache's dtype."""

    rows: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 32
    v_dim: int = 32
    block: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kv: str = "float32"
    seed: int = 0


class Scene:
    """The cache filled, and this step's queries, as a layer of a model would hand them over."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        torch.manual_seed(shape.seed)
        stored = kv_dtype(shape.kv)
        layer = LayerKV(
            0, shape.kv_heads, shape.k_dim, shape.v_dim, stored.bytes, shape.window, scale_bytes=stored.scale_bytes
        )
        layout = page_layout([layer], shape.block)
        ends = [-(-(start + count) // shape.block) for start, count in shape.rows]
        self.store = KVStore([layer], layout, sum(ends) + 3, dtype=stored_dtype(stored), device=CPU)
        self.layer = layer
        self._leave_garbage()
        self.tables = self._filled_tables(ends)
        offsets = [sum(count for _, count in shape.rows[:i]) for i in range(len(shape.rows))]
        self.rows = [Row(at, count, start) for at, (start, count) in zip(offsets, shape.rows, strict=True)]
        tokens = sum(row.count for row in self.rows)
        self.query = torch.randn(shape.heads, tokens, shape.k_dim)
        self.scoring = Scoring(
            2.0 * shape.k_dim**-0.5, shape.softcap, torch.randn(shape.heads) if shape.sinks else None
        )

    def run(self, backend: Backend, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[tokens, heads, v_dim] in float32."""
        current = Current()
        cache = LayerCache(0, self.layer, 0, False, 10**6, self.store, backend, current)
        plan = backend.plan(self.rows, self.tables, self.shape.window, self.shape.block, CPU)
        current.batch = Batch(self.rows, [], torch.empty(0), [plan], {})
        nothing = torch.empty(self.shape.kv_heads, 0, self.shape.k_dim, dtype=dtype)
        return backend.attend(self.query.to(dtype), nothing, nothing, cache, self.scoring).float()

    def _leave_garbage(self) -> None:
        """Earlier holders left anything finite, and K that is no number where it is a float."""
        store = self.store
        if store.dtype in (torch.int8, torch.float8_e4m3fn):
            store.buffer.fill_(0x7E)  # the largest numbers of both
            store.k_scales[0].fill_(1e30)
            store.v_scales[0].fill_(1e30)
        else:
            store.k[0].fill_(float("nan"))
            store.v[0].fill_(min(torch.finfo(kind).max for kind in (store.dtype, torch.bfloat16)))

    def _filled_tables(self, ends: Sequence[int]) -> list[list[int]]:
        ids = list(range(sum(ends) + 3))
        random.Random(self.shape.seed).shuffle(ids)
        tables = []
        for (start, count), end in zip(self.shape.rows, ends, strict=True):
            table = [ids.pop() for _ in range(end)]
            self._write(table, start + count)
            if self.shape.window is not None:
                gone = max(0, start + 1 - self.shape.window) // self.shape.block
                table[:gone] = [-1] * gone
            tables.append(table)
        return tables

    def _write(self, table: list[int], length: int) -> None:
        shape = self.shape
        at = torch.arange(length)
        k = torch.randn(length, shape.kv_heads, shape.k_dim)
        v = torch.randn(length, shape.kv_heads, shape.v_dim)
        self.store.write(0, k, v, torch.tensor(table)[at // shape.block], at % shape.block)
