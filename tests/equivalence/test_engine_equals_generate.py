"""Greedy tokens in float32 equal transformers' generate under every strategy, block, chunk, batch, preemption and
cache state."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from octavo.kv.strategies import STRATEGIES
from octavo.types import SamplingParams
from tests.equivalence.harness import engine_for, generate, real_subject, tiny_subject
from tests.runner.tiny import TINY

FULL_MATRIX = list(itertools.product((1, 4, 16), (8, 64), (1, 8)))
COVERING = [(1, 64, 8), (4, 8, 8), (16, 64, 1), (16, 8, 8)]  # every value, and every pair with the chunk size


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_block_chunk_and_batch_cold_and_warm(strategy: str) -> None:
    subject = tiny_subject("llama")
    for block, chunk, batch in FULL_MATRIX:
        built = engine_for(subject, strategy=strategy, block=block, chunk=chunk, batch=batch)
        cold, warm = generate(built, subject, rounds=2)
        assert cold == subject.wanted, f"block {block}, chunk {chunk}, batch {batch}, cold cache"
        assert warm == subject.wanted, f"block {block}, chunk {chunk}, batch {batch}, warm cache"
        if strategy == "paged":
            assert built.engine.scheduler.totals.hit_tokens > 0


@pytest.mark.parametrize("name", TINY)
def test_paged_serves_every_architecture(name: str) -> None:
    subject = tiny_subject(name)
    built = engine_for(subject, block=4, chunk=16, batch=8)
    for answer in generate(built, subject, rounds=2):
        assert answer == subject.wanted
    (answer,) = generate(engine_for(subject, block=4, chunk=16), subject, preempt_every=5)
    assert answer == subject.wanted, "preempted twice"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_strategy_gives_the_same_tokens(name: str, strategy: str) -> None:
    subject = tiny_subject(name)
    (answer,) = generate(engine_for(subject, strategy=strategy, block=4, chunk=16), subject)
    assert answer == subject.wanted


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", TINY)
def test_architectures(name: str, strategy: str) -> None:
    subject = tiny_subject(name)
    for block, chunk, batch in COVERING:
        built = engine_for(subject, strategy=strategy, block=block, chunk=chunk, batch=batch)
        for answer in generate(built, subject, rounds=2):
            assert answer == subject.wanted, f"{name}, {strategy}: block {block}, chunk {chunk}, batch {batch}"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", TINY)
def test_each_request_preempted_twice(name: str, strategy: str) -> None:
    subject = tiny_subject(name)
    for block, chunk, caching in ((4, 8, True), (16, 64, False)):
        built = engine_for(subject, strategy=strategy, block=block, chunk=chunk, enable_prefix_caching=caching)
        (answer,) = generate(built, subject, preempt_every=5)
        assert answer == subject.wanted, f"{name}, {strategy}: block {block}, chunk {chunk}, caching {caching}"


@pytest.mark.parametrize("strategy", ["growing", "paged"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_pool_too_small_for_all(name: str, strategy: str) -> None:
    subject = tiny_subject(name)
    built = engine_for(
        subject, strategy=strategy, block=4, chunk=16, pool_tokens=100, max_model_len=96, admission="prompt"
    )
    (answer,) = generate(built, subject)
    assert answer == subject.wanted
    assert built.engine.scheduler.totals.preemptions > 0


@pytest.mark.parametrize("strategy", ["growing", "paged"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "opt"])
def test_pool_so_small_that_each_request_is_preempted_twice(name: str, strategy: str) -> None:
    """Five requests of up to 80 tokens in a pool of 120, and three times one of better priority that takes 104."""
    subject = tiny_subject(name, 64)
    built = engine_for(
        subject,
        strategy=strategy,
        block=4,
        chunk=16,
        pool_tokens=120,
        max_model_len=120,
        order="priority",
        admission="prompt",
        max_preemptions=6,
    )
    engine = built.engine
    greedy = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    ids = [engine.submit(prompt, greedy, priority=1) for prompt in subject.prompts[:5]]
    seqs = [engine.scheduler.requests[request_id][0] for request_id in ids]
    done: dict[str, list[int]] = {}
    for _ in range(3):
        big = engine.submit([5, 6, 7, 8], replace(greedy, max_tokens=100), priority=0)
        while big not in done:
            done |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
    done |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.drain()}
    assert all(seq.preemptions >= 2 for seq in seqs)
    assert [done[request_id] for request_id in ids] == subject.wanted[:5]


REAL = {
    "demo": (3, 15, 16, 17, 33, 130, 250, 520),
    "gemma3-270m": (3, 15, 16, 17, 33, 130, 500, 560),  # beyond its window of 512
}


# strategy, block, chunk, batch, steps between preemptions (0: none), rounds (the second one finds a warm cache)
REAL_SETTINGS = [
    ("reserve-max", 16, 64, 8, 0, 1),
    ("reserve-pow2", 4, 64, 8, 0, 1),
    ("reserve-oracle", 1, 64, 8, 25, 1),
    ("growing", 4, 64, 8, 25, 1),
    ("paged", 1, 8, 8, 0, 1),
    ("paged", 16, 64, 1, 0, 1),
    ("paged", 4, 64, 8, 0, 2),
    ("paged", 16, 64, 8, 20, 1),
]


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("setting", REAL_SETTINGS, ids=lambda setting: "-".join(map(str, setting)))
@pytest.mark.parametrize("name", REAL)
def test_real_models(name: str, setting: tuple[str, int, int, int, int, int]) -> None:
    """8 prompts, 64 tokens, lengths across block edges and beyond Gemma's window."""
    strategy, block, chunk, batch, preempt_every, rounds = setting
    subject = real_subject(name, REAL[name], 64)
    built = engine_for(
        subject, strategy=strategy, block=block, chunk=chunk, batch=batch, pool_tokens=8192, max_model_len=640
    )
    for answer in generate(built, subject, preempt_every=preempt_every, rounds=rounds):
        assert answer == subject.wanted
    if rounds > 1:
        assert built.engine.scheduler.totals.hit_tokens > 500
