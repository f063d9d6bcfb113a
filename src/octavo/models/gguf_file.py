"""Reading a GGUF file: header, tokenizer arrays and dequantised tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian). We parse the
header ourselves because a truncated file must be told in one sentence, and because `gguf.GGUFReader` builds one numpy
view per array element (11 s for a vocabulary of 262,144). Block formats are dequantised by the `gguf` package.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from octavo.models.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ITEMS = 1 << 32  # no real file comes near; a corrupt count must not be believed


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` in torch order (rows first), `start` and `size` in bytes of the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed header; tensor data is read on demand."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def read(self, tensor: TensorInfo) -> np.ndarray:
        """The tensor as float32 (or its own float type), dequantised, shape `tensor.shape`."""
        from gguf import GGMLQuantizationType, dequantize

        with open(self.path, "rb") as file:
            file.seek(tensor.start)
            raw = np.frombuffer(file.read(tensor.size), dtype=np.uint8)
        kind = GGMLQuantizationType(tensor.kind)
        if kind == GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(tensor.shape)
        if kind == GGMLQuantizationType.F16:
            return raw.view(np.float16).astype(np.float32).reshape(tensor.shape)
        return dequantize(raw.reshape(*tensor.shape[:-1], -1), kind).reshape(tensor.shape)


class _Cursor:
    """Reads little-endian values and never past the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.pos = data, path, 0

    def take(self, size: int) -> bytes:
        end = self.pos + size
        if size < 0 or end > len(self.data):
            raise ModelError(
                f"{self.path} is a truncated GGUF file: its header needs {end:,} bytes and the file has "
                f"{len(self.data):,}; download it again."
            )
        piece = self.data[self.pos : end]
        self.pos = end
        return piece

    def scalars(self, code: str, count: int = 1) -> tuple[Any, ...]:
        form = f"<{count}{code}"
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def string(self) -> str:
        return self.take(self.scalars("Q")[0]).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalars(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ModelError(f"{self.path} is not a valid GGUF file: metadata value type {kind} is unknown.")
        item, count = self.scalars("I")[0], self.scalars("Q")[0]
        if count > _MAX_ITEMS:
            raise ModelError(f"{self.path} is not a valid GGUF file: an array claims {count:,} items.")
        if item in _SCALARS:
            return list(self.scalars(_SCALARS[item], count))
        return [self.value(item) for _ in range(count)]


def read_gguf(path: str | Path) -> GgufFile:
    """Parse the header of a GGUF file and check that every tensor lies inside the file.

    Raises ModelError in one sentence if it is no GGUF file, truncated, or of an unknown version.
    """
    path = Path(path)
    if path.stat().st_size < 24:
        raise ModelError(f"{path} is not a GGUF file: it has {path.stat().st_size} bytes, fewer than a header.")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, path)
        if cursor.take(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it does not start with the letters GGUF.")
        version = cursor.scalars("I")[0]
        if version not in (2, 3):
            raise ModelError(f"{path} has GGUF version {version}; versions 2 and 3 are supported.")
        tensor_count, key_count = cursor.scalars("Q", 2)
        metadata = {}
        for _ in range(key_count):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalars("I")[0])
        if "general.architecture" not in metadata:
            raise ModelError(f"{path} has no general.architecture in its metadata; it cannot be loaded.")
        tensors = _tensor_table(cursor, tensor_count, int(metadata.get("general.alignment", 32)))
    return GgufFile(path, metadata, tensors)


def _tensor_table(cursor: _Cursor, count: int, alignment: int) -> tuple[TensorInfo, ...]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    entries = []
    for _ in range(count):
        name = cursor.string()
        dims = cursor.scalars("Q", cursor.scalars("I")[0])
        kind, offset = cursor.scalars("I")[0], cursor.scalars("Q")[0]
        entries.append((name, tuple(reversed(dims)), kind, offset))
    data_start = -(-cursor.pos // alignment) * alignment
    tensors = []
    for name, shape, kind, offset in entries:
        try:
            items, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise ModelError(f"{cursor.path} stores tensor {name} in the unknown format {kind}.") from None
        tensors.append(TensorInfo(name, shape, kind, data_start + offset, prod(shape) // items * size))
    end = max((t.start + t.size for t in tensors), default=0)
    if end > len(cursor.data):
        raise ModelError(
            f"{cursor.path} is a truncated GGUF file: its tensors need {end:,} bytes and the file has "
            f"{len(cursor.data):,}; download it again."
        )
    return tuple(tensors)
