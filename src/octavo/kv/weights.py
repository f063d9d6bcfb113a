"""Bytes of a model's weights on one tensor-parallel rank, from parameter counts and a storage format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from octavo.kv.fields import ConfigError, Fields
from octavo.kv.params import Parameters


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Bits per value of the matrices, of the experts, and of what stays 16-bit (embedding, output, norms)."""

    name: str
    matrices: Fraction
    experts: Fraction
    rest: int

    def bytes(self, parameters: Parameters) -> int:
        """Bytes of all weights, rounded up."""
        rest = parameters.embedding + parameters.output + parameters.small
        bits = parameters.matrices * self.matrices + parameters.experts * self.experts + rest * self.rest
        return -(-bits // 8)


def _uniform(name: str, bits: Fraction | int, rest: int = 16) -> WeightFormat:
    return WeightFormat(name, Fraction(bits), Fraction(bits), rest)


# Scales: GPTQ and AWQ keep an fp16 scale and a 4-bit zero per 128 values; bitsandbytes NF4 an fp32 scale per
# 64; MXFP4 an 8-bit exponent per 32, and only in the experts (gpt-oss); FP8 scales are too few to count.
FORMATS: Mapping[str, WeightFormat] = {
    "float32": _uniform("float32", 32, 32),
    "bf16": _uniform("bf16", 16),
    "fp16": _uniform("fp16", 16),
    "fp8": _uniform("fp8", 8),
    "int8": _uniform("int8", 8),
    "int4": _uniform("int4", 4 + Fraction(16 + 4, 128)),
    "nf4": _uniform("nf4", 4 + Fraction(32, 64)),
    "mxfp4": WeightFormat("mxfp4", Fraction(16), 4 + Fraction(8, 32), 16),
}
_DTYPES = {"float32": "float32", "float": "float32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "fp32": "float32"}


def weight_format(name: str) -> WeightFormat:
    """The format called `name`. Raises ConfigError with the known names."""
    key = name.strip().lower()
    found = FORMATS.get(_SHORT.get(key, key))
    if found is None:
        raise ConfigError(f"Weight dtype {name!r} is unknown; use one of {', '.join(FORMATS)}.")
    return found


def published_format(config: Mapping[str, Any]) -> tuple[WeightFormat, str]:
    """The format of the published checkpoint and the config path that says so.

    Raises ConfigError for a quantisation method that is not in the table, and when the config names no dtype.
    """
    fields = Fields(config)
    quantised = fields.anywhere("quantization_config")
    if isinstance(quantised, Mapping):
        method = str(quantised.get("quant_method", "")).lower()
        found = _quantised(method, quantised)
        where = fields.sources["quantization_config"]
        if found is None:
            raise ConfigError(
                f"{where}.quant_method {method!r} has no known bytes per weight: give --weight-dtype "
                f"({', '.join(FORMATS)}) or the measured --weight-memory."
            )
        return FORMATS[found], f"{where} {method}"
    dtype = fields.anywhere("torch_dtype")
    found = _DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ConfigError(
            f"torch_dtype is {dtype!r} in the config: give --weight-dtype ({', '.join(FORMATS)}) or --weight-memory."
        )
    return FORMATS[found], f"{fields.sources['torch_dtype']} {dtype}"


def _quantised(method: str, config: Mapping[str, Any]) -> str | None:
    bits = config.get("bits", config.get("num_bits"))
    if method in ("gptq", "awq") and bits in (4, 8):
        return "int4" if bits == 4 else "int8"
    if method == "bitsandbytes":
        return "nf4" if config.get("load_in_4bit") else "int8"
    return {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4"}.get(method) or _compressed(config)


def _compressed(config: Mapping[str, Any]) -> str | None:
    """compressed-tensors: bits and type of the weights of its only group."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        return None
    weights = next(iter(groups.values())).get("weights") or {}
    kind: tuple[Any, Any] = (weights.get("type"), weights.get("num_bits"))
    known: Mapping[tuple[Any, Any], str] = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int4"}
    return known.get(kind)
