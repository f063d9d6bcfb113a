"""Every way a model can fail to load is one clear sentence; a saved model loads back as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from driver import Driver, reference
from tiny import TINY, tiny_module

from octavo.errors import OctavoError
from octavo.models.loader import load_model
from octavo.models.shapes import max_positions
from octavo.types import SamplingParams


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_module("llama").save_pretrained(path)
    return path


def test_directory_with_safetensors(saved: Path) -> None:
    model = load_model(str(saved), device="cpu")
    assert (model.dtype, model.tokenizer, model.max_positions) == (torch.float32, None, 512)
    assert (model.vocab_size, model.eos_ids, model.has_chat_template) == (199, frozenset({2}), False)
    wanted = reference(tiny_module("llama"), [5, 6, 7], 6)
    driver = Driver(model, 4, 32)
    assert driver.generate([driver.new(0, [5, 6, 7], SamplingParams(temperature=0.0))], 6) == [wanted]


def test_weight_bytes_count_shared_storage_once(saved: Path) -> None:
    model = load_model(str(saved), dtype="bfloat16", device="cpu")
    assert model.dtype == torch.bfloat16
    parameters = sum(p.numel() * 2 for p in model.module.parameters())
    assert parameters <= model.weight_bytes <= parameters + 4096  # rotary frequencies are buffers


def error(name: str, **options: str) -> str:
    with pytest.raises(OctavoError) as caught:
        load_model(name, **{"device": "cpu", **options})
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_bad_names_and_dtypes(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "must be auto, float32, bfloat16, float16" in error(str(saved), dtype="fp32")
    assert "device is 'tpu'" in error(str(saved), device="tpu")
    assert "does not exist" in error("no-such-model")
    assert "does not exist" in error(str(tmp_path / "gone.gguf"))
    assert "has no config.json" in error(str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "hub cannot be reached" in error("octavo-nobody/no-such-model")


def test_broken_checkpoints(saved: Path, tmp_path: Path) -> None:
    import shutil

    whole = (saved / "model.safetensors").read_bytes()
    for name, data in (("cut", whole[: len(whole) // 2]), ("noise", b"\0" * 100)):
        broken = tmp_path / name
        shutil.copytree(saved, broken)
        (broken / "model.safetensors").write_bytes(data)
        assert "cannot be loaded" in error(str(broken))
    empty = tmp_path / "empty"
    shutil.copytree(saved, empty)
    (empty / "model.safetensors").unlink()
    assert "no *.safetensors" in error(str(empty))
    other = tmp_path / "other"
    shutil.copytree(saved, other)
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    assert "lacks 9 weights" in error(str(other))
    (other / "config.json").write_text("{not json")
    assert "cannot be loaded" in error(str(other))


def test_unsupported_architectures(tmp_path: Path) -> None:
    import transformers as tf

    for config, word in (
        (tf.T5Config(vocab_size=50, d_model=16, num_layers=1), "encoder-decoder"),
        (tf.MptConfig(vocab_size=50, d_model=16, n_heads=2, n_layers=1), "ALiBi"),
    ):
        path = tmp_path / type(config).__name__
        config.save_pretrained(path)
        (path / "model.safetensors").write_bytes(b"\0" * 16)
        assert word in error(str(path))


def test_bad_gguf_files(tmp_path: Path) -> None:
    for name, data, word in (
        ("empty.gguf", b"", "not a GGUF file"),
        ("text.gguf", b"hello, this is not a model at all", "not a GGUF file"),
        ("old.gguf", b"GGUF" + (1).to_bytes(4, "little") + bytes(40), "version 1"),
        ("short.gguf", b"GGUF" + (3).to_bytes(4, "little") + (5).to_bytes(8, "little") * 2 + bytes(3), "truncated"),
    ):
        (tmp_path / name).write_bytes(data)
        assert word in error(str(tmp_path / name))


@pytest.mark.real_model
def test_truncated_real_gguf(tmp_path: Path) -> None:
    from octavo.models.demo import packaged_model

    whole = packaged_model("demo")
    assert whole is not None
    data = whole.read_bytes()
    for size in (1000, 1_000_000, len(data) - 1):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        assert "truncated GGUF file" in error(str(tmp_path / "cut.gguf"))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_gguf_written_from_a_tiny_model_loads_back(architecture: str, tmp_path: Path) -> None:
    from gguf_writing import write_tiny_gguf

    module = tiny_module(architecture)
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(module, architecture, path)
    model = load_model(str(path), dtype="float32", device="cpu")
    with torch.inference_mode():
        ids = torch.tensor([[5, 6, 7, 8]])
        assert torch.allclose(model.module(ids).logits, module(ids).logits, atol=1e-5)


def test_rope_that_depends_on_the_batch_is_held_to_its_original_length() -> None:
    config = TINY["llama"]()
    assert max_positions(config) == 512
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 128,
    }
    assert max_positions(config) == 128
