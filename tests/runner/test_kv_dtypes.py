"""The runner with K and V in another dtype than the model's: near the float cache, and blind to how work is cut."""

from __future__ import annotations

import pytest
import torch
from driver import Driver
from tiny import TINY, tiny_module

from octavo.kv.dtypes import ENGINE_NAMES
from octavo.kv.groups import page_layout
from octavo.kv.spec import spec_from_config
from octavo.models.errors import ModelError
from octavo.models.loader import LoadedModel, loaded
from octavo.models.shapes import cache_dtype, cache_layers
from octavo.runner.attention.cuda import CudaAttention
from octavo.runner.memory import measure
from octavo.runner.torch_runner import TorchRunner
from octavo.types import SamplingParams

PROMPT = [5, 9, 17, 33, 65, 100, 7, 8, 9, 10, 11, 12, 13, 150, 3, 77]
OTHERS = ["bfloat16", "float16", "int8", "fp8"]
FURTHEST = {"float32": 1e-5, "float16": 0.01, "bfloat16": 0.05, "int8": 0.1, "fp8": 0.5}


def model(name: str) -> LoadedModel:
    return loaded(name, tiny_module(name), None, torch.device("cpu"))


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return model("llama")


def prompt_logprobs(subject: LoadedModel, kv_dtype: str, chunk: int = 64, block: int = 4) -> list[float]:
    driver = Driver(subject, block, 128, kv_dtype=kv_dtype)
    seq = driver.new(1, PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=0, max_tokens=None))
    entries = []
    while seq.computed < len(PROMPT):
        entries += driver.step([seq], chunk).prompt_logprobs.get(seq.id, ())
    return [entry.logprob for entry in entries]


@pytest.mark.parametrize("kv_dtype", OTHERS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "deepseek"])
def test_a_prompt_sees_the_stored_values_however_it_is_cut(name: str, kv_dtype: str) -> None:
    """In one step (where this step's own unrounded K and V are at hand), in chunks, and token by token.

    Other batch shapes change last bits, and rarely one of them decides how a value is rounded into the cache.
    """
    subject = model(name)
    whole = prompt_logprobs(subject, kv_dtype)
    for chunk, block in ((1, 4), (5, 4), (5, 16), (64, 1)):
        cut = prompt_logprobs(subject, kv_dtype, chunk, block)
        assert cut == pytest.approx(whole, abs=3e-4), f"chunk {chunk}, block {block}"


@pytest.mark.parametrize("kv_dtype", FURTHEST)
def test_logprobs_stay_near_those_of_the_models_own_dtype(llama: LoadedModel, kv_dtype: str) -> None:
    wanted, got = (prompt_logprobs(llama, name) for name in ("auto", kv_dtype))
    distance = max(abs(a - b) for a, b in zip(wanted, got, strict=True))
    assert distance <= FURTHEST[kv_dtype]
    assert kv_dtype == "float32" or distance > 0, "another dtype leaves its trace"


@pytest.mark.parametrize("kv_dtype", ENGINE_NAMES)
def test_a_half_precision_model_takes_every_kv_dtype(kv_dtype: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        half = loaded("half", tiny_module("llama").to(dtype), None, torch.device("cpu"))
        assert prompt_logprobs(half, kv_dtype) == pytest.approx(prompt_logprobs(half, "auto"), abs=0.6)


@pytest.mark.parametrize("kv_dtype", ENGINE_NAMES[1:])
@pytest.mark.parametrize("name", TINY)
def test_size_counts_the_bytes_that_the_layout_has(name: str, kv_dtype: str) -> None:
    """`octavo size`, from the config alone, and the pages of the runner."""
    subject = model(name)
    layers = cache_layers(subject.layers, cache_dtype(kv_dtype, subject.dtype))
    spec = spec_from_config(subject.config.to_dict(), kv_dtype=kv_dtype, mla_form="expanded")
    assert spec.bytes_per_token == sum(layer.token_bytes for layer in layers)
    assert sum(page_layout(layers, 16).used_bytes) == 16 * spec.bytes_per_token


def test_memory_is_measured_with_the_cache_that_will_be_used(llama: LoadedModel) -> None:
    plain, eight = (
        measure(llama, max_num_batched_tokens=64, max_num_seqs=4, kv_dtype=name) for name in ("auto", "int8")
    )
    assert plain.weights == eight.weights
    assert eight.activations > 0


def test_the_cuda_kernel_refuses_eight_bits_when_the_runner_is_built(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for name in ("int8", "fp8"):
        layers = cache_layers(llama.layers, cache_dtype(name, llama.dtype))
        with pytest.raises(ModelError, match=r"does not read an int8 or fp8 KV cache .* set kv_dtype to auto"):
            TorchRunner(llama, page_layout(layers, 16), 8, backend=CudaAttention(), kv_dtype=name)
