"""The native decoder's greedy tokens in float32 equal transformers' generate: every family, strategy, block, chunk,
batch, preemption, cache state, draft and instruction set."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from octavo.kv.strategies import STRATEGIES
from octavo.runner.native_runner import NativeRunner
from octavo.types import SamplingParams
from tests.equivalence.harness import engine_for, generate, native_subject, random_prompts, real_subject
from tests.equivalence.test_engine_equals_generate import REAL, REAL_SETTINGS
from tests.native.needs import library, needs_native, python, usable_isas
from tests.runner.tiny import NATIVE

pytestmark = needs_native
BLOCKS = (1, 8, 16, 24, 32, 64)
FULL_MATRIX = list(itertools.product(BLOCKS, (8, 64), (1, 8)))
COVERING = [(1, 64, 8), (8, 8, 8), (16, 64, 1), (24, 8, 8), (32, 64, 8), (64, 8, 1)]

WHOLE_PROCESS = """
import torch
from octavo.native import calls
from tests.equivalence.harness import engine_for, generate, native_subject
torch.set_num_threads(2)
for name in ("native-llama", "native-gemma3", "native-smollm3"):
    subject = native_subject(name)
    for block in (8, 16):
        built = engine_for(subject, block=block, chunk=16, speculative_tokens=3, speculative_limit=30)
        assert generate(built, subject, rounds=2) == [subject.wanted] * 2, (name, block)
print(calls.kernels().isa)
"""


@pytest.fixture
def _best_isa_afterwards() -> Iterator[None]:
    best = library().isa
    yield
    library().use_isa(best)


@pytest.mark.parametrize("name", NATIVE)
def test_paged_serves_every_family(name: str) -> None:
    subject = native_subject(name)
    assert len({tuple(tokens) for tokens in subject.wanted}) > 4, "too monotonous to prove anything"
    built = engine_for(subject, block=16, chunk=16)
    assert isinstance(built.engine.runner, NativeRunner)
    for answer in generate(built, subject, rounds=2):
        assert answer == subject.wanted
    assert built.engine.scheduler.totals.hit_tokens > 0
    (answer,) = generate(engine_for(subject, block=8, chunk=16), subject, preempt_every=5)
    assert answer == subject.wanted, "preempted twice"


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_and_block_gives_the_same_tokens(strategy: str, block: int) -> None:
    for name in ("native-llama", "native-mistral"):
        subject = native_subject(name)
        built = engine_for(subject, strategy=strategy, block=block, chunk=16, pool_tokens=1536)
        (answer,) = generate(built, subject)
        assert answer == subject.wanted, name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["native-llama", "native-gemma3"])
def test_every_block_chunk_and_batch_cold_and_warm(name: str, strategy: str) -> None:
    subject = native_subject(name)
    for block, chunk, batch in FULL_MATRIX:
        built = engine_for(subject, strategy=strategy, block=block, chunk=chunk, batch=batch, pool_tokens=1536)
        for answer in generate(built, subject, rounds=2):
            assert answer == subject.wanted, f"block {block}, chunk {chunk}, batch {batch}"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NATIVE)
def test_families_under_every_strategy(name: str, strategy: str) -> None:
    subject = native_subject(name)
    for block, chunk, batch in COVERING:
        built = engine_for(subject, strategy=strategy, block=block, chunk=chunk, batch=batch, pool_tokens=1536)
        for answer in generate(built, subject, rounds=2):
            assert answer == subject.wanted, f"{name}, {strategy}: block {block}, chunk {chunk}, batch {batch}"
    for block, chunk, caching in ((8, 8, True), (24, 64, False)):
        built = engine_for(
            subject, strategy=strategy, block=block, chunk=chunk, enable_prefix_caching=caching, pool_tokens=1536
        )
        (answer,) = generate(built, subject, preempt_every=5)
        assert answer == subject.wanted, f"{name}, {strategy}, preempted: block {block}, chunk {chunk}"


@pytest.mark.parametrize("strategy", ["growing", "paged"])
@pytest.mark.parametrize("name", ["native-llama", "native-gemma3", "native-mistral"])
def test_pool_too_small_for_all(name: str, strategy: str) -> None:
    """Regions move, windows give blocks back to others, requests lose their memory."""
    subject = native_subject(name)
    built = engine_for(
        subject, strategy=strategy, block=8, chunk=16, pool_tokens=100, max_model_len=96, admission="prompt"
    )
    (answer,) = generate(built, subject)
    assert answer == subject.wanted
    assert built.engine.scheduler.totals.preemptions > 0


@pytest.mark.parametrize("name", ["native-llama", "native-gemma2", "native-gemma3", "native-mistral"])
def test_greedy_text_with_drafts_is_that_of_generate(name: str) -> None:
    subject = native_subject(name, 40)
    for block in (8, 16):
        built = engine_for(subject, block=block, chunk=16, speculative_tokens=6, speculative_limit=30)
        assert generate(built, subject, rounds=2) == [subject.wanted] * 2
        assert built.engine.scheduler.totals.drafts_accepted > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["native-llama", "native-gemma3"])
def test_samples_that_share_a_prompt_equal_single_runs(name: str, strategy: str) -> None:
    """Four samples of a prompt that ends within a block."""
    prompt = random_prompts(199, (21,))[0]
    params = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)

    def run(own: SamplingParams) -> list[tuple[int, ...]]:
        engine = engine_for(native_subject(name), strategy=strategy, block=8).engine
        engine.submit(prompt, own)
        (output,) = engine.drain()
        return [sample.token_ids for sample in output.outputs]

    together = run(params)
    assert len(set(together)) == 4
    assert together == [run(params.for_sample(i))[0] for i in range(4)]


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("setting", REAL_SETTINGS[2:], ids=lambda setting: "-".join(map(str, setting)))
@pytest.mark.parametrize("name", REAL)
def test_real_models(name: str, setting: tuple[str, int, int, int, int, int]) -> None:
    strategy, block, chunk, batch, preempt_every, rounds = setting
    subject = real_subject(name, REAL[name], 64, "native")
    built = engine_for(
        subject, strategy=strategy, block=block, chunk=chunk, batch=batch, pool_tokens=8192, max_model_len=640
    )
    for answer in generate(built, subject, preempt_every=preempt_every, rounds=rounds):
        assert answer == subject.wanted


@pytest.mark.usefixtures("_best_isa_afterwards")
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("isa", usable_isas())
def test_every_instruction_set_gives_the_same_tokens(isa: str, name: str) -> None:
    subject = native_subject(name)
    library().use_isa(isa)
    (answer,) = generate(engine_for(subject, block=16, chunk=32), subject)
    assert answer == subject.wanted


@pytest.mark.parametrize(
    "isa", [pytest.param(isa, marks=[pytest.mark.slow] * (isa == "portable")) for isa in usable_isas()[-2:]]
)
def test_a_process_without_avx512_gives_the_same_tokens(isa: str) -> None:
    assert python(WHOLE_PROCESS, OCTAVO_ISA=isa) == isa
