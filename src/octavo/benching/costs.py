"""What a step of a model cannot do without: bytes read once and floating-point operations, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from octavo.build import BuiltEngine
    from octavo.native.calls import Linear
    from octavo.native.model import NativeModel

Span = tuple[int, int]  # positions start .. start + count - 1 of a sequence


class Need(NamedTuple):
    bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Attention:
    """The layers of one window: KV bytes of a token, and operations for each pair of a query and a key."""

    window: int | None
    token_bytes: float
    pair_flops: float

    def need(self, spans: Sequence[Span]) -> Need:
        seen = sum(visible(start, count, self.window) for start, count in spans)
        pairs = sum(pairs_of(start, count, self.window) for start, count in spans)
        return Need(seen * self.token_bytes, pairs * self.pair_flops)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """
    linears      of all layers; operations for each token
    head         operations for each row of logits
    other_bytes  of norms and biases
    whole        True: the parts are not known, and all needs are the runner's
    """

    linears: Need
    head: Need
    other_bytes: float
    attention: tuple[Attention, ...]
    whole: bool = False

    def needs(self, spans: Sequence[Span], rows: int | None) -> dict[str, Need]:
        """By part of the step. `rows` of logits are computed."""
        tokens = sum(count for _, count in spans)
        each = [layers.need(spans) for layers in self.attention]
        attention = Need(sum(need.bytes for need in each), sum(need.flops for need in each))
        if self.whole:
            return {"runner": Need(self.linears.bytes + attention.bytes, 0.0)}
        rows = rows or 0
        return {
            "linears": Need(self.linears.bytes, tokens * self.linears.flops),
            "attention": attention,
            "norm and rope": Need(self.other_bytes, 0.0),
            "head": Need(self.head.bytes if rows else 0.0, rows * self.head.flops),
        }


def model_cost(built: BuiltEngine) -> ModelCost:
    """Of the model as this engine runs it. Without the native code only bytes are known, not by part."""
    loaded, layout = built.loaded, built.layout
    native = loaded.native
    heads = {} if native is None else {layer.index: 4 * layer.heads * layer.head_dim for layer in native.spec.layers}
    attention = tuple(
        Attention(group.window, used / layout.block_size, float(sum(heads.get(layer, 0) for layer in group.layers)))
        for group, used in zip(layout.groups, layout.used_bytes, strict=True)
    )
    if native is None:
        return ModelCost(Need(loaded.weight_bytes, 0.0), Need(0.0, 0.0), 0.0, attention, whole=True)
    return _native_cost(native, attention)


def _native_cost(native: NativeModel, attention: tuple[Attention, ...]) -> ModelCost:
    linears = [getattr(layer, name) for layer in native.layers for name in ("qkv", "o", "gate_up", "down")]
    head, embedding = native.model.head, native.model.embedding
    matrices = _nbytes(head) + sum(_nbytes(linear) for linear in linears)
    apart = _nbytes(embedding) if embedding.data != head.data else 0.0  # looked up row by row, not read
    return ModelCost(
        linears=Need(sum(_nbytes(linear) for linear in linears), float(sum(2 * one.n * one.k for one in linears))),
        head=Need(_nbytes(head), float(2 * head.n * head.k)),
        other_bytes=native.weight_bytes - matrices - apart,
        attention=attention,
    )


def _nbytes(linear: Linear) -> float:
    from octavo.native import calls

    library = calls.kernels()
    assert library is not None
    return float(-(-linear.n // 32) * library.handle.octavo_panel_bytes(linear.type, linear.k))


def visible(start: int, count: int, window: int | None) -> int:
    """KV tokens that the queries of a span see, each counted once."""
    end = start + count
    return end if window is None else min(end, window + count - 1)


def pairs_of(start: int, count: int, window: int | None) -> int:
    """Pairs of a query of the span and a key that it sees."""
    growing = count if window is None else min(count, max(0, window - start))
    pairs = growing * start + growing * (growing + 1) // 2
    return pairs if window is None else pairs + (count - growing) * window
