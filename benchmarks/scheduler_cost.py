"""What one decode step costs in the scheduler (plan + settle), and what a block operation costs in the KV manager.

Measures: median time of plan and settle over many steps in which n sequences decode one token each (no model: the
tokens are constants), paged, block 16, prefix cache on, events going to a sink that drops them. Against: the figure
the issue tracker gives for vLLM 0.32's scheduler on the same load on such a machine (0.71 ms at 64, 3.10 ms at 256).

    python benchmarks/scheduler_cost.py
"""

from __future__ import annotations

import gc
import statistics
import time

from octavo.kv.api import Ask
from octavo.kv.paged import Paged
from octavo.kv.prefix import KeyChain, encode_identity
from octavo.runner.api import StepResult
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler
from octavo.types import Request, SamplingParams

PROMPT, STEPS = 256, 400


def decode_step(n: int) -> tuple[float, float, float]:
    """Median seconds of plan, of settle, and of both in one step with `n` decoding sequences."""
    kv = Paged(n * 80, 16)
    config = SchedulerConfig(max_model_len=2048, max_num_seqs=n, max_num_batched_tokens=max(8192, n))
    scheduler = Scheduler(config, kv)
    params = SamplingParams(max_tokens=STEPS + 100, temperature=0, ignore_eos=True)
    for i in range(n):
        scheduler.submit(Request(f"r{i}", tuple(range(i * 1000, i * 1000 + PROMPT)), params), 0.0)
    plans, settles, both = [], [], []
    gc.collect()
    while len(both) < STEPS:
        start = time.perf_counter()
        plan = scheduler.plan(0.0)
        middle = time.perf_counter()
        result = StepResult(tuple((7,) * len(work.samples) for work in plan.work))
        ready = time.perf_counter()
        scheduler.settle(plan, result, 0.0)
        end = time.perf_counter()
        if len(plan.work) == n and plan.tokens == n:
            plans.append(middle - start)
            settles.append(end - ready)
            both.append(middle - start + end - ready)
    return statistics.median(plans), statistics.median(settles), statistics.median(both)


def block_operations(sequences: int = 2000, blocks: int = 64) -> float:
    """Block operations a second: commit, seal and release of `blocks` blocks each for many sequences."""
    kv = Paged(blocks * 16, 16)
    tokens = list(range(blocks * 16))
    rates = []
    for _ in range(5):
        chains = [KeyChain(tokens, 16, encode_identity((("salt", str(i)),))) for i in range(sequences)]
        for chain in chains:
            chain.upto(len(tokens))  # hashing is timed apart: it belongs to the request, not to the manager
        start = time.perf_counter()
        for i, chain in enumerate(chains):
            ask = Ask(i, len(tokens), len(tokens), len(tokens), len(tokens), chain.upto(len(tokens)))
            kv.commit(kv.quote(ask))
            kv.seal(i, len(tokens), chain.upto(len(tokens)))
            kv.release(i)
        rates.append(3 * sequences * blocks / (time.perf_counter() - start))
    return statistics.median(rates)


def main() -> None:
    print(f"{'sequences':>10} {'plan ms':>9} {'settle ms':>10} {'both ms':>9} {'us/seq':>8}")
    for n in (16, 64, 128, 256, 512, 1024):
        plan, settle, both = decode_step(n)
        print(f"{n:>10} {plan * 1e3:>9.3f} {settle * 1e3:>10.3f} {both * 1e3:>9.3f} {both / n * 1e6:>8.2f}")
    print(f"commit + seal + release: {block_operations() / 1e3:.0f}k block operations a second")


if __name__ == "__main__":
    main()
