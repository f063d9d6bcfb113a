"""Answers under an int8 or fp8 cache are not quite transformers' own, and the same under all memory conditions."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers as tf

from octavo.build import BuiltEngine, build_engine
from octavo.config import EngineConfig
from octavo.errors import OctavoError
from octavo.kv.strategies import STRATEGIES
from octavo.models.loader import LoadedModel, loaded
from octavo.types import SamplingParams
from tests.equivalence.harness import engine_for, generate, random_prompts, tiny_subject
from tests.runner.tiny import BASE

EIGHT_BIT = ("int8", "fp8")
CASES = [("llama", "int8"), ("llama", "fp8"), ("llama", "bfloat16"), ("gemma3", "int8"), ("gpt-oss", "fp8")]


@cache
def undisturbed(name: str, kv_dtype: str) -> list[list[int]]:
    """Each prompt alone, in one chunk, nothing shared."""
    built = engine_for(tiny_subject(name), batch=1, kv_dtype=kv_dtype, enable_prefix_caching=False)
    (answer,) = generate(built, tiny_subject(name))
    return answer


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("name", "kv_dtype"), CASES)
def test_every_strategy_block_and_chunk(name: str, strategy: str, kv_dtype: str) -> None:
    subject = tiny_subject(name)
    for block, chunk, rounds in ((4, 16, 2), (16, 64, 1), (1, 8, 1)):
        built = engine_for(subject, strategy=strategy, block=block, chunk=chunk, kv_dtype=kv_dtype)
        for answer in generate(built, subject, rounds=rounds):
            assert answer == undisturbed(name, kv_dtype), f"block {block}, chunk {chunk}"


@pytest.mark.parametrize("strategy", ["growing", "paged"])
@pytest.mark.parametrize(("name", "kv_dtype"), CASES)
def test_each_request_preempted_twice(name: str, strategy: str, kv_dtype: str) -> None:
    subject = tiny_subject(name)
    for block, chunk, caching in ((4, 8, True), (16, 64, False)):
        built = engine_for(
            subject, strategy=strategy, block=block, chunk=chunk, kv_dtype=kv_dtype, enable_prefix_caching=caching
        )
        (answer,) = generate(built, subject, preempt_every=5)
        assert answer == undisturbed(name, kv_dtype), f"block {block}, chunk {chunk}, caching {caching}"


@pytest.mark.parametrize("kv_dtype", EIGHT_BIT)
@pytest.mark.parametrize("strategy", ["growing", "paged"])
def test_a_pool_too_small_for_all(strategy: str, kv_dtype: str) -> None:
    """Regions move (pages are copied, scales with them) and requests lose their memory."""
    subject = tiny_subject("llama")
    built = engine_for(
        subject, strategy=strategy, block=4, chunk=16, pool_tokens=60, max_model_len=96, admission="prompt",
        kv_dtype=kv_dtype,
    )  # fmt: skip
    (answer,) = generate(built, subject)
    assert answer == undisturbed("llama", kv_dtype)
    assert built.engine.scheduler.totals.preemptions > 0


@pytest.mark.parametrize("kv_dtype", EIGHT_BIT)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_samples_that_share_a_prompt_equal_single_runs(strategy: str, kv_dtype: str) -> None:
    """Four samples of a prompt that ends within a block: its tail is copied, scales with it."""
    prompt = random_prompts(199, (11,))[0]
    params = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)

    def run(own: SamplingParams) -> list[tuple[int, ...]]:
        engine = engine_for(tiny_subject("llama"), strategy=strategy, block=4, kv_dtype=kv_dtype).engine
        engine.submit(prompt, own)
        (output,) = engine.drain()
        return [sample.token_ids for sample in output.outputs]

    assert run(params) == [run(params.for_sample(i))[0] for i in range(4)]


@cache
def wide() -> LoadedModel:
    """Heads of 64 elements, as the models that are served have."""
    torch.manual_seed(0)
    module = tf.LlamaForCausalLM(tf.LlamaConfig(**BASE | {"head_dim": 64}))
    return loaded("wide", module, None, torch.device("cpu"))


def wide_engine(kv_dtype: str, kv_memory: int = 1 << 20, strategy: str = "paged") -> BuiltEngine:
    config = EngineConfig(
        model="wide",
        kv_strategy=strategy,
        kv_memory=kv_memory,
        max_model_len=128,
        max_num_batched_tokens=2048,
        kv_dtype=kv_dtype,
        check=True,
    )
    return build_engine(config, loaded=wide())


def most_running(built: BuiltEngine) -> int:
    """The most of 60 equal requests that ever run together."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for prompt in random_prompts(199, (40,) * 60):
        built.engine.submit(prompt, params)
    most = 0
    while built.engine.busy:
        built.engine.step()
        most = max(most, len(built.engine.scheduler.running))
    assert built.engine.scheduler.totals.finished == 60
    return most


