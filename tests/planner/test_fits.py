"""Bundled fits and the fitting behind them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.kv.spec import spec_from_config
from octavo.kv.weights import weight_format
from octavo.planner.catalogue import find_device, find_model
from octavo.planner.deployment import Fidelity, Level
from octavo.planner.timing import kernel_tables as tables
from octavo.planner.timing.fits import FitsError, Host, bundled, datasheet, datasheet_timer, timer_for, typical
from octavo.planner.timing.fitting import Bound, FitError, Kernel, Search, fit_kernel, held_out, space_filling
from octavo.runner.rates import Coefficients, experts_seconds, gemm_seconds, reduction_seconds
from octavo.runner.timing import RooflineTimer, StepShape
from octavo.runner.work import model_work

FITTED = ("RTX 4090", "RTX PRO 6000 Blackwell Server", "A100 SXM 80GB", "H100 SXM 80GB", "H200 SXM 141GB", "L40S")
ALL = (*FITTED, "B200 SXM 180GB")


def timed(
    model: str, device: str, *, tp: int = 1, weights: str = "bf16", kv: str = "bf16", **more: Any
) -> tuple[RooflineTimer, Fidelity]:
    entry = find_model(model)
    assert entry is not None
    spec = spec_from_config(entry.config, tp=tp, kv_dtype=kv)
    timer, fidelity = timer_for(entry.config, spec, device, weights=weight_format(weights), **more)
    assert isinstance(timer, RooflineTimer)
    return timer, fidelity


def steps(timer: RooflineTimer) -> list[StepShape]:
    windowed = tuple(32 * min(window, 1500) for window in timer.windows)
    alone = StepShape((), 32, 32 * 1500, windowed, 32)
    return [alone, replace(alone, chunks=((512, 0),), samples=33)]


# -- choosing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ALL)
def test_devices_with_kernel_times_get_the_bundled_fit(device: str) -> None:
    timer, fidelity = timed("llama-3.1-8b", device)
    assert fidelity.level is Level.BUNDLED
    assert 0.0 < fidelity.error < 0.12
    assert "held-out" in fidelity.statement
    assert any("Engine overhead" in note for note in fidelity.assumptions)
    for shape in steps(timer):
        assert 2e-3 < timer.seconds(shape) < 0.2


def test_other_devices_get_the_datasheet_and_say_so() -> None:
    timer, fidelity = timed("llama-3.1-8b", "A10G")
    assert fidelity.level is Level.DATASHEET
    assert 0.10 <= fidelity.error <= 0.25
    assert "10-25 %" in fidelity.statement
    assert timer.alternatives() == []


def test_the_models_own_fit_beats_that_of_the_device() -> None:
    _, own = timed("qwen3-32b", "RTX PRO 6000 Blackwell Server", tp=2)
    _, general = timed("qwen3-14b", "RTX PRO 6000 Blackwell Server", tp=2)
    assert "Qwen3-32B" in own.statement
    assert "Qwen3-32B" not in general.statement
    assert general.level is Level.BUNDLED


def test_fits_of_a_device_agree_between_its_models() -> None:
    """Operators transfer: what all models of a card say together times each one alone within 8 %."""
    device = "RTX PRO 6000 Blackwell Server"
    shared = bundled()["devices"][device]
    for entry in bundled()["models"]:
        if entry["device"] == device and entry["tp"] == 1:
            own, _ = timed(entry["model"], device)
            values = {k: v for op in ("gemm", "decode", "prefill") for k, v in coefficients(shared, op).items()}
            general = RooflineTimer(own.work, replace(own.coefficients, **values))
            for shape in steps(own):
                assert general.seconds(shape) == pytest.approx(own.seconds(shape), rel=0.08)


def coefficients(entry: Mapping[str, Any], operator: str) -> dict[str, Any]:
    found = dict(entry["operators"][operator]["bf16"]["coefficients"])
    if "gemm_factors" in found:
        found["gemm_factors"] = tuple(map(tuple, found["gemm_factors"]))
    return found


def test_datasheet_and_fit_agree_within_what_the_datasheet_promises() -> None:
    entry = find_model("llama-3.1-8b")
    assert entry is not None
    work = model_work(entry.config, spec_from_config(entry.config), weight_format("bf16"))
    for device in ("H100 SXM 80GB", "H200 SXM 141GB", "A100 SXM 80GB", "RTX 4090"):
        fitted, _ = timed("llama-3.1-8b", device)
        plain = datasheet_timer(work, find_device(device), weight_format("bf16"))
        for shape in steps(fitted):
            assert plain.seconds(shape) == pytest.approx(fitted.seconds(shape), rel=0.40)


def test_what_a_device_has_no_kernel_times_for_is_named() -> None:
    _, quantised = timed("llama-3.1-8b", "A100 SXM 80GB", weights="fp8")
    assert any("gemm in fp8" in note for note in quantised.assumptions)
    _, parallel = timed("llama-3.1-70b", "RTX PRO 6000 Blackwell Server", tp=4)
    assert any("link (4)" in note for note in parallel.assumptions)
    _, plain = timed("llama-3.1-70b", "H100 SXM 80GB", tp=4)
    assert not any("No kernel times" in note for note in plain.assumptions)


def test_formats_choose_their_kernels() -> None:
    shape = StepShape((), 64, 64 * 4000, samples=64)
    plain, _ = timed("llama-3.1-70b", "H100 SXM 80GB", tp=4)
    fp8, _ = timed("llama-3.1-70b", "H100 SXM 80GB", tp=4, weights="fp8", kv="fp8_per_tensor")
    before, after = plain.breakdown(shape), fp8.breakdown(shape)
    assert 0.4 < after["linear"] / before["linear"] < 0.75
    assert 0.45 < after["attention_decode"] / before["attention_decode"] < 0.75


def test_alternatives_spread_about_the_fit() -> None:
    timer, _ = timed("llama-3.1-8b", "RTX 4090")
    for shape in steps(timer):
        seconds = [other.seconds(shape) for other in timer.alternatives()]
        assert len(seconds) == 8
        assert min(seconds) < max(seconds) < 1.15 * min(seconds)
        assert np.median(seconds) == pytest.approx(timer.seconds(shape), rel=0.05)


@pytest.mark.parametrize("device", ALL)
def test_more_tokens_never_take_less_time(device: str) -> None:
    """Tables over rows may correct a fit, not turn it round: by 2 % at most between batch sizes."""
    timer, _ = timed("llama-3.1-8b", device)
    longest = 0.0
    for decodes in (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 144, 160, 192, 256, 512):
        seconds = timer.seconds(StepShape((), decodes, decodes * 500, samples=decodes))
        assert seconds > 0.98 * longest
        longest = max(longest, seconds)


def test_a_host_profile_replaces_the_default() -> None:
    shape = StepShape((), 1, 100, samples=1)
    slow, fidelity = timed("qwen3-0.6b", "H100 SXM 80GB", host=Host(0.01, 0.0, overlaps=False))
    usual, _ = timed("qwen3-0.6b", "H100 SXM 80GB", host=Host(0.0, 0.0))
    assert slow.seconds(shape) == pytest.approx(usual.seconds(shape) + 0.01)
    assert any("10 ms a step" in note for note in fidelity.assumptions)


@pytest.mark.parametrize(("device", "said"), [(None, "--gpu"), ("EPYC 9654 Genoa (1 socket)", "octavo calibrate")])
def test_unknown_speed_is_an_error_with_the_remedy(device: str | None, said: str) -> None:
    entry = find_model("llama-3.1-8b")
    assert entry is not None
    with pytest.raises(FitsError, match=said):
        timer_for(entry.config, spec_from_config(entry.config), device, weights=weight_format("bf16"))


def test_consumer_cards_do_not_reach_their_label() -> None:
    """330 TFLOP/s of the RTX 4090 are with fp16 accumulation; kernels accumulate in fp32 (gpus.json)."""
    card = find_device("RTX 4090")
    assert datasheet(card, weight_format("bf16")).gemm_compute == pytest.approx(0.75 * 165e12)


# -- the file -------------------------------------------------------------------------------------------------------


def test_every_fit_names_its_source_and_its_error() -> None:
    data = bundled()
    names = {entry.name for entry in fields(Coefficients)}
    for entry in (*data["devices"].values(), *data["models"]):
        assert entry["licence"] in data["sources"]
        assert "vLLM" in entry["source"]
        for formats in entry["operators"].values():
            for fit in formats.values():
                assert names >= set(fit["coefficients"])
                assert fit["median"] is None or (fit["median"] < 0.35 and fit["points"] > 0)
                assert all(len(row) == len(fit["fitted"]) for row in fit.get("draws", ()))
    assert all("Copyright" in text for text in data["sources"].values())


@pytest.mark.parametrize(
    ("tp", "message", "seconds"),
    [("4", 2**20, 18.6e-6), ("4", 2**27, 1.18e-3), ("8", 2**18, 12.0e-6), ("8", 2**25, 325e-6), ("8", 2**27, 1.09e-3)],
)
def test_reductions_take_what_the_table_says_whatever_their_size(tp: str, message: int, seconds: float) -> None:
    fit = bundled()["devices"]["H100 SXM 80GB"]["operators"]["link"][tp]["coefficients"]
    c = replace(datasheet(find_device("H100 SXM 80GB"), weight_format("bf16")), **fit)
    assert reduction_seconds(c, message, int(tp)) == pytest.approx(seconds, rel=0.06)


@pytest.mark.parametrize(("tokens", "ranks", "seconds"), [(64, 1, 382e-6), (64, 8, 89e-6), (8192, 2, 1594e-6)])
def test_narrow_experts_take_what_the_table_of_their_own_kernel_says(tokens: int, ranks: int, seconds: float) -> None:
    """gpt-oss-120b on B200: another kernel of the same format is twice as slow."""
    fit = bundled()["devices"]["B200 SXM 180GB"]["operators"]["moe"]["mxfp4"]["coefficients"]
    c = replace(datasheet(find_device("B200 SXM 180GB"), weight_format("bf16")), **fit)
    width = 2880 / ranks
    found = experts_seconds(c, 128, 4 * tokens, 3 * 2880 * width, 0.53125, 2 * (2 * 2880 + 3 * width), even=1.0)
    assert found == pytest.approx(seconds, rel=0.2)


def test_every_device_of_the_fits_is_in_the_catalogue() -> None:
    for name in bundled()["devices"]:
        assert find_device(name).name == name


# -- fitting --------------------------------------------------------------------------------------------------------

TRUE = replace(typical(1e12, 1e14), gemm_start=7e-6, gemm_bandwidth=8e11, gemm_compute=6e13, gemm_sharpness=3.0)
GEMM = ("gemm_start", "gemm_bandwidth", "gemm_compute", "gemm_sharpness")


def synthetic(noise: float, outliers: float = 0.0, points: int = 600) -> Kernel:
    """GEMM times of `TRUE` with relative noise; a share of them three times too slow."""
    rng = np.random.default_rng(3)
    m, n, k = (np.round(2 ** rng.uniform(low, 13, points)) for low in (0, 10, 10))
    slow = np.where(rng.random(points) < outliers, 3.0, 1.0)
    measured = gemm_seconds(TRUE, m, n, k, 2.0, 2.0) * np.exp(rng.normal(0, noise, points)) * slow
    return Kernel("gemm", "bf16", measured, GEMM, lambda c, i: gemm_seconds(c, m[i], n[i], k[i], 2.0, 2.0), m)


@pytest.mark.parametrize(("noise", "outliers", "within"), [(0.0, 0.0, 0.01), (0.05, 0.0, 0.04), (0.03, 0.1, 0.06)])
def test_known_coefficients_are_recovered(noise: float, outliers: float, within: float) -> None:
    found = fit_kernel(synthetic(noise, outliers), typical(1e12, 1e14), Search(strength=1e-3))
    for name in GEMM[:3]:
        assert getattr(found.coefficients, name) == pytest.approx(getattr(TRUE, name), rel=within)
    assert found.held_out.points == 450
    assert found.held_out.median < noise + 0.01
    assert len(found.draws) == 8


def test_one_outlier_in_ten_moves_least_squares_but_not_this_fit() -> None:
    kernel = synthetic(0.03, 0.1)
    found = fit_kernel(kernel, typical(1e12, 1e14), Search(draws=0))
    clean = synthetic(0.0)
    every = np.arange(600)
    bias = np.log(kernel.predict(found.coefficients, every) / clean.measured).mean()
    assert abs(bias) < 0.03  # the mean of the measured logarithms is 0.11 too high


def test_a_bad_fit_is_refused_with_its_error_and_the_bound() -> None:
    with pytest.raises(FitError, match=r"held-out points its error is \d+\.\d%.*the bound is 10% and 30%"):
        fit_kernel(synthetic(0.5), typical(1e12, 1e14), Search(draws=0), Bound())
    fit_kernel(synthetic(0.05), typical(1e12, 1e14), Search(draws=0), Bound())


def test_times_that_are_not_times_are_refused() -> None:
    broken = synthetic(0.0)
    for value in (0.0, -1.0, float("nan")):
        measured = broken.measured.copy()
        measured[7] = value
        with pytest.raises(FitError, match="not a number above 0"):
            fit_kernel(replace(broken, measured=measured), TRUE)
    with pytest.raises(FitError, match="No points"):
        held_out(np.array([]), np.array([]))


def test_a_table_over_rows_takes_out_what_no_roofline_has() -> None:
    plain = synthetic(0.02, points=2000)
    assert plain.tokens is not None
    bumpy = replace(plain, measured=plain.measured * np.where((plain.tokens > 20) & (plain.tokens < 60), 1.2, 1.0))
    without = fit_kernel(bumpy, typical(1e12, 1e14), Search(draws=0))
    table = fit_kernel(tabled(bumpy), typical(1e12, 1e14), Search(draws=0), knots=(1, 8, 16, 32, 48, 64, 96))
    factors = dict(table.coefficients.gemm_factors)
    assert factors[32.0] == pytest.approx(1.2, abs=0.08)
    assert factors[108.0] == 1.0
    assert table.held_out.p90 < without.held_out.p90


def tabled(kernel: Kernel) -> Kernel:
    """With a prediction that applies the table, as `kernel_tables` does."""
    tokens = kernel.tokens
    assert tokens is not None

    def predict(c: Coefficients, i: Any) -> Any:
        knots, factors = np.array(c.gemm_factors or ((1.0, 1.0),)).T
        return kernel.predict(c, i) * np.interp(np.log(tokens[i]), np.log(knots), factors)

    return replace(kernel, predict=predict)


def test_space_filling_choices_leave_no_hole_that_random_ones_leave() -> None:
    rng = np.random.default_rng(0)
    candidates = [
        StepShape((), int(n), int(n * context), samples=int(n))
        for n, context in zip(2 ** rng.exponential(1.5, 3000), 2 ** rng.uniform(0, 13, 3000), strict=True)
    ]
    chosen = space_filling(candidates, 60)
    assert len(set(map(id, chosen))) == 60
    random = [candidates[i] for i in rng.choice(3000, 60, replace=False)]
    assert hole(candidates, chosen) < 0.7 * hole(candidates, random)
    assert space_filling(candidates[:5], 60) == candidates[:5]


def hole(candidates: list[StepShape], chosen: list[StepShape]) -> float:
    """The largest distance from a candidate to the nearest chosen shape, in log decodes and log mean context."""

    def at(shapes: list[StepShape]) -> np.ndarray[Any, Any]:
        return np.log([[s.decodes, s.context / s.decodes + 1] for s in shapes])

    gaps = np.linalg.norm(at(candidates)[:, None] - at(chosen)[None], axis=2)
    return float(gaps.min(axis=1).max())


# -- the tables themselves --------------------------------------------------------------------------------------------


def test_held_out_errors_are_those_of_the_tables(shared: Path) -> None:
    """Refitted here on a quarter of each table: the stated medians hold."""
    folder = shared / "facts" / "profiles" / "aic"
    if not folder.is_dir():
        pytest.skip(f"no kernel times at {folder}; name the folder of shared/ with --shared")
    search = Search(draws=0, starts=2)
    for name, device in (("a100_sxm", "A100 SXM 80GB"), ("l40s", "L40S")):
        rows = tables.read_table(folder / name / "attention_decode.csv.gz")
        kernel = tables.decode_kernel(rows, "bfloat16", warm=device == "L40S")
        prior = replace(datasheet(find_device(device), weight_format("bf16")), cache_bytes=8e7, cache_gain=3.0)
        stated = bundled()["devices"][device]["operators"]["decode"]["bf16"]
        error = fit_kernel(kernel, prior, search).held_out
        assert error.median == pytest.approx(stated["median"], rel=0.15)
        assert error.points == stated["points"]


def test_layer_profiles_are_explained_by_the_bundled_coefficients(shared: Path) -> None:
    """Mixed batches of three models and two degrees of parallelism, by one set of coefficients for the card."""
    folder = shared / "facts" / "profiles" / "llmservingsim" / "perf"
    if not folder.is_dir():
        pytest.skip(f"no kernel times at {folder}; name the folder of shared/ with --shared")
    device = "RTX PRO 6000 Blackwell Server"
    entry = bundled()["devices"][device]
    for model, name, tp in (("qwen3-32b", "Qwen3-32B", 2), ("llama-3.1-8b", "Llama-3.1-8B", 1)):
        work = tables.served_work(model, tp)
        memory = find_device(device).memory_bytes
        for kernel in tables.layer_kernels(folder, f"RTXPRO6000_{name}_tp{tp}", work, memory):
            if kernel.operator in ("gemm", "decode", "prefill"):
                values = coefficients(entry, kernel.operator)
                c = replace(datasheet(find_device(device), weight_format("bf16")), **values)
                error = held_out(kernel.predict(c, np.arange(len(kernel.measured))), kernel.measured)
                assert error.median < 0.09, (kernel.operator, name, error)


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(FitsError, match=r"nowhere\.csv\.gz"):
        tables.read_table(tmp_path / "nowhere.csv.gz")
    (tmp_path / "bad.csv.gz").write_text(json.dumps({}))
    with pytest.raises(FitsError, match="not a readable table"):
        tables.read_table(tmp_path / "bad.csv.gz")
