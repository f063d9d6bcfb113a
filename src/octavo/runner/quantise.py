"""How values become what the cache stores, and back: casts between float dtypes, and one scale per row for 8 bits.

A row is the K or the V of one token and one head. Its scale is a bfloat16, so that the C++ kernels and this file agree
on every bit: scale = bfloat16(largest magnitude / top), stored = round_to_even(value / scale), value = stored x scale.
"""

from __future__ import annotations

import torch

from octavo.kv.dtypes import KVDtype

STORED = {
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
_TOPS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def stored_dtype(dtype: KVDtype) -> torch.dtype:
    """The tensor dtype of a cache's elements."""
    return STORED[dtype.name]


def quantise(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """values [..., dim] → elements [..., dim] in `dtype` (int8 or float8_e4m3fn) and scales [...] in bfloat16.

    What is no finite number counts as 0 and is stored as 0.
    """
    top = _TOPS[dtype]
    values = values.float().nan_to_num(0.0, 0.0, 0.0)
    scales = (values.abs().amax(-1) / top).to(torch.bfloat16)
    divisor = scales.float().unsqueeze(-1)
    scaled = values / divisor.masked_fill(divisor == 0, 1.0)  # so small a row becomes 0 by itself
    if dtype is torch.int8:
        scaled = scaled.round_()
    return scaled.clamp_(-top, top).to(dtype), scales


def dequantise(elements: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """elements [..., dim] and scales [...] → values [..., dim] in `dtype`, finite as `narrow` makes them."""
    top = torch.finfo(dtype).max
    return elements.float().mul_(scales.float().unsqueeze(-1)).clamp_(-top, top).to(dtype)


def narrow(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast; what `dtype` cannot hold becomes its largest value and not infinity: a cache is read with weight 0 too,
    and 0 x infinity is no number."""
    if values.dtype == dtype:
        return values
    top = torch.finfo(dtype).max
    return values.float().clamp(-top, top).to(dtype)
