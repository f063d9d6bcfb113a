"""Text to token ids and back, and chat templates: a thin face over a `transformers` tokenizer.

It is made when text is first needed: requests of token ids that want no text do not wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from octavo.models.errors import ModelError
from octavo.models.gguf_file import read_gguf
from octavo.models.gguf_header import GgufHeader
from octavo.models.plain_config import PlainConfig
from octavo.models.plain_tokenizer import PlainTokenizer, plain_tokenizer
from octavo.types import RequestError

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class Tokenizer:
    """`hf` is the transformers tokenizer; the methods are all that Octavo uses of it."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf

    @property
    def hf(self) -> Any:
        return self._hf

    @property
    def backend(self) -> Any:
        """That of the `tokenizers` library; None if there is none."""
        return getattr(self.hf, "backend_tokenizer", None)

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.hf, "chat_template", None))

    @property
    def chat_template(self) -> str:
        """The program that writes conversations, or all of them if there are several; "" if there is none."""
        template = getattr(self.hf, "chat_template", None) or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    def use_chat_template(self, template: str) -> None:
        """Write conversations with this Jinja template from now on."""
        self.hf.chat_template = template

    @property
    def eos_token_id(self) -> int | None:
        token: int | None = self.hf.eos_token_id
        return token

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with the beginning-of-sequence token where the model wants one.

        Raises RequestError for text that UTF-8 cannot write (half of a surrogate pair).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt has half of a surrogate pair ({text[error.start]!r} at {error.start}); it must be text that "
                "UTF-8 can write: remove that character.",
                field="prompt",
            ) from error
        return self._ids(text, add_special_tokens)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.hf.encode(text, add_special_tokens=add_special_tokens))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> list[int]:
        """Token ids of a conversation through the model's chat template, ready for the assistant's turn.

        A message's content is a text or a list of {"type": "text", "text": …} parts. Raises RequestError for a
        conversation that is none or that the template refuses, ModelError if there is no template or it is broken.
        """
        conversation = check_messages(messages)
        if not self.has_chat_template:
            raise ModelError("the model has no chat template; send a plain text prompt instead of messages.")
        try:
            text = self.hf.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **options)
        except Exception as error:  # templates are programs: they raise what they like
            if isinstance(error, ImportError) or type(error).__name__ == "TemplateSyntaxError":
                raise ModelError(f"the model's chat template cannot be run: {first_line(error)}") from error
            raise RequestError(
                f"messages cannot be written with the model's chat template: {first_line(error)}; change the "
                "conversation or send a plain text prompt.",
                field="messages",
            ) from error
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, with no cleaning up of spaces. Incomplete UTF-8 shows as U+FFFD."""
        if (backend := self.backend) is not None:  # five times faster than the transformers wrapper
            return str(backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        text = self.hf.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return str(text)


class LateTokenizer(Tokenizer):
    """A tokenizer that is made at first use; until then only what was read of its files is known. Using it raises
    ModelError if it cannot be made."""

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        eos_token_id: int | None,
        has_chat_template: bool,
        plain: PlainTokenizer | None = None,
    ) -> None:
        """`make`: the transformers tokenizer; `plain`: the way to do without it for everything but chats."""
        self._make, self._plain = make, plain
        self._eos, self._chats = eos_token_id, has_chat_template
        super().__init__(None)

    def use_chat_template(self, template: str) -> None:
        super().use_chat_template(template)
        self._chats = True

    @property
    def hf(self) -> Any:
        if self._hf is None:
            self._hf = self._make()
        return self._hf

    @cached_property
    def _own(self) -> Any:
        """The backend without transformers; None: it takes transformers."""
        if self._plain is None:
            return None
        try:
            return self._plain.backend()
        except Exception as error:  # the tokenizers library raises plain Exception
            raise _unreadable(self._plain.path, error) from error

    @property
    def backend(self) -> Any:
        return self._own if self._own is not None else super().backend

    @property
    def has_chat_template(self) -> bool:
        return self._chats

    @property
    def eos_token_id(self) -> int | None:
        return self._eos

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._own is None or self._plain is None:
            return super()._ids(text, add_special_tokens)
        return list(self._own.encode(text, add_special_tokens=add_special_tokens and self._plain.adds).ids)


def check_messages(messages: object) -> list[dict[str, Any]]:
    """The conversation with every content as one text and the arguments of tool calls as objects, as templates want
    them. An assistant that calls tools need not say anything. Raises RequestError naming the message and its field."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise _bad("messages", messages, 'a list of at least one {"role": …, "content": …}')
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _bad(f"messages[{i}]", message, 'an object with "role" and "content"')
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise _bad(f"messages[{i}].role", role, "a text such as user, assistant or system")
        fields = dict(message)
        if fields.get("tool_calls") is None:
            fields.pop("tool_calls", None)
        elif role == "assistant":
            fields["tool_calls"] = _tool_calls(fields["tool_calls"], f"messages[{i}].tool_calls")
            fields["content"] = fields.get("content") or ""
        checked.append({**fields, "content": _content(fields.get("content"), f"messages[{i}].content")})
    return checked


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Tool calls of an earlier answer, in OpenAI's shape. Templates write arguments as JSON: they want the object."""
    if not isinstance(calls, (list, tuple)) or not calls:
        raise _bad(where, calls, "a list of at least one call")
    checked = []
    for j, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _bad(f"{where}[{j}]", call, 'like {"type": "function", "function": {"name": …, "arguments": …}}')
        arguments = function.get("arguments", "{}")
        try:
            value = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, Mapping):
            raise _bad(f"{where}[{j}].function.arguments", arguments, "a JSON object as text")
        checked.append({**call, "function": {**function, "arguments": dict(value)}})
    return checked


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise _bad(where, content, 'a text or a list of {"type": "text", "text": …} parts')
    texts = []
    for j, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise _bad(f"{where}[{j}]", part, '{"type": "text", "text": …}: only text parts are supported')
        texts.append(text)
    return "".join(texts)


