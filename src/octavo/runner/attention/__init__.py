"""How attention reaches the paged cache: one flat ragged batch, its metadata, and the hook in transformers' models.

Each attention module of the model carries a `LayerCache` in its attribute `octavo_layer`; that is how the function
registered under the name "octavo" finds the store and the current batch: nothing is global.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from octavo.kv.groups import LayerKV
from octavo.models.errors import ModelError
from octavo.runner.store import KVStore

IMPLEMENTATION = "octavo"


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence in the batch: its tokens lie at [offset, offset + count) of the flat batch and are its
    positions [start, start + count)."""

    offset: int
    count: int
    start: int

    @property
    def length(self) -> int:
        """Tokens that have KV once this step has written its own."""
        return self.start + self.count


class Scoring(NamedTuple):
    """How scores become weights: scale, soft cap of the scores, one sink logit per query head."""

    scale: float
    softcap: float | None
    sinks: torch.Tensor | None


class Backend(Protocol):
    """One way to compute attention over paged KV. `token_major`: the order of bytes in a page that it wants."""

    token_major: bool

    def plan(
        self, rows: list[Row], tables: list[list[int]], window: int | None, block_size: int, device: torch.device
    ) -> Any:
        """Index tensors of one layer group for one step, shared by its layers."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, scoring: Scoring
    ) -> torch.Tensor:
        """query [heads, tokens, k_dim], key and value [kv_heads, tokens, dim] of this step (already written to the
        store) → [tokens, heads, v_dim]."""


@dataclass(slots=True)
class Batch:
    """The step in progress: per layer group the slots to write and the backend's plan."""

    rows: list[Row]
    blocks: list[torch.Tensor]  # per group [tokens]: block of each token
    offsets: torch.Tensor  # [tokens]: offset within the block
    plans: list[Any]
    calls: dict[int, int]  # layer → how often its attention ran


@dataclass(slots=True)
class Current:
    """What all layers of a runner share: the batch of the step in progress (None between steps)."""

    batch: Batch | None = None


@dataclass(slots=True, eq=False)
class LayerCache:
    """What one attention module needs. `shape.layer` is the layer whose KV it reads; `writes` is False for layers
    that share another layer's KV; `longest` is the longest sequence the model takes."""

    layer: int
    shape: LayerKV
    group: int
    writes: bool
    longest: int
    store: KVStore
    backend: Backend
    current: Current

    @property
    def k(self) -> torch.Tensor:
        return self.store.k[self.shape.layer]

    @property
    def v(self) -> torch.Tensor:
        return self.store.v[self.shape.layer]

    @property
    def k_scales(self) -> torch.Tensor:
        """Only where `shape.scale_bytes`."""
        return self.store.k_scales[self.shape.layer]

    @property
    def v_scales(self) -> torch.Tensor:
        return self.store.v_scales[self.shape.layer]

    def read(self, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KVStore.read`."""
        return self.store.read(self.shape.layer, blocks, dtype)

    @property
    def plan(self) -> Any:
        assert self.current.batch is not None
        return self.current.batch.plans[self.group]

    def run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring, window: int | None
    ) -> torch.Tensor:
        """Write this step's KV, then attend. query [1, heads, tokens, k_dim] → [1, tokens, heads, v_dim].

        Raises ModelError if the shapes or the window are not those the cache was laid out for.
        """
        batch = self.current.batch
        if batch is None:
            raise ModelError("the model ran outside of a step; call the runner, not the module.")
        batch.calls[self.layer] = batch.calls.get(self.layer, 0) + 1
        key, value = key[0], value[0]
        if self.writes:
            self._check(key, value, window)
            self.store.write(
                self.shape.layer,
                key.transpose(0, 1),
                value.transpose(0, 1),
                batch.blocks[self.group],
                batch.offsets,
            )
        return self.backend.attend(query[0], key, value, self, scoring).unsqueeze(0)

    def _check(self, key: torch.Tensor, value: torch.Tensor, window: int | None) -> None:
        shape = self.shape
        if shape.window is None and window is not None and window >= self.longest:
            window = None  # a window that no sequence can fill
        found = (key.shape[0], key.shape[2], value.shape[2], window)
        if found != (shape.kv_heads, shape.k_dim, shape.v_dim, shape.window):
            raise ModelError(
                f"layer {self.layer}: the model produces (KV heads, K dim, V dim, window) = {found}, the cache is "
                f"laid out for {(shape.kv_heads, shape.k_dim, shape.v_dim, shape.window)}; its config is read "
                "wrongly, please report the model."
            )


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim].

    Causality and windows follow from the batch, so `attention_mask` must be None. Returns [1, tokens, heads, v_dim].
    """
    if attention_mask is not None or position_bias is not None:
        raise ModelError(f"{type(module).__name__} adds a mask or position bias of its own; it is not supported.")
    cache: Any = module.octavo_layer  # a LayerCache
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return cache.run(query, key, value, Scoring(scale, softcap, s_aux), sliding_window), None


def register() -> None:
    """Make `attn_implementation="octavo"` known. No mask function is registered, so transformers builds no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, paged_attention)
