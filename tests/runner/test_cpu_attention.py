"""The C++ attention against the reference backend over random paged batches, and who gets which backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from attending import Scene, Shape
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.native.needs import library, needs_native, python, usable_isas
from tiny import ATTENDED, NATIVE, tiny_module

from octavo.kv.groups import page_layout
from octavo.models.errors import ModelError
from octavo.models.loader import loaded
from octavo.native.library import Library
from octavo.runner.attention.cpu import CpuAttention, why_not
from octavo.runner.attention.reference import ReferenceAttention
from octavo.runner.torch_runner import TorchRunner

FLOAT32 = 4e-5  # largest difference of float32 results of about 1
HALF = {torch.bfloat16: 0.03, torch.float16: 0.002}
KV = ("float32", "bf16", "fp16", "int8", "fp8")


@pytest.fixture(autouse=True)
def _one_thread_again() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.fixture(params=usable_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[Library]:
    found = library()
    best = found.isa
    found.use_isa(request.param)
    yield found
    found.use_isa(best)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    k_dim, v_dim = draw(
        st.one_of(
            st.sampled_from([16, 32, 48, 64, 80, 128, 256]).map(lambda d: (d, d)),
            st.sampled_from([(48, 32), (32, 64), (192, 128), (16, 256)]),
        )
    )
    row = st.tuples(st.integers(0, 150), st.sampled_from([1, 1, 1, 2, 3, 5, 9, 40]))
    return Shape(
        rows=tuple(draw(st.lists(row, min_size=1, max_size=5))),
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 7, 8, 9, 16])),
        kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        block=draw(st.sampled_from([1, 4, 8, 16, 24, 32, 64])),
        window=draw(st.sampled_from([None, None, 1, 7, 16, 40])),
        softcap=draw(st.sampled_from([None, None, 3.0])),
        sinks=draw(st.booleans()),
        kv=draw(st.sampled_from(KV)),
        seed=draw(st.integers(0, 1000)),
    )


def furthest(scene: Scene, dtype: torch.dtype = torch.float32) -> float:
    wanted = scene.run(ReferenceAttention())
    got = scene.run(CpuAttention(), dtype)
    assert got.shape == wanted.shape
    assert torch.isfinite(got).all(), "garbage of an unused slot was seen"
    return float((got - wanted).abs().max())


@needs_native
@settings(max_examples=120, deadline=None)
@given(shapes(), st.sampled_from([1, 2]))
def test_float32_equals_the_reference(shape: Shape, threads: int) -> None:
    torch.set_num_threads(threads)
    assert furthest(Scene(shape)) < FLOAT32


@needs_native
@settings(max_examples=60, deadline=None)
@given(shapes(), st.sampled_from(list(HALF)))
def test_half_precision_is_near_the_reference_in_float32(shape: Shape, dtype: torch.dtype) -> None:
    scene = Scene(shape)
    scene.query = scene.query.to(dtype).float()  # its rounding is not the backend's
    assert furthest(scene, dtype) < HALF[dtype]


@needs_native
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (128, 128), (256, 256), (192, 128)])
def test_every_instruction_set_equals_the_reference(isa: Library, dims: tuple[int, int], kv: str) -> None:
    """Decode with few and many heads per KV head, a prompt chunk, a window, blocks with and without whole runs."""
    k_dim, v_dim = dims
    rows = ((0, 1), (77, 1), (130, 1), (20, 3), (33, 50))
    for heads, block, window in ((2, 16, None), (24, 8, 30)):
        scene = Scene(Shape(rows, heads, 2, k_dim, v_dim, block, window, kv=kv))
        assert furthest(scene) < FLOAT32, f"{heads} heads, block {block}, window {window}"
        scene.query = scene.query.bfloat16().float()
        assert furthest(scene, torch.bfloat16) < HALF[torch.bfloat16]


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("kv", ["float32", "bf16", "int8"])
def test_a_long_context_split_over_threads(kv: str, window: int | None, threads: int) -> None:
    torch.set_num_threads(threads)
    for heads, kv_heads, sinks in ((2, 1, True), (6, 3, False)):
        shape = Shape(((2999, 1),), heads, kv_heads, 64, 64, 16, window, sinks=sinks, kv=kv)
        assert furthest(Scene(shape)) < FLOAT32
        beside = dataclasses.replace(shape, rows=((2999, 1), (5, 1), (1000, 9)), block=8)
        assert furthest(Scene(beside)) < FLOAT32


@needs_native
def test_a_long_prompt_in_chunks() -> None:
    for window in (None, 200):
        assert furthest(Scene(Shape(((700, 300), (0, 250), (900, 1)), 8, 2, 64, 64, 32, window))) < FLOAT32


@needs_native
@pytest.mark.parametrize("sharing", [1, 8, 9, 64, 71, 96])
def test_as_many_heads_may_share_a_kv_head_as_it_says(sharing: int) -> None:
    scene = Scene(Shape(((40, 1), (3, 20)), sharing, 1, 16, 16))
    assert furthest(scene) < FLOAT32
    assert why_not((scene.layer,), 97) != ""


@needs_native
def test_bfloat16_is_no_further_from_float32_than_the_reference() -> None:
    """Summed over many shapes, as single roundings are luck."""
    own = reference = 0.0
    for seed in range(20):
        scene = Scene(Shape(((50 + seed, 1), (200, 1), (30, 20)), 8, 2, 64, 64, kv="bf16", seed=seed))
        scene.query = scene.query.bfloat16().float()
        wanted = scene.run(ReferenceAttention())
        own += float((scene.run(CpuAttention(), torch.bfloat16) - wanted).square().sum())
        reference += float((scene.run(ReferenceAttention(), torch.bfloat16) - wanted).square().sum())
    assert own <= reference * 1.1


@needs_native
def test_a_layer_that_does_not_fit_is_refused_before_memory_is_touched() -> None:
    for shape, word in (
        (Shape(((3, 1),), k_dim=24, v_dim=24), "head size 24"),
        (Shape(((3, 1),), k_dim=32, v_dim=272), "head size 272"),
        (Shape(((3, 1),), heads=3, kv_heads=2), "3 query heads"),
        (Shape(((3, 1),), heads=97, kv_heads=1), "97 query heads"),
    ):
        scene = Scene(shape)
        with pytest.raises(ModelError, match=word):
            scene.run(CpuAttention())


@needs_native
def test_the_runner_picks_the_native_attention_where_every_layer_fits() -> None:
    for name, kind in (
        *((name, CpuAttention) for name in (*ATTENDED, *NATIVE)),
        ("qwen2", ReferenceAttention),  # heads of 12
        ("deepseek", ReferenceAttention),  # K of 24
    ):
        model = loaded(name, tiny_module(name), None, torch.device("cpu"))
        assert isinstance(TorchRunner(model, page_layout(model.layers, 8), 4).backend, kind), name


@needs_native
def test_the_reference_can_be_asked_for() -> None:
    model = loaded("llama", tiny_module("native-llama"), None, torch.device("cpu"))
    runner = TorchRunner(model, page_layout(model.layers, 8), 4, backend=ReferenceAttention())
    assert isinstance(runner.backend, ReferenceAttention)


SWITCHED_OFF = """
import pytest, torch
from octavo.models.errors import ModelError
from octavo.runner.attention.cpu import CpuAttention
from tests.equivalence.harness import engine_for, generate, tiny_subject
for name in ("native-llama", "wide-gpt-oss"):
    subject = tiny_subject(name)
    assert subject.model.native is None
    built = engine_for(subject, block=8, chunk=16)
    print(type(built.engine.runner).__name__, type(built.engine.runner.backend).__name__)
    assert generate(built, subject) == [subject.wanted]
with pytest.raises(ModelError, match="not there"):
    CpuAttention()
"""


def test_switched_off_everything_runs_on_the_reference_with_equal_tokens() -> None:
    said = python(SWITCHED_OFF, OCTAVO_NATIVE="off")
    assert said.splitlines() == ["TorchRunner ReferenceAttention"] * 2
