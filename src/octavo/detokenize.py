"""Token ids to text as they arrive, and stop strings that end it.

Both work on whole characters: a character whose bytes are not all there is held back, and so is text that may become
a stop string. Nothing is ever sent that would have to be taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol

_BROKEN = "\ufffd"
_MOST_PENDING = 3  # tokens that an unfinished UTF-8 character (4 bytes) can consist of
_MOST_SILENT = 64  # tokens without any text that are kept in case later ones need them
_CONTEXT = 6  # prompt tokens that tell a sentencepiece decoder whether a space begins the text


class Decoder(Protocol):
    """What is needed of a tokenizer (`octavo.models.tokenizer.Tokenizer` has it)."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Incremental detokenisation of one sequence.

    The pieces that `feed` and `flush` return, joined, are the text of all tokens, decoded after the prompt (a broken
    byte may show as another number of U+FFFD than in one decoding of everything). Works on byte-level BPE,
    byte-fallback and sentencepiece vocabularies, because it only compares decoded texts: those of the tokens before
    (context) with and without the pending ones.
    """

    def __init__(self, tokenizer: Decoder, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context = list(prompt[-_CONTEXT:])
        self._before = self._decode(self._context)
        self._pending: list[int] = []
        self._waiting = ""  # what the pending tokens show: nothing, or an unfinished character
        self._void: dict[int, bool] = {}

    def feed(self, ids: Iterable[int]) -> str:
        """Add tokens; returns the text that is complete now, perhaps none."""
        out = []
        for token in ids:
            self._pending.append(token)
            text = self._text(self._pending)
            if text == self._waiting and self._is_void(token):
                self._pending.pop()
                continue
            if not text.endswith(_BROKEN):
                out.append(self._release(len(self._pending), text))
                if len(self._pending) > _MOST_SILENT:
                    del self._pending[0]
            elif len(self._pending) > _MOST_PENDING:  # no character is that long: the first of them is broken
                out.append(self._release(1, self._text(self._pending[:1])))
                text = self._text(self._pending)
            self._waiting = text if self._pending else ""
        return "".join(out)

    def flush(self) -> str:
        """The end: whatever is left, an unfinished character as U+FFFD."""
        return self._release(len(self._pending), self._text(self._pending))

    def twin(self) -> Detokenizer:
        """One that goes on from here on its own."""
        other = copy(self)
        other._pending = list(self._pending)
        return other

    def _is_void(self, token: int) -> bool:
        """Whether the decoder passes over the token (a skipped special, an id beyond the vocabulary). A space that only
        begins a text shows when it is repeated."""
        if token not in self._void:
            self._void[token] = not self._decode([token] * 4)
        return self._void[token]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def _text(self, ids: list[int]) -> str:
        """What `ids` add to the context."""
        text = self._decode(self._context + ids)
        if text.startswith(self._before):
            return text[len(self._before) :]
        return self._decode(ids)  # a broken byte spoils the whole run of bytes before it (byte-fallback decoders)

    def _release(self, count: int, text: str) -> str:
        """Return the text of the first `count` pending tokens; they become the context if they show anything."""
        if text:
            self._context = self._pending[:count]
            self._before = self._decode(self._context)
            del self._pending[:count]
        elif count < len(self._pending):
            del self._pending[:count]
        return text


@dataclass(frozen=True, slots=True)
class Stopped:
    """What `StopChecker.feed` returns: text that is safe to show, and the stop string that ended it, if any."""

    text: str
    match: str | None = None


class StopChecker:
    """Finds stop strings in a stream of text, whatever the borders of its pieces.

    The stop string whose last character comes first ends the text (so of two stops of which one begins the other, the
    shorter); of several that end there, the longest, because it began first. The result therefore does not depend on
    how the text is cut into pieces. Text is held back only while it is the beginning of a stop string: at most the
    length of the longest one minus 1.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the stop string itself is part of the text."""
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._include = include
        self._held = ""

    @property
    def held(self) -> str:
        """Text that waits for more."""
        return self._held

    def feed(self, text: str) -> Stopped:
        """Add text; returns what is safe. After a match nothing more may be fed."""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return Stopped(text[: end if self._include else start], stop)
        hold = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return Stopped(text[: len(text) - hold])

    def flush(self) -> str:
        """The end of the stream: the text that was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without being all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
