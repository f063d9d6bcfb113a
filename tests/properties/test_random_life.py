"""20,000 random steps per strategy, 5,000 under fair share: the invariants hold after each, and nothing is left at the
end (A1, A3, D1)."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from octavo.kv.strategies import STRATEGIES
from octavo.types import RequestError, Status
from tests.simulation import Bench

STEPS = 20_000
LIVES = [("fcfs", STEPS), ("fair", STEPS // 4)]


def random_prompt(rng: random.Random, block: int, pool: list[list[int]], longest: int) -> list[int]:
    """Half of the prompts start like an earlier one; lengths lie round block edges."""
    length = max(1, min(longest, rng.randint(0, 6) * block + rng.choice((-1, 0, 1, 2))))
    prompt = [rng.randint(0, 50) for _ in range(length)]
    if pool and rng.random() < 0.5:
        prompt = (rng.choice(pool)[: rng.randint(1, 40)] + prompt)[:longest]
    pool.append(prompt)
    del pool[:-20]
    return prompt


@pytest.mark.parametrize("windows", [(None,), (None, 9, 9)], ids=["full", "windows"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("order", "steps"), LIVES, ids=[order for order, _ in LIVES])
def test_invariants_hold_through_a_random_life(
    strategy: str, windows: tuple[int | None, ...], order: str, steps: int
) -> None:
    seed = 20261129
    rng = random.Random(seed)
    bench = Bench(
        strategy,
        pages=48 if len(windows) == 1 or strategy == "paged" else 48 * len(windows),
        block=4,
        windows=windows,
        config=dict(max_model_len=96, max_num_seqs=6, max_num_batched_tokens=16, admission="prompt", order=order),
    )
    seen: Counter[str] = Counter()
    prompts: list[list[int]] = []
    for step in range(steps):
        try:
            action = rng.random()
            if action < 0.25 and bench.scheduler.waiting < 12:
                n = rng.choice((1, 1, 1, 2, 3))
                params = dict(
                    n=n, seed=step, priority=rng.choice((0, 0, 1)), identity=rng.choice(((), (("salt", "x"),)))
                )
                if order == "fair":
                    params["tenant"] = rng.choice("abcdddd")
                try:
                    bench.add(random_prompt(rng, 4, prompts, 60), rng.choice((0, 1, 5, 20, 36, None)), **params)
                    seen["add"] += 1
                except RequestError:
                    seen["refused"] += 1
            elif action < 0.28 and bench.scheduler.requests:
                request = rng.choice(list(bench.scheduler.requests))
                seen[f"abort {bench.scheduler.requests[request][0].status.value}"] += 1
                bench.scheduler.abort(request, bench.clock.now())
                bench.look()
            elif action < 0.29:
                bench.scheduler.reset_cache()
                bench.look()
            elif action < 0.31 and bench.scheduler.requests:
                request = rng.choice(list(bench.scheduler.requests))
                before = (bench.kv.free, bench.kv.evictable, bench.scheduler.ledger())
                bench.scheduler.explain(request, bench.clock.now())
                assert before == (bench.kv.free, bench.kv.evictable, bench.scheduler.ledger())
            else:
                bench.step()
        except Exception as error:
            raise AssertionError(f"seed {seed}, step {step}, {strategy}: {error}") from error
        bench.events.clear()
        bench.plans.clear()
    bench.run()
    totals = bench.scheduler.totals
    assert seen["add"] > 500
    assert seen[f"abort {Status.RUNNING.value}"] > 20
    if strategy == "paged":
        assert totals.hit_tokens > 0
        assert totals.evicted > 0
        assert totals.preemptions > 20
    if strategy == "growing":
        assert totals.preemptions + totals.compactions > 20
