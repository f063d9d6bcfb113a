"""Which coefficients a timer runs on: calibrated here, a bundled fit, or the datasheet; with the error of each.

    timer, fidelity = timer_for(config, spec, "H100 SXM 80GB", weights=weight_format("bf16"))
    timer.alternatives()       the same model on refits to resampled points, for error bars

Bundled fits (`data/fits.json`, written by `benchmarks/fit_timing.py`) come from published kernel times only; no fit saw
an end-to-end run. Calibrations made here are `octavo.planner.timing.calibration`'s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from octavo.errors import OctavoError
from octavo.kv.spec import KVSpec
from octavo.kv.weights import WeightFormat
from octavo.planner.catalogue import Device, find_device
from octavo.planner.deployment import Fidelity, Level
from octavo.runner.rates import Coefficients
from octavo.runner.timing import RooflineTimer, StepShape, StepTimer
from octavo.runner.work import ModelWork, model_work

_DATA = Path(__file__).parent.parent / "data" / "fits.json"
_DATASHEET_ERROR = 0.18  # middle of the 10-25 % seen with one efficiency set for all cards (PLANNER 2b)
#: Share of the peak that the label promises with fp16 accumulation but kernels, which accumulate in fp32, cannot reach.
_FP32_ACCUMULATION = {"RTX 3090": 0.5, "RTX 4090": 0.5, "RTX 5090": 0.5}
#: Weight format -> formats of GEMM and MoE kernels, best first. Weight-only formats compute in bf16.
_KERNELS: Mapping[str, tuple[str, ...]] = {
    "fp8": ("fp8", "bf16"),
    "int4": ("int4", "bf16"),
    "mxfp4": ("mxfp4", "bf16"),
}


class FitsError(OctavoError, ValueError):
    """Step times that cannot be told: no device, no peak figures, no table."""


@dataclass(frozen=True, slots=True)
class Host:
    """Time of the engine's own code: per step, per sequence, and whether the next step is prepared under this one.

    gap: the device waits for so long between two steps all the same (150-170 us as measured for asynchronous
    scheduling in vllm-project/vllm pull request 11133).
    """

    start: float = 1.5e-3
    sequence: float = 1e-5
    overlaps: bool = True
    gap: float = 1.6e-4


def typical(bandwidth: float, compute: float, link: float = math.inf, host: Host | None = None) -> Coefficients:
    """One generic efficiency set on peak figures (PLANNER 2b: .85 / .75 / .9 / .45 / .5), kernel overheads as seen on
    Ampere to Blackwell. The prior of every fit, too.

    bandwidth: memory, B/s; compute: FLOP/s of the weight format; link: B/s between ranks, one way.
    """
    host = host or Host()
    return Coefficients(
        gemm_start=4e-6,
        gemm_bandwidth=0.85 * bandwidth,
        gemm_compute=0.75 * compute,
        decode_bandwidth=0.9 * bandwidth,
        mixed_bandwidth=0.45 * bandwidth,
        prefill_compute=0.5 * compute,
        elementwise_bandwidth=0.8 * bandwidth,
        sampler_bandwidth=0.8 * bandwidth,
        copy_bandwidth=0.8 * bandwidth,
        link_bandwidth=0.8 * link,
        elementwise_start=8e-6,
        attention_start=9e-6,
        attention_sequence=0.15e-6,
        attention_ramp=30e-6,
        prefill_start=5e-6,
        prefill_tile=0.1e-6,
        prefill_span=0.02e-6,
        query_tile=128,
        latent_start=40e-6,
        latent_bandwidth=0.6 * bandwidth,
        latent_compute=0.4 * compute,
        mixed_sequence=0.015e-6,
        mixed_idle=0.004e-6,
        uneven=1.06,
        moe_start=30e-6,
        moe_bandwidth=0.75 * bandwidth,
        moe_compute=0.45 * compute,
        moe_activation=0.4 * bandwidth,
        moe_tile=16.0,
        moe_imbalance=1.2,
        link_start=8e-6,
        sampler_start=25e-6,
        copy_start=5e-6,
        host_start=host.start,
        host_sequence=host.sequence,
        host_overlaps=host.overlaps,
        host_gap=host.gap,
    )


def datasheet(device: Device, weights: WeightFormat, host: Host | None = None) -> Coefficients:
    """Coefficients from a device's peak figures. Raises FitsError if the catalogue has no peak."""
    facts = device.facts
    bandwidth, compute = facts.get("memory_bandwidth_bytes_per_s"), facts.get("bf16_dense_flops")
    if not bandwidth or not compute:
        raise FitsError(
            f"{device.name} has no {'compute' if bandwidth else 'memory'} peak in the catalogue, so its step times are "
            "unknown: run `octavo calibrate` on it and give the file with --calibration."
        )
    whole = _FP32_ACCUMULATION.get(device.name, 1.0)
    found = typical(bandwidth, compute * whole, facts.get("interconnect_bytes_per_s_one_way") or math.inf, host)
    if weights.name == "fp8" and (fp8 := facts.get("fp8_dense_flops")):
        found = replace(found, gemm_compute=0.75 * fp8 * whole, moe_compute=0.45 * fp8 * whole)
    return found