@pytest.mark.parametrize("strategy", ["reserve-max", "paged"])
def test_twice_as_many_requests_run_in_the_same_bytes(strategy: str) -> None:
    most = {name: most_running(wide_engine(name, strategy=strategy)) for name in ("bfloat16", *EIGHT_BIT)}
    assert most["int8"] == most["fp8"]
    assert 1.9 <= most["int8"] / most["bfloat16"] <= 2.1, "132 bytes where bfloat16 takes 256"


def test_bytes_and_identity_are_those_of_the_stored_dtype() -> None:
    built = {name: wide_engine(name) for name in ("auto", "float32", "bfloat16", *EIGHT_BIT)}
    assert {name: one.layout.page_bytes // 16 for name, one in built.items()} == {
        "auto": 3 * 2 * 128 * 4,
        "float32": 3 * 2 * 128 * 4,
        "bfloat16": 3 * 2 * 128 * 2,
        "int8": 3 * 2 * (128 + 4),
        "fp8": 3 * 2 * (128 + 4),
    }
    assert {name: one.kv_dtype for name, one in built.items()} == {
        "auto": "float32", "float32": "float32", "bfloat16": "bf16", "int8": "int8", "fp8": "fp8",
    }  # fmt: skip
    roots = {}
    for name, one in built.items():
        one.engine.submit([5] * 16, SamplingParams(max_tokens=1), request_id="r")
        roots[name] = one.engine.scheduler.requests["r"][0].keys.upto(16)[0].digest
    assert roots["auto"] == roots["float32"]
    assert len(set(roots.values())) == 4, "KV of two dtypes never meets in a hash"


def test_the_log_names_the_kv_dtype(tmp_path: Path) -> None:
    config = EngineConfig(model="wide", kv_memory=1 << 20, kv_dtype="int8")
    built = build_engine(config, loaded=wide(), log=tmp_path / "log.jsonl")
    assert built.log is not None
    built.log.close()
    assert json.loads((tmp_path / "log.jsonl").open().readline())["engine_identity"] == [
        "wide", "torch.float32", "float32", "int8",
    ]  # fmt: skip


def test_memory_left_of_the_device_is_counted_in_the_stored_dtype() -> None:
    sizes = {
        name: build_engine(EngineConfig(model="wide", max_model_len=64, max_num_seqs=4, kv_dtype=name), loaded=wide())
        for name in ("bfloat16", "int8")
    }
    pages = {name: built.pages for name, built in sizes.items()}
    assert pages["bfloat16"] == pages["int8"] == 16, "four sequences of 64 tokens, whatever a token takes"
    assert sizes["int8"].kv_bytes / sizes["bfloat16"].kv_bytes == 132 / 256


@pytest.mark.parametrize("wrong", ["int4", "bf16", "", None])
def test_an_unknown_kv_dtype_is_refused_with_the_known_ones(wrong: str) -> None:
    with pytest.raises(OctavoError, match=r"kv_dtype is .* one of auto, float32, bfloat16, float16, int8, fp8\."):
        EngineConfig(model="wide", kv_dtype=wrong)
