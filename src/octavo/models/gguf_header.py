"""A GGUF file's header: metadata, and where each tensor lies. Tensor data is never touched.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian). Pure Python over a
memory map, because sizing a model must not need the `gguf` package, a truncated file must be told in one sentence, and
`gguf.GGUFReader` builds one numpy view per array element (11 s for a vocabulary of 262,144).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from octavo.models.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
SHORT = 4096  # for sizing, longer arrays (vocabulary, merges, scores) are kept as their length only

#: ggml type → (values in a block, bytes of a block); ggml.h and gguf-py's GGML_QUANT_SIZES.
_BLOCKS: Mapping[int, tuple[int, int]] = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    9: (32, 40),  # Q8_1
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    15: (256, 292),  # Q8_K
    16: (256, 66),  # IQ2_XXS
    17: (256, 74),  # IQ2_XS
    18: (256, 98),  # IQ3_XXS
    19: (256, 50),  # IQ1_S
    20: (32, 18),  # IQ4_NL
    21: (256, 110),  # IQ3_S
    22: (256, 82),  # IQ2_S
    23: (256, 136),  # IQ4_XS
    24: (1, 1),  # I8
    25: (1, 2),  # I16
    26: (1, 4),  # I32
    27: (1, 8),  # I64
    28: (1, 8),  # F64
    29: (256, 56),  # IQ1_M
    30: (1, 2),  # BF16
    34: (256, 54),  # TQ1_0
    35: (256, 66),  # TQ2_0
    39: (32, 17),  # MXFP4
    40: (64, 36),  # NVFP4
    41: (128, 18),  # Q1_0
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` in torch order (rows first), `start` and `size` in bytes of the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF header says.

    metadata  scalars, strings and arrays
    lengths   key → length of an array that was not kept
    tensors   where each tensor lies, in file order
    """

    path: Path
    metadata: Mapping[str, Any]
    lengths: Mapping[str, int]
    tensors: tuple[TensorInfo, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.tensors)

    @property
    def parameters(self) -> int:
        """Values in all tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors)


class _Cursor:
    """Reads little-endian values and never past the end of the file. Arrays longer than `keep` are skipped."""

    def __init__(self, data: mmap.mmap, path: Path, keep: int | None) -> None:
        self.data, self.path, self.at = data, path, 0
        self._keep = len(data) if keep is None else keep

    def skip(self, size: int) -> int:
        """Move past `size` bytes and return where they began."""
        start = self.at
        self.at += size
        if self.at > len(self.data):
            raise truncated(self.path, self.at, len(self.data))
        return start

    def scalar(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        return struct.unpack_from(f"<{code}", self.data, self.skip(size))[0]

    def string(self) -> str:
        size = self.scalar("Q")
        start = self.skip(size)
        return self.data[start : start + size].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """A metadata value; a long array as an `int` inside a `_Length`."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ModelError(f"{self.path} is not a valid GGUF file: metadata value type {kind} is unknown.")
        item, count = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            code = _SCALARS[item]
            start = self.skip(count * struct.calcsize(f"<{code}"))
            if count > self._keep:
                return _Length(count)
            return list(struct.unpack_from(f"<{count}{code}", self.data, start))
        if item == _STRING and count > self._keep:
            self._skip_strings(count)
            return _Length(count)
        return [self.value(item) for _ in range(min(count, len(self.data)))]

    def _skip_strings(self, count: int) -> None:
        # The hot loop of a large vocabulary: no call per string.
        data, at, end, unpack = self.data, self.at, len(self.data) - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > end:
                raise truncated(self.path, at + 8, len(data))
            at += 8 + unpack(data, at)[0]
        self.at = at
        self.skip(0)


@dataclass(frozen=True, slots=True)
class _Length:
    value: int


def truncated(path: Path, needed: int, size: int) -> ModelError:
    """The error for a file that ends too early."""
    return ModelError(
        f"{path} is a truncated GGUF file: it needs {needed:,} bytes and has {size:,}; download it again."
    )


def read_header(path: str | Path, keep: int | None = SHORT) -> GgufHeader:
    """Read the header of a GGUF file and check that every tensor lies inside the file. Of arrays longer than `keep`
    only the length is kept; None keeps all.

    Raises ModelError in one sentence if the file is absent, not GGUF, truncated, or of an unknown version.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise ModelError(f"{path} is not a GGUF file: it has {size} bytes, fewer than a header.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(data, path, keep))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None


def _parse(cursor: _Cursor) -> GgufHeader:
    path = cursor.path
    start = cursor.skip(4)
    if cursor.data[start : start + 4] != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it does not start with the letters GGUF.")
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ModelError(f"{path} has GGUF version {version}; little-endian versions 2 and 3 are supported.")
    tensors, keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    lengths: dict[str, int] = {}
    for _ in range(keys):
        key = cursor.string()
        value = cursor.value(cursor.scalar("I"))
        if isinstance(value, _Length):
            lengths[key] = value.value
        else:
            metadata[key] = value
    if not isinstance(metadata.get("general.architecture"), str):
        raise ModelError(f"{path} has no general.architecture in its metadata, so its model cannot be read.")
    table = _tensor_table(cursor, tensors, int(metadata.get("general.alignment", 32)))
    return GgufHeader(path, metadata, lengths, table)


def _tensor_table(cursor: _Cursor, count: int, alignment: int) -> tuple[TensorInfo, ...]:
    entries: list[TensorInfo] = []
    for _ in range(count):
        name = cursor.string()
        dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
        kind, offset = cursor.scalar("I"), cursor.scalar("Q")
        if kind not in _BLOCKS:
            raise ModelError(f"{cursor.path} stores tensor {name} in the unknown format {kind}.")
        values, size = _BLOCKS[kind]
        entries.append(TensorInfo(name, tuple(reversed(dims)), kind, offset, prod(dims) // values * size))
    data_start = -(-cursor.at // alignment) * alignment
    end = max((entry.start + entry.size for entry in entries), default=0)
    if data_start + end > len(cursor.data):
        raise truncated(cursor.path, data_start + end, len(cursor.data))
    return tuple(replace(entry, start=data_start + entry.start) for entry in entries)
