"""Quantised matrices as whole numbers and scales of 32 inputs each, and their way into packed panels.

Nothing is computed here: the numbers that a file stores are moved to where the native code reads them (linear.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

GROUP, PANEL = 32, 32
_HALF = PANEL // 2  # gate and up take turns by so many columns


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A matrix [outputs, inputs] in one of the group formats: int8_group, int4 or int4_affine.

    words   uint32 [outputs, groups, units]: four bytes q + 128 each, or, in the int4 formats, two times four nibbles
    scales  float16 [outputs, groups]; minima: the same, int4_affine only
    """

    kind: str
    words: NDArray[np.uint32]
    scales: NDArray[np.float16]
    minima: NDArray[np.float16] | None = None

    def __len__(self) -> int:
        return len(self.words)

    @property
    def inputs(self) -> int:
        return int(self.words.shape[1]) * GROUP

    def rows(self, first: int, last: int) -> Blocks:
        minima = None if self.minima is None else self.minima[first:last]
        return Blocks(self.kind, self.words[first:last], self.scales[first:last], minima)

    def values(self) -> NDArray[np.float32]:
        """What the matrix stands for, [outputs, inputs]."""
        packed = np.ascontiguousarray(self.words).view(np.uint8)
        scales = self.scales.astype(np.float32)[..., None]
        if self.kind == "int8_group":
            numbers = packed.astype(np.float32) - 128
        else:
            numbers = np.concatenate([packed & 15, packed >> 4], -1).astype(np.float32)
            numbers -= 0 if self.minima is not None else 8
        out: NDArray[np.float32] = numbers * scales
        if self.minima is not None:
            out += self.minima.astype(np.float32)[..., None]
        return out.reshape(len(self), -1)


def joined(parts: Sequence[Blocks], *, halves: bool) -> Blocks:
    """Matrices of one kind below each other; `halves`: two, 16 rows of each in turn (gate and up)."""
    minima = [part.minima for part in parts if part.minima is not None]
    return Blocks(
        parts[0].kind,
        _join([part.words for part in parts], halves),
        _join([part.scales for part in parts], halves),
        _join(minima, halves) if minima else None,
    )


def _join(arrays: Sequence[NDArray[Any]], halves: bool) -> NDArray[Any]:
    if not halves:
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    tail = arrays[0].shape[1:]
    return np.stack([array.reshape(-1, _HALF, *tail) for array in arrays], 1).reshape(-1, *tail)


def place(blocks: Blocks, memory: NDArray[np.uint8]) -> None:
    """Write a matrix into packed memory: panels of 32 outputs, in a panel one block of each group after another."""
    _, groups, units = blocks.words.shape
    fields: list[Any] = [("words", "<u4", (units, PANEL)), ("scales", "<f2", (PANEL,))]
    if blocks.minima is not None:
        fields.append(("minima", "<f2", (PANEL,)))
    panels = memory.view(np.dtype(fields)).reshape(-1, groups)
    panels["words"][...] = _panels(blocks.words, len(panels)).transpose(0, 2, 3, 1)
    panels["scales"][...] = _panels(blocks.scales, len(panels)).transpose(0, 2, 1)
    if blocks.minima is not None:
        panels["minima"][...] = _panels(blocks.minima, len(panels)).transpose(0, 2, 1)


def _panels(array: NDArray[Any], count: int) -> NDArray[Any]:
    """[outputs, …] → [count, 32, …], with zeros after the last output."""
    if missing := count * PANEL - len(array):
        array = np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
    return array.reshape(count, PANEL, *array.shape[1:])


def to_int8(values: NDArray[np.float32]) -> Blocks:
    """Quantise [outputs, inputs] to int8_group: one float16 scale of the largest magnitude of 32 inputs."""
    groups = values.reshape(len(values), -1, GROUP)
    scales = (np.abs(groups).max(-1) / 127).astype(np.float16)
    wide = scales.astype(np.float32)
    inverse = np.divide(1, wide, out=np.zeros_like(wide), where=wide > 0)
    numbers = np.clip(np.rint(groups * inverse[..., None]), -127, 127)
    return Blocks("int8_group", (numbers.astype(np.int8).view(np.uint8) ^ 128).view(np.uint32), scales)
