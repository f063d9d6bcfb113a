"""A tokenizer straight from tokenizer.json with the `tokenizers` library, where transformers would do no more.

Importing transformers takes longer than starting a small model. Chat templates stay with transformers, and so does
every tokenizer whose files say more than what is checked here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast")
_OTHER_FILES = ("added_tokens.json", "chat_template.json", "special_tokens_map.json", "additional_chat_templates")
_UNUSUAL = ("add_bos_token", "add_eos_token", "add_prefix_space", "auto_map", "split_special_tokens")
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
# What transformers' class for Qwen 2 puts in the place of the file's own.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PlainTokenizer:
    """adds: whether the post-processor of tokenizer.json may add special tokens."""

    path: Path
    qwen2: bool
    adds: bool
    eos_token_id: int | None
    has_chat_template: bool

    def backend(self) -> Any | None:
        """The `tokenizers` tokenizer; None if transformers has to make it after all. Raises what that library does."""
        from tokenizers import Tokenizer

        backend: Any = Tokenizer.from_file(str(self.path / "tokenizer.json"))
        backend.no_truncation()
        backend.no_padding()
        return backend if not self.qwen2 or _splits_as_qwen2(backend) else None


def plain_tokenizer(path: Path, model_type: str) -> PlainTokenizer | None:
    """The tokenizer of a model directory; None if transformers has to read it. Raises nothing: whatever is wrong with
    the files, transformers finds it, too."""
    try:
        config = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        added = _added_tokens((path / "tokenizer.json").read_text(encoding="utf-8"))
        return _plain(path, config, added) if model_type != "mistral" else None  # those get another regex
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _plain(path: Path, config: dict[str, Any], added: dict[str, dict[str, Any]]) -> PlainTokenizer | None:
    if config.get("tokenizer_class") not in _CLASSES or any((path / name).exists() for name in _OTHER_FILES):
        return None
    template = config.get("chat_template")
    plain = "eos_token" in config and isinstance(template, (str, type(None)))
    if not plain or any(config.get(name) for name in _UNUSUAL):
        return None
    named = [_content(config.get(name)) for name in _NAMED]
    named += [_content(token) for token in _extra(config)]
    if any(token is not None and not added[token]["special"] for token in named):
        return None
    for number, token in config.get("added_tokens_decoder", {}).items():
        own = added[token["content"]]
        if own["id"] != int(number) or any(own[key] != value for key, value in token.items() if key in own):
            return None
    eos = _content(config["eos_token"])
    return PlainTokenizer(
        path=path,
        qwen2=config["tokenizer_class"].startswith("Qwen2"),
        adds="add_bos_token" not in config and "add_eos_token" not in config,
        eos_token_id=None if eos is None else added[eos]["id"],
        has_chat_template=bool(template) or (path / "chat_template.jinja").is_file(),
    )


def _added_tokens(text: str) -> dict[str, dict[str, Any]]:
    """The added tokens of tokenizer.json by content, without parsing its vocabulary."""
    if not text.lstrip().startswith("{"):
        raise ValueError("no object")
    start = text.index("[", text.index('"added_tokens"'))
    tokens, _ = json.JSONDecoder().raw_decode(text, start)
    return {token["content"]: token for token in tokens}


def _extra(config: dict[str, Any]) -> list[Any]:
    extra = [config.get(name) or [] for name in ("additional_special_tokens", "extra_special_tokens")]
    if not all(isinstance(tokens, list) for tokens in extra):
        raise ValueError("named extra tokens")
    return [token for tokens in extra for token in tokens]


def _content(token: Any) -> str | None:
    content = token["content"] if isinstance(token, dict) else token
    if not isinstance(content, (str, type(None))):
        raise ValueError("no text")
    return content


def _splits_as_qwen2(backend: Any) -> bool:
    splitter = json.loads(backend.pre_tokenizer.__getstate__())
    parts = splitter.get("pretokenizers", [])
    pattern = parts[0].get("pattern", {}).get("Regex") if parts else None
    normalizer = json.loads(backend.normalizer.__getstate__()) if backend.normalizer is not None else {}
    return len(parts) == 2 and pattern == _QWEN2 and normalizer.get("type") == "NFC"
