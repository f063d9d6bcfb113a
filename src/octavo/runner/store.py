"""The KV tensors: one flat byte buffer of equal pages, per-layer views into it, and the copies between pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.errors import OctavoError
from octavo.kv.api import Copy
from octavo.kv.groups import LayerKV, Layout, page_layout
from octavo.native.memory import huge_pages
from octavo.runner.quantise import dequantise, narrow, quantise

SPARE = 64  # readable bytes behind the last page: C++ takes V in pairs of vectors, where a head may end after one


class StoreError(OctavoError):
    """A cache that cannot be built or a copy that cannot be done."""


class KVStore:
    """`buffer` is [num_blocks, page_bytes] bytes; `k[layer]` and `v[layer]` are views of it.

    A view is [num_blocks, kv_heads, block_size, dim] in the cache's dtype, whatever the order of bytes: head-major
    inside a block by default (one head's tokens are adjacent: what a CPU kernel walks), or token-major
    (`token_major=True`: all heads of a token are adjacent, as `varlen_attn` wants its pages).

    An int8 or fp8 cache has `k_scales[layer]` and `v_scales[layer]` too, [num_blocks, kv_heads, block_size] in
    bfloat16 and always head-major; other caches have none. They lie behind V: K | V | K scales | V scales.
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
        """Allocate. `dtype` is that of the stored elements.

        Raises StoreError if the layers or the layout are made for another dtype, if scales would lie at odd bytes, or
        if no block is asked for.
        """
        if num_blocks < 1:
            raise StoreError(f"num_blocks is {num_blocks}; a cache needs at least 1 block.")
        _check(layers, layout, dtype)
        self.layout, self.num_blocks, self.dtype = layout, num_blocks, dtype
        self.buffer = _zeros(num_blocks, layout.page_bytes, device)
        self.k: dict[int, torch.Tensor] = {}
        self.v: dict[int, torch.Tensor] = {}
        self.k_scales: dict[int, torch.Tensor] = {}
        self.v_scales: dict[int, torch.Tensor] = {}
        for layer in layers:
            heads, at = layer.kv_heads, layout.offsets[layer.layer][1]
            for views, dim in ((self.k, layer.k_dim), (self.v, layer.v_dim)):
                views[layer.layer] = self._view(heads, dim, at, dtype, token_major)
                at += layout.block_size * heads * dim * layer.element_bytes
            if layer.scale_bytes:
                for scales in (self.k_scales, self.v_scales):
                    scales[layer.layer] = self._view(heads, 1, at, torch.bfloat16, False).squeeze(-1)
                    at += layout.block_size * heads * layer.scale_bytes

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
        all of its slots with weight 0, and 0 x infinity would spoil another request's sum. An int8 or fp8 cache
        stores such a K as 0 too.
        """
        if layer not in self.k_scales:
            self.k[layer][blocks, :, offsets] = narrow(k, self.dtype)
            self.v[layer][blocks, :, offsets] = narrow(v.nan_to_num(0.0, 0.0, 0.0), self.dtype)
            return
        for elements, scales, values in ((self.k, self.k_scales, k), (self.v, self.v_scales, v)):
            elements[layer][blocks, :, offsets], scales[layer][blocks, :, offsets] = quantise(values, self.dtype)

    def read(self, layer: int, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Values of K and V in whole blocks, [blocks, kv_heads, block_size, dim] in `dtype`."""
        k, v = (views[layer].index_select(0, blocks) for views in (self.k, self.v))
        if layer not in self.k_scales:
            return narrow(k, dtype), narrow(v, dtype)
        k_scales, v_scales = (views[layer].index_select(0, blocks) for views in (self.k_scales, self.v_scales))
        return dequantise(k, k_scales, dtype), dequantise(v, v_scales, dtype)

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


def _zeros(num_blocks: int, page_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(num_blocks, page_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(huge_pages(num_blocks * page_bytes)).view(num_blocks, page_bytes)


def _check(layers: Sequence[LayerKV], layout: Layout, dtype: torch.dtype) -> None:
    scaled = 0 if dtype.is_floating_point and dtype.itemsize > 1 else torch.bfloat16.itemsize
    for layer in layers:
        if (layer.element_bytes, layer.scale_bytes) != (dtype.itemsize, scaled):
            raise StoreError(
                f"layer {layer.layer} is laid out for {layer.element_bytes} bytes per KV element and "
                f"{layer.scale_bytes} per scale; {dtype} takes {dtype.itemsize} and {scaled}: lay it out for the "
                "cache's dtype."
            )
        if scaled and layout.block_size * layer.kv_heads * (layer.k_dim + layer.v_dim) % scaled:
            raise StoreError(
                f"layer {layer.layer}: a block of {layout.block_size} tokens, {layer.kv_heads} heads and "
                f"{layer.k_dim} + {layer.v_dim} values has an odd number of bytes, behind which no scale can lie; "
                "choose an even block_size."
            )
    if page_layout(layers, layout.block_size) != layout:
        raise StoreError("the layout of the pages is that of other layers or of another KV dtype.")
