"""Fit the bundled coefficients to published kernel times and print their held-out errors.

    python benchmarks/fit_timing.py --facts ../shared/facts [--write] [--only moe link] [--table FILE]

Reads the tables under FACTS/profiles; 25 % of each table's points are fitted, the rest is held out. With --write
the result replaces src/octavo/planner/data/fits.json. No end-to-end run is read. --only: the other operators stay as
they are in that file; --table: the held-out errors of the result, in Markdown.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.kv.weights import weight_format
from octavo.planner.catalogue import find_device
from octavo.planner.timing import kernel_tables as tables
from octavo.planner.timing.fits import bundled, datasheet
from octavo.planner.timing.fitting import Array, Bound, Fit, HeldOut, Kernel, Rows, Search, fit_kernel, held_out
from octavo.planner.timing.kernel_tables import read_table
from octavo.runner.rates import Coefficients

OUT = Path(__file__).resolve().parent.parent / "src/octavo/planner/data/fits.json"
AIC = {
    "a100_sxm": "A100 SXM 80GB",
    "h100_sxm": "H100 SXM 80GB",
    "h200_sxm": "H200 SXM 141GB",
    "l40s": "L40S",
    "b200_sxm": "B200 SXM 180GB",
}
RTX = {"RTX4090": "RTX 4090", "RTXPRO6000": "RTX PRO 6000 Blackwell Server"}
PROFILES = {
    "RTX4090": [("Llama-3.1-8B", 1)],
    "RTXPRO6000": [
        (model, tp) for model in ("Llama-3.1-8B", "Qwen3-32B", "Qwen3-30B-A3B-Instruct-2507") for tp in (1, 2)
    ],
}
CATALOGUE = {
    "Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    "Qwen3-32B": "Qwen/Qwen3-32B",
    "Qwen3-30B-A3B-Instruct-2507": "Qwen/Qwen3-30B-A3B",
}
CACHE = {"RTX4090": 72e6, "RTXPRO6000": 128e6, "A100 SXM 80GB": 40e6, "L40S": 96e6}  # last-level cache, bytes
WARM = ("L40S", "B200 SXM 180GB")  # their caches show in kernels timed in a loop
BOUND = Bound(median=0.35, p90=1.0)  # a worse fit is no better than the datasheet
#: Attention over batches of different lengths against equal ones: LLMServingSim's profiler measured -6.2 % on average
#: when the difference is ignored (RTX PRO 6000, its profiler/core/fit_alpha.py). FlashAttention 2 gives each sequence
#: its blocks as they come; the schedulers of FlashAttention 3 and FlashInfer balance them.
UNEVEN = 1 / (1 - 0.062)
KNOTS = (1, 8, 16, 32, 48, 64, 96, 128)  # rows of a GEMM; beyond, times rise in steps, which no table follows
QUERY_TILE = {"aic": 64, "llmservingsim": 128}  # whichever fits its tables better
LAYERS_LINK = {  # LLMServingSim's cluster configuration of the 2 x RTX PRO 6000 run
    "fitted": [],
    "coefficients": {"link_start": 20e-6, "link_bandwidth": 16e9},
    "median": None,
    "points": 0,
}
SOURCES = {
    "aic": "NVIDIA AIConfigurator 0.12.0 (PyPI aiconfigurator-core, ai-dynamo/aiconfigurator), Apache-2.0, Copyright "
    "(c) 2025-2026 NVIDIA CORPORATION & AFFILIATES; coefficients fitted by Octavo to its vLLM operator tables",
    "llmservingsim": "casys-kaist/LLMServingSim at 5daddb2, MIT, Copyright (c) 2024 CASYS Lab at KAIST; coefficients "
    "fitted by Octavo to its profiles of vLLM 0.19.0",
}


def prior_of(device: str, weights: str, tile: int) -> Coefficients:
    """Datasheet figures, with a start for what those leave out."""
    base = datasheet(find_device(device), weight_format(weights))
    return replace(
        base,
        query_tile=tile,
        attention_ramp=40e-6,
        quantise_bandwidth=0.3 * base.gemm_bandwidth if weights == "fp8" else base.quantise_bandwidth,
        moe_expert=5e-8,
        moe_skew=0.7,
        link_turn=6e-6,
        link_turn_bytes=1e5,
        link_fill=5e-5,
        link_fill_bytes=2e7,
        mixed_bandwidth=base.decode_bandwidth,
        mixed_compute=base.prefill_compute / 70,
        reread_bytes=2e8,
        cache_bytes=8e7,
        cache_gain=3.0,
    )


def combined(kernels: Sequence[Kernel]) -> Kernel:
    """Tables of one operator as one."""
    ends = np.cumsum([len(kernel.measured) for kernel in kernels])
    first = kernels[0]

    def predict(c: Coefficients, rows: Rows) -> Array:
        out = np.empty(len(rows))
        which = np.searchsorted(ends, rows, side="right")
        for number, kernel in enumerate(kernels):
            mine = which == number
            begin = ends[number] - len(kernel.measured)
            out[mine] = kernel.predict(c, rows[mine] - begin)
        return out

    tokens = None if first.tokens is None else np.concatenate([k.tokens for k in kernels if k.tokens is not None])
    return replace(first, measured=np.concatenate([k.measured for k in kernels]), predict=predict, tokens=tokens)


def figure(value: float) -> float:
    return float(f"{value:.5g}")


def entry(fit: Fit, **fixed: Any) -> dict[str, Any]:
    """A fit as fits.json holds it."""
    return {
        "fitted": list(fit.fitted),
        "coefficients": {name: figure(getattr(fit.coefficients, name)) for name in fit.fitted} | fixed,
        "draws": [[float(f"{getattr(draw, name):.4g}") for name in fit.fitted] for draw in fit.draws],
        "median": figure(fit.held_out.median),
        "p90": figure(fit.held_out.p90),
        "used": fit.used,
        "points": fit.held_out.points,
    }


def solve(kernel: Kernel, prior: Coefficients, label: str, search: Search) -> Fit:
    found = fit_kernel(kernel, prior, search, BOUND, KNOTS if kernel.operator == "gemm" else ())
    values = ", ".join(f"{name} {getattr(found.coefficients, name):.4g}" for name in kernel.fitted)
    show(label, kernel, found.held_out, values)
    return found


def show(label: str, kernel: Kernel, error: HeldOut, values: str = "") -> None:
    what = f"{kernel.operator} {kernel.format}"
    print(f"{label:44} {what:18} {error.median:6.1%} {error.p90:6.1%} {error.points:6d}  {values}", flush=True)


def fit_layers(
    folder: Path, card: str, search: Search, only: Sequence[str] = ()
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A card's operator fits over all its models, and the fits of each model."""
    device, tile = RTX[card], QUERY_TILE["llmservingsim"]
    prior = replace(prior_of(device, "bf16", tile), reread_bytes=1.7 * CACHE[card])
    memory = find_device(device).memory_bytes
    profiles: dict[tuple[str, int], list[Kernel]] = {}
    for model, tp in PROFILES[card]:
        work = tables.served_work(CATALOGUE[model], tp)
        kernels = tables.layer_kernels(folder, f"{card}_{model}_tp{tp}", work, memory)
        profiles[model, tp] = [kernel for kernel in kernels if not only or kernel.operator in only]
    every = [kernel for kernels in profiles.values() for kernel in kernels]
    operators = dict(bundled()["devices"][device]["operators"]) if only else {}
    for name, form in dict.fromkeys((k.operator, k.format) for k in every):
        both = combined([k for k in every if (k.operator, k.format) == (name, form)])
        operators[name] = {form: _layer_entry(both, prior, f"{device}", search, tile)}
    if len(profiles) > 1:
        operators["link"] = {"2": LAYERS_LINK}
    source = f"kernel times of vLLM 0.19.0 on {device} (LLMServingSim)"
    shared = {"source": source, "licence": "llmservingsim", "operators": operators}
    return shared, [
        _model_entry(kernels, prior, (device, model, tp), operators, search, tile, only)
        for (model, tp), kernels in profiles.items()
    ]


