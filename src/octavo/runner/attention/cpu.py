"""CPU attention in C++ over the pages as they lie, for models that run through transformers' code (`octavo_attend`).

Queries go in and results come out in float32 or bfloat16. float16 models, and bfloat16 ones whose heads are no multiple
of 32, are converted to float32 and back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kv.groups import LayerKV
from octavo.models.errors import ModelError
from octavo.native import calls
from octavo.native.model import KV_TYPES, thread_count
from octavo.runner.attention import LayerCache, Row, Scoring

_UNIT, _PAIRED_UNIT, _MOST_DIM = 16, 32, 256
_MOST_SHARING = 96  # query heads of one KV head: QUERY_ROWS in attention.h


@dataclass(slots=True)
class CpuPlan:
    """The batch as the C code reads it; the arrays are those that `batch` points to."""

    batch: calls.Batch
    window: int
    arrays: tuple[NDArray[np.int32], ...]


def why_not(layers: Iterable[LayerKV], heads: int) -> str:
    """Why the C++ attention cannot serve these layers with `heads` query heads, as a clause; "" if it can."""
    if calls.kernels() is None:
        return "the native library is not there"
    for layer in layers:
        for dim in (layer.k_dim, layer.v_dim):
            if dim % _UNIT or dim > _MOST_DIM:
                return f"head size {dim} is no multiple of {_UNIT} up to {_MOST_DIM}"
        if heads % layer.kv_heads or heads // layer.kv_heads > _MOST_SHARING:
            return f"{heads} query heads do not share {layer.kv_heads} KV heads, at most {_MOST_SHARING} each"
    return ""


class CpuAttention:
    """See the module's text. Its working memory is its own: one step at a time."""

    token_major = False

    def __init__(self) -> None:
        library = calls.kernels()
        if library is None:
            raise ModelError("the native library is not there, so CpuAttention cannot run; use ReferenceAttention.")
        self._handle = library.handle
        self._scratch = np.empty(0, np.uint8)

    def plan(
        self, rows: list[Row], tables: list[list[int]], window: int | None, block_size: int, device: torch.device
    ) -> CpuPlan:
        """One layer group's table and the places of the sequences in the flat batch."""
        width = max(-(-row.length // block_size) for row in rows)
        table = np.full((len(rows), width), -1, np.int32)
        for i, (row, blocks) in enumerate(zip(rows, tables, strict=True)):
            held = blocks[: -(-row.length // block_size)]
            table[i, : len(held)] = held
        starts = np.array([row.start for row in rows], np.int32)
        offsets = np.array([*(row.offset for row in rows), rows[-1].offset + rows[-1].count], np.int32)
        batch = calls.Batch(
            block_size=block_size, n_seqs=len(rows), n_tokens=int(offsets[-1]), n_groups=1, table_width=width
        )
        batch.starts, batch.offsets, batch.tables = starts.ctypes.data, offsets.ctypes.data, table.ctypes.data
        return CpuPlan(batch, window or 0, (table, starts, offsets))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, scoring: Scoring
    ) -> torch.Tensor:
        """See `Backend.attend`. Raises ModelError for sizes that `why_not` refuses."""
        heads, tokens, _ = query.shape
        if why := why_not((cache.shape,), heads):
            raise ModelError(f"layer {cache.layer}: {why}.")
        dtype = _computed(query.dtype, cache.shape)
        q = query.transpose(0, 1).to(dtype).contiguous()
        out = torch.empty(tokens, heads, cache.shape.v_dim, dtype=dtype)
        sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
        order = self._order(cache, scoring, heads)
        order.q, order.out, order.type = q.data_ptr(), out.data_ptr(), KV_TYPES[dtype]
        order.sinks = None if sinks is None else sinks.data_ptr()
        if self._handle.octavo_attend(ctypes.byref(order)):
            raise ModelError("the native attention did not fit its scratch memory; please report this.")
        return out.to(query.dtype)

    def _order(self, cache: LayerCache, scoring: Scoring, heads: int) -> calls.Attend:
        plan: CpuPlan = cache.plan
        store, shape = cache.store, cache.shape
        base = store.buffer.data_ptr()
        order = calls.Attend(batch=plan.batch, window=plan.window, heads=heads, kv_heads=shape.kv_heads)
        order.batch.kv, order.batch.page_bytes = base, store.layout.page_bytes
        order.k_at, order.v_at = cache.k.data_ptr() - base, cache.v.data_ptr() - base
        if shape.scale_bytes:
            order.k_scale_at = cache.k_scales.data_ptr() - base
            order.v_scale_at = cache.v_scales.data_ptr() - base
        order.k_dim, order.v_dim, order.kv_type = shape.k_dim, shape.v_dim, KV_TYPES[store.dtype]
        order.scale, order.softcap = scoring.scale, scoring.softcap or 0.0
        order.threads = thread_count()
        order.scratch, order.scratch_bytes = self._scratch_for(order)
        return order

    def _scratch_for(self, order: calls.Attend) -> tuple[int, int]:
        batch = order.batch
        need = self._handle.octavo_attend_bytes(batch.n_tokens, batch.n_seqs, order.kv_heads, order.threads)
        if len(self._scratch) < need:
            self._scratch = np.empty(need, np.uint8)
        return self._scratch.ctypes.data, len(self._scratch)


def _computed(dtype: torch.dtype, shape: LayerKV) -> torch.dtype:
    """What the C++ code computes in for a model in `dtype`."""
    paired = shape.k_dim % _PAIRED_UNIT == shape.v_dim % _PAIRED_UNIT == 0
    return torch.bfloat16 if dtype == torch.bfloat16 and paired else torch.float32
