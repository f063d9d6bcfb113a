"""What to change: the right knobs are recommended, error bars are believed, and the answer is the same every time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.errors import OctavoError
from octavo.planner.deployment import Deployment, resolve
from octavo.planner.replay import ReplayOptions
from octavo.planner.search.changes import Change, Figures, Judge, Verdict
from octavo.planner.search.jobs import Workers
from octavo.planner.search.knobs import Knob, knobs_for
from octavo.planner.search.whatif import Bottleneck, WhatIf, what_if
from octavo.planner.slo import parse_slo
from octavo.planner.traces.api import TraceRequest

HERE = Workers(1)
BASE = Deployment("llama-3.1-8b", gpu="H100 SXM 80GB", max_model_len=2048, max_num_batched_tokens=2048)


def traffic(count: int = 60, gap: float = 0.05, prompt: int = 300, output: int = 60) -> tuple[TraceRequest, ...]:
    return tuple(
        TraceRequest(i * gap, prompt + 97 * (i % 7), output + 11 * (i % 5), str(i), max_tokens=200)
        for i in range(count)
    )


def study(deployment: Deployment, slo: str | None = None, **changes: int) -> WhatIf:
    options = ReplayOptions(slo=None if slo is None else parse_slo(slo))
    return what_if(resolve(deployment), traffic(**changes), options, HERE, seeds=3)


def settings(change: Change) -> set[str]:
    return {knob.setting for knob in change.knobs}


@pytest.fixture(scope="module")
def starved() -> WhatIf:
    """260 blocks hold about six of these requests; there are 256 slots and compute to spare."""
    return study(replace(BASE, num_blocks=260))


@pytest.fixture(scope="module")
def slots() -> WhatIf:
    """Two sequences at once on a device with room for hundreds."""
    return study(replace(BASE, max_num_seqs=2))


def test_a_pool_that_is_too_small_is_called_memory_and_memory_knobs_lead(starved: WhatIf) -> None:
    assert starved.bottleneck is Bottleneck.MEMORY
    assert "KV memory" in starved.statement
    alone = [change for change in starved.changes if len(change.knobs) == 1 and "gpu" not in settings(change)]
    helps = {"kv_dtype", "utilization", "tp"}
    assert settings(alone[0]) <= helps
    found = {next(iter(settings(change))): change for change in alone}
    assert {"e2e", "ttft_p99"} <= set(found["kv_dtype"].better)
    assert found["kv_dtype"].after.running_mean > 1.5 * starved.before.running_mean
    assert found["max_num_seqs"].verdict is Verdict.NONE


def test_too_few_slots_are_called_slots_and_more_of_them_lead(slots: WhatIf) -> None:
    assert slots.bottleneck is Bottleneck.SLOTS
    alone = [change for change in slots.changes if len(change.knobs) == 1 and "tp" not in settings(change)]
    assert alone[0].octavo == alone[0].vllm == "--max-num-seqs 4"
    assert alone[0].after.e2e < 0.6 * slots.before.e2e
    memory = next(change for change in slots.changes if settings(change) == {"utilization"})
    assert memory.verdict is Verdict.NONE


def test_a_busy_device_with_room_to_spare_is_called_compute() -> None:
    found = study(replace(BASE, gpu="A100 SXM 80GB"), gap=0.001, prompt=1200, output=4)
    assert found.bottleneck is Bottleneck.COMPUTE
    assert "compute, not memory" in found.statement
    assert found.probe.verdict is Verdict.NONE


def test_an_error_bar_wider_than_the_relief_is_called_unclear_not_compute() -> None:
    """Two seeds and few requests: twice the memory helps, but by less than the seeds differ."""
    resolved = resolve(replace(BASE, num_blocks=260))
    found = what_if(resolved, traffic(25, gap=0.02), ReplayOptions(), HERE, seeds=2)
    assert found.bottleneck is Bottleneck.UNCLEAR
    assert "more seeds" in found.statement


def test_a_light_load_lacks_nothing() -> None:
    found = study(BASE, gap=5.0)
    assert found.bottleneck is Bottleneck.NOTHING
    assert found.probe.verdict is Verdict.NONE


def test_pairs_of_the_best_are_tried_and_ranked_with_the_rest(starved: WhatIf) -> None:
    pairs = [change for change in starved.changes if len(change.knobs) == 2]
    assert pairs
    assert all(len(settings(pair)) == 2 for pair in pairs)
    assert starved.changes[0].after.e2e <= min(c.after.e2e for c in starved.changes if len(c.knobs) == 1 and c.after)


def test_ranking_is_by_goodput_with_an_slo() -> None:
    found = study(replace(BASE, num_blocks=260), slo="ttft<0.5s@p95,tpot<50ms@p95")
    assert found.judged_by == "goodput"
    sure = [change for change in found.changes if change.after and change.difference["goodput"].differs_from_zero]
    goodputs = [change.after.goodput for change in sure]
    assert goodputs == sorted(goodputs, reverse=True)
    assert goodputs[0] > found.before.goodput


def test_every_difference_is_after_minus_before_with_an_error_bar(starved: WhatIf) -> None:
    for change in starved.changes:
        if change.after is None:
            continue
        moved = change.difference["running_mean"]
        assert moved.mean == pytest.approx(change.after.running_mean - starved.before.running_mean)
        assert moved.count == 3 or (change.verdict is Verdict.NONE and change.after == starved.before)
        assert moved.error >= 0


def test_a_change_within_its_error_bar_is_no_measurable_change(starved: WhatIf) -> None:
    judged = ("goodput", "e2e", "ttft_p99", "itl_p99")
    quiet = [change for change in starved.changes if change.verdict is Verdict.NONE]
    assert quiet
    for change in quiet:
        for name in judged:
            moved, before = change.difference[name], getattr(starved.before, name)
            assert not moved.differs_from_zero or abs(moved.mean) < 0.01 * before


def test_what_cannot_run_comes_last_with_the_reason() -> None:
    found = what_if(
        resolve(replace(BASE, model="llama-3.1-8b", utilization="0.9")),
        traffic(20),
        ReplayOptions(),
        HERE,
        seeds=2,
        devices=("T4",),
    )
    last = found.changes[-1]
    assert last.name == "T4"
    assert last.verdict is Verdict.IMPOSSIBLE
    assert "bytes short" in last.reason


def test_workers_and_repetition_change_nothing() -> None:
    deployment, requests = resolve(replace(BASE, num_blocks=260)), traffic(20)
    with Workers(2) as workers:
        side_by_side = what_if(deployment, requests, ReplayOptions(), workers, seeds=2)
    assert side_by_side == what_if(deployment, requests, ReplayOptions(), HERE, seeds=2)


def test_one_seed_has_no_error_bar_and_is_refused() -> None:
    with pytest.raises(OctavoError, match="seeds is 1"):
        what_if(resolve(BASE), traffic(4), ReplayOptions(), HERE, seeds=1)


# -- knobs ----------------------------------------------------------------------------------------------------------


def test_knobs_name_the_flags_of_both_engines() -> None:
    flags = {knob.setting: knob.vllm for knob in knobs_for(resolve(BASE), traffic())}
    assert flags["kv_dtype"] == "--kv-cache-dtype fp8"
    assert flags["utilization"] == "--gpu-memory-utilization 0.95"
    assert flags["prefix_caching"] == "--no-enable-prefix-caching"
    assert flags["tp"] == "--tensor-parallel-size 2"
    assert flags["max_model_len"] == "--max-model-len 1024"
    assert flags["admission"] == flags["victims"] == "", "vLLM has no flag for these"


def test_every_knob_can_be_turned_and_changes_the_deployment() -> None:
    for knob in knobs_for(resolve(BASE), traffic(), ("L40S",)):
        changed = knob.apply(BASE)
        assert changed != BASE, knob.name
        resolve(changed)


def test_a_pool_given_in_blocks_keeps_its_bytes_when_blocks_change() -> None:
    resolved = resolve(replace(BASE, num_blocks=260))
    for knob in knobs_for(resolved, traffic()):
        if knob.setting in ("block_size", "kv_dtype"):
            after = resolve(knob.apply(resolved.deployment))
            before, now = resolved.pages * resolved.block_bytes, after.pages * after.block_bytes
            assert before - after.block_bytes < now <= before, knob.name


def test_more_sequences_than_tokens_in_a_step_raise_both() -> None:
    resolved = resolve(replace(BASE, max_num_seqs=1500, max_num_batched_tokens=2048))
    more = next(knob for knob in knobs_for(resolved, traffic()) if knob.name == "up to 3,000 sequences")
    assert more.vllm == "--max-num-seqs 3000 --max-num-batched-tokens 3000"
    resolve(more.apply(resolved.deployment))


def test_among_changes_that_leave_the_ranking_figure_alone_a_better_one_comes_before_a_mixed_one() -> None:
    def figures(goodput: float, ttft: float, itl: float) -> list[Figures]:
        noisy = (goodput, goodput + 0.2, goodput - 0.2)
        return [Figures(1.0, 1.0, now, 0.5, ttft, itl, 5.0, 100.0, 0.0, 0.5, 0.0) for now in noisy]

    judge = Judge(figures(1.0, 2.0, 0.1), "goodput")
    names = {
        "worse": judge.change(knobs_named("worse"), figures(1.0, 2.0, 0.2)),
        "mixed": judge.change(knobs_named("mixed"), figures(1.0, 1.0, 0.2)),
        "better": judge.change(knobs_named("better"), figures(1.0, 1.0, 0.1)),
        "more goodput": judge.change(knobs_named("more goodput"), figures(3.0, 4.0, 0.1)),
    }
    ranked = [change.name for change in judge.rank(names.values())]
    assert ranked == ["more goodput", "better", "mixed", "worse"]


def knobs_named(name: str) -> tuple[Knob, ...]:
    return (Knob(name, "block_size", {}, "", ""),)
