"""Weights packed for the native code: one block of memory, replacing the checkpoint's tensors.

Matrices that are used together are fused (q, k, v; gate and up), tied embeddings are packed once. Matrices that a file
has in a format of the native code are moved as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.models.decoder import DecoderSpec, Part, TensorOf, attention_parts, mlp_parts, norm_names
from octavo.models.errors import ModelError
from octavo.native import calls
from octavo.native.blocks import GROUP, PANEL, Blocks, joined, place, to_int8
from octavo.native.memory import huge_pages

TYPES = {torch.float32: calls.F32, torch.bfloat16: calls.BF16, torch.float16: calls.F16}
KV_TYPES = TYPES | {torch.int8: calls.I8, torch.float8_e4m3fn: calls.FP8}
WEIGHTS = {"int8": calls.I8, "int8_group": calls.I8_GROUP, "int4": calls.I4, "int4_affine": calls.I4_AFFINE}
NAMES = {kind: str(dtype).removeprefix("torch.") for dtype, kind in TYPES.items()}
NAMES |= {kind: name for name, kind in WEIGHTS.items()}
_GROUPS = (calls.I8_GROUP, calls.I4, calls.I4_AFFINE)  # formats with a scale for every 32 inputs
_ACTIVATIONS = {"silu": calls.SILU, "gelu_tanh": calls.GELU_TANH, "gelu": calls.GELU}


class Stored(Protocol):
    """Matrices of a file that is quantised already, by checkpoint name without `.weight`."""

    def kind(self, name: str) -> str | None:
        """The format that `blocks` gives, one of WEIGHTS; None: the matrix is stored in floats, or not at all."""

    def blocks(self, name: str) -> Blocks: ...


@dataclass(frozen=True, slots=True, eq=False)
class NativeModel:
    """A decoder ready for `octavo_step`: `layers` and `model` are C structs whose pointers stay valid while `keep`
    lives. The KV fields of the layers and `kv_type` belong to a runner, which works on a copy."""

    spec: DecoderSpec
    dtype: torch.dtype
    weights: str  # formats of the matrices, most bytes first: "bfloat16", "int4_affine + int8_group"
    layers: ctypes.Array[calls.Layer]
    model: calls.Model
    weight_bytes: int
    keep: tuple[object, ...]


def thread_count() -> int:
    """Threads of the native code: torch's, so that OMP_NUM_THREADS and torch.set_num_threads hold for both."""
    return min(torch.get_num_threads(), 256)  # MOST_THREADS in src/team.h