def datasheet_timer(
    work: ModelWork, device: Device, weights: WeightFormat, *, host: Host | None = None, block_bytes: float = 0.0
) -> RooflineTimer:
    """The uncalibrated timer: expect its steps to be 10 to 25 % off."""
    return RooflineTimer(work, datasheet(device, weights, host), block_bytes)


@cache
def bundled() -> Mapping[str, Any]:
    """`data/fits.json`: sources, fits by device, fits by device and model."""
    data: Mapping[str, Any] = json.loads(_DATA.read_text(encoding="utf-8"))
    return data


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Coefficients put together from operator fits, with each operator's held-out median."""

    coefficients: Coefficients
    draws: tuple[Coefficients, ...]
    medians: Mapping[str, float]
    source: str
    assumptions: tuple[str, ...]


def timer_for(
    config: Mapping[str, Any],
    spec: KVSpec,
    device: str | None,
    *,
    weights: WeightFormat,
    names: Mapping[str, str] | None = None,
    calibration: str | None = None,
    host: Host | None = None,
    block_bytes: float = 0.0,
) -> tuple[StepTimer, Fidelity]:
    """The timer of a model on a device, and what to believe of it.

    spec fixes tensor parallelism and KV dtype; `calibration` (a path) beats the bundled fit of device and model, which
    beats the operator fits of the device, which beat the datasheet. host: the engine's own time, where its profile
    knows it. Raises FitsError without device and calibration, and for a device without peaks.
    """
    work = model_work(config, spec, weights, names)
    if calibration is not None:
        from octavo.planner.timing.calibration import load

        return load(Path(calibration)).timer(work, weights.name, spec.dtype)
    if device is None:
        raise FitsError("Neither a device nor a calibration is given, so step times are unknown: give --gpu.")
    found = find_device(device)
    base = datasheet(found, weights, host)
    chosen = _choose(found.name, work, spec, weights, base)
    if chosen is None:
        statement = f"uncalibrated: peak figures of {found.name} times typical efficiencies; expect 10-25 % error"
        notes = (*work.assumptions, _host_note(base))
        return RooflineTimer(work, base, block_bytes), Fidelity(Level.DATASHEET, _DATASHEET_ERROR, statement, notes)
    timer = RooflineTimer(work, chosen.coefficients, block_bytes, chosen.draws)
    error = _typical_error(timer, chosen.medians)
    listed = ", ".join(f"{operator} {median:.1%}" for operator, median in sorted(chosen.medians.items()))
    statement = f"bundled fit: {chosen.source}; median error on held-out kernel times: {listed}"
    notes = (*work.assumptions, *chosen.assumptions, _host_note(base))
    return timer, Fidelity(Level.BUNDLED, error, statement, notes)


