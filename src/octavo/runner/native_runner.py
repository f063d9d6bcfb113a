"""The native runner: a step plan becomes arrays, and one call into C++ runs the whole decoder over them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kv.groups import LayerKV, Layout
from octavo.models.errors import ModelError
from octavo.native import calls
from octavo.native.model import KV_TYPES, NativeModel
from octavo.runner.api import SeqWork, StepPlan, StepResult, TokenLogprobs
from octavo.runner.drawing import draw, flat_tokens, rows_to_sample
from octavo.runner.profile import StepProfile
from octavo.runner.sampler import Draw, Sampler, describe
from octavo.runner.store import KVStore
from octavo.runner.structure import Structures
from octavo.types import Sequence


class NativeRunner:
    """Implements `Runner` with liboctavo.so. Several runners may share one NativeModel, one at a time."""

    def __init__(
        self,
        model: NativeModel,
        layers: Seq[LayerKV],
        layout: Layout,
        num_blocks: int,
        *,
        kv_dtype: torch.dtype,
        seed: int | None = None,
        structures: Structures | None = None,
    ) -> None:
        """`layers`: KV shapes as the cache stores them, `kv_dtype`: of its elements."""
        library = calls.kernels()
        assert library is not None
        self._handle = library.handle
        self.model, self.layout = model, layout
        self.store = KVStore(layers, layout, num_blocks, dtype=kv_dtype, device=torch.device("cpu"))
        self.sampler = Sampler(seed, structures)
        self.profile: StepProfile | None = None
        self._layers = _placed(model, layers, layout, self.store)
        self._model = calls.Model.from_buffer_copy(model.model)
        self._model.layers = self._layers
        self._model.kv_type = KV_TYPES[kv_dtype]
        self._scratch = np.empty(0, np.uint8)
        self._room = (0, 0, 0)  # tokens, sequences, logit rows for which the scratch memory is large enough
        self._seconds = (ctypes.c_double * len(calls.PARTS))()
        self._call = calls.Step(seconds=self._seconds)
        batch = self._call.batch
        batch.kv, batch.page_bytes = self.store.buffer.data_ptr(), layout.page_bytes
        batch.block_size, batch.n_groups = layout.block_size, len(layout.groups)
        self._model_pointer, self._call_pointer = ctypes.byref(self._model), ctypes.byref(self._call)

    def run(self, plan: StepPlan) -> StepResult:
        """Execute the plan: copies in order, then all work as one batch.

        Raises OctavoError for a plan that cannot be run; no sequence has changed then.
        """
        begin = time.perf_counter()
        if plan.copies:
            self.store.apply(plan.copies)
        if not plan.work:
            return StepResult(())
        work = plan.work
        sampled = rows_to_sample(work)
        prompts = _prompt_rows(work)
        rows, places = sampled, None
        if prompts:
            rows, places = np.unique(np.concatenate([sampled, *prompts.values()]), return_inverse=True)
        greedy = not prompts and all(_plain(w) for w in work)
        logits, argmax = self._step(work, rows.astype(np.int32), greedy)
        computed = time.perf_counter()
        if greedy:
            tokens, logprobs = draw(work, logits, self.sampler, argmax)
            prompt_logprobs = {}
        else:
            if places is None:
                own, best = logits, argmax
            else:
                own, best = logits[torch.from_numpy(places[: len(sampled)])], argmax[places[: len(sampled)]]
            tokens, logprobs = draw(work, own, self.sampler, best)
            prompt_logprobs = {} if places is None else _describe_prompts(work, prompts, logits, places[len(sampled) :])
        self.profile = self._profiled(len(rows), begin, computed)
        return StepResult(tokens, logprobs, prompt_logprobs)

    def forget(self, seq: Sequence) -> None:
        """Drop what is kept for the sequence: the seed of one without, how far its structure was read."""
        self.sampler.forget(seq)

    def scratch_bytes(self, tokens: int, seqs: int, rows: int) -> int:
        """Working memory kept for steps up to this size, exactly as the native code lays it out. It grows by powers of
        two, so that it seldom has to."""
        tokens, seqs, rows = map(_rounded, (tokens, seqs, rows))
        size: int = self._handle.octavo_scratch_bytes(
            ctypes.byref(self._model), tokens, seqs, rows, len(self.layout.groups)
        )
        return size

    def _step(self, work: tuple[SeqWork, ...], rows: NDArray[np.int32], greedy: bool) -> tuple[Any, NDArray[np.int32]]:
        """Logits of `rows` (ascending; empty when only the best tokens are wanted) and the best token of each."""
        ids, tables = flat_tokens(work), self._tables(work)
        counts = np.array([[w.start, w.count] for w in work], np.int32)
        starts = np.ascontiguousarray(counts[:, 0])
        offsets = np.zeros(len(work) + 1, np.int32)
        np.cumsum(counts[:, 1], out=offsets[1:])
        logits = torch.empty(0 if greedy else len(rows), self.model.spec.vocabulary)
        argmax = np.empty(len(rows), np.int32)
        step, batch = self._call, self._call.batch
        batch.n_seqs, batch.n_tokens, batch.table_width = len(work), len(ids), tables.shape[2]
        batch.starts, batch.offsets, batch.tables = _address(starts), _address(offsets), _address(tables)
        step.ids, step.rows, step.n_rows = _address(ids), _address(rows), len(rows)
        step.logits, step.argmax = None if greedy else logits.data_ptr(), _address(argmax)
        self._reserve_scratch(len(ids), len(work), len(rows))
        ctypes.memset(self._seconds, 0, ctypes.sizeof(self._seconds))
        if self._handle.octavo_step(self._model_pointer, self._call_pointer):
            raise ModelError("the native step did not fit its scratch memory; please report this.")
        return logits, argmax

    def _reserve_scratch(self, tokens: int, seqs: int, rows: int) -> None:
        """Grow the working memory to what the step needs."""
        if tokens > self._room[0] or seqs > self._room[1] or rows > self._room[2]:
            self._room = tuple(map(max, self._room, map(_rounded, (tokens, seqs, rows))))
            self._scratch = np.empty(self.scratch_bytes(*self._room), np.uint8)
            self._call.scratch, self._call.scratch_bytes = self._scratch.ctypes.data, len(self._scratch)

    def _tables(self, work: tuple[SeqWork, ...]) -> NDArray[np.int32]:
        """Block tables [groups, sequences, blocks]. Raises ModelError if a token of the step has no block."""
        block, groups = self.layout.block_size, range(len(self.layout.groups))
        ends = [-(-(w.start + w.count) // block) for w in work]
        tables = np.full((len(groups), len(work), max(ends)), -1, np.int32)
        for i, (w, end) in enumerate(zip(work, ends, strict=True)):
            view = w.seq.view
            if view is None:
                raise ModelError(f"sequence {w.seq.id} has no block table; it was planned without memory.")
            for g in groups:
                held = view.tables[g][:end]
                tables[g, i, : len(held)] = held
            if (tables[:, i, w.start // block : end] < 0).any():
                raise ModelError(
                    f"sequence {w.seq.id}: its block table has no block for some of the positions {w.start} to "
                    f"{w.start + w.count - 1}."
                )
        return tables

    def _profiled(self, rows: int, begin: float, computed: float) -> StepProfile:
        parts = dict(zip(calls.PARTS, self._seconds, strict=True))
        parts["metadata"] = max(0.0, computed - begin - sum(parts.values()))
        parts["sampling"] = time.perf_counter() - computed
        return StepProfile(parts, rows)


def _placed(model: NativeModel, layers: Seq[LayerKV], layout: Layout, store: KVStore) -> ctypes.Array[calls.Layer]:
    """The layers' structs with the places of their KV in this store's pages."""
    placed = (calls.Layer * len(model.layers)).from_buffer_copy(model.layers)
    base = store.buffer.data_ptr()
    for out, shape in zip(placed, layers, strict=True):
        group, _ = layout.offsets[shape.layer]
        out.group = group
        out.k_at = store.k[shape.layer].data_ptr() - base
        out.v_at = store.v[shape.layer].data_ptr() - base
        if shape.scale_bytes:
            out.k_scale_at = store.k_scales[shape.layer].data_ptr() - base
            out.v_scale_at = store.v_scales[shape.layer].data_ptr() - base
    return placed


def _plain(work: SeqWork) -> bool:
    """Whether the best token is all that is wanted of this work."""
    return all(Draw(seq).plain for seq in work.samples)


def _prompt_rows(work: tuple[SeqWork, ...]) -> dict[int, NDArray[np.int64]]:
    """For work that asks for prompt log probabilities, by its place: rows of the positions start .. start+count-1
    whose next prompt token is known."""
    out, offset = {}, 0
    for i, w in enumerate(work):
        count = min(w.count, w.seq.prompt_length - 1 - w.start)
        if w.seq.request.params.prompt_logprobs is not None and count > 0:
            out[i] = np.arange(offset, offset + count)
        offset += w.count
    return out


def _describe_prompts(
    work: tuple[SeqWork, ...],
    prompts: dict[int, NDArray[np.int64]],
    logits: torch.Tensor,
    places: NDArray[np.int64],
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """`places`: rows of `logits` of the prompt rows, one after the other."""
    out, at = {}, 0
    for i, rows in prompts.items():
        w, top = work[i], work[i].seq.request.params.prompt_logprobs
        targets = w.seq.tokens[w.start + 1 : w.start + 1 + len(rows)]
        own = logits[torch.from_numpy(places[at : at + len(rows)])]
        out[w.seq.id] = tuple(describe(own, targets, [top or 0] * len(targets)))
        at += len(rows)
    return out


def _rounded(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
