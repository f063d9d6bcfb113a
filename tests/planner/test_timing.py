"""The roofline timer: what its terms depend on, and how."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kv.spec import spec_from_config
from octavo.kv.weights import published_format, weight_format
from octavo.planner.catalogue import find_device, find_model
from octavo.planner.timing.fits import datasheet
from octavo.runner.rates import Coefficients, experts_seconds, factor_at, pairs, reduction_seconds, smooth_max
from octavo.runner.timing import RooflineTimer, StepShape
from octavo.runner.work import Experts, ModelWork, model_work

H100 = datasheet(find_device("H100 SXM 80GB"), weight_format("bf16"))
MODELS = ("llama-3.1-8b", "gemma-3-27b", "gpt-oss-120b", "deepseek-v3", "qwen3-30b-a3b")


def work_of(model: str, tp: int = 1, kv_dtype: str = "bf16", weights: str | None = None) -> ModelWork:
    entry = find_model(model)
    assert entry is not None
    spec = spec_from_config(entry.config, tp=tp, kv_dtype=kv_dtype)
    return model_work(entry.config, spec, weight_format(weights) if weights else published_format(entry.config)[0])


def timer_of(model: str, coefficients: Coefficients = H100, **options: object) -> RooflineTimer:
    return RooflineTimer(work_of(model, **options), coefficients, block_bytes=2e6)  # type: ignore[arg-type]


def decoding(timer: RooflineTimer, sequences: int, context: int, **more: object) -> StepShape:
    """A step of `sequences` decodes of `context` tokens each."""
    windowed = tuple(sequences * min(context, window) for window in timer.windows)
    fields = {"samples": sequences, "windowed": windowed} | more
    return StepShape((), sequences, sequences * context, **fields)  # type: ignore[arg-type]


# -- counted work ---------------------------------------------------------------------------------------------------


def test_weights_read_in_a_step_are_the_published_parameters() -> None:
    """Llama-3.1-8B: 8,030,261,248 parameters less the embedding, 16 bits each."""
    work = work_of("llama-3.1-8b")
    assert work.resident_bytes / 2 == pytest.approx(8_030_261_248 - 128256 * 4096, rel=1e-4)  # norms left out


@pytest.mark.parametrize(
    ("model", "active"), [("deepseek-v3", 37e9), ("qwen3-30b-a3b", 3.3e9 - 0.31e9), ("gpt-oss-120b", 5.1e9)]
)
def test_active_parameters_of_mixtures_are_the_published_ones(model: str, active: float) -> None:
    """As the model cards give them; Qwen's figure counts the embedding, of which a step reads a few rows."""
    work = work_of(model)
    routed = work.experts
    assert routed is not None
    dense = sum(m.outputs * m.inputs * m.times for m in work.linears) + work.head.outputs * work.head.inputs
    chosen = routed.layers * routed.active * routed.matrices * routed.width * work.hidden
    assert dense + chosen == pytest.approx(active, rel=0.05)


@pytest.mark.parametrize(
    ("model", "parameters"), [("jamba-v0.1", 52e9), ("qwen3-next-80b-a3b", 80e9), ("gpt-oss-20b", 21e9)]
)
def test_layers_with_experts_are_told_from_those_without(model: str, parameters: float) -> None:
    work = work_of(model, weights="bf16")
    assert work.resident_bytes / 2 == pytest.approx(parameters, rel=0.08)


def test_tensor_parallelism_shares_weights_and_kv_but_not_a_latent() -> None:
    one, eight = work_of("llama-3.1-70b"), work_of("llama-3.1-70b", tp=8)
    assert eight.resident_bytes == pytest.approx(one.resident_bytes / 8)
    assert eight.attention[0].row_bytes == one.attention[0].row_bytes / 8
    assert (one.reductions, eight.reductions) == (0, 160)
    latent = work_of("deepseek-v3", tp=8).attention[0]
    assert (latent.latent, latent.row_bytes) == (True, 576 * 2)
    assert latent.row_bytes == work_of("deepseek-v3").attention[0].row_bytes