def _bad(where: str, value: object, wanted: str) -> RequestError:
    return RequestError(f"{where} is {shown(value)}; it must be {wanted}.", field="messages")


def tokenizer_from_directory(path: str | Path, config: Any = None) -> Tokenizer | None:
    """The tokenizer saved beside a checkpoint; None if the directory has none. `config`: the model's, already read."""
    path = Path(path)
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((path / name).is_file() for name in names):
        return None
    if isinstance(config, PlainConfig):
        plain = plain_tokenizer(path, config.model_type)
        if plain is not None:
            return LateTokenizer(
                lambda: _from_transformers(path, None),
                eos_token_id=plain.eos_token_id,
                has_chat_template=plain.has_chat_template,
                plain=plain,
            )
        config = None  # transformers reads its own
    return Tokenizer(_from_transformers(path, config))


def _from_transformers(path: Path, config: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), config=config, trust_remote_code=False)
    except Exception as error:  # what the files hold reaches transformers and tokenizers unchecked
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ModelError:
    why = first_line(error).rstrip(".")
    if "trust_remote_code" in str(error):
        why = "it needs code that it brings along (auto_map), which is not run"
    return ModelError(f"the tokenizer in {path} cannot be read: {why}; check its files or download them again.")


def tokenizer_from_gguf(file: GgufHeader) -> Tokenizer:
    """The tokenizer that a GGUF file describes, with its chat template and special tokens; rebuilt at first use."""
    key = "tokenizer.ggml.tokens"
    if key not in file.metadata and key not in file.lengths:
        raise ModelError(f"{file.path} has no tokenizer.ggml.tokens; a file without vocabulary is not usable.")
    return LateTokenizer(
        lambda: _rebuilt(read_gguf(file.path)),
        eos_token_id=file.metadata.get("tokenizer.ggml.eos_token_id"),
        has_chat_template=bool(file.metadata.get("tokenizer.chat_template")),
    )


def _rebuilt(file: GgufHeader) -> Any:
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    prefix = "tokenizer."
    found = {
        group: {name: file.metadata[prefix + key] for key, name in keys.items() if prefix + key in file.metadata}
        for group, keys in GGUF_TOKENIZER_MAPPING.items()
    }
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
    return PreTrainedTokenizerFast(tokenizer_object=backend, **config)


def first_line(error: BaseException) -> str:
    """The first line of an error of another library, to be shown inside one of our sentences.

    A line that only announces the next is followed by it; errors that only Python understands get their name.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    unclear = isinstance(error, (LookupError, TypeError, AttributeError, ArithmeticError))
    return f"{type(error).__name__}: {text}" if unclear else text