def _layer_entry(kernel: Kernel, prior: Coefficients, label: str, search: Search, tile: int) -> dict[str, Any]:
    fixed: dict[str, Any] = {"query_tile": tile} if kernel.operator == "prefill" else {}
    fit = solve(kernel, prior, label, search)
    if kernel.operator == "decode":
        fixed["uneven"] = figure(UNEVEN)
    if kernel.operator == "gemm":
        fixed["gemm_factors"] = fit.coefficients.gemm_factors
    return entry(fit, **fixed)


def _model_entry(
    kernels: Sequence[Kernel],
    prior: Coefficients,
    which: tuple[str, str, int],
    shared: Mapping[str, Any],
    search: Search,
    tile: int,
    only: Sequence[str],
) -> dict[str, Any]:
    device, model, tp = which
    work = tables.served_work(CATALOGUE[model], tp)
    same = [m for m in bundled()["models"] if (m["device"], m["model"], m["tp"]) == (device, CATALOGUE[model], tp)]
    operators = dict(shared) | (same[0]["operators"] if only else {})
    for kernel in kernels:
        label = f"{device}, {model} TP{tp}"
        operators[kernel.operator] = {kernel.format: _layer_entry(kernel, prior, label, search, tile)}
    return {
        "device": device,
        "model": CATALOGUE[model],
        "layers": work.layers,
        "hidden": work.hidden,
        "vocab": work.vocab,
        "tp": tp,
        "source": f"kernel times of {model} under vLLM 0.19.0 on {device} (LLMServingSim)",
        "licence": "llmservingsim",
        "operators": operators,
    }


