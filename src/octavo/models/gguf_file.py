"""A GGUF file to be loaded: the whole header with its tokenizer arrays, and its tensors dequantised on demand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from octavo.models.gguf_header import GgufHeader, TensorInfo, read_header


def read_gguf(path: str | Path) -> GgufHeader:
    """The header with every array. Raises ModelError in one sentence as `read_header` does."""
    return read_header(path, keep=None)


def read_tensor(file: GgufHeader, tensor: TensorInfo) -> np.ndarray:
    """The tensor as float32 (or its own float type), dequantised by the `gguf` package, shape `tensor.shape`."""
    from gguf import GGMLQuantizationType, dequantize

    with open(file.path, "rb") as data:
        data.seek(tensor.start)
        raw = np.frombuffer(data.read(tensor.size), dtype=np.uint8)
    kind = GGMLQuantizationType(tensor.kind)
    if kind == GGMLQuantizationType.F32:
        return raw.view(np.float32).reshape(tensor.shape)
    if kind == GGMLQuantizationType.F16:
        return raw.view(np.float16).astype(np.float32).reshape(tensor.shape)
    return dequantize(raw.reshape(*tensor.shape[:-1], -1), kind).reshape(tensor.shape)
