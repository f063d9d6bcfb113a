"""The torch runner: a step plan becomes one flat ragged batch through transformers' own model code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from octavo.errors import OctavoError
from octavo.kv.groups import Layout
from octavo.models.errors import ModelError
from octavo.models.falcon import adapt_falcon
from octavo.models.loader import LoadedModel
from octavo.models.shapes import cache_dtype, cache_layers
from octavo.models.tokenizer import first_line
from octavo.runner.api import SeqWork, StepPlan, StepResult, TokenLogprobs
from octavo.runner.attention import IMPLEMENTATION, Backend, Batch, Current, LayerCache, Row, register
from octavo.runner.attention.cpu import CpuAttention, why_not
from octavo.runner.attention.cuda import CudaAttention, varlen_available
from octavo.runner.attention.reference import ReferenceAttention
from octavo.runner.drawing import draw, flat_positions, flat_tokens, rows_to_sample
from octavo.runner.quantise import stored_dtype
from octavo.runner.sampler import Sampler, describe
from octavo.runner.store import KVStore
from octavo.runner.structure import Structures
from octavo.types import Sequence

_HEAD_ROWS = 256  # rows of logits at once: bounds the memory of prompt log probabilities


class TorchRunner:
    """Implements `Runner` on a transformers causal LM.

    Several runners may share one LoadedModel (as `compare` does), one at a time: each step first makes sure that the
    model's layers point at this runner's store.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        layout: Layout,
        num_blocks: int,
        *,
        seed: int | None = None,
        backend: Backend | None = None,
        kv_dtype: str = "auto",
        structures: Structures | None = None,
    ) -> None:
        """Allocate the KV store and hook the model. `seed` makes requests without one reproducible; `layout` must be
        that of the layers in `kv_dtype` (see `EngineConfig`). `backend`: None for the fastest that can serve the model.

        Raises ModelError if the architecture does not use transformers' attention interface for all its attention, or
        produces other shapes than its config says: one token is run through the model to see.
        """
        register()
        self.loaded, self.layout = loaded, layout
        self.backend = backend = backend or _backend_for(loaded)
        stored = cache_dtype(kv_dtype, loaded.dtype)
        self._layers = cache_layers(loaded.layers, stored)
        self.store = KVStore(
            self._layers,
            layout,
            num_blocks,
            dtype=stored_dtype(stored),
            device=loaded.device,
            token_major=backend.token_major,
        )
        self.sampler = Sampler(seed, structures)
        self._current = Current()
        self._body = getattr(loaded.module, loaded.module.base_model_prefix)
        self._head = _head_of(loaded.module)
        self._caches = self._layer_caches()
        self._attach()
        self._verify()

    def run(self, plan: StepPlan) -> StepResult:
        """Execute the plan: copies in order, then all work as one batch.

        Raises OctavoError for a plan that cannot be run; no sequence has changed then.
        """
        self.store.apply(plan.copies)
        if not plan.work:
            return StepResult(())
        self._attach()
        with torch.inference_mode():
            hidden = self._forward(plan.work)
            rows = torch.from_numpy(rows_to_sample(plan.work)).to(hidden.device)
            logits = self._head(hidden[rows]) if len(rows) else hidden
            tokens, logprobs = draw(plan.work, logits, self.sampler)
            prompt_logprobs = self._prompt_logprobs(plan.work, hidden)
        return StepResult(tokens, logprobs, prompt_logprobs)

    def forget(self, seq: Sequence) -> None:
        """Drop what is kept for the sequence: the seed of one without, how far its structure was read."""
        self.sampler.forget(seq)

    def _layer_caches(self) -> dict[int, LayerCache]:
        shapes = {shape.layer: shape for shape in self._layers}
        sources = {layer: layer for layer in shapes} | self.loaded.shared
        return {
            layer: LayerCache(
                layer,
                shapes[source],
                self.layout.offsets[source][0],
                layer == source,
                self.loaded.max_positions,
                self.store,
                self.backend,
                self._current,
            )
            for layer, source in sources.items()
        }

    def _attach(self) -> None:
        """Point every attention module of the model at this runner's caches."""
        module = self.loaded.module
        if getattr(module, "octavo_owner", None) is self._current:
            return
        if module.config.model_type == "falcon":
            adapt_falcon(module)
        elif not module._can_set_attn_implementation():
            raise ModelError(
                f"{self.loaded.name}: {type(module).__name__} does not use transformers' attention interface, "
                "so its attention cannot read a paged cache; choose another architecture."
            )
        for config in {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}.values():
            config._attn_implementation = IMPLEMENTATION
        found = set()
        for part in module.modules():
            layer = getattr(part, "layer_idx", None)
            if isinstance(layer, int) and "Attention" in type(part).__name__ and layer in self._caches:
                part.octavo_layer = self._caches[layer]
                found.add(layer)
        if missing := sorted(set(self._caches) - found):
            raise ModelError(f"{self.loaded.name}: no attention module was found for layers {missing}.")
        module.octavo_owner = self._current

    def _forward(self, work: tuple[SeqWork, ...]) -> torch.Tensor:
        """Hidden states [tokens, hidden] after the last norm; KV of all tokens is in the store afterwards."""
        positions = flat_positions(work)
        return self._decode(flat_tokens(work), positions, self._batch(work, positions))

    def _decode(self, ids: np.ndarray, positions: np.ndarray, batch: Batch) -> torch.Tensor:
        device = self.loaded.device
        self._current.batch = batch
        try:
            hidden: torch.Tensor = self._body(
                input_ids=torch.from_numpy(ids).to(device, torch.int64)[None],
                position_ids=torch.from_numpy(positions).to(device)[None],
                use_cache=False,
            )[0][0]
        finally:
            self._current.batch = None
        return hidden

    def _batch(self, work: tuple[SeqWork, ...], positions: np.ndarray) -> Batch:
        block_size, device = self.layout.block_size, self.loaded.device
        rows, offset = [], 0
        for w in work:
            rows.append(Row(offset, w.count, w.start))
            offset += w.count
        blocks, plans = [], []
        for group, window in enumerate(self.layout.windows):
            tables = [_table(w, group) for w in work]
            slots = np.concatenate([_blocks_of(w, t, block_size) for w, t in zip(work, tables, strict=True)])
            blocks.append(torch.from_numpy(slots).to(device))
            plans.append(self.backend.plan(rows, tables, window, block_size, device))
        offsets = torch.from_numpy(positions % block_size).to(device)
        return Batch(rows, blocks, offsets, plans, {})

    def _verify(self) -> None:
        """One token through the model, in block 0 and wiped afterwards: each layer must attend exactly once, with the
        shapes its cache was laid out for. Done once for a module and layout; several runners may share them."""
        module, kind = self.loaded.module, (self._layers, self.loaded.shared, type(self.backend), self.store.dtype)
        if getattr(module, "octavo_verified", None) == kind:
            return
        device, block_size = self.loaded.device, self.layout.block_size
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        rows, windows = [Row(0, 1, 0)], self.layout.windows
        plans = [self.backend.plan(rows, [[0]], window, block_size, device) for window in windows]
        batch = Batch(rows, [zero] * len(windows), zero, plans, {})
        try:
            with torch.inference_mode():
                self._head(self._decode(np.zeros(1, np.int32), np.zeros(1, np.int64), batch))
        except OctavoError:
            raise
        except Exception as error:
            raise ModelError(
                f"{self.loaded.name}: {type(module).__name__} fails on its first token ({first_line(error)}); it "
                "cannot be run with a paged cache: choose another model."
            ) from error
        finally:
            self.store.buffer[0] = 0
        if wrong := sorted(layer for layer in self._caches if batch.calls.get(layer) != 1):
            raise ModelError(
                f"{self.loaded.name}: in {type(module).__name__} the layers {wrong} do not call transformers' "
                "attention interface exactly once, so their attention cannot read a paged cache; choose another model."
            )
        module.octavo_verified = kind

    def _prompt_logprobs(self, work: tuple[SeqWork, ...], hidden: torch.Tensor) -> dict[int, tuple[TokenLogprobs, ...]]:
        """For work that asks: those of the prompt tokens at positions start+1 .. start+count (as far as the prompt
        goes; tokens generated before a preemption are not reported again)."""
        out, offset = {}, 0
        for w in work:
            top = w.seq.request.params.prompt_logprobs
            count = min(w.count, w.seq.prompt_length - 1 - w.start)
            if top is not None and count > 0:
                entries: list[TokenLogprobs] = []
                for low in range(0, count, _HEAD_ROWS):
                    high = min(low + _HEAD_ROWS, count)
                    targets = w.seq.tokens[w.start + low + 1 : w.start + high + 1]
                    logits = self._head(hidden[offset + low : offset + high])
                    entries += describe(logits, targets, [top] * len(targets))
                out[w.seq.id] = tuple(entries)
            offset += w.count
        return out


