"""Token ids to text as they arrive, and stop strings that end it.

Both work on whole characters: a character whose bytes are not all there is held back, and so is text that may become
a stop string. Nothing is ever sent that would have to be taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

_BROKEN = "\ufffd"
_MOST_BROKEN = 3  # replacement characters that an unfinished UTF-8 character can show as (byte-fallback tokenizers)
_CONTEXT = 6  # prompt tokens that tell a sentencepiece decoder whether a space begins the text


class Decoder(Protocol):
    """What is needed of a tokenizer (`octavo.models.tokenizer.Tokenizer` has it)."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Incremental detokenisation of one sequence.

    The pieces that `feed` and `flush` return, joined, are the text of all tokens, decoded after the prompt. Works on
    byte-level BPE, byte-fallback and sentencepiece vocabularies, because it only compares decoded texts: those of the
    last few tokens with and without the new ones.
    """

    def __init__(self, tokenizer: Decoder, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt[-_CONTEXT:])
        self._read = len(self._ids)  # ids whose text has been returned in full
        self._sent = 0  # characters of the rest that have been returned already
        self._before = self._decode(0, self._read)

    def feed(self, ids: Iterable[int]) -> str:
        """Add tokens; returns the text that is complete now, perhaps none."""
        out = []
        for token in ids:
            self._ids.append(token)
            out.append(self._advance(final=False))
        return "".join(out)

    def flush(self) -> str:
        """The end: whatever is left, unfinished characters as U+FFFD."""
        return self._advance(final=True)

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip)

    def _advance(self, final: bool) -> str:
        text = self._decode(0, len(self._ids))[len(self._before) :]
        broken = 0 if final else _trailing_broken(text)
        ready = text[self._sent : len(text) - broken]
        if broken:
            self._sent += len(ready)
        elif text:
            self._restart()
        return ready

    def _restart(self) -> None:
        """All text is out: keep the tokens since the last restart as context and drop those before."""
        del self._ids[: self._read]
        self._read, self._sent = len(self._ids), 0
        self._before = self._decode(0, self._read)


def _trailing_broken(text: str) -> int:
    """Replacement characters at the end of `text` that further bytes may still turn into a character."""
    return min(len(text) - len(text.rstrip(_BROKEN)), _MOST_BROKEN)


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
