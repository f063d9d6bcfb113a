"""Which runner computes a model: the native one where its weights are packed for it, else torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kv.groups import Layout
from octavo.models.loader import LoadedModel
from octavo.models.shapes import cache_dtype, cache_layers
from octavo.runner.native_runner import NativeRunner
from octavo.runner.quantise import stored_dtype
from octavo.runner.structure import Structures

if TYPE_CHECKING:
    from octavo.runner.torch_runner import TorchRunner


def make_runner(
    loaded: LoadedModel,
    layout: Layout,
    num_blocks: int,
    *,
    seed: int | None = None,
    kv_dtype: str = "auto",
    structures: Structures | None = None,
) -> NativeRunner | TorchRunner:
    """A runner with a KV store of its own. See the two classes for what they raise."""
    if loaded.native is None:
        from octavo.runner.torch_runner import TorchRunner

        return TorchRunner(loaded, layout, num_blocks, seed=seed, kv_dtype=kv_dtype, structures=structures)
    stored = cache_dtype(kv_dtype, loaded.dtype)
    layers = cache_layers(loaded.layers, stored)
    kv = stored_dtype(stored)
    return NativeRunner(loaded.native, layers, layout, num_blocks, kv_dtype=kv, seed=seed, structures=structures)
