"""Every way a model can fail to load is one clear sentence; a saved model loads back as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from driver import Driver, reference
from tiny import TINY, tiny_module

from octavo.errors import OctavoError
from octavo.kv.groups import page_layout
from octavo.models.errors import ModelError
from octavo.models.loader import load_model, loaded
from octavo.models.shapes import max_positions, position_limit
from octavo.models.tokenizer import Tokenizer
from octavo.native import calls
from octavo.runner.torch_runner import TorchRunner
from octavo.types import RequestError, SamplingParams


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
    assert "lacks 9 weights" in error(str(other), implementation="transformers")
    if calls.kernels() is not None:
        assert "has no tensor model.layers.3.self_attn.q_proj.weight" in error(str(other))
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
    model = load_model(str(path), dtype="float32", device="cpu", implementation="transformers")
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
    assert "longrope" in position_limit(config)[1]
    assert "original length of 128" in position_limit(config)[1]
    assert position_limit(TINY["llama"]()) == (512, "")


@pytest.fixture
def variant(saved: Path, tmp_path: Path) -> Callable[..., str]:
    """The saved model with other config values or files; returns its path."""

    def make(config: dict[str, object] | None = None, /, *, mark: str = "", **files: str) -> str:
        path = tmp_path / f"variant{len(list(tmp_path.iterdir()))}"
        shutil.copytree(saved, path)
        merged = json.loads((path / "config.json").read_text()) | (config or {})
        (path / "config.json").write_text(mark + json.dumps(merged), encoding="utf-8")
        for name, text in files.items():
            (path / f"{name}.json").write_text(text)
        return str(path)

    return make


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"num_attention_heads": 5}, "not a multiple of the number of attention heads (5)"),
        ({"num_key_value_heads": 3}, "other sizes than config.json says"),
        ({"vocab_size": "many"}, "Field 'vocab_size' expected int"),
        ({"head_dim": 0}, "ZeroDivisionError"),
        ({"hidden_act": "zzz"}, "KeyError: 'zzz'"),
        ({"dtype": "float99"}, "float99"),
        ({"text_config": [1]}, "cannot be loaded"),
        ({"quantization_config": [1]}, "cannot be loaded"),
        ({"num_hidden_layers": 10**12}, "names 1000000000000 layers; at most 10000"),
        ({"model_type": "zzz"}, "model_type is 'zzz'"),
        ({"model_type": [1]}, "model_type is [1]"),
    ],
)
def test_a_config_that_transformers_cannot_use(
    variant: Callable[..., str], config: dict[str, object], word: str
) -> None:
    assert word in error(variant(config), implementation="transformers")


@pytest.mark.skipif(calls.kernels() is None, reason="liboctavo.so was not built or is switched off")
@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"num_attention_heads": 5}, "not a multiple of the number of attention heads (5)"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"vocab_size": 198}, "has 199 rows, more than the config says"),
        ({"intermediate_size": 80}, "64 rows; the config says 160"),
    ],
)
def test_a_config_that_the_native_code_cannot_use(
    variant: Callable[..., str], config: dict[str, object], word: str
) -> None:
    assert word in error(variant(config))


def test_loading_says_where_the_time_went(saved: Path) -> None:
    model = load_model(str(saved), device="cpu")
    assert {"config", "finding the files"} < set(model.load_seconds)
    assert all(seconds >= 0 for seconds in model.load_seconds.values())


@pytest.mark.parametrize(
    ("file", "text", "word"),
    [
        ("generation_config", "[]", "holds a JSON list"),
        ("generation_config", "{oops", "no UTF-8 JSON"),
        ("generation_config", "\ufeff{}", "byte order mark"),
        ("generation_config", '{"eos_token_id": "x"}', "eos_token_id is 'x'"),
        ("tokenizer", "[]", "the tokenizer in"),
        ("tokenizer", "{", "the tokenizer in"),
        ("tokenizer_config", "[]", "the tokenizer in"),
        ("config", "[]", "holds a JSON list"),
        ("config", "[" * 100_000, "recursion"),
    ],
)
def test_a_file_that_transformers_cannot_use(variant: Callable[..., str], file: str, text: str, word: str) -> None:
    assert word in error(variant(**{file: text}))


def test_a_byte_order_mark_before_the_config_is_allowed(variant: Callable[..., str]) -> None:
    model = load_model(variant(mark="\ufeff"), device="cpu")
    assert model.eos_ids == frozenset({2})
    assert "variant" in model.config._name_or_path


def test_code_that_comes_with_a_model_is_neither_run_nor_asked_about(
    variant: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("a question on the terminal")

    monkeypatch.setattr("builtins.input", ask)
    code = {"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    assert "(auto_map) is not run" in error(variant({**code, "model_type": "zzz"}))
    own = json.dumps({"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "tokenizer_class": "OwnTokenizer"})
    assert "(auto_map), which is not run" in error(variant(tokenizer_config=own))


def test_the_remedy_fits_the_cause(variant: Callable[..., str]) -> None:
    gptq = error(variant({"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    assert "quant_method is 'gptq'" in gptq
    assert ".gguf" in gptq
    assert "rotary" not in gptq
    chunked = error(variant({"layer_types": ["chunked_attention"] * 3}))
    assert "layers are all of these kinds" in chunked
    assert "rotary" not in chunked


def test_a_name_that_is_too_long() -> None:
    assert "does not exist" in error("x" * 5000)
    assert "does not exist" in error("x" * 5000 + ".gguf")


def test_attention_that_bypasses_the_interface_is_refused_when_the_runner_is_built() -> None:
    """DiffLlama loads, names its layers as usual, and computes its attention by itself."""
    import transformers as tf
    from tiny import BASE

    module = tf.AutoModelForCausalLM.from_config(tf.DiffLlamaConfig(**BASE))
    model = loaded("odd", module, None, torch.device("cpu"))
    with pytest.raises(ModelError, match=r"odd: in DiffLlamaForCausalLM the layers \[0, 1, 2\] do not call"):
        TorchRunner(model, page_layout(model.layers, 4), 8)


def test_a_model_that_fails_on_its_first_token_is_refused_when_the_runner_is_built() -> None:
    module = tiny_module("llama")
    module.model.norm.forward = lambda hidden: hidden.no_such_thing
    model = loaded("odd", module, None, torch.device("cpu"))
    with pytest.raises(ModelError, match=r"odd: LlamaForCausalLM fails on its first token .AttributeError"):
        TorchRunner(model, page_layout(model.layers, 4), 8)


def test_the_check_of_the_runner_leaves_nothing_behind() -> None:
    model = loaded("llama", tiny_module("llama"), None, torch.device("cpu"))
    runner = TorchRunner(model, page_layout(model.layers, 4), 8)
    assert not runner.store.buffer.any()


# --- chat ------------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('no such role here') }}"
    "{% endif %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
)


@pytest.fixture(scope="module")
def chatty() -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["?", "user", "assistant", "hello", "there"])}
    backend = Backend(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", chat_template=TEMPLATE))


def test_text_parts_are_joined(chatty: Tokenizer) -> None:
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
    assert chatty.encode_chat([{"role": "user", "content": parts}]) == [1, 3, 4]
    assert chatty.encode_chat([{"role": "user", "content": "hello there"}]) == [1, 3, 4]


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ("hello", "messages is 'hello'; it must be a list"),
        ([], "messages is []"),
        (["hello"], "messages[0] is 'hello'"),
        ([{"role": "user"}], "messages[0].content is None; it must be a text or a list"),
        ([{"content": "hello"}], "messages[0].role is None"),
        ([{"role": "user", "content": 5}], "messages[0].content is 5"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0] is"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0] is"),
        ([{"role": "wizard", "content": "hello"}], "no such role here"),
        ([{"role": "user", "content": "\ud800"}], "half of a surrogate pair"),
    ],
)
def test_a_conversation_that_is_none(chatty: Tokenizer, messages: object, word: str) -> None:
    with pytest.raises(RequestError) as caught:
        chatty.encode_chat(messages)  # type: ignore[arg-type]
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_chat_template(chatty: Tokenizer) -> None:
    broken = Tokenizer(type(chatty.hf)(tokenizer_object=chatty.hf.backend_tokenizer, chat_template="{% for"))
    with pytest.raises(ModelError, match="chat template cannot be run"):
        broken.encode_chat([{"role": "user", "content": "hello"}])


def test_a_prompt_with_half_a_surrogate_pair(chatty: Tokenizer) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        chatty.encode("hello \udc80")
