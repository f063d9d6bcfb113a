"""Several kinds of layers over one pool: layers are dealt into groups whose pages have equal bytes.

A page holds `block_size` tokens of all layers of one group. Because every page has the same size, a block freed by a
sliding-window group serves a full-attention group and the other way round. The grouping by the greatest common
divisor of the layer counts wastes nothing when layers have equal bytes (the idea is vLLM's hybrid grouping, which
pads to equal group sizes instead).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd

from octavo.kv.dtypes import row_bytes


@dataclass(frozen=True, slots=True)
class LayerKV:
    """KV of one layer that owns a cache.

    element_bytes  of one value of K or V as it is stored
    window         tokens a query sees, itself included; None: all
    scale_bytes    of the scale that each row (one token and head, K and V apart) has; 0: the elements are the values

    Within a page a layer's part is [K | V | K scales | V scales]: K [kv_heads, block, k_dim], V [kv_heads, block,
    v_dim], each of the scales [kv_heads, block].
    """

    layer: int
    kv_heads: int
    k_dim: int
    v_dim: int
    element_bytes: int
    window: int | None = None
    scale_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        return self.kv_heads * sum(
            row_bytes(dim, self.element_bytes, self.scale_bytes) for dim in (self.k_dim, self.v_dim)
        )


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers that share one block table."""

    layers: tuple[int, ...]
    window: int | None


@dataclass(frozen=True, slots=True)
class Layout:
    """How layers lie in pages. `offsets[layer]` = (group, byte offset of the layer's part within the page)."""

    block_size: int
    groups: tuple[PageGroup, ...]
    page_bytes: int
    offsets: dict[int, tuple[int, int]]
    used_bytes: tuple[int, ...]  # per group: bytes of a page that its layers fill; the rest is padding

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(g.window for g in self.groups)

    @property
    def padding_bytes(self) -> int:
        """Bytes lost per block of tokens over all groups."""
        return sum(self.page_bytes - used for used in self.used_bytes)


def page_layout(layers: Sequence[LayerKV], block_size: int) -> Layout:
    """Deal `layers` into groups of equal page bytes.

    Raises ValueError if no layer owns a cache or `block_size` is not positive.
    """
    if not layers:
        raise ValueError("layers is empty: a model without any KV layer has nothing to page.")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1.")
    kinds: dict[int | None, list[LayerKV]] = {}
    for layer in layers:
        kinds.setdefault(layer.window, []).append(layer)
    per_group = reduce(gcd, (len(kind) for kind in kinds.values()))
    token_bytes = per_group * max(layer.token_bytes for layer in layers)
    groups: list[PageGroup] = []
    offsets: dict[int, tuple[int, int]] = {}
    used: list[int] = []
    for window, kind in kinds.items():
        for members in _fill(kind, token_bytes):
            at = 0
            for layer in members:
                offsets[layer.layer] = (len(groups), at * block_size)
                at += layer.token_bytes
            groups.append(PageGroup(tuple(layer.layer for layer in members), window))
            used.append(at * block_size)
    return Layout(block_size, tuple(groups), token_bytes * block_size, offsets, tuple(used))


def _fill(kind: list[LayerKV], token_bytes: int) -> list[list[LayerKV]]:
    """Split one kind into groups that fit a page, in layer order."""
    groups: list[list[LayerKV]] = [[]]
    room = token_bytes
    for layer in kind:
        if layer.token_bytes > room:
            groups.append([])
            room = token_bytes
        groups[-1].append(layer)
        room -= layer.token_bytes
    return groups
