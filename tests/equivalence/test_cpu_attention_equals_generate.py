"""Models that run through transformers' code over the C++ attention: greedy tokens in float32 equal generate's."""

from __future__ import annotations

import pytest

from octavo.kv.strategies import STRATEGIES
from octavo.runner.attention.cpu import CpuAttention
from octavo.runner.torch_runner import TorchRunner
from tests.equivalence.harness import engine_for, generate, tiny_subject
from tests.native.needs import needs_native
from tests.runner.tiny import ATTENDED

pytestmark = needs_native
COVERING = [(1, 64, 8), (8, 8, 8), (16, 64, 1), (24, 8, 8), (32, 64, 8), (64, 8, 1)]  # block, chunk, batch


@pytest.mark.parametrize("name", ATTENDED)
def test_paged_serves_every_architecture(name: str) -> None:
    subject = tiny_subject(name)
    built = engine_for(subject, block=8, chunk=16)
    runner = built.engine.runner
    assert isinstance(runner, TorchRunner)
    assert isinstance(runner.backend, CpuAttention)
    (answer,) = generate(built, subject, preempt_every=5)
    assert answer == subject.wanted


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "int8", "fp8"])
def test_strategies_agree_in_every_cache_dtype(kv_dtype: str) -> None:
    subject = tiny_subject("wide-gpt-oss")
    alone = engine_for(subject, batch=1, kv_dtype=kv_dtype, enable_prefix_caching=False)
    (wanted,) = generate(alone, subject)
    for strategy in STRATEGIES:
        built = engine_for(subject, strategy=strategy, block=8, chunk=16, kv_dtype=kv_dtype)
        assert generate(built, subject) == [wanted], strategy


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ATTENDED)
def test_architectures_under_every_strategy(name: str, strategy: str) -> None:
    subject = tiny_subject(name)
    for block, chunk, batch in COVERING:
        drafts = dict(speculative_tokens=4, speculative_limit=30) if block == 8 else {}
        built = engine_for(
            subject, strategy=strategy, block=block, chunk=chunk, batch=batch, pool_tokens=1536, **drafts
        )
        for answer in generate(built, subject, rounds=2):
            assert answer == subject.wanted, f"{name}, {strategy}: block {block}, chunk {chunk}, batch {batch}"
