"""A transformers model that computes with exactly what quantised weights and activations stand for, in plain torch.

Written from the description of the formats in src/octavo/native/src/{pack,linear}.h, and independent of that code.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn.functional import linear

GROUP = 32


def _rows_as_int8(x: torch.Tensor) -> torch.Tensor:
    """Each last dimension as 127 steps of its largest magnitude."""
    top = x.abs().amax(-1, keepdim=True)
    return (x * torch.where(top > 0, 127.0 / top, 0.0)).round() * (top / 127.0)


def _grouped(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], -1, GROUP)


def _stored_scale(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale as half precision keeps it, and its inverse."""
    kept = scale.half().float()
    return kept, torch.where(kept != 0, 1.0 / kept, 0.0)


def dequantised(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """weight [n, k] as the format stores it."""
    if kind == "int8":
        return _rows_as_int8(weight)
    x = _grouped(weight)
    if kind == "int8_group":
        scale, inverse = _stored_scale(x.abs().amax(-1, keepdim=True) / 127.0)
        return ((x * inverse).round().clamp(-127, 127) * scale).reshape(weight.shape)
    if kind == "int4":
        peak = x.gather(-1, x.abs().argmax(-1, keepdim=True))
        scale, inverse = _stored_scale(peak / -8.0)
        return ((x * inverse).round().clamp(-8, 7) * scale).reshape(weight.shape)
    low = x.amin(-1, keepdim=True)
    scale, inverse = _stored_scale((x.amax(-1, keepdim=True) - low) / 15.0)
    low = low.half().float()
    return (((x - low) * inverse).round().clamp(0, 15) * scale + low).reshape(weight.shape)


class _Quantised(torch.nn.Module):
    def __init__(self, plain: torch.nn.Linear, kind: str) -> None:
        super().__init__()
        self.kind, self.bias = kind, plain.bias
        self.weight = torch.nn.Parameter(dequantised(plain.weight, kind), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = _rows_as_int8(x) if self.kind == "int8" else _rows_as_int8(_grouped(x)).reshape(x.shape)
        return linear(rounded, self.weight, self.bias)


@torch.no_grad()
def quantised_twin(module: Any, kind: str) -> Any:
    """`outer`, the format of embedding and head: that of the matrices, but int8 for 4 bits."""
    outer = "int8" if kind.startswith("int4") else kind
    twin = copy.deepcopy(module)
    for name, part in list(twin.named_modules()):
        if isinstance(part, torch.nn.Linear):
            parent = twin.get_submodule(name.rpartition(".")[0])
            head = name == "lm_head"
            setattr(parent, name.rpartition(".")[2], _Quantised(part, outer if head else kind))
        elif isinstance(part, torch.nn.Embedding):
            part.weight = torch.nn.Parameter(dequantised(part.weight, outer), requires_grad=False)
    return twin