class _Arena:
    """Memory handed out front to back."""

    def __init__(self, size: int) -> None:
        self._view = huge_pages(size)
        self._used = 0

    def take(self, size: int) -> NDArray[np.uint8]:
        piece = self._view[self._used : self._used + size]
        assert len(piece) == size
        self._used += -(-size // 64) * 64
        return piece


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix to pack: outputs, inputs, type, and the parts it is fused from."""

    n: int
    k: int
    kind: int
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        library = calls.kernels()
        assert library is not None
        return -(-self.n // PANEL) * int(library.handle.octavo_panel_bytes(self.kind, self.k))


def pack_model(
    spec: DecoderSpec, tensor: TensorOf, dtype: torch.dtype, weights: str = "auto", *, stored: Stored | None = None
) -> NativeModel:
    """Pack a checkpoint. `tensor(name)` is asked once for each tensor; None: there is none.

    weights "auto" keeps what is `stored` in a quantised format, and gives `dtype` to the others. Any other quantises
    while packing. Embedding and head are int8 at least. Raises ModelError for missing or misshapen tensors.
    """
    packer = _Packer(spec, tensor, dtype, weights, stored)
    layers = (calls.Layer * len(spec.layers))(*(packer.layer(i) for i in range(len(spec.layers))))
    model = packer.whole(layers)
    return NativeModel(spec, dtype, packer.formats, layers, model, packer.weight_bytes, (packer.keep, layers))


class _Packer:
    def __init__(
        self, spec: DecoderSpec, tensor: TensorOf, dtype: torch.dtype, weights: str, stored: Stored | None
    ) -> None:
        self.spec, self.tensor, self.dtype = spec, tensor, dtype
        self.stored = stored if weights == "auto" else None
        self.kind = TYPES[dtype] if weights == "auto" else WEIGHTS[weights]
        self.keep: list[object] = []
        self._layers = [self._plans(i) for i in range(len(spec.layers))]
        self._outer = self._outer_plans()
        plans = [plan for group in (*self._layers, self._outer) for plan in group.values()]
        self._arena = _Arena(sum(-(-m.nbytes // 64) * 64 for m in plans))
        self.keep.append(self._arena)
        self.weight_bytes = 0
        self.formats = _formats(plans)

    def _plans(self, i: int) -> dict[str, _Matrix]:
        spec, layer = self.spec, self.spec.layers[i]
        inner = layer.heads * layer.head_dim
        at = f"model.layers.{i}."
        qkv = (layer.heads + 2 * layer.kv_heads) * layer.head_dim
        return {
            "qkv": self._matrix(qkv, spec.hidden, attention_parts(spec, i)),
            "o": self._matrix(spec.hidden, inner, (Part(f"{at}self_attn.o_proj"),)),
            "gate_up": self._matrix(2 * spec.intermediate, spec.hidden, mlp_parts(spec, i)),
            "down": self._matrix(spec.hidden, spec.intermediate, (Part(f"{at}mlp.down_proj"),)),
        }

    def _outer_plans(self) -> dict[str, _Matrix]:
        """Embedding and head."""
        spec = self.spec
        names = {"embedding": "model.embed_tokens"} | ({} if spec.tied else {"head": "lm_head"})
        plans = {place: self._matrix(spec.vocabulary, spec.hidden, (Part(name),)) for place, name in names.items()}
        wider = calls.I8 if self.stored is None else calls.I8_GROUP
        return {
            place: replace(plan, kind=wider) if plan.kind in (calls.I4, calls.I4_AFFINE) else plan
            for place, plan in plans.items()
        }

    def _matrix(self, n: int, k: int, parts: tuple[Part, ...]) -> _Matrix:
        """With one format for all parts: theirs, or the widest that is needed."""
        kinds = {None if self.stored is None else self.stored.kind(part.name) for part in parts}
        kind = self.kind
        if None not in kinds:
            kind = WEIGHTS[str(kinds.pop())] if len(kinds) == 1 else calls.I8_GROUP
        if kind in _GROUPS and k % GROUP:
            raise ModelError(f"{parts[0].name} has {k} inputs; {NAMES[kind]} weights need a multiple of {GROUP}.")
        return _Matrix(n, k, kind, parts)

    def layer(self, i: int) -> calls.Layer:
        out, about = calls.Layer(), self.spec.layers[i]
        for name, plan in self._layers[i].items():
            setattr(out, name, self._linear(plan))
        for at, name in norm_names(self.spec, i).items():
            setattr(out, at, self._norm(name, about.head_dim if at in ("q_norm", "k_norm") else self.spec.hidden))
        out.heads, out.kv_heads, out.head_dim = about.heads, about.kv_heads, about.head_dim
        out.window = about.window or 0
        out.rope = -1 if about.rope is None else about.rope
        out.rotary_dim = 0 if about.rope is None else 2 * len(self.spec.frequencies[about.rope])
        out.scale, out.softcap = about.scale, about.softcap
        return out

    def whole(self, layers: ctypes.Array[calls.Layer]) -> calls.Model:
        spec = self.spec
        linears = {name: self._linear(plan) for name, plan in self._outer.items()}
        out = calls.Model(layers=layers, embedding=linears["embedding"], head=linears.get("head", linears["embedding"]))
        out.final_norm = self._norm("model.norm", spec.hidden, spec.logit_scale)
        out.n_ropes, out.rotary_half = len(spec.frequencies), max((len(f) for f in spec.frequencies), default=0)
        frequencies = np.zeros((out.n_ropes, out.rotary_half), np.float32)
        for i, own in enumerate(spec.frequencies):
            frequencies[i, : len(own)] = own
        self.keep.append(frequencies)
        out.frequencies = frequencies.ctypes.data
        out.n_layers, out.hidden = len(spec.layers), spec.hidden
        out.intermediate, out.vocabulary = spec.intermediate, spec.vocabulary
        out.activation = _ACTIVATIONS[spec.activation]
        out.compute = calls.F32 if self.dtype != torch.bfloat16 else calls.BF16
        out.threads = thread_count()
        out.eps, out.embedding_scale = spec.eps, spec.embedding_scale
        out.logit_softcap, out.residual_scale = spec.logit_softcap, spec.residual_scale
        return out

    def _linear(self, plan: _Matrix) -> calls.Linear:
        memory = self._arena.take(plan.nbytes)
        self.weight_bytes += plan.nbytes
        if self.stored is not None and plan.kind in _GROUPS:
            counts = self._move(plan, memory)
        else:
            counts = self._convert(plan, memory)
        if sum(counts) != plan.n or (plan.parts[0].half and counts[0] != counts[1]):
            raise ModelError(
                f"{plan.parts[0].name} and its kin have {' + '.join(map(str, counts))} rows; the config says {plan.n}."
            )
        biases = [self._bias(part, count) for part, count in zip(plan.parts, counts, strict=True)]
        return calls.Linear(memory.ctypes.data, self._fuse_biases(plan, biases), plan.n, plan.k, plan.kind)

    def _convert(self, plan: _Matrix, memory: NDArray[np.uint8]) -> list[int]:
        """Pack the parts from float tensors; returns the rows of each."""
        counts: list[int] = []
        for part in plan.parts:
            source = self._part(part, plan.k)
            first = 0 if part.half else sum(counts)
            if first + len(source) > (plan.n // 2 if part.half else plan.n):
                raise ModelError(f"{part.name}.weight has {len(source)} rows, more than the config says.")
            pack_rows(source, memory, plan.kind, first=first, half=part.half)
            counts.append(len(source))
        return counts

    def _move(self, plan: _Matrix, memory: NDArray[np.uint8]) -> list[int]:
        """Pack the parts as they are stored; returns the rows of each."""
        parts = [self._blocks(part, plan) for part in plan.parts]
        counts = [len(part) for part in parts]
        if sum(counts) == plan.n:
            place(joined(parts, halves=bool(plan.parts[0].half)), memory)
        return counts

    def _blocks(self, part: Part, plan: _Matrix) -> Blocks:
        assert self.stored is not None
        blocks = self.stored.blocks(part.name)
        if blocks.inputs != plan.k:
            raise ModelError(f"{part.name}.weight has {blocks.inputs} columns; the config says {plan.k}.")
        if part.rows is not None:
            blocks = blocks.rows(*part.rows)
        return blocks if blocks.kind == NAMES[plan.kind] else to_int8(blocks.values())

    def _part(self, part: Part, k: int) -> torch.Tensor:
        source = self._get(f"{part.name}.weight")
        if source.dim() != 2 or source.shape[1] != k:
            raise ModelError(f"{part.name}.weight is {tuple(source.shape)}; the config says {k} columns.")
        return source if part.rows is None else source[part.rows[0] : part.rows[1]]

    def _get(self, name: str) -> torch.Tensor:
        if (found := self.tensor(name)) is None:
            raise ModelError(f"the checkpoint has no tensor {name}; it is incomplete or of another architecture.")
        return found

    def _bias(self, part: Part, rows: int) -> NDArray[np.float32]:
        found = self.tensor(f"{part.name}.bias")
        if found is None:
            return np.zeros(rows, np.float32)
        if found.shape != (rows,):
            raise ModelError(f"{part.name}.bias is {tuple(found.shape)}; its weight has {rows} rows.")
        return found.float().numpy()

    def _fuse_biases(self, plan: _Matrix, biases: Sequence[NDArray[np.float32]]) -> int | None:
        if not any(bias.any() for bias in biases):
            return None
        if plan.parts[0].half:
            gate, up = (bias.reshape(-1, 16) for bias in biases)
            return self._floats(np.stack([gate, up], 1).reshape(-1))
        return self._floats(np.concatenate(biases))

    def _norm(self, name: str, size: int, factor: float = 1.0) -> int:
        weight = self._get(f"{name}.weight")
        if weight.shape != (size,):
            raise ModelError(f"{name}.weight is {tuple(weight.shape)}; the config says ({size},).")
        return self._floats((weight.float().numpy() + np.float32(self.spec.norm_offset)) * np.float32(factor))

    def _floats(self, values: NDArray[np.float32]) -> int:
        """Keep a float32 vector, padded to whole panels; returns its address."""
        padded = np.zeros(-(-len(values) // PANEL) * PANEL, np.float32)
        padded[: len(values)] = values
        self.keep.append(padded)
        self.weight_bytes += padded.nbytes
        return int(padded.ctypes.data)


def _formats(plans: Sequence[_Matrix]) -> str:
    """The formats in use, most bytes first."""
    sizes: dict[str, int] = {}
    for plan in plans:
        sizes[NAMES[plan.kind]] = sizes.get(NAMES[plan.kind], 0) + plan.nbytes
    return " + ".join(sorted(sizes, key=lambda name: -sizes[name]))


def pack_rows(source: torch.Tensor, memory: NDArray[np.uint8], kind: int, *, first: int = 0, half: int = 0) -> None:
    """Pack the rows of `source` [n, k] as output columns first, first + 1, … of the packed matrix in `memory`."""
    library = calls.kernels()
    assert library is not None
    source = source.contiguous()
    if source.dtype not in TYPES:
        raise ModelError(f"weights are {source.dtype}; float32, bfloat16 and float16 are read.")
    order = calls.Pack(source.data_ptr(), memory.ctypes.data, *source.shape, TYPES[source.dtype], kind)
    order.first, order.interleave, order.threads = first, half, thread_count()
    library.handle.octavo_pack(ctypes.byref(order))


def read_bandwidth(megabytes: int = 512, rounds: int = 5) -> float:
    """Bytes per second that all threads together read from memory: the median of a few passes, measured now."""
    import time

    library = calls.kernels()
    if library is None:
        raise ModelError("the native library is not there; it is what measures the bandwidth.")
    data = huge_pages(megabytes << 20)
    data[:] = 1
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        library.handle.octavo_read_bytes(data.ctypes.data, data.nbytes, thread_count())
        times.append(time.perf_counter() - start)
    return data.nbytes / sorted(times)[rounds // 2]