def fit_operators(folder: Path, device: str, like: Mapping[str, Any], search: Search) -> dict[str, Any]:
    """A data-centre card's operator fits; what its tables lack is carried over from the card `like`."""
    found: dict[str, dict[str, Any]] = {"gemm": {}, "decode": {}, "prefill": {}, "latent": {}}
    tile, rows = QUERY_TILE["aic"], tables_of(folder)
    gemm = None
    for dtype, (name, _) in tables.GEMM_FORMATS.items():
        if any(row["gemm_dtype"] == dtype for row in rows["gemm"]):
            kernel = tables.gemm_kernel(rows["gemm"], dtype)
            fit = solve(kernel, prior_of(device, name, tile), device, search)
            gemm = gemm or fit.coefficients
            found["gemm"][name] = entry(fit, gemm_factors=fit.coefficients.gemm_factors)
    prior = prior_of(device, "bf16", tile)
    for cache, (name, _) in tables.KV_FORMATS.items():
        if not any(row["kv_cache_dtype"] == cache for row in rows["attention_decode"]):
            continue
        decode = solve(tables.decode_kernel(rows["attention_decode"], cache, device in WARM), prior, device, search)
        balanced = device.startswith(("H", "B"))
        found["decode"][name] = entry(decode, uneven=1.0 if balanced else figure(UNEVEN))
        prefill = solve(tables.prefill_kernel(rows["attention_prefill"], cache), prior, device, search)
        mixed = mixed_steps(device, decode.coefficients, prefill.coefficients, like)
        found["prefill"][name] = entry(prefill, query_tile=tile, **mixed)
    if "mla_decode_module" in rows and gemm is not None:
        base = replace(prior, **{n: getattr(gemm, n) for n in found["gemm"]["bf16"]["fitted"]})
        work = tables.served_work("deepseek-ai/DeepSeek-V3", 1)
        for cache, (name, _) in tables.KV_FORMATS.items():
            if any(row["kv_cache_dtype"] == cache for row in rows["mla_decode_module"]):
                kernel = tables.latent_kernel(rows["mla_decode_module"], cache, work)
                found["latent"][name] = entry(solve(kernel, base, device, search))
    return found | {name: fit(rows, device, search) for name, fit in ALONE.items()} | carried(device, like)


def tables_of(folder: Path) -> Tables:
    return {path.name.removesuffix(".csv.gz"): read_table(path) for path in sorted(folder.glob("*.csv.gz"))}


def fit_experts(rows: Tables, device: str, search: Search) -> dict[str, Any]:
    found = {}
    for dtype, (name, _) in tables.MOE_FORMATS.items():
        if any(row["moe_dtype"] == dtype for row in rows["moe"]):
            prior = prior_of(device, "fp8" if name == "fp8" else "bf16", QUERY_TILE["aic"])
            found[name] = entry(solve(tables.moe_kernel(rows["moe"], dtype), prior, device, search))
    return found


def fit_links(rows: Tables, device: str, search: Search) -> dict[str, Any]:
    """All-reduces. Their tables have 16 sizes, too few for a quarter."""
    prior, search = prior_of(device, "bf16", QUERY_TILE["aic"]), replace(search, share=0.75)
    every = [*rows["allreduce_custom"], *rows["nccl"]]
    return {str(tp): entry(solve(tables.link_kernel(every, tp), prior, device, search)) for tp in (2, 4, 8)}


Tables = Mapping[str, list[dict[str, str]]]
ALONE: Mapping[str, Callable[[Tables, str, Search], dict[str, Any]]] = {"moe": fit_experts, "link": fit_links}


def mixed_steps(device: str, decode: Coefficients, prefill: Coefficients, like: Mapping[str, Any]) -> dict[str, float]:
    """Decodes beside prompt chunks, which the tables lack, from how each card's attention kernel works.

    FlashAttention 2 (A100, L40S) gives every decode and query head a query tile, as measured on the card `like`: its
    ratio to prompt attention is kept. FlashAttention 3 (Hopper) packs the query heads that share KV into one tile: a
    quarter of the products and no second read. FlashInfer (Blackwell) runs decodes and prompts apart.
    """
    measured = like["operators"]["prefill"]["bf16"]["coefficients"]
    each, idle = measured["mixed_sequence"], measured["mixed_idle"]
    tile_cost = measured["prefill_compute"] / measured["mixed_compute"]
    if device.startswith("B200"):
        return {
            "mixed_bandwidth": figure(decode.decode_bandwidth),
            "mixed_compute": figure(prefill.prefill_compute),
            "mixed_sequence": figure(decode.attention_sequence / 8),
            "mixed_idle": 0.0,
            "reread_bytes": 1e30,
        }
    packed = 4.0 if device.startswith("H") else 1.0
    return {
        "mixed_bandwidth": figure(decode.decode_bandwidth),
        "mixed_compute": figure(prefill.prefill_compute / tile_cost * packed),
        "mixed_sequence": figure(each / packed),
        "mixed_idle": figure(idle / packed),
        "reread_bytes": 1e30 if packed > 1 else 1.7 * CACHE[device],
    }


