"""Figures that follow from counting alone: the published bar of Orca (Max), and what paging makes of the same bytes."""

from __future__ import annotations

import pytest

from octavo.kv.strategies import STRATEGIES
from tests.simulation import Bench

OPT_13B_BYTES = 819_200  # K and V of one token: 40 layers x 2 x 5,120 x 2 bytes
POOL = 12 * 2**30


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_opt_13b_in_12_gib_at_2048(strategy: str) -> None:
    pages = POOL // (16 * OPT_13B_BYTES)
    bench = Bench(
        strategy,
        pages=pages,
        block=16,
        config=dict(max_model_len=2048, max_num_seqs=256, max_num_batched_tokens=4096, admission="prompt"),
    )
    for _ in range(100):
        bench.add(160, 339)  # ShareGPT's means
    peak = 0
    while bench.scheduler.busy:
        plan, _ = bench.step()
        peak = max(peak, len(plan.work))
    assert all(len(seqs[0].output) == 339 for seqs in bench.all.values())
    if strategy == "reserve-max":
        assert peak == 7
    elif strategy.startswith("reserve"):
        assert peak == 30  # regions of 512 tokens (499 in blocks of 16): 15,728 // 512
    else:
        assert peak > 30