def test_layers_that_share_a_cache_attend_all_the_same() -> None:
    """Gemma-3n-like: 15 of 35 layers read an earlier layer's KV."""
    entry = find_model("gemma-3n-e4b")
    if entry is None:
        pytest.skip("no Gemma-3n in the catalogue")
    spec = spec_from_config(entry.config)
    work = model_work(entry.config, spec, weight_format("bf16"))
    assert sum(kind.layers for kind in work.attention) == 35


@pytest.mark.parametrize(
    ("tokens", "touched"),
    [(0, 0.0), (1, 8.0), (10_000, 128.0), (16, 128 * (1 - (15 / 16) ** 16))],
)
def test_experts_touched(tokens: int, touched: float) -> None:
    assert Experts(1, 128, 8, 768, 3).touched(tokens) == pytest.approx(touched)


def test_fewer_experts_are_touched_the_more_their_popularity_differs() -> None:
    experts = Experts(1, 128, 4, 2880, 3)
    found = [experts.touched(32, skew) for skew in (0.0, 1e-6, 0.5, 1.0)]
    assert found[1] == pytest.approx(found[0], rel=0.02)
    assert found[0] > found[2] > found[3] == pytest.approx(64.0)  # one visit each on average: half of them have none
    assert experts.touched(1, 0.7) == pytest.approx(4.0, rel=0.05)
    assert experts.touched(1e6, 0.7) == pytest.approx(128.0, rel=1e-3)


def test_large_messages_get_more_of_the_link_than_middling_ones() -> None:
    c = replace(H100, link_turn=6e-6, link_turn_bytes=9e4, link_fill=1e-4, link_fill_bytes=4e7)
    rates = [2**n / (reduction_seconds(c, 2.0**n, 8) - c.link_start) for n in (18, 22, 27)]
    assert rates == sorted(rates)
    assert reduction_seconds(c, 0.0, 8) == c.link_start


def test_an_expert_with_few_tokens_takes_its_whole_tile() -> None:
    c = replace(H100, moe_tile=64.0, moe_bandwidth=math.inf)
    few, none_wasted = (experts_seconds(d, 128.0, 128.0, 2e7, 0.5, 0.0) for d in (c, replace(c, moe_tile=0.0)))
    assert few - c.moe_start > 10 * (none_wasted - c.moe_start)


def test_pairs_of_a_windowed_chunk_are_those_counted_one_by_one() -> None:
    for count, start, window in [(10, 0, 4), (10, 3, 4), (10, 20, 4), (10, 0, 100), (7, 5, 9)]:
        counted = sum(min(start + i + 0.5, window) for i in range(count))
        assert pairs(count, start, window) == pytest.approx(counted, abs=window / 8)


# -- seconds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_breakdown_sums_to_the_seconds(model: str) -> None:
    for c in (H100, replace(H100, host_start=1.0, host_overlaps=True), replace(H100, host_overlaps=False)):
        timer = timer_of(model, c)
        for chunks in ((), ((512, 0),), ((100, 4000), (16, 0))):
            for sequences in (0, 1, 64):
                shape = replace(decoding(timer, sequences, 1500), chunks=chunks, samples=sequences + 1, copied=3)
                terms = timer.breakdown(shape)
                assert sum(terms.values()) == pytest.approx(timer.seconds(shape), rel=1e-12)
                assert min(terms.values()) >= -1e-12


step = st.fixed_dictionaries(
    {
        "sequences": st.integers(1, 512),
        "context": st.integers(1, 30_000),
        "count": st.integers(2, 4096),
        "start": st.integers(0, 30_000),
        "more": st.integers(1, 500),
        "model": st.sampled_from(MODELS),
    }
)


