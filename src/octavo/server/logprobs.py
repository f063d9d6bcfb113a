"""Log probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from octavo.runner.api import TokenLogprobs
from octavo.text import TextCodec

LEAST = -9999.0  # stands for minus infinity, which JSON cannot say


class TokenTexts:
    """The text of single tokens, remembered: the same few make up most answers. A part of a character has none: it is
    written as `bytes:\\xf0\\x9f`, as OpenAI does."""

    def __init__(self, codec: TextCodec | None) -> None:
        self._codec = codec
        self._known: dict[int, str] = {}
        self._parts: dict[int, bytes] = {}  # of tokens that are no whole characters

    def __getitem__(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._text(token)
        return self._known[token]

    def bytes(self, token: int) -> list[int]:
        text = self[token]
        return list(self._parts.get(token) or text.encode())

    def _text(self, token: int) -> str:
        if self._codec is None:
            return f"token_id:{token}"
        text = self._codec.decode([token], skip_special_tokens=False)
        if BROKEN not in text or (part := _bytes_of(self._codec, token)) is None:
            return text
        self._parts[token] = part
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in part)


def _bytes_of(codec: TextCodec, token: int) -> bytes | None:
    """What a token stands for in vocabularies of bytes: byte-level ones, and those with tokens like <0xF0>."""
    backend = getattr(codec, "backend", None)
    word = None if backend is None else backend.id_to_token(token)
    if word is None:
        return None
    if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        return bytes.fromhex(word[3:5])
    return bytes(_BYTES[letter] for letter in word) if all(letter in _BYTES for letter in word) else None


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level vocabularies (GPT-2's) write for each byte: itself if it can be seen, else one from
    256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BROKEN = "\ufffd"
_BYTES = _byte_letters()


def for_completion(
    tokens: Seq[int], entries: Seq[TokenLogprobs | None], texts: TokenTexts, offset: int
) -> dict[str, Any]:
    """`logprobs` of a completion choice. entries[i] belongs to tokens[i]; None: nothing comes before it. `offset`: of
    the first token's text in the choice's text."""
    words = [texts[token] for token in tokens]
    offsets, part = [], b""
    for token, word in zip(tokens, words, strict=True):
        offsets.append(offset)
        if not word.startswith("bytes:"):
            offset, part = offset + len(word), b""
            continue
        part += bytes(texts.bytes(token))
        if BROKEN not in (whole := part.decode(errors="replace")):  # its last byte has come
            offset, part = offset + len(whole), b""
    return {
        "tokens": words,
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [None if entry is None else _top(entry, texts) for entry in entries],
        "text_offset": offsets,
    }


def _top(entry: TokenLogprobs, texts: TokenTexts) -> dict[str, float]:
    """Alternatives by their text; of several tokens with the same text the likeliest. The token itself is one."""
    top: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token, entry.logprob)):
        top.setdefault(texts[token], _finite(logprob))
    return top


def for_chat(entries: Seq[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    content = []
    for entry in entries:
        top = [_chat_token(token, logprob, texts) for token, logprob in entry.top]
        content.append({**_chat_token(entry.token, entry.logprob, texts), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(token: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts[token], "logprob": _finite(logprob), "bytes": texts.bytes(token)}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
