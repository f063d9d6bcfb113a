"""Eight-bit KV: every stored bit is as the layout says, errors are bounded, nothing that is no number survives."""

from __future__ import annotations

import pytest
import torch

from octavo.kv.api import Copy
from octavo.kv.dtypes import FORMATS
from octavo.kv.groups import LayerKV, page_layout
from octavo.models.shapes import cache_layers
from octavo.runner.quantise import STORED, dequantise, quantise
from octavo.runner.store import KVStore, StoreError

INT8, FP8 = torch.int8, torch.float8_e4m3fn
EIGHT_BIT = ["int8", "fp8"]
HEADS, K, V, BLOCK = 2, 6, 4, 4
FLOAT_LAYERS = (LayerKV(0, HEADS, K, V, 4), LayerKV(1, HEADS, K, V, 4))


def make(name: str, block: int = BLOCK, blocks: int = 12, layers: tuple[LayerKV, ...] = FLOAT_LAYERS) -> KVStore:
    stored = cache_layers(layers, FORMATS[name])
    return KVStore(stored, page_layout(stored, block), blocks, dtype=STORED[name], device=torch.device("cpu"))


def filled(name: str) -> tuple[KVStore, torch.Tensor, torch.Tensor]:
    """Five tokens of layer 1 in the slots (7, 0..3) and (3, 0)."""
    store = make(name)
    torch.manual_seed(0)
    k, v = torch.randn(5, HEADS, K), torch.randn(5, HEADS, V)
    store.write(1, k, v, torch.tensor([7, 7, 7, 7, 3]), torch.tensor([0, 1, 2, 3, 0]))
    return store, k, v


@pytest.mark.parametrize(("name", "size"), [("float32", 4), ("bf16", 2), ("fp16", 2), ("int8", 1), ("fp8", 1)])
def test_bytes_of_a_token_are_its_elements_and_one_scale_per_head_for_k_and_for_v(name: str, size: int) -> None:
    (layer, _) = cache_layers(FLOAT_LAYERS, FORMATS[name])
    assert layer.token_bytes == HEADS * (K + V) * size + (4 * HEADS if size == 1 else 0)
    assert page_layout([layer], 16).page_bytes == 16 * layer.token_bytes


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_a_layers_part_of_a_page_is_k_then_v_then_their_scales(name: str) -> None:
    """Read back from the bytes alone, by the offsets that kernels rely on."""
    store, k, v = filled(name)
    part = HEADS * BLOCK * (K + V + 4)
    assert store.layout.page_bytes == 2 * part
    page = store.buffer[7, part:]  # layer 1 lies behind layer 0
    sizes = [HEADS * BLOCK * n for n in (K, V, 2, 2)]
    k_bytes, v_bytes, k_scale_bytes, v_scale_bytes = page.split(sizes)
    for raw, raw_scales, values, dim in ((k_bytes, k_scale_bytes, k, K), (v_bytes, v_scale_bytes, v, V)):
        elements, scales = quantise(values[:4], STORED[name])
        assert torch.equal(raw.view(HEADS, BLOCK, dim), elements.transpose(0, 1).view(torch.uint8))
        assert torch.equal(raw_scales.view(torch.bfloat16).view(HEADS, BLOCK), scales.T)
    assert not store.buffer[7, :part].any()
    assert int((store.buffer.view(12, -1).any(1)).sum()) == 2, "only the two blocks that were written"


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_views_of_elements_and_scales_are_the_buffer(name: str) -> None:
    store, k, v = filled(name)
    for values, data, scales in ((k, store.k[1], store.k_scales[1]), (v, store.v[1], store.v_scales[1])):
        assert data.dtype == STORED[name]
        assert scales.shape == (12, HEADS, BLOCK)
        wanted, wanted_scales = quantise(values, STORED[name])
        assert torch.equal(data[7].view(torch.uint8), wanted[:4].transpose(0, 1).contiguous().view(torch.uint8))
        assert torch.equal(scales[3, :, 0], wanted_scales[4])
    assert not make("bf16").k_scales


@pytest.mark.parametrize("name", EIGHT_BIT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_read_is_element_times_scale(name: str, dtype: torch.dtype) -> None:
    store, k, _ = filled(name)
    read, _ = store.read(1, torch.tensor([3, 7]), dtype)
    elements, scales = quantise(k, STORED[name])
    wanted = elements.float() * scales.float()[..., None]
    assert read.dtype == dtype
    assert torch.equal(read[1], wanted[:4].transpose(0, 1).to(dtype))
    assert torch.equal(read[0, :, 0], wanted[4].to(dtype))


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 300.0, 1e30])
def test_errors_are_at_most_half_a_step(magnitude: float) -> None:
    torch.manual_seed(1)
    x = torch.randn(500, 64) * magnitude
    top = x.abs().amax(-1, keepdim=True)
    for dtype in (INT8, FP8):
        back = dequantise(*quantise(x, dtype), torch.float32)
        error = (back - x).abs()
        if dtype is INT8:  # half a step, and what a scale rounded down clamps: half a unit of bfloat16's 8 bits
            assert (error <= top / 127 * (0.5 + 127 / 2**9) * 1.01).all()
            assert (error[x.abs() < 0.99 * top] <= (top / 127 * 0.503).expand_as(x)[x.abs() < 0.99 * top]).all()
        else:  # three bits of mantissa: 1/16 of the value, and below its normal range half of 2^-9 of the scale
            assert (error <= torch.maximum(x.abs() / 16, top / 448 * 2.0**-10) * 1.01).all()


