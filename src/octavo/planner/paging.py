"""The KV pool of a model on paper, in the pages that an engine deals it into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from octavo.errors import OctavoError
from octavo.kv.api import KVManager
from octavo.kv.groups import LayerKV, page_layout
from octavo.kv.spec import KVSpec, LayerGroup, LayerKind
from octavo.kv.strategies import make_manager
from octavo.planner.engines import EngineProfile


@dataclass(frozen=True, slots=True)
class Pages:
    """What `make_manager` needs to know of a model's cache. `page_bytes`: one page on one rank; `padding`: of all
    groups' pages for the same tokens, the bytes that no layer fills."""

    block_size: int
    page_bytes: int
    windows: tuple[int | None, ...]
    padding: int

    def block_bytes_of_all(self) -> int:
        """Bytes of one block of tokens in every group."""
        return self.page_bytes * len(self.windows)

    def manager(self, strategy: str, pages: int, *, max_model_len: int, chunk: int) -> KVManager:
        """The serving KV manager over `pages` of these pages."""
        return make_manager(
            strategy, pages, self.block_size, max_model_len=max_model_len, windows=self.windows, chunk=chunk
        )


def pages_of(spec: KVSpec, block_size: int, profile: EngineProfile) -> Pages:
    """How the engine lays the cache of `spec` out. Raises OctavoError for a model without any KV layer.

    Octavo deals layers by the greatest common divisor of their counts (`kv/groups.py`). vLLM, where all layers have
    equal bytes, takes the count of the rarer kind as group size and pads the last group of the other
    (`kv_cache_utils.py`, `_get_kv_cache_groups_uniform_page_size`): Gemma-3-27B's 52 + 10 layers become 6 + 1 groups of
    10 with 8 paddings. Where bytes differ it gives the smaller layers longer blocks, so that pages are full; here they
    are dealt into smaller pages instead, which comes to the same bytes.
    """
    caching = [group for group in spec.groups if group.kind is not LayerKind.STATE]
    if not caching:
        raise OctavoError(
            f"{spec.model_type}: no layer keeps keys and values, only a state of {spec.fixed_bytes} bytes a sequence: "
            "there is nothing to page; choose a model with attention layers."
        )
    layers = sorted(
        (_layer(group, layer) for group in caching for layer in group.layers), key=lambda shape: shape.layer
    )
    found = _vllm_pages(layers, block_size) if profile.is_vllm else None
    if found is not None:
        return found
    layout = page_layout(layers, block_size)
    return Pages(block_size, layout.page_bytes, layout.windows, layout.padding_bytes)


def _layer(group: LayerGroup, layer: int) -> LayerKV:
    """A layer by its bytes alone, whatever the storage format: a layout depends on nothing else."""
    return LayerKV(layer, 1, group.bytes_per_token // len(group.layers), 0, 1, group.window)


def _vllm_pages(layers: Sequence[LayerKV], block_size: int) -> Pages | None:
    """vLLM's layout; None where its rule needs pages that no equal groups fill."""
    kinds: dict[int | None, list[int]] = {}
    for layer in layers:
        kinds.setdefault(layer.window, []).append(layer.token_bytes)
    widths = {width for kind in kinds.values() for width in kind}
    if len(widths) == 1:
        least, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
        size = most if most < 1.25 * least else least
        groups = {window: -(-len(kind) // size) for window, kind in kinds.items()}
        page = size * widths.pop()
    else:
        page = gcd(*(sum(kind) for kind in kinds.values()))
        if any(len(set(kind)) > 1 or page % kind[0] for kind in kinds.values()):
            return None
        groups = {window: sum(kind) // page for window, kind in kinds.items()}
    windows = tuple(window for window, count in groups.items() for _ in range(count))
    filled = sum(sum(kind) for kind in kinds.values())
    return Pages(block_size, page * block_size, windows, (page * len(windows) - filled) * block_size)
