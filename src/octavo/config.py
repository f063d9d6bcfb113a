"""The engine's settings: one frozen dataclass, built once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real

from octavo.errors import OctavoError
from octavo.kv.dtypes import ENGINE_NAMES as KV_DTYPES
from octavo.kv.strategies import STRATEGIES

WEIGHTS = ("auto", "int8", "int8_group", "int4", "int4_affine")
IMPLEMENTATIONS = ("auto", "native", "transformers")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """
    model                   directory, .gguf file, hub id, or `demo`
    kv_strategy             where KV goes: one of `STRATEGIES`
    block_size              tokens in a block
    kv_dtype                what K and V are stored in: auto (the model's dtype), float32, bfloat16, float16, or, with
                            one scale per token and head, int8 or fp8 (float8_e4m3fn)
    weights                 auto (as `dtype` says; where that is auto too, a GGUF file's quantised blocks stay as they
                            are in the file: Q8_0, Q5_0, Q4_0, Q4_1, Q4_K; others become int8_group), or quantised
                            while loading, for the native code only: int8 (one scale per output), int8_group, int4,
                            int4_affine (one scale per 32 inputs). Matrices in any of these formats round their
                            inputs to 8 bits
    implementation          native (Octavo's own decoder), transformers, or auto: native where it can run the model
    kv_memory               bytes for KV; None: what is left of the device after weights and activations
    memory_utilization      share of the device's memory the engine may use when `kv_memory` is None
    max_model_len           longest sequence; None: what the model can take, or what the memory can
    enable_prefix_caching   share equal prefixes (paged only)
    seed                    makes requests without a seed of their own repeatable
    itl_target              seconds that a running stream should wait for its next token at most: prompts of others are
                            computed in chunks that keep to it, if at all possible; None: max_num_batched_tokens alone
                            decides
    check                   verify every invariant after each step: slow, for hunting bugs
    order                   `fcfs`, `priority`, or `fair`: tenants share tokens, slots and memory by `tenant_weights`
                            (not to be taken for `weights`)
    max_queued_tokens       most prompt tokens that may wait for their first admission; None: no limit
    The others are the scheduler's, and these in more detail: see `SchedulerConfig`.
    """

    model: str
    kv_strategy: str = "paged"
    block_size: int = 16
    dtype: str = "auto"
    device: str = "auto"
    weights: str = "auto"
    implementation: str = "auto"
    kv_dtype: str = "auto"
    kv_memory: int | None = None
    memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    admission: str = "peak"
    victims: str = "cheapest"
    max_preemptions: int = 3
    max_skips: int = 8
    order: str = "fcfs"
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    max_queue: int | None = None
    max_queued_tokens: int | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)
    speculative_tokens: int = 0
    speculative_limit: int = 16
    itl_target: float | None = None
    seed: int | None = None
    check: bool = False

    def __post_init__(self) -> None:
        if self.kv_strategy not in STRATEGIES:
            raise OctavoError(f"kv_strategy is {self.kv_strategy!r}; it must be one of {', '.join(STRATEGIES)}.")
        if self.kv_dtype not in KV_DTYPES:
            raise OctavoError(f"kv_dtype is {self.kv_dtype!r}; it must be one of {', '.join(KV_DTYPES)}.")
        for name in ("block_size", "kv_memory", "max_model_len"):
            value = getattr(self, name)
            optional = name != "block_size" and value is None
            if not optional and (not isinstance(value, Integral) or isinstance(value, bool) or value < 1):
                raise OctavoError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        target = self.itl_target
        if target is not None and (not isinstance(target, Real) or not 0 < target < float("inf")):
            raise OctavoError(f"itl_target is {target!r}; it must be a number of seconds above 0, or None.")
        for name, known in (("weights", WEIGHTS), ("implementation", IMPLEMENTATIONS)):
            if (value := getattr(self, name)) not in known:
                raise OctavoError(f"{name} is {value!r}; it must be one of {', '.join(known)}.")
        if not 0 < self.memory_utilization <= 1:
            raise OctavoError(f"memory_utilization is {self.memory_utilization}; it must be above 0 and at most 1.")


_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {unit + "b": factor for unit, factor in list(_UNITS.items()) if unit in "kmgt" and unit}
_UNITS |= {unit + "i" + b: 1024**power for power, unit in enumerate("kmgt", 1) for b in ("", "b")}


def parse_bytes(text: str, name: str) -> int:
    """'512MiB', '4GiB', '1.5GB' or a plain number of bytes. Raises OctavoError naming `name`."""
    number = text.strip().rstrip("BbIiKkMmGgTt").strip()
    unit = text.strip()[len(number) :].strip().lower()
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if unit not in _UNITS or value <= 0 or value != value or value == float("inf"):
        raise OctavoError(f"{name} is {text!r}; it must be a positive size such as 512MiB, 4GiB or 1073741824.")
    return int(value * _UNITS[unit])
