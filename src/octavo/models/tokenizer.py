"""Text to token ids and back, and chat templates: a thin face over a `transformers` tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.models.errors import ModelError
from octavo.models.gguf_header import GgufHeader

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """`hf` is the transformers tokenizer; the methods are all that Octavo uses of it."""

    hf: Any

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.hf, "chat_template", None))

    @property
    def eos_token_id(self) -> int | None:
        token: int | None = self.hf.eos_token_id
        return token

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with the beginning-of-sequence token where the model wants one."""
        return list(self.hf.encode(text, add_special_tokens=add_special_tokens))

    def encode_chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> list[int]:
        """Token ids of a conversation through the model's chat template, ready for the assistant's turn.

        Raises ModelError if the model has no chat template.
        """
        if not self.has_chat_template:
            raise ModelError("the model has no chat template; send a plain text prompt instead of messages.")
        text = self.hf.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, with no cleaning up of spaces. Incomplete UTF-8 shows as U+FFFD."""
        backend = getattr(self.hf, "backend_tokenizer", None)
        if backend is not None:  # five times faster than the transformers wrapper
            return str(backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        text = self.hf.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return str(text)


def tokenizer_from_directory(path: str | Path) -> Tokenizer | None:
    """The tokenizer saved beside a checkpoint; None if the directory has none."""
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((Path(path) / name).is_file() for name in names):
        return None
    try:
        return Tokenizer(AutoTokenizer.from_pretrained(str(path)))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the tokenizer in {path} cannot be read: {first_line(error)}") from error


def tokenizer_from_gguf(file: GgufHeader) -> Tokenizer:
    """Rebuild the tokenizer that a GGUF file describes, with its chat template and special tokens."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    prefix = "tokenizer."
    found = {
        group: {name: file.metadata[prefix + key] for key, name in keys.items() if prefix + key in file.metadata}
        for group, keys in GGUF_TOKENIZER_MAPPING.items()
    }
    if "tokens" not in found["tokenizer"]:
        raise ModelError(f"{file.path} has no tokenizer.ggml.tokens; a file without vocabulary is not usable.")
    try:
        backend, _ = convert_gguf_tokenizer(file.architecture, found["tokenizer"])
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelError(f"the tokenizer in {file.path} cannot be rebuilt: {first_line(error)}") from error
    config = dict(found["tokenizer_config"])
    if found["tokenizer"].get("tokenizer_type") == "llama":
        config.setdefault("add_bos_token", True)  # llama.cpp's rule for sentencepiece files without the flag
    tokens = found["tokenizer"]["tokens"]
    for name, key in _SPECIAL.items():
        token_id = file.metadata.get(f"tokenizer.ggml.{key}")
        config[name] = None if token_id is None else tokens[token_id]
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **config))


def first_line(error: BaseException) -> str:
    """The first line of an error of another library, to be shown inside one of our sentences."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
