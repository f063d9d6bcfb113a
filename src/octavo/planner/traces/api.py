"""What a trace is: requests in order of arrival, as lengths and prefix identities, never as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from octavo.errors import OctavoError


class TraceError(OctavoError):
    """A trace that cannot be read: which file, which line, which field, why."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request.

    arrival        seconds after the trace's first arrival
    prompt_tokens, output_tokens
    id             as the trace names it, or its row; unique within the trace
    hashes         chained prefix ids of consecutive blocks of `hash_block` tokens, from token 0 on: an id stands for
                   its block and all before it, so equal ids mean equal prefixes. They may cover the answer, too, and
                   the last may stand for a part-filled block. Tokens behind them are nobody else's. () when unknown.
    max_tokens     the limit that the client gave, None when the trace does not know it
    cached_tokens  prompt tokens that the recorded engine served from its cache, None when not recorded
    session        which conversation it belongs to; "" when unknown
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    id: str
    hashes: tuple[int, ...] = ()
    hash_block: int = 0
    max_tokens: int | None = None
    cached_tokens: int | None = None
    session: str = ""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that was left out, and why."""

    line: int
    reason: str


class Trace(Protocol):
    """Requests that can be read more than once; streaming, so that only live requests need memory."""

    @property
    def name(self) -> str:
        """What it is, for reports: file and format, or the distribution it was drawn from."""

    @property
    def bad_lines(self) -> tuple[BadLine, ...]:
        """Lines left out in the last complete reading (at most the first 100), in order."""

    @property
    def bad_count(self) -> int:
        """How many lines were left out, those beyond the first 100, too."""

    @property
    def timed(self) -> bool:
        """Whether arrivals are known or were drawn; if not, all requests arrive at 0 and only a closed loop makes
        sense."""

    def __iter__(self) -> Iterator[TraceRequest]:
        """From the first request, in order of arrival (ties in file order)."""
