"""Log probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from octavo.runner.api import TokenLogprobs
from octavo.text import TextCodec

LEAST = -9999.0  # stands for minus infinity, which JSON cannot say


class TokenTexts:
    """The text of single tokens, remembered: the same few make up most answers."""

    def __init__(self, codec: TextCodec | None) -> None:
        self._codec = codec
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = (
                f"token_id:{token}" if self._codec is None else self._codec.decode([token], skip_special_tokens=False)
            )
        return self._known[token]


def for_completion(
    tokens: Seq[int], entries: Seq[TokenLogprobs | None], texts: TokenTexts, offset: int
) -> dict[str, Any]:
    """`logprobs` of a completion choice. entries[i] belongs to tokens[i]; None: nothing comes before it. `offset`: of
    the first token's text in the choice's text."""
    words = [texts[token] for token in tokens]
    offsets = []
    for word in words:
        offsets.append(offset)
        offset += len(word)
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
        top = [_chat_token(texts[token], logprob) for token, logprob in entry.top]
        content.append({**_chat_token(texts[entry.token], entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