def test_int8_rounds_half_to_even_and_clamps() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -2.5, -127.0])
    elements, scale = quantise(x, INT8)
    assert float(scale) == 1.0
    assert elements.tolist() == [127, 0, 2, 2, 0, -2, -127]
    amax = 127 * (1 + 2**-9)  # its scale rounds down to 1: the largest value would be 127.2
    assert quantise(torch.tensor([amax, -amax]), INT8)[0].tolist() == [127, -127]
    assert float(quantise(torch.tensor([127 * (1 + 3 * 2**-8)]), INT8)[1]) == 1 + 2**-6, "a tie goes to the even scale"


def test_fp8_saturates() -> None:
    amax = 448 * (1 + 2**-9)
    elements, scale = quantise(torch.tensor([amax, -amax, 1.0625, 1.1875]), FP8)
    assert float(scale) == 1.0
    assert elements.float().tolist() == [448.0, -448.0, 1.0, 1.25], "ties go to the even mantissa"


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_what_is_no_finite_number_counts_as_zero(name: str) -> None:
    store = make(name)
    row = torch.tensor([1.0, float("nan"), float("inf"), -2.0, float("-inf"), 0.5]).repeat(1, HEADS, 1)
    store.write(0, row, row[..., :V], torch.tensor([5]), torch.tensor([2]))
    (k, v) = store.read(0, torch.tensor([5]), torch.float32)
    clean = row.nan_to_num(0.0, 0.0, 0.0)
    torch.testing.assert_close(k[0, :, 2], clean[0], rtol=0.07, atol=0.01)
    torch.testing.assert_close(v[0, :, 2], clean[0, :, :V], rtol=0.07, atol=0.01)
    store.write(0, row * float("nan"), row[..., :V] * float("nan"), torch.tensor([5]), torch.tensor([2]))
    assert not store.buffer.any()


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_zeros_stay_zeros_and_the_smallest_and_largest_values_stay_finite(dtype: torch.dtype) -> None:
    limits = torch.finfo(torch.float32)
    for value in (0.0, 1e-45, limits.tiny, limits.max, -limits.max):
        elements, scale = quantise(torch.full((8,), value), dtype)
        for read_as in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.isfinite(dequantise(elements, scale, read_as)).all()
    assert not quantise(torch.zeros(3, 8), dtype)[0].float().any()
    assert not quantise(torch.full((8,), 1e-45), dtype)[0].float().any(), "a scale of 0 makes all elements 0"


@pytest.mark.parametrize("stored", ["bf16", "fp16", "float32"])
@pytest.mark.parametrize("model", [torch.float32, torch.bfloat16, torch.float16])
def test_a_float_cache_of_another_dtype_casts_and_never_makes_infinity(stored: str, model: torch.dtype) -> None:
    store = make(stored)
    largest = torch.finfo(model).max
    v = torch.tensor([1.5, -0.25, largest, float("inf")], dtype=model).repeat(1, HEADS, 1)
    k = torch.zeros(1, HEADS, K, dtype=model)
    store.write(0, k, v, torch.tensor([1]), torch.tensor([0]))
    _, read = store.read(0, torch.tensor([1]), model)
    assert read.dtype == model
    assert read[0, 0, 0, :2].tolist() == [1.5, -0.25]
    assert float(read[0, 0, 0, 2]) == pytest.approx(min(largest, torch.finfo(STORED[stored]).max), rel=0.01)
    assert float(read[0, 0, 0, 3]) == 0.0


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_copies_of_pages_carry_the_scales(name: str) -> None:
    store, _, _ = filled(name)
    wanted = store.read(1, torch.tensor([7]), torch.float32)
    store.apply([Copy(7, 10), Copy(3, 7)])
    assert all(torch.equal(a, b) for a, b in zip(store.read(1, torch.tensor([10]), torch.float32), wanted, strict=True))


def test_refuses_layers_or_a_layout_of_another_dtype() -> None:
    eight, half = (cache_layers(FLOAT_LAYERS, FORMATS[name]) for name in ("int8", "bf16"))
    place = torch.device("cpu")
    with pytest.raises(StoreError, match=r"2 bytes per KV element and 0 .* torch.int8 takes 1 and 2"):
        KVStore(half, page_layout(half, 4), 4, dtype=INT8, device=place)
    with pytest.raises(StoreError, match="another KV dtype"):
        KVStore(eight, page_layout(half, 4), 4, dtype=INT8, device=place)
    with pytest.raises(StoreError, match="choose an even block_size"):
        make("int8", block=1, layers=(LayerKV(0, 1, 4, 5, 4),))
    make("int8", block=2, layers=(LayerKV(0, 1, 4, 5, 4),))