@given(step)
@settings(max_examples=150, deadline=None)
def test_no_time_falls_when_the_step_grows(at: dict[str, object]) -> None:
    n, context, count, start, more = (int(str(at[k])) for k in ("sequences", "context", "count", "start", "more"))
    timer = TIMERS[str(at["model"])]
    alone, longer = decoding(timer, n, context), decoding(timer, n, context + more)
    wider = decoding(timer, n + more, context)
    assert timer.seconds(alone) <= timer.seconds(longer) <= timer.seconds(decoding(timer, n + more, context + more))
    assert timer.seconds(alone) < timer.seconds(wider)
    mixed = replace(alone, chunks=((count, start),))
    assert timer.seconds(StepShape((), 0, 0, (0,) * len(timer.windows))) < timer.seconds(mixed)
    assert timer.seconds(mixed) <= timer.seconds(replace(mixed, chunks=((count, start + more),))) * (1 + 1e-9)
    assert timer.seconds(mixed) <= timer.seconds(replace(mixed, chunks=((count + 128, start),)))
    assert timer.seconds(mixed) <= timer.seconds(replace(longer, chunks=((count, start),)))
    assert timer.seconds(alone) < timer.seconds(replace(alone, samples=alone.samples + more, copied=more))


TIMERS = {model: timer_of(model, replace(H100, host_overlaps=False)) for model in MODELS}


@pytest.mark.parametrize("model", MODELS)
def test_decode_times_are_affine_in_context(model: str) -> None:
    """What lets the simulator jump over decode steps."""
    timer = TIMERS[model]
    shape = decoding(timer, 64, 2000)
    seconds, slope = timer.affine(shape)
    for further in (1, 64, 12_800):
        longer = replace(shape, context=shape.context + further)
        assert timer.seconds(longer) == pytest.approx(seconds + slope * further, rel=1e-12)


def test_a_window_stops_the_growth() -> None:
    """Gemma-3-27B: beyond 1,024 tokens only 10 of 62 layers read more."""
    timer = TIMERS["gemma-3-27b"]
    assert timer.windows == (1024,)
    below = timer.seconds(decoding(timer, 32, 1000)) - timer.seconds(decoding(timer, 32, 900))
    beyond = timer.seconds(decoding(timer, 32, 9000)) - timer.seconds(decoding(timer, 32, 8900))
    assert beyond / below == pytest.approx(10 / 62, rel=0.01)
    full = timer_of("gemma-3-27b")
    assert (
        full.breakdown(StepShape(((4096, 8192),), 0, 0, (0,)))["attention_prefill"]
        < 0.5
        * (RooflineTimer(unwindowed(full.work), H100).breakdown(StepShape(((4096, 8192),), 0, 0))["attention_prefill"])
    )


def unwindowed(work: ModelWork) -> ModelWork:
    return replace(work, attention=tuple(replace(kind, window=None) for kind in work.attention))


def test_a_quantised_cache_halves_the_reads() -> None:
    plain, small = timer_of("llama-3.1-8b"), timer_of("llama-3.1-8b", kv_dtype="fp8_per_tensor")
    assert small.affine(decoding(small, 8, 100))[1] == pytest.approx(
        plain.affine(decoding(plain, 8, 100))[1] / 2, rel=1e-2
    )


def test_narrow_weights_speed_up_small_batches() -> None:
    for weights, least in (("fp8", 1.6), ("int4", 2.2)):
        plain, small = timer_of("llama-3.1-8b"), timer_of("llama-3.1-8b", weights=weights)
        shape = decoding(plain, 1, 1)
        assert plain.breakdown(shape)["linear"] / small.breakdown(shape)["linear"] > least


def test_a_slow_link_costs_what_the_ring_says() -> None:
    slow = replace(H100, link_start=20e-6, link_bandwidth=16e9)
    shape = decoding(timer_of("qwen3-32b"), 64, 500)
    assert timer_of("qwen3-32b", slow).breakdown(shape)["communication"] == 0.0
    two = timer_of("qwen3-32b", slow, tp=2).breakdown(shape)["communication"]
    assert two == pytest.approx(2 * 64 * (20e-6 + 64 * 5120 * 2 / 16e9))
    four = timer_of("qwen3-32b", slow, tp=4).breakdown(shape)["communication"]
    assert four == pytest.approx(2 * 64 * (20e-6 + 1.5 * 64 * 5120 * 2 / 16e9))


def test_decodes_cost_more_beside_a_chunk() -> None:
    """PLANNER 2b: e_mixed is not optional."""
    timer = TIMERS["llama-3.1-8b"]
    alone = decoding(timer, 64, 2000)
    mixed = replace(alone, chunks=((256, 0),))
    assert timer.breakdown(mixed)["attention_decode"] > 1.5 * timer.breakdown(alone)["attention_decode"]


