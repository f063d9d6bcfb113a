"""Configs and tokenizers that are read without transformers are what transformers makes of the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as tf
from gguf_writing import write_tiny_gguf
from tiny import BASE, TINY, tiny_module

from octavo.models.decoder import DecoderSpec, NotNative, decoder_spec
from octavo.models.errors import ModelError
from octavo.models.gguf_file import read_gguf
from octavo.models.gguf_header import read_header
from octavo.models.gguf_model import gguf_config
from octavo.models.gguf_plain import plain_gguf_config
from octavo.models.loader import eos_ids
from octavo.models.plain_config import FAMILIES, plain_config
from octavo.models.plain_tokenizer import plain_tokenizer
from octavo.models.shapes import layer_shapes, position_limit
from octavo.models.tokenizer import Tokenizer, tokenizer_from_directory

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
CONFIGS = {
    **{name: TINY[name] for name in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")},
    "llama3": lambda: tf.LlamaConfig(**BASE | {"rope_parameters": LLAMA3}),
    "linear": lambda: tf.LlamaConfig(
        **BASE | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}
    ),
    "two-ends": lambda: tf.LlamaConfig(**BASE | {"eos_token_id": [2, 5], "tie_word_embeddings": True}),
}


def described(config: object) -> tuple[object, ...]:
    """All that Octavo takes from a config."""
    layers, shared = layer_shapes(config, torch.bfloat16)
    try:
        spec = shown(decoder_spec(config, layers, shared, torch.bfloat16))
    except NotNative as reason:
        spec = str(reason)
    vocabulary = config.get_text_config().vocab_size  # type: ignore[attr-defined]
    return spec, layers, shared, position_limit(config), eos_ids(None, config, None), vocabulary


def shown(spec: DecoderSpec) -> str:
    return str([spec, [list(frequencies) for frequencies in spec.frequencies]])


def saved(config: object, path: Path) -> dict[str, object]:
    config.save_pretrained(path)  # type: ignore[attr-defined]
    return json.loads((path / "config.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_without_transformers_is_the_same(name: str, tmp_path: Path) -> None:
    plain = plain_config(saved(CONFIGS[name](), tmp_path))
    assert plain is not None
    assert described(plain) == described(tf.AutoConfig.from_pretrained(tmp_path))


def test_old_rope_fields_are_understood(tmp_path: Path) -> None:
    data = saved(tf.LlamaConfig(**BASE), tmp_path)
    del data["rope_parameters"]
    old = data | {"rope_theta": LLAMA3["rope_theta"], "rope_scaling": LLAMA3 | {"rope_theta": 5e5}}
    (tmp_path / "config.json").write_text(json.dumps(old))
    plain = plain_config(old)
    assert plain is not None
    assert described(plain) == described(tf.AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "olmo"},
        {"hidden_size": "48"},
        {"num_hidden_layers": True},
        {"num_attention_heads": 5},
        {"rms_norm_eps": float("nan")},
        {"hidden_act": "zzz"},
        {"dtype": "float99"},
        {"head_dim": 0},
        {"text_config": {}, "auto_map": {"AutoConfig": "own"}},
        {"quantization_config": {"quant_method": "gptq"}},
        {"layer_types": ["chunked_attention"] * 3},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
        {"eos_token_id": ...},
        {"tie_word_embeddings": ...},
        {"num_key_value_heads": ...},
    ],
    ids=str,
)
def test_what_is_not_plain_is_left_to_transformers(change: dict[str, object], tmp_path: Path) -> None:
    data = saved(TINY["llama"](), tmp_path) | change
    assert plain_config({name: value for name, value in data.items() if value is not ...}) is None


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_a_gguf_config_without_transformers_is_the_same(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    config = CONFIGS[architecture]()
    if architecture == "qwen3":
        config.head_dim = 128  # transformers takes no other from a file
    write_tiny_gguf(tf.AutoModelForCausalLM.from_config(config), architecture, path)
    plain = plain_gguf_config(read_header(path))
    assert plain is not None
    assert described(plain) == described(gguf_config(read_gguf(path)))
    assert architecture.replace("gemma3", "gemma3_text") in FAMILIES


# --- tokenizers ------------------------------------------------------------------------------------------------------

TEXTS = ["", "abc ab", " Grüße, 世界! 12345\n\n\tx", "<|end|>ab<|end|>", "don't <|other|> 🙂"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model directory with a byte-level tokenizer."""
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate([*letters, "ab"])}, [("a", "b")]))
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("<|other|>")])
    tiny_module("llama").save_pretrained(tmp_path)
    tf.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", chat_template="{{ messages[0].content }}"
    ).save_pretrained(tmp_path)
    return tmp_path


def late(path: Path) -> Tokenizer:
    config = plain_config(json.loads((path / "config.json").read_text()))
    assert config is not None
    found = tokenizer_from_directory(path, config)
    assert found is not None
    return found


def test_a_tokenizer_without_transformers_is_the_same(directory: Path) -> None:
    assert plain_tokenizer(directory, "llama") is not None
    own, full = late(directory), Tokenizer(tf.AutoTokenizer.from_pretrained(directory))
    assert (own.eos_token_id, own.has_chat_template) == (full.eos_token_id, True)
    for text in TEXTS:
        ids = own.encode(text)
        assert ids == full.encode(text)
        assert own.encode(text, add_special_tokens=False) == full.encode(text, add_special_tokens=False)
        for skip in (False, True):
            assert own.decode(ids, skip_special_tokens=skip) == full.decode(ids, skip_special_tokens=skip)
    messages = [{"role": "user", "content": "ab <|end|>"}]
    assert own.encode_chat(messages) == full.encode_chat(messages)


@pytest.mark.parametrize(
    "change",
    [
        {"add_bos_token": True},
        {"tokenizer_class": "LlamaTokenizer"},
        {"bos_token": "<|unknown|>"},
        {"eos_token": "ab"},
        {"eos_token": 5},
        {"added_tokens_decoder": {"9": {"content": "<|end|>"}}},
        {"extra_special_tokens": {"image_token": "<|end|>"}},
        {"chat_template": [{"name": "default", "template": ""}]},
    ],
    ids=str,
)
def test_a_tokenizer_with_rules_of_its_own_is_left_to_transformers(directory: Path, change: dict[str, object]) -> None:
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert plain_tokenizer(directory, "llama") is None


def test_a_broken_tokenizer_is_one_sentence_at_first_use(directory: Path) -> None:
    file = directory / "tokenizer.json"
    file.write_text(file.read_text().replace('"type": "BPE"', '"type": "no such type"'))
    tokenizer = late(directory)
    assert tokenizer.eos_token_id is not None
    with pytest.raises(ModelError, match=r"the tokenizer in .* cannot be read"):
        tokenizer.encode("ab")
    with pytest.raises(ModelError, match=r"the tokenizer in .* cannot be read"):
        tokenizer.decode([1])
