"""How far the native decoder's log probabilities are from exact ones, in every dtype of weights and cache."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from native_logits import distance, native_logprobs, own_logprobs, small_module, spread, text
from quantised_twin import quantised_twin
from tests.native.needs import library, needs_native, usable_isas
from tiny import NATIVE

from octavo.kv.dtypes import ENGINE_NAMES as KV_DTYPES
from octavo.native.library import Library

pytestmark = needs_native
QUANTISED = ("int8", "int8_group", "int4", "int4_affine")
NO_PAIRS = ("native-llama-tied-mqa", "native-llama-gelu")  # heads of 16 and 48: not for bfloat16
# Root mean square, as a share of the log probabilities' own spread. Measured: 1e-6, 0.012, 0.0014.
FURTHEST = {torch.float32: 3e-6, torch.bfloat16: 0.018, torch.float16: 0.003}
FURTHEST_KV = {"float32": 3e-6, "float16": 0.002, "bfloat16": 0.01, "int8": 0.02, "fp8": 0.1}
SHAPES = {
    "native-llama": dict(hidden_size=96, intermediate_size=160, num_hidden_layers=1),
    "native-llama-linear-rope-biases": dict(hidden_size=32, intermediate_size=96, num_hidden_layers=1),
    "native-gemma3": dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, layer_types=["full_attention"] * 2
    ),
    "native-granite": dict(intermediate_size=96, num_hidden_layers=1),
}


@pytest.fixture(params=usable_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[Library]:
    found = library()
    best = found.isa
    found.use_isa(request.param)
    yield found
    found.use_isa(best)


@pytest.mark.parametrize("dtype", FURTHEST, ids=str)
@pytest.mark.parametrize("name", NATIVE)
def test_logprobs_are_near_those_of_float32_and_nearer_than_transformers(name: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and name in NO_PAIRS:
        pytest.skip("runs through transformers' code")
    half = small_module(name).to(dtype)
    tokens = text(65)
    exact = own_logprobs(copy.deepcopy(half).float(), tokens)
    own = distance(native_logprobs(copy.deepcopy(half), tokens), exact)
    assert own <= FURTHEST[dtype] * max(spread(exact), 0.5)
    if dtype != torch.float32:
        assert own <= distance(own_logprobs(half, tokens), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_instruction_set_is_as_near(isa: Library, dtype: torch.dtype) -> None:
    for name in ("native-llama", "native-gemma2", "native-qwen2"):
        half = small_module(name).to(dtype)
        exact = own_logprobs(copy.deepcopy(half).float(), text(65))
        assert distance(native_logprobs(half, text(65)), exact) <= FURTHEST[dtype] * spread(exact)


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("name", SHAPES)
def test_quantised_weights_compute_what_they_stand_for(isa: Library, name: str, kind: str) -> None:
    """Every number of rows that a tile can have, and several blocks of rows. One activation in thousands lies so near
    the middle between two steps that float32 rounds it the other way; such rows, and later ones, may differ."""
    module = small_module(name, **SHAPES[name])
    tokens = text(64)
    exact = own_logprobs(quantised_twin(module, kind), tokens)
    for count, chunk in ((64, 64), (13, 13), (13, 1), (64, 11), *((n, n) for n in range(2, 13))):
        got = native_logprobs(copy.deepcopy(module), tokens[:count], weights=kind, chunk=chunk)
        furthest = (got - exact[: count - 1]).abs().amax(-1)
        assert float(furthest.max()) < 0.15 * spread(exact), f"{count} tokens in chunks of {chunk}"
        assert float((furthest < 1e-4).float().mean()) > 0.6, f"{count} tokens in chunks of {chunk}"


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_of_a_half_precision_model(kind: str) -> None:
    """Queries, K and V of a bfloat16 model are rounded as without quantised weights."""
    module = small_module("native-llama", **SHAPES["native-llama"]).bfloat16()
    exact = own_logprobs(quantised_twin(copy.deepcopy(module).float(), kind), text(64))
    assert distance(native_logprobs(module, text(64), weights=kind), exact) < 0.03 * spread(exact)


@pytest.mark.parametrize("kv_dtype", FURTHEST_KV)
@pytest.mark.parametrize("name", ["native-llama", "native-gemma3"])
def test_the_cache_dtype_keeps_logprobs_near(isa: Library, name: str, kv_dtype: str) -> None:
    module = small_module(name)
    exact = own_logprobs(module, text(65))
    for chunk in (65, 7, 1):
        got = native_logprobs(copy.deepcopy(module), text(65), kv_dtype=kv_dtype, chunk=chunk)
        assert distance(got, exact) <= FURTHEST_KV[kv_dtype] * spread(exact)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_precision_model_takes_every_cache_dtype(dtype: torch.dtype, kv_dtype: str) -> None:
    half = small_module("native-llama").to(dtype)
    exact = own_logprobs(copy.deepcopy(half).float(), text(65))
    assert distance(native_logprobs(half, text(65), kv_dtype=kv_dtype), exact) < 0.1 * spread(exact)
