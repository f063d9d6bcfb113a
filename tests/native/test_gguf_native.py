"""GGUF files straight into packed memory: quantised blocks keep their values, the converter's changes are undone."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers as tf

from octavo.build import build_engine
from octavo.config import EngineConfig
from octavo.models.errors import ModelError
from octavo.models.gguf_blocks import blocks_from
from octavo.models.loader import LoadedModel, load_model
from octavo.native.blocks import GROUP, Blocks, joined, place, to_int8
from octavo.native.model import WEIGHTS
from octavo.types import SamplingParams
from tests.native.needs import library, needs_native
from tests.runner.gguf_writing import write_tiny_gguf

Q = gguf.GGMLQuantizationType
SIZES = {
    "vocab_size": 224,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8, "tie_word_embeddings": True}
CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**SIZES),
    "qwen2": lambda: tf.Qwen2Config(**SIZES),
    "qwen3": lambda: tf.Qwen3Config(**SIZES | {"head_dim": 128}),
    "gemma2": lambda: tf.Gemma2Config(**SIZES | GEMMA),
    "gemma3": lambda: tf.Gemma3TextConfig(**SIZES | GEMMA),
    "phi3": lambda: tf.Phi3Config(**SIZES),
}
EXACT = {Q.Q8_0: "int8_group", Q.Q5_0: "int8_group", Q.Q4_0: "int4", Q.Q4_1: "int4_affine"}
PROMPT = [int(token) for token in np.random.default_rng(1).integers(3, 224, 120)]


def module_of(architecture: str) -> torch.nn.Module:
    torch.manual_seed(3)
    module = tf.AutoModelForCausalLM.from_config(
        CONFIGS[architecture](), dtype=torch.float32, attn_implementation="eager"
    )
    for parameter in module.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.06)
        else:
            parameter.data += torch.randn_like(parameter) * 0.1
    return module.eval()


def logprobs(model: LoadedModel, prompt: list[int] = PROMPT) -> np.ndarray:
    """Log probability of each prompt token but the first."""
    engine = build_engine(EngineConfig(model="tiny", kv_memory=1 << 28, max_num_seqs=1), loaded=model).engine
    engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    (output,) = engine.drain()
    assert output.error is None
    return np.array([entry.logprob for entry in output.prompt_logprobs or () if entry is not None])


def logprobs_of(module: torch.nn.Module) -> np.ndarray:
    """The same from a transformers module."""
    with torch.inference_mode():
        logits = module(torch.tensor([PROMPT])).logits[0, :-1]
    return torch.log_softmax(logits, -1)[torch.arange(len(PROMPT) - 1), PROMPT[1:]].numpy()


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Root mean square of the difference, in standard deviations of the values."""
    return float(np.sqrt(np.mean((a - b) ** 2)) / b.std())


