"""The C structs and functions of liboctavo.so as ctypes sees them: the mirror of src/octavo.h, nothing else."""

from __future__ import annotations

import functools
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_void_p

from octavo.native.library import Library, load

F32, BF16, F16, I8, FP8, I8_GROUP, I4, I4_AFFINE = range(8)
SILU, GELU_TANH, GELU = range(3)
PARTS = ("linears", "attention", "norm and rope", "head", "embedding")


class Linear(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("type", c_int32),
        ("pad", c_int32),
    )


class Layer(Structure):
    _fields_ = (
        *((name, Linear) for name in ("qkv", "o", "gate_up", "down")),
        *((f"norm_{name}", c_void_p) for name in ("in", "after_attention", "before_mlp", "after_mlp")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "sinks")),
        *((name, c_int64) for name in ("k_at", "v_at", "k_scale_at", "v_scale_at")),
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "rotary_dim", "window", "group", "rope")),
        ("scale", c_float),
        ("softcap", c_float),
        ("pad", c_int32),
    )


class Model(Structure):
    _fields_ = (
        ("layers", POINTER(Layer)),
        ("embedding", Linear),
        ("head", Linear),
        ("final_norm", c_void_p),
        ("frequencies", c_void_p),
        ("n_ropes", c_int32),
        ("rotary_half", c_int32),
        *((name, c_int32) for name in ("n_layers", "hidden", "intermediate", "vocabulary")),
        *((name, c_int32) for name in ("activation", "compute", "kv_type", "threads")),
        *((name, c_float) for name in ("eps", "embedding_scale", "logit_softcap", "residual_scale")),
    )


class Batch(Structure):
    _fields_ = (
        ("kv", c_void_p),
        ("page_bytes", c_int64),
        *((name, c_int32) for name in ("block_size", "n_seqs", "n_tokens", "n_groups", "table_width", "pad")),
        *((name, c_void_p) for name in ("starts", "offsets", "tables")),
    )


class Step(Structure):
    _fields_ = (
        ("batch", Batch),
        *((name, c_void_p) for name in ("ids", "rows")),
        ("n_rows", c_int32),
        ("pad", c_int32),
        *((name, c_void_p) for name in ("logits", "argmax", "scratch")),
        ("scratch_bytes", c_int64),
        ("seconds", POINTER(c_double)),
    )


class Attend(Structure):
    _fields_ = (
        ("batch", Batch),
        *((name, c_void_p) for name in ("q", "out", "sinks")),
        *((name, c_int64) for name in ("k_at", "v_at", "k_scale_at", "v_scale_at")),
        *((name, c_int32) for name in ("heads", "kv_heads", "k_dim", "v_dim", "window", "group", "type", "kv_type")),
        *((name, c_float) for name in ("scale", "softcap")),
        ("threads", c_int32),
        ("pad", c_int32),
        ("scratch", c_void_p),
        ("scratch_bytes", c_int64),
    )


class Pack(Structure):
    _fields_ = (
        ("source", c_void_p),
        ("data", c_void_p),
        *((name, c_int32) for name in ("n", "k", "source_type", "type", "first", "interleave", "threads", "pad")),
    )


_FUNCTIONS = {
    "octavo_scratch_bytes": (c_int64, (POINTER(Model), c_int, c_int, c_int, c_int)),
    "octavo_step": (c_int, (POINTER(Model), POINTER(Step))),
    "octavo_attend_bytes": (c_int64, (c_int, c_int, c_int, c_int)),
    "octavo_attend": (c_int, (POINTER(Attend),)),
    "octavo_panel_bytes": (c_int64, (c_int, c_int64)),
    "octavo_pack": (c_int, (POINTER(Pack),)),
    "octavo_read_bytes": (c_int64, (c_void_p, c_int64, c_int)),
}


@functools.cache
def kernels() -> Library | None:
    """The loaded library with the argument types of its functions declared; None without one (see `library.load`)."""
    library = load()
    if library is not None:
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library.handle, name)
            function.restype, function.argtypes = result, arguments
    return library