def carried(device: str, like: Mapping[str, Any]) -> dict[str, Any]:
    """Small kernels and the sampler: no table has them for this card; scaled by memory bandwidth from `like`."""
    ratio = (
        find_device(device).facts["memory_bandwidth_bytes_per_s"]
        / find_device(RTX["RTXPRO6000"]).facts["memory_bandwidth_bytes_per_s"]
    )
    found = {}
    for operator in ("elementwise", "sampler"):
        values = dict(like["operators"][operator]["all"]["coefficients"])
        values[f"{operator}_bandwidth"] = figure(values[f"{operator}_bandwidth"] * ratio)
        found[operator] = {"all": {"fitted": [], "coefficients": values, "median": None, "points": 0}}
    return found


def compare(folder: Path, devices: Mapping[str, Any]) -> None:
    """The shapes of PLANNER's table: 32 query heads and 8 KV heads of 128."""
    for name, device in AIC.items():
        for kind in ("decode", "prefill"):
            rows = read_table(folder / name / f"attention_{kind}.csv.gz")
            kept = [r for r in rows if (r["num_heads"], r["num_key_value_heads"], r["head_dim"]) == ("32", "8", "128")]
            warm = device in WARM
            kernel = tables.decode_kernel(kept, "bfloat16", warm) if kind == "decode" else None
            kernel = kernel or tables.prefill_kernel(kept, "bfloat16")
            values = devices[device]["operators"][kind]["bf16"]["coefficients"]
            c = replace(prior_of(device, "bf16", QUERY_TILE["aic"]), **values)
            every = np.arange(len(kernel.measured))
            show(f"{device}, 32/8 heads", kernel, held_out(kernel.predict(c, every), kernel.measured))


def markdown(devices: Mapping[str, Any]) -> str:
    """Median and 90th percentile of the held-out errors, a row per operator and format, a column per device."""
    kinds = {(name, form): None for d in devices.values() for name, fits in d["operators"].items() for form in fits}
    lines = ["| operator | " + " | ".join(devices) + " |", "|---" * (len(devices) + 1) + "|"]
    for name, form in sorted(kinds):
        fits = [d["operators"].get(name, {}).get(form) for d in devices.values()]
        if any(fit and fit["median"] is not None for fit in fits):
            shown = [f"{f['median']:.1%} ({f['p90']:.0%})" if f and f["median"] is not None else "-" for f in fits]
            lines.append(f"| {name} {form} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--facts", type=Path, required=True, help="folder that holds profiles/")
    parser.add_argument("--write", action="store_true", help=f"replace {OUT.name}")
    parser.add_argument("--only", nargs="+", choices=tuple(ALONE), default=(), help="fit these operators alone")
    parser.add_argument("--table", type=Path, help="write the held-out errors there")
    parser.add_argument("--draws", type=int, default=8, help="refits to resampled points")
    options = parser.parse_args()
    search, profiles = Search(draws=options.draws), options.facts / "profiles"
    print(f"{'device':44} {'operator':18} {'median':>6} {'p90':>6} {'points':>6}  (held out)")
    devices: dict[str, Any] = {}
    models: list[dict[str, Any]] = []
    for card, device in RTX.items():
        devices[device], more = fit_layers(profiles / "llmservingsim" / "perf", card, search, options.only)
        models += more
    index = json.loads((profiles / "aic" / "index.json").read_text())
    for name, device in AIC.items():
        version = index[name]["attention_decode"]["vllm_version"]
        if options.only:
            again = {only: ALONE[only](tables_of(profiles / "aic" / name), device, search) for only in options.only}
            operators = bundled()["devices"][device]["operators"] | again
        else:
            operators = fit_operators(profiles / "aic" / name, device, devices[RTX["RTXPRO6000"]], search)
        source = f"kernel times of vLLM {version} on {device} (AIConfigurator)"
        devices[device] = {"source": source, "licence": "aic", "operators": operators}
    compare(profiles / "aic", devices)
    if options.table:
        options.table.write_text(markdown(devices), encoding="utf-8")
    if options.write:
        made = {"sources": SOURCES, "search": asdict(search), "devices": devices, "models": models}
        OUT.write_text(json.dumps(made, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")
        print(f"wrote {OUT} ({OUT.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
