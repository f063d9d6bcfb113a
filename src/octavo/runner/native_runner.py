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
from octavo.native.model import NativeModel
from octavo.runner.api import SeqWork, StepPlan, StepResult, TokenLogprobs
from octavo.runner.drawing import draw, flat_positions, flat_tokens, rows_to_sample
from octavo.runner.profile import StepProfile
from octavo.runner.sampler import Draw, Sampler, describe
from octavo.runner.store import KVStore
from octavo.types import Sequence

KV_TYPES = {
    torch.float32: calls.F32,
    torch.bfloat16: calls.BF16,
    torch.float16: calls.F16,
    torch.int8: calls.I8,
    torch.float8_e4m3fn: calls.FP8,
}


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
    ) -> None:
        """`layers`: KV shapes as the cache stores them, `kv_dtype`: of its elements."""
        library = calls.kernels()
        assert library is not None
        self._handle = library.handle
        self.model, self.layout = model, layout
        self.store = KVStore(layers, layout, num_blocks, dtype=kv_dtype, device=torch.device("cpu"))
        self.sampler = Sampler(seed)
        self.profile: StepProfile | None = None
        self._layers = _placed(model, layers, layout, self.store)
        self._model = calls.Model.from_buffer_copy(model.model)
        self._model.layers = self._layers
        self._model.kv_type = KV_TYPES[kv_dtype]
        self._scratch = np.empty(0, np.uint8)
        self._seconds = (ctypes.c_double * len(calls.PARTS))()
        self._half = max((len(f) for f in model.spec.frequencies), default=0)

    def run(self, plan: StepPlan) -> StepResult:
        """Execute the plan: copies in order, then all work as one batch.

        Raises OctavoError for a plan that cannot be run; no sequence has changed then.
        """
        begin = time.perf_counter()
        self.store.apply(plan.copies)
        if not plan.work:
            return StepResult(())
        work = plan.work
        sampled = rows_to_sample(work)
        prompts = _prompt_rows(work)
        rows = np.concatenate([sampled, *prompts.values()]).astype(np.int32)
        greedy = not prompts and all(_plain(w) for w in work)
        logits, argmax = self._step(work, rows, greedy)
        computed = time.perf_counter()
        tokens, logprobs = draw(work, logits[: len(sampled)], self.sampler, argmax if greedy else None)
        prompt_logprobs = _describe_prompts(work, prompts, logits[len(sampled) :])
        self.profile = self._profiled(work, len(rows), begin, computed)
        return StepResult(tokens, logprobs, prompt_logprobs)

    def forget(self, seq: Sequence) -> None:
        """Drop the seed kept for a sequence without one."""
        self.sampler.forget(seq)

    def scratch_bytes(self, tokens: int, seqs: int, rows: int) -> int:
        """Working memory of a step: exact, as the native code lays it out."""
        size: int = self._handle.octavo_scratch_bytes(
            ctypes.byref(self._model), tokens, seqs, rows, len(self.layout.groups)
        )
        return size

    def _step(self, work: tuple[SeqWork, ...], rows: NDArray[np.int32], greedy: bool) -> tuple[Any, NDArray[np.int32]]:
        """Logits of `rows` (empty when only the best tokens are wanted) and the best token of each."""
        ids, positions = flat_tokens(work), flat_positions(work)
        starts = np.fromiter((w.start for w in work), np.int32, len(work))
        offsets = np.zeros(len(work) + 1, np.int32)
        np.cumsum([w.count for w in work], out=offsets[1:])
        tables = self._tables(work)
        cos, sin = self._angles(positions)
        vocabulary = self.model.spec.vocabulary
        logits = torch.empty(0 if greedy else len(rows), vocabulary)
        argmax = np.empty(len(rows), np.int32)
        step = calls.Step()
        batch = step.batch
        batch.kv, batch.page_bytes = self.store.buffer.data_ptr(), self.layout.page_bytes
        batch.block_size, batch.n_seqs, batch.n_tokens = self.layout.block_size, len(work), len(ids)
        batch.n_groups, batch.table_width = tables.shape[0], tables.shape[2]
        batch.starts, batch.offsets, batch.tables = starts.ctypes.data, offsets.ctypes.data, tables.ctypes.data
        step.ids, step.rows, step.n_rows = ids.ctypes.data, rows.ctypes.data, len(rows)
        step.cos, step.sin, step.rotary_half = cos.ctypes.data, sin.ctypes.data, self._half
        step.logits, step.argmax = None if greedy else logits.data_ptr(), argmax.ctypes.data
        step.scratch, step.scratch_bytes = self._scratch_for(len(ids), len(work), len(rows))
        ctypes.memset(self._seconds, 0, ctypes.sizeof(self._seconds))
        step.seconds = self._seconds
        if self._handle.octavo_step(ctypes.byref(self._model), ctypes.byref(step)):
            raise ModelError("the native step did not fit its scratch memory; please report this.")
        return logits, argmax

    def _scratch_for(self, tokens: int, seqs: int, rows: int) -> tuple[int, int]:
        need = self.scratch_bytes(tokens, seqs, rows)
        if len(self._scratch) < need:
            self._scratch = np.empty(need, np.uint8)
        return self._scratch.ctypes.data, len(self._scratch)

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

    def _angles(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """cos and sin [kinds of rope, tokens, half]."""
        kinds = self.model.spec.frequencies
        angles = np.zeros((len(kinds), len(positions), self._half), np.float32)
        for i, frequencies in enumerate(kinds):
            angles[i, :, : len(frequencies)] = positions.astype(np.float32)[:, None] * frequencies
        return np.cos(angles), np.sin(angles)

    def _profiled(self, work: tuple[SeqWork, ...], rows: int, begin: float, computed: float) -> StepProfile:
        end = time.perf_counter()
        native = dict(zip(calls.PARTS, self._seconds, strict=True))
        native["metadata"] = max(0.0, computed - begin - sum(native.values()))
        native["sampling"] = end - computed
        return StepProfile(
            seconds=native,
            tokens=sum(w.count for w in work),
            sequences=len(work),
            logit_rows=rows,
            weight_bytes=self.model.weight_bytes,
            kv_bytes=sum((w.start + w.count) for w in work) * self.token_bytes,
        )

    @property
    def token_bytes(self) -> int:
        """KV bytes of a token over all layers."""
        return sum(used for used in self.layout.used_bytes) // self.layout.block_size


def _placed(
    model: NativeModel, layers: Seq[LayerKV], layout: Layout, store: KVStore
) -> "ctypes.Array[calls.Layer]":
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
    work: tuple[SeqWork, ...], prompts: dict[int, NDArray[np.int64]], logits: torch.Tensor
) -> dict[int, tuple[TokenLogprobs, ...]]:
    out, at = {}, 0
    for i, rows in prompts.items():
        w, top = work[i], work[i].seq.request.params.prompt_logprobs
        targets = w.seq.tokens[w.start + 1 : w.start + 1 + len(rows)]
        out[w.seq.id] = tuple(describe(logits[at : at + len(rows)], targets, [top or 0] * len(targets)))
        at += len(rows)
    return out
