"""Rows of a quantised GGUF tensor as the native code's groups, value for value where a group format can say them.

ggml's blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Q8_0, Q5_0, Q4_0, Q4_1 keep their numbers
and scales; Q4_K keeps its numbers, and the product of its two scales is rounded to float16. All others are dequantised
and quantised again to int8 groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.native.blocks import Blocks, to_int8

Rows = NDArray[np.uint8]  # [rows, bytes of a row]
FLOATS = {0: "F32", 1: "F16", 30: "BF16"}  # ggml type → name
_SLAB = 4096  # rows that are dequantised at a time

_Q4_0 = np.dtype([("d", "<f2"), ("q", "u1", (16,))])
_Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", (16,))])
_Q5_0 = np.dtype([("d", "<f2"), ("high", "u1", (4,)), ("q", "u1", (16,))])
_Q8_0 = np.dtype([("d", "<f2"), ("q", "u1", (32,))])
_Q4_K = np.dtype([("d", "<f2"), ("m", "<f2"), ("scales", "u1", (12,)), ("q", "u1", (4, 32))])


def blocks_from(rows: Rows, kind: int) -> Blocks:
    """`rows` of a tensor of ggml type `kind`, which is none of FLOATS. Raises what `gguf.dequantize` raises."""
    reader = _READERS.get(kind)
    if reader is not None:
        return reader(rows)
    slabs = [to_int8(dequantised(rows[at : at + _SLAB], kind)) for at in range(0, len(rows), _SLAB)]
    words = np.concatenate([slab.words for slab in slabs])
    return Blocks("int8_group", words, np.concatenate([slab.scales for slab in slabs]))


def stored_kind(kind: int) -> str | None:
    """The native format that `blocks_from` gives for a ggml type; None for floats."""
    return None if kind in FLOATS else _KINDS.get(kind, "int8_group")


def dequantised(rows: Rows, kind: int) -> NDArray[np.float32]:
    """float32 [rows, values]."""
    if kind == 0:
        return rows.view(np.float32)
    if kind == 1:
        return rows.view(np.float16).astype(np.float32)
    if kind == 30:
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    from gguf import GGMLQuantizationType, dequantize

    out: NDArray[np.float32] = dequantize(np.ascontiguousarray(rows), GGMLQuantizationType(kind))
    return out


def _words(values: NDArray[Any]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values).view(np.uint32)


def _nibbles(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """32 numbers below 16 as 16 bytes, the second half in the high nibbles."""
    out: NDArray[Any] = values[..., :16] | values[..., 16:] << 4
    return out


def _q4_0(rows: Rows) -> Blocks:
    block = rows.view(_Q4_0)
    return Blocks("int4", _words(block["q"]), np.ascontiguousarray(block["d"]))


def _q4_1(rows: Rows) -> Blocks:
    block = rows.view(_Q4_1)
    scales, minima = (np.ascontiguousarray(block[name]) for name in "dm")
    return Blocks("int4_affine", _words(block["q"]), scales, minima)


def _q5_0(rows: Rows) -> Blocks:
    block = rows.view(_Q5_0)
    high = np.unpackbits(np.ascontiguousarray(block["high"]), axis=-1, bitorder="little")
    numbers: NDArray[Any] = np.concatenate([block["q"] & 15, block["q"] >> 4], -1) | high << 4
    return Blocks("int8_group", _words(numbers + np.uint8(112)), np.ascontiguousarray(block["d"]))  # q - 16 + 128


def _q8_0(rows: Rows) -> Blocks:
    block = rows.view(_Q8_0)
    return Blocks("int8_group", _words(block["q"] ^ np.uint8(128)), np.ascontiguousarray(block["d"]))


def _q4_k(rows: Rows) -> Blocks:
    """Eight groups of 32 under one scale and one minimum, each with six bits of its own for both."""
    block = rows.view(_Q4_K)
    shape = (len(rows), -1)
    packed = block["scales"]
    low, mid, top = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([low & 63, top & 15 | low >> 6 << 4], -1)
    minima = np.concatenate([mid & 63, top >> 4 | mid >> 6 << 4], -1)
    numbers = np.stack([block["q"] & 15, block["q"] >> 4], -2)  # [rows, blocks, 4, 2, 32]
    d, m = (block[name].astype(np.float32)[..., None] for name in "dm")
    return Blocks(
        "int4_affine",
        _words(_nibbles(numbers)).reshape(len(rows), -1, 4),
        (d * scales).astype(np.float16).reshape(shape),
        (-m * minima).astype(np.float16).reshape(shape),
    )


_READERS: dict[int, Callable[[Rows], Blocks]] = {2: _q4_0, 3: _q4_1, 6: _q5_0, 8: _q8_0, 12: _q4_k}
_KINDS = {2: "int4", 3: "int4_affine", 12: "int4_affine"}