def _host_note(c: Coefficients) -> str:
    how = "hidden behind the device's work" if c.host_overlaps else "added to the device's work"
    return (
        f"Engine overhead {c.host_start * 1e3:g} ms a step and {c.host_sequence * 1e6:g} us a sequence, {how}; "
        f"{c.host_gap * 1e6:g} us between steps."
    )


def _choose(device: str, work: ModelWork, spec: KVSpec, weights: WeightFormat, base: Coefficients) -> _Chosen | None:
    """The bundled operator fits that apply, over `base`; None if the device has none."""
    for entry in bundled()["models"]:
        shape = (entry["layers"], entry["hidden"], entry["vocab"], entry["tp"])
        if entry["device"] == device and shape == (work.layers, work.hidden, work.vocab, work.tp):
            return _assemble(entry, work, spec, weights, base)
    entry = bundled()["devices"].get(device)
    return None if entry is None else _assemble(entry, work, spec, weights, base)


def _assemble(
    entry: Mapping[str, Any], work: ModelWork, spec: KVSpec, weights: WeightFormat, base: Coefficients
) -> _Chosen:
    kernels = _KERNELS.get("bf16" if weights.matrices >= 16 else weights.name, ("bf16",))
    cache = ("fp8", "bf16") if spec.dtype.startswith("fp8") else ("bf16",)
    wanted: dict[str, tuple[str, ...]] = {
        "gemm": kernels,
        "elementwise": ("all",),
        "decode": cache,
        "prefill": cache,
        "sampler": ("all",),
    }
    if any(kind.latent for kind in work.attention):
        wanted["latent"] = cache
    if work.experts is not None:
        wanted["moe"] = _KERNELS.get(_expert_format(weights), ("bf16",))
    if work.tp > 1:
        wanted["link"] = (str(work.tp),)
    found, medians, notes = base, {}, []
    draws = [base] * 8
    for operator, formats in wanted.items():
        fits = entry["operators"].get(operator, {})
        chosen = next((name for name in formats if name in fits), None)
        if chosen is None:
            notes.append(f"No kernel times of {operator} ({formats[0]}) for this device: datasheet figures.")
            continue
        if chosen != formats[0]:
            notes.append(f"No kernel times of {operator} in {formats[0]}: those of {chosen}.")
        fit = fits[chosen]
        found = replace(found, **_values(fit["coefficients"]))
        draws = [replace(d, **_values(fit["coefficients"] | more)) for d, more in zip(draws, _draws(fit), strict=True)]
        if fit.get("median") is not None:
            medians[operator] = fit["median"]
    return _Chosen(found, tuple(draws), medians, entry["source"], tuple(notes))


def _expert_format(weights: WeightFormat) -> str:
    return "mxfp4" if weights.experts < 5 and weights.matrices >= 16 else weights.name


def _values(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(map(tuple, v)) if name == "gemm_factors" else v for name, v in named.items()}


def _draws(fit: Mapping[str, Any]) -> list[dict[str, float]]:
    """The eight resampled values of a fit's coefficients; a figure that was not fitted stands still."""
    rows = fit.get("draws") or [[]] * 8
    return [dict(zip(fit.get("fitted", ()), row, strict=False)) for row in rows]


def _typical_error(timer: RooflineTimer, medians: Mapping[str, float]) -> float:
    """The operators' medians weighed by their shares of a step: 64 decodes of 1,024 tokens and a chunk of 256."""
    windowed = tuple(64 * min(1024, window) for window in timer.windows)
    terms = timer.breakdown(StepShape(((256, 0),), 64, 64 * 1024, windowed, 65))
    attention = "latent" if "latent" in medians else "decode"
    of = {
        "linear": "gemm",
        "head": "gemm",
        "experts": "moe",
        "attention_decode": attention,
        "attention_prefill": "prefill",
        "elementwise": "elementwise",
        "communication": "link",
        "sampler": "sampler",
    }
    total = sum(terms[name] for name in of)
    return sum(terms[name] * medians.get(operator, _DATASHEET_ERROR) for name, operator in of.items()) / total