def quantised(shape: tuple[int, int], kind: gguf.GGMLQuantizationType, seed: int = 0) -> np.ndarray:
    """The raw rows of a random matrix; K-quants, which `gguf` does not write, from random bytes with small scales."""
    random = np.random.default_rng(seed)
    if kind in (Q.Q4_K, Q.Q6_K):
        values, size = gguf.GGML_QUANT_SIZES[kind]
        raw = random.integers(0, 256, (shape[0], shape[1] // values, size), dtype=np.uint8)
        scales = random.uniform(0.0001, 0.001, (*raw.shape[:2], 2)).astype(np.float16).view(np.uint8)
        if kind == Q.Q4_K:
            raw[..., :4] = scales
        else:
            raw[..., -2:] = scales[..., :2]
        return raw.reshape(shape[0], -1)
    return gguf.quantize(random.normal(0, 0.06, shape).astype(np.float32), kind)


# --- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EXACT)
def test_blocks_stand_for_exactly_what_the_file_says(kind: gguf.GGMLQuantizationType) -> None:
    raw = quantised((40, 256), kind)
    blocks = blocks_from(raw, int(kind))
    assert blocks.kind == EXACT[kind]
    assert np.array_equal(blocks.values(), gguf.dequantize(raw, kind))


def test_q4_k_keeps_its_numbers_and_rounds_its_scales() -> None:
    raw = quantised((40, 512), Q.Q4_K)
    blocks, wanted = blocks_from(raw, int(Q.Q4_K)), gguf.dequantize(raw, Q.Q4_K)
    assert blocks.kind == "int4_affine"
    assert np.abs(blocks.values() - wanted).max() <= 2**-10 * np.abs(wanted).max() * 2


def test_other_kinds_are_requantised_within_half_a_step() -> None:
    raw = quantised((40, 256), Q.Q6_K)
    blocks, wanted = blocks_from(raw, int(Q.Q6_K)), gguf.dequantize(raw, Q.Q6_K)
    assert blocks.kind == "int8_group"
    steps = np.repeat(blocks.scales.astype(np.float32), GROUP, axis=1)
    assert (np.abs(blocks.values() - wanted) <= 0.57 * steps).all()  # 127 steps are 128 rounded to float16 at most


def test_zeros_stay_zeros() -> None:
    assert not to_int8(np.zeros((3, 64), np.float32)).values().any()


def read_back(memory: np.ndarray, blocks: Blocks, row: int, at: int) -> float:
    """One value as linear.h addresses it."""
    int8, affine = blocks.kind == "int8_group", blocks.minima is not None
    weights = 1024 if int8 else 512
    size = weights + (128 if affine else 64)
    group = memory[((row // 32) * (blocks.inputs // 32) + at // 32) * size :][:size]
    column, i = row % 32, at % 32
    if int8:
        number = int(group[(i // 4 * 32 + column) * 4 + i % 4]) - 128
    else:
        byte = int(group[(i // 4 % 4 * 32 + column) * 4 + i % 4])
        number = (byte & 15 if i < 16 else byte >> 4) - (0 if affine else 8)
    scale = np.float32(group[weights:].view(np.float16)[column])
    return number * scale + (np.float32(group[weights + 64 :].view(np.float16)[column]) if affine else 0)


@pytest.mark.parametrize("kind", EXACT)
@needs_native
def test_placed_blocks_lie_where_the_native_code_reads_them(kind: gguf.GGMLQuantizationType) -> None:
    blocks = blocks_from(quantised((40, 64), kind), int(kind))  # 40: the second panel is not full
    memory = np.zeros(2 * library().handle.octavo_panel_bytes(WEIGHTS[blocks.kind], 64), np.uint8)
    place(blocks, memory)
    values = blocks.values()
    for row, at in np.ndindex(40, 64):
        assert read_back(memory, blocks, row, at) == values[row, at]


def test_gate_and_up_take_turns_by_16_rows() -> None:
    gate, up = (to_int8(np.random.default_rng(i).normal(size=(32, 64)).astype(np.float32)) for i in range(2))
    both = joined([gate, up], halves=True).values()
    assert np.array_equal(both[16:32], up.values()[:16])
    assert np.array_equal(both[32:48], gate.values()[16:])


# --- files -----------------------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_architecture_computes_what_its_module_does(architecture: str, tmp_path: Path) -> None:
    """Float32 tensors: names, the permutation of Q and K, Gemma's norms, phi3's fused matrices, windows."""
    module = module_of(architecture)
    write_tiny_gguf(module, architecture, tmp_path / "tiny.gguf")
    model = load_model(str(tmp_path / "tiny.gguf"), dtype="float32", device="cpu")
    assert model.native is not None
    assert model.weights == "float32"
    assert np.abs(logprobs(model) - logprobs_of(module)).max() < 1e-4


@needs_native
@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_1], ids=lambda kind: kind.name)
def test_blocks_give_the_probabilities_of_the_dequantised_weights(
    architecture: str, kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    """Within what rounding the inputs of each matrix to 8 bits costs in two layers of random weights: 1.5 to 3.5 % of
    the standard deviation."""
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(module_of(architecture), architecture, path, kind)
    blocks, floats = load_model(str(path), device="cpu"), load_model(str(path), dtype="float32", device="cpu")
    assert EXACT.get(kind, "int8_group") in blocks.weights
    assert blocks.weight_bytes < floats.weight_bytes / 2.5
    assert distance(logprobs(blocks), logprobs(floats)) < 0.04


@needs_native
def test_parts_of_different_kinds_become_the_widest(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    kinds = {"attn_v": Q.Q8_0, "ffn_up": Q.F32, "token_embd": Q.Q4_0}
    write_tiny_gguf(module_of("llama"), "llama", path, Q.Q4_1, kinds)
    blocks, floats = load_model(str(path), device="cpu"), load_model(str(path), dtype="float32", device="cpu")
    assert set(blocks.weights.split(" + ")) >= {"int4_affine", "int8_group", str(blocks.dtype).removeprefix("torch.")}
    assert distance(logprobs(blocks), logprobs(floats)) < 0.04


@needs_native
def test_a_fully_quantised_format_can_still_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(module_of("llama"), "llama", path, Q.Q8_0)
    assert load_model(str(path), device="cpu", weights="int4").weights == "int4 + int8"
    assert load_model(str(path), device="cpu", dtype="bfloat16").weights == "bfloat16"


@needs_native
def test_rope_factors_divide_the_frequencies(tmp_path: Path) -> None:
    module = module_of("llama")
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    write_tiny_gguf(module, "llama", tmp_path / "tiny.gguf", rope_factors=factors)
    module.model.rotary_emb.inv_freq.div_(torch.from_numpy(factors))
    model = load_model(str(tmp_path / "tiny.gguf"), dtype="float32", device="cpu")
    assert np.abs(logprobs(model) - logprobs_of(module)).max() < 1e-4


@needs_native
def test_rope_factors_of_another_size_are_refused(tmp_path: Path) -> None:
    write_tiny_gguf(module_of("llama"), "llama", tmp_path / "tiny.gguf", rope_factors=np.ones(7, np.float32))
    with pytest.raises(ModelError, match=r"rope_freqs.weight is \(7,\)"):
        load_model(str(tmp_path / "tiny.gguf"), device="cpu")


@needs_native
@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize(("name", "wanted"), [("demo", "int4_affine + int8_group"), ("gemma3-270m", "int8_group + ")])
def test_a_real_file_reads_a_text_as_well_as_in_float32(name: str, wanted: str) -> None:
    """The mean log probability of the text changes by less than 0.02, which is 2 % of the perplexity."""
    blocks, floats = load_model(name, device="cpu"), load_model(name, device="cpu", dtype="float32")
    assert blocks.weights.startswith(wanted)
    assert blocks.tokenizer is not None
    text = (Path(__file__).parents[2] / "benchmarks" / "data" / "kv_quality.txt").read_text()
    ids = blocks.tokenizer.encode(text)[:400]
    assert abs(logprobs(blocks, ids).mean() - logprobs(floats, ids).mean()) < 0.02
