"""The KV tensors: one flat byte buffer of equal pages, per-layer views into it, and the copies between pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.errors import OctavoError
from octavo.kv.api import Copy
from octavo.kv.groups import LayerKV, Layout


class StoreError(OctavoError):
    """A cache that cannot be built or a copy that cannot be done."""


class KVStore:
    """`buffer` is [num_blocks, page_bytes] bytes; `k[layer]` and `v[layer]` are views of it.

    A view is [num_blocks, kv_heads, block_size, dim] in the model's dtype, whatever the order of bytes: head-major
    inside a block by default (one head's tokens are adjacent: what a CPU kernel walks), or token-major
    (`token_major=True`: all heads of a token are adjacent, as `varlen_attn` wants its pages).
    """

    def __init__(
        self,
        layers: Sequence[LayerKV],
        layout: Layout,
        num_blocks: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        token_major: bool = False,
    ) -> None:
        """Allocate. Raises StoreError if a layer's element size is not the dtype's or no block is asked for."""
        if num_blocks < 1:
            raise StoreError(f"num_blocks is {num_blocks}; a cache needs at least 1 block.")
        for layer in layers:
            if layer.element_bytes != dtype.itemsize:
                raise StoreError(
                    f"layer {layer.layer} keeps {layer.element_bytes} bytes per KV element and the model computes in "
                    f"{dtype} ({dtype.itemsize} bytes); this runner stores KV in the model's dtype."
                )
        self.layout, self.num_blocks = layout, num_blocks
        self.buffer = torch.zeros(num_blocks, layout.page_bytes, dtype=torch.uint8, device=device)
        self.k: dict[int, torch.Tensor] = {}
        self.v: dict[int, torch.Tensor] = {}
        for layer in layers:
            at = layout.offsets[layer.layer][1]
            middle = at + layout.block_size * layer.kv_heads * layer.k_dim * layer.element_bytes
            self.k[layer.layer] = self._view(layer.kv_heads, layer.k_dim, at, dtype, token_major)
            self.v[layer.layer] = self._view(layer.kv_heads, layer.v_dim, middle, dtype, token_major)

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    def _view(self, heads: int, dim: int, at: int, dtype: torch.dtype, token_major: bool) -> torch.Tensor:
        size, block = dtype.itemsize, self.layout.block_size
        head_step, token_step = (dim, heads * dim) if token_major else (block * dim, dim)
        return self.buffer.view(dtype).as_strided(
            (self.num_blocks, heads, block, dim),
            (self.layout.page_bytes // size, head_step, token_step, 1),
            at // size,
        )

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        """Store k [tokens, kv_heads, k_dim] and v [tokens, kv_heads, v_dim] at (blocks[i], offsets[i]).

        V that is no finite number (an overflow in half precision) is stored as 0: the next holder of the block reads
        all of its slots with weight 0, and 0 x infinity would spoil another request's sum.
        """
        self.k[layer][blocks, :, offsets] = k
        self.v[layer][blocks, :, offsets] = v.nan_to_num(0.0, 0.0, 0.0)

    def apply(self, copies: Sequence[Copy]) -> None:
        """Run the copies in order; each reads all of its source before it writes.

        Raises StoreError, before anything is copied, for a block outside the pool.
        """
        for copy in copies:
            if min(copy.src, copy.dst) < 0 or max(copy.src, copy.dst) + copy.n > self.num_blocks:
                raise StoreError(f"{copy} leaves the pool of {self.num_blocks} blocks.")
        for copy in copies:
            source = self.buffer[copy.src : copy.src + copy.n]
            if abs(copy.src - copy.dst) < copy.n:
                source = source.clone()
            self.buffer[copy.dst : copy.dst + copy.n] = source
