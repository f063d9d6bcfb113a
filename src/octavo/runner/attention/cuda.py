"""CUDA attention through `torch.nn.attention.varlen.varlen_attn` with block tables (torch 2.13 and later).

NOT RUN ON A GPU: written against the signature and docstring of torch 2.13; every result of this file is unproven.
The kernel wants pages [blocks, block_size, kv_heads, dim] with all heads of a token adjacent, so the store is built
token-major for it (no copy of KV). Whatever the kernel does not do (soft-capping, sinks, K and V of different or large
dims, float32, blocks not a multiple of 256 with FlashAttention 2) goes to the reference backend, layer by layer.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch

from octavo.models.errors import ModelError
from octavo.runner.attention import LayerCache, Row, Scoring
from octavo.runner.attention.reference import ReferenceAttention, ReferencePlan

_FLASH2_PAGE = 256
_MAX_DIM = 256


@dataclass(slots=True)
class CudaPlan:
    """`tables` [rows, pages] int32; entries before the window are clamped to 0 and never visible."""

    reference: ReferencePlan
    tables: torch.Tensor
    starts: torch.Tensor  # [rows + 1] int32: where each row's queries begin
    lengths: torch.Tensor  # [rows] int32: tokens with KV
    longest_query: int
    longest: int
    block_size: int
    window: int | None


def varlen_available() -> bool:
    """Whether this torch has a variable-length kernel that reads block tables, on a CUDA device."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return torch.cuda.is_available() and "block_table" in inspect.signature(varlen_attn).parameters


class CudaAttention:
    """`varlen_attn` where it applies, the reference elsewhere. Stateless."""

    token_major = True

    def __init__(self) -> None:
        self.reference = ReferenceAttention()
        major = torch.cuda.get_device_capability()[0]
        self.any_page = major == 9  # FlashAttention 3 takes any page size; 2 wants multiples of 256

    def plan(
        self, rows: list[Row], tables: list[list[int]], window: int | None, block_size: int, device: torch.device
    ) -> CudaPlan:
        """Metadata of the kernel and, for layers that it cannot do, of the reference."""
        width = max(-(-row.length // block_size) for row in rows)
        padded = [[max(b, 0) for b in t[:width]] + [0] * (width - len(t[:width])) for t in tables]
        starts = [row.offset for row in rows] + [rows[-1].offset + rows[-1].count]
        return CudaPlan(
            self.reference.plan(rows, tables, window, block_size, device),
            torch.tensor(padded, dtype=torch.int32, device=device),
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor([row.length for row in rows], dtype=torch.int32, device=device),
            max(row.count for row in rows),
            max(row.length for row in rows),
            block_size,
            window,
        )

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, scoring: Scoring
    ) -> torch.Tensor:
        if cache.shape.scale_bytes:
            raise ModelError(
                f"the CUDA kernel does not read an int8 or fp8 KV cache ({cache.k.dtype} here): set kv_dtype to auto, "
                "bfloat16 or float16, or device to cpu."
            )
        plan: CudaPlan = cache.plan
        if not self._fits(query, cache, scoring, plan):
            return self.reference.attend(query, key, value, cache, scoring, plan.reference)
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(
            query.transpose(0, 1).contiguous(),
            cache.k.transpose(1, 2),
            cache.v.transpose(1, 2),
            plan.starts,
            None,
            plan.longest_query,
            plan.longest,
            scale=scoring.scale,
            window_size=(-1 if plan.window is None else plan.window - 1, 0),
            enable_gqa=query.shape[0] != cache.shape.kv_heads,
            seqused_k=plan.lengths,
            block_table=plan.tables,
        )
        assert isinstance(out, torch.Tensor)
        return out

    def _fits(self, query: torch.Tensor, cache: LayerCache, scoring: Scoring, plan: CudaPlan) -> bool:
        shape = cache.shape
        return (
            query.is_cuda
            and query.dtype in (torch.float16, torch.bfloat16)
            and query.dtype == cache.k.dtype
            and scoring.softcap is None
            and scoring.sinks is None
            and shape.k_dim == shape.v_dim <= _MAX_DIM
            and (self.any_page or plan.block_size % _FLASH2_PAGE == 0)
        )