def _backend_for(loaded: LoadedModel) -> Backend:
    if loaded.device.type == "cuda" and varlen_available():
        return CudaAttention()
    heads = getattr(loaded.config.get_text_config(decoder=True), "num_attention_heads", None)
    native = loaded.device.type == "cpu" and isinstance(heads, int) and not why_not(loaded.layers, heads)
    return CpuAttention() if native else ReferenceAttention()


def _table(work: SeqWork, group: int) -> list[int]:
    if work.seq.view is None:
        raise ModelError(f"sequence {work.seq.id} has no block table; it was planned without memory.")
    return work.seq.view.tables[group]


def _blocks_of(work: SeqWork, table: list[int], block_size: int) -> np.ndarray:
    """Block of each new token. Raises ModelError if the table has no block for one of them."""
    first, end = work.start // block_size, -(-(work.start + work.count) // block_size)
    held = np.array(table[first:end], dtype=np.int64)
    if len(held) < end - first or (held < 0).any():
        raise ModelError(
            f"sequence {work.seq.id}: its block table has no block for positions {work.start} to "
            f"{work.start + work.count - 1} (blocks {first} to {end - 1} are {held.tolist()})."
        )
    return held[np.arange(work.start, work.start + work.count) // block_size - first]


class _Hidden(dict[str, Any]):
    """What a decoder returns, with nothing in it but the hidden states."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self["last_hidden_state"] if key == 0 else super().__getitem__(key)


class _Given(torch.nn.Module):
    """Stands for the decoder: returns the hidden states it is given as `inputs_embeds`."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Hidden:
        return _Hidden(last_hidden_state=inputs_embeds)

    @property
    def decoder(self) -> _Given:  # OPT's causal LM calls `model.decoder`
        return self


def _head_of(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """hidden [n, size] → logits [n, vocabulary] through the model's own code (head, scaling, soft-capping).

    A shallow copy of the causal LM shares all weights; only its decoder is replaced by one that returns the hidden
    states it is given.
    """
    head = copy.copy(module)
    head.__dict__["_modules"] = dict(module._modules)
    head._modules[module.base_model_prefix] = _Given()

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return out

    return logits
