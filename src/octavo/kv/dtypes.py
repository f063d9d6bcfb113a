"""How one row of a K or V cache is stored: bytes per value, scales included.

A row is the `k_dim` or `v_dim` values of one head and one token. The quantised formats keep one fp16 scale
per 32 values inside the row, as llama.cpp's q8_0 and q4_0 blocks do (ggml-common.h): 32 int8 + 2 bytes = 34
bytes, 16 bytes of int4 + 2 = 18 bytes. fp8 (E4M3) has one scale per tensor, which is a constant and not part
of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.kv.fields import ConfigError


@dataclass(frozen=True, slots=True)
class KVDtype:
    """A storage format: `values` values take `bytes` bytes, scales included."""

    name: str
    values: int
    bytes: int

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` values. Raises ConfigError if the row is not a whole number of groups."""
        if width % self.values:
            raise ConfigError(
                f"KV dtype {self.name} stores one scale per {self.values} values; a row has {width}: "
                f"choose bf16, fp16 or fp8, or a model whose head size is a multiple of {self.values}."
            )
        return width // self.values * self.bytes

    @property
    def per_value(self) -> str:
        """The bytes of one value, as a formula writes them: "2 B" or "34/32 B"."""
        return f"{self.bytes} B" if self.values == 1 else f"{self.bytes}/{self.values} B"


FORMATS: Mapping[str, KVDtype] = {
    "float32": KVDtype("float32", 1, 4),
    "bf16": KVDtype("bf16", 1, 2),
    "fp16": KVDtype("fp16", 1, 2),
    "fp8": KVDtype("fp8", 1, 1),
    "int8": KVDtype("int8", 32, 34),
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
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8": "fp8",
    "q4_0": "int4",
}


def kv_dtype(name: str) -> KVDtype:
    """The format called `name` (any case). Raises ConfigError with the known names."""
    key = name.strip().lower()
    found = FORMATS.get(_OTHER_NAMES.get(key, key))
    if found is None:
        raise ConfigError(f"KV dtype {name!r} is unknown; use one of {', '.join(FORMATS)}.")
    return found
