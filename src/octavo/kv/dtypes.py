"""How one row of a K or V cache is stored: bytes per value, scales included.

A row is the `k_dim` or `v_dim` values of one head and one token.

The engine's own quantised formats, int8 and fp8 (E4M3), keep one bfloat16 scale per row: 2 bytes more. Other engines'
formats are there to be sized only: llama.cpp's q8_0 and q4_0 (int4) keep one fp16 scale per 32 values inside the row
(ggml-common.h: 32 int8 + 2 bytes = 34, 16 bytes of int4 + 2 = 18), and vLLM's fp8 has one scale per tensor, which is
a constant and not part of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.kv.fields import ConfigError


@dataclass(frozen=True, slots=True)
class KVDtype:
    """A storage format: `values` values take `bytes` bytes, and a row `scale_bytes` more for its one scale."""

    name: str
    values: int
    bytes: int
    scale_bytes: int = 0

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` values. Raises ConfigError if the row is not a whole number of groups."""
        if width % self.values:
            raise ConfigError(
                f"KV dtype {self.name} stores one scale per {self.values} values; a row has {width}: "
                f"choose bf16, fp16, int8 or fp8, or a model whose head size is a multiple of {self.values}."
            )
        return row_bytes(width // self.values, self.bytes, self.scale_bytes)

    def formula(self, widths: str, rows: int) -> str:
        """The bytes of `rows` rows as a formula writes them: "2 x 64 x 2 B", "(2 x 64 x 1 B + 2 x 2 B of scales)"."""
        per_value = f"{self.bytes} B" if self.values == 1 else f"{self.bytes}/{self.values} B"
        if not self.scale_bytes:
            return f"{widths} x {per_value}"
        scales = f"{rows} x {self.scale_bytes} B" if rows > 1 else f"{self.scale_bytes} B"
        return f"({widths} x {per_value} + {scales} of scales)"


def row_bytes(elements: int, element_bytes: int, scale_bytes: int) -> int:
    """Bytes of one row: its elements and its scale. The one rule by which caches are sized and laid out."""
    return elements * element_bytes + scale_bytes


#: what the engine can store KV in, as `EngineConfig.kv_dtype` calls it; the model's own dtype is "auto"
ENGINE_NAMES = ("auto", "float32", "bfloat16", "float16", "int8", "fp8")


FORMATS: Mapping[str, KVDtype] = {
    "float32": KVDtype("float32", 1, 4),
    "bf16": KVDtype("bf16", 1, 2),
    "fp16": KVDtype("fp16", 1, 2),
    "int8": KVDtype("int8", 1, 1, 2),
    "fp8": KVDtype("fp8", 1, 1, 2),
    "fp8_per_tensor": KVDtype("fp8_per_tensor", 1, 1),
    "int4": KVDtype("int4", 32, 18),
    "q8_0": KVDtype("q8_0", 32, 34),
}
_OTHER_NAMES = {
    "fp32": "float32",
    "f32": "float32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "f16": "fp16",
    "half": "fp16",
    "float8": "fp8",
    "fp8_e4m3": "fp8_per_tensor",
    "fp8_e5m2": "fp8_per_tensor",
    "q4_0": "int4",
}


def kv_dtype(name: str) -> KVDtype:
    """The format called `name` (any case). Raises ConfigError with the known names."""
    key = name.strip().lower()
    found = FORMATS.get(_OTHER_NAMES.get(key, key))
    if found is None:
        raise ConfigError(f"KV dtype {name!r} is unknown; use one of {', '.join(FORMATS)}.")
    return found