def test_query_heads_read_again_what_the_cache_lost() -> None:
    c = replace(H100, reread_bytes=50e6)
    shape = replace(decoding(TIMERS["llama-3.1-8b"], 256, 8000), chunks=((256, 0),))
    kept, lost = timer_of("llama-3.1-8b").breakdown(shape), timer_of("llama-3.1-8b", c).breakdown(shape)
    assert 2.0 < lost["attention_decode"] / kept["attention_decode"] < 4.0  # four query heads share a KV head


def test_the_cache_gain_of_kernels_timed_alone_does_not_reach_a_step() -> None:
    c = replace(H100, cache_bytes=50e6, cache_gain=4.0)
    shape = decoding(TIMERS["llama-3.1-8b"], 16, 1000)
    assert timer_of("llama-3.1-8b", c).seconds(shape) == pytest.approx(timer_of("llama-3.1-8b").seconds(shape))


def test_a_host_that_overlaps_shows_only_when_it_is_slower() -> None:
    hidden = replace(H100, host_start=1e-3, host_sequence=1e-5, host_overlaps=True)
    shape = decoding(TIMERS["llama-3.1-8b"], 64, 1000)
    device = timer_of("llama-3.1-8b", replace(hidden, host_start=0.0, host_sequence=0.0)).seconds(shape)
    no_gap = replace(hidden, host_start=0.0, host_sequence=0.0, host_gap=0.0)
    assert device == pytest.approx(timer_of("llama-3.1-8b", no_gap).seconds(shape) + hidden.host_gap)
    assert timer_of("llama-3.1-8b", hidden).seconds(shape) == device
    assert timer_of("llama-3.1-8b", replace(hidden, host_start=1.0)).seconds(shape) == pytest.approx(1.0 + 64e-5)
    added = timer_of("llama-3.1-8b", replace(hidden, host_overlaps=False)).seconds(shape)
    assert added == pytest.approx(device + 1e-3 + 64e-5)


def test_recurrent_layers_cost_per_sequence_and_not_per_token() -> None:
    entry = find_model("qwen3-next-80b-a3b")
    assert entry is not None
    work = model_work(entry.config, spec_from_config(entry.config), weight_format("bf16"))
    assert work.state_bytes > 0
    assert work.assumptions
    timer = RooflineTimer(work, H100)
    short, long = timer.breakdown(decoding(timer, 8, 100)), timer.breakdown(decoding(timer, 8, 100_000))
    assert short["state"] == long["state"] == pytest.approx(2 * 8 * work.state_bytes / H100.decode_bandwidth)


def test_alternatives_are_the_resampled_fits() -> None:
    draws = tuple(replace(H100, gemm_bandwidth=H100.gemm_bandwidth * f) for f in (0.9, 1.0, 1.1))
    timer = RooflineTimer(work_of("llama-3.1-8b"), H100, draws=draws)
    shape = decoding(timer, 8, 1000)
    seconds = [other.seconds(shape) for other in timer.alternatives()]
    assert sorted(seconds, reverse=True) == seconds
    assert seconds[1] == timer.seconds(shape)
    assert len(timer.alternatives(2)) == 2


# -- formulas -------------------------------------------------------------------------------------------------------


def test_smooth_maximum_lies_between_the_larger_and_the_sum() -> None:
    assert smooth_max(3.0, 4.0, 2.0) == pytest.approx(5.0)
    assert smooth_max(1e-9, 1.0, 3.0) == pytest.approx(1.0)
    assert 4.0 < smooth_max(3.0, 4.0, 8.0) < 4.2


def test_factors_are_interpolated_in_the_logarithm_of_rows() -> None:
    table = ((1.0, 1.0), (4.0, 2.0), (16.0, 1.0))
    assert [factor_at(table, rows) for rows in (0.5, 1, 2, 4, 16, 99)] == [1.0, 1.0, 1.5, 2.0, 1.0, 1.0]
    assert factor_at((), 7) == 1.0
    assert math.isclose(factor_at(table, 8), 1.5)
