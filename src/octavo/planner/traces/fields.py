"""Checks of single fields of a trace line; each says in a sentence why a line cannot be used."""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, date, datetime
from reprlib import repr as shown
from typing import Any, Literal

MOST_TOKENS = 10**9  # of one prompt or answer: anything above is a slip, and would be allocated
MOST_SECONDS = 1e15
Rounding = Literal["ceil", "floor", "either"]


class FieldError(ValueError):
    """Why a line cannot be used: field, value, limit."""


def is_text(text: str) -> bool:
    """Whether it has no half of a surrogate pair: no UTF-8 can write such a character."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_object(line: str) -> dict[str, Any]:
    """The JSON object of a line. Raises FieldError."""
    if not is_text(line):
        raise FieldError("not UTF-8 text; save the file as UTF-8.")
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise FieldError(f"not JSON ({error.msg} at column {error.colno}); correct it.") from error
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
        raise FieldError(f"the JSON cannot be read, {why}; correct it.") from error
    if not isinstance(record, dict):
        raise FieldError(f"a JSON object is wanted, not {shown(record)}.")
    return record


def child(record: dict[str, Any], name: str) -> dict[str, Any]:
    """The object at `name`. Raises FieldError where it is none."""
    value = record.get(name)
    if not isinstance(value, dict):
        raise FieldError(f"{name} is {shown(value)}; it must be a JSON object.")
    return value


def tokens(value: Any, name: str) -> int:
    """A count of tokens from JSON: whole, from 1 to MOST_TOKENS. Raises FieldError."""
    if type(value) is not int or value < 1:
        raise FieldError(f"{name} is {shown(value)}; it must be a whole number of at least 1.")
    if value > MOST_TOKENS:
        raise FieldError(f"{name} is {shown(value)}; it must be at most {MOST_TOKENS} tokens.")
    return value


def some(value: Any, name: str) -> int | None:
    """A count that may be absent (None) or 0. Raises FieldError."""
    return value if value is None or (value == 0 and type(value) is int) else tokens(value, name)


def cell_tokens(cell: str, name: str) -> int:
    """A count of tokens from a CSV cell; zeros may stand behind a point. Raises FieldError."""
    if cell.isdigit() and cell.isascii() and len(cell) < 10 and (value := int(cell)):
        return value
    text = cell.strip()
    if not text:
        raise FieldError(f"{name} is missing.")
    if re.fullmatch(r"[+-]?\d{1,4000}(\.0*)?", text, re.ASCII):
        return tokens(int(text.partition(".")[0]), name)
    raise FieldError(f"{name} is {shown(text)}; it must be a whole number of at least 1.")


def seconds(value: Any, name: str, *, per_second: float = 1.0) -> float:
    """A time from JSON in units of which a second has `per_second`, from 0. Raises FieldError."""
    if type(value) not in (int, float) or not 0 <= value < MOST_SECONDS * per_second:
        raise FieldError(f"{name} is {shown(value)}; it must be a time, 0 or more and below 1e15 seconds.")
    return float(value / per_second)


def cell_seconds(cell: str, name: str) -> float:
    """A time in seconds from a CSV cell. Raises FieldError."""
    if not cell.strip():
        raise FieldError(f"{name} is missing.")
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0 <= value < MOST_SECONDS or "_" in cell:
        raise FieldError(f"{name} is {shown(cell)}; it must be seconds, 0 or more and below 1e15.")
    return value


def text(value: Any, name: str) -> str:
    """A name that is written down, None as "". Raises FieldError."""
    if value is None:
        return ""
    if not isinstance(value, (str, int)) or isinstance(value, bool) or not is_text(str(value)):
        raise FieldError(f"{name} is {shown(value)}; it must be a text.")
    return str(value)


class Since:
    """Times of one file as seconds after its first one, so that Unix nanoseconds keep their digits in a float."""

    def __init__(self, name: str, per_second: int) -> None:
        self._name = name
        self._per_second = per_second
        self._zero: int | float | None = None

    def __call__(self, value: Any) -> float:
        """Raises FieldError."""
        seconds(value, self._name, per_second=self._per_second)
        if self._zero is None:
            self._zero = value
        return float((value - self._zero) / self._per_second)


class Calendar:
    """Date and time of day as seconds after the midnight before the first one, to the last of its digits.

    Without an offset a stamp is UTC. (`datetime` would drop digits behind the sixth, a float of Unix seconds those
    behind the seventh.)
    """

    MINUTE = re.compile(r"(\d{4}-\d\d-\d\d)[ T]([01]\d|2[0-3]):([0-5]\d):", re.ASCII)
    SECOND = re.compile(r"[0-5]\d(\.\d+)?", re.ASCII)

    def __init__(self, name: str) -> None:
        self._name = name
        self._zero: int | None = None
        self._minute = ("", 0.0)  # the last one, as written and as seconds: rows of a trace follow each other

    def __call__(self, stamp: str) -> float:
        """Raises FieldError."""
        stamp = stamp.strip()
        minute, rest = stamp[:17], stamp[17:]
        try:
            if self.SECOND.fullmatch(rest) is None:
                return self._with_offset(stamp)
            if minute != self._minute[0]:
                self._minute = (minute, self._start_of(minute))
            return self._minute[1] + float(rest)
        except (ValueError, OverflowError) as error:
            if not stamp:
                raise FieldError(f"{self._name} is missing.") from error
            raise FieldError(
                f"{self._name} is {shown(stamp)}; it must be a date and time such as 2023-11-16 18:15:46.68."
            ) from error

    def _start_of(self, minute: str) -> float:
        found = self.MINUTE.fullmatch(minute)
        if found is None:
            raise ValueError(minute)
        day, hours, minutes = found.groups()
        return self._midnight(date.fromisoformat(day).toordinal()) + int(hours) * 3600 + int(minutes) * 60

    def _midnight(self, ordinal: int) -> float:
        if self._zero is None:
            self._zero = ordinal
        return (ordinal - self._zero) * 86_400.0

    def _with_offset(self, stamp: str) -> float:
        when = datetime.fromisoformat(stamp)
        utc = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
        time = utc.hour * 3600 + utc.minute * 60 + utc.second + utc.microsecond / 1e6
        return self._midnight(utc.toordinal()) + time


def hash_ids(value: Any, name: str, tokens: int, block: int, rounding: Rounding) -> tuple[int, ...]:
    """Chained block ids over `tokens` tokens: whole, below 2^64, none twice, as many as blocks of `block` tokens.

    `rounding`: whether the format gives a part-filled last block an id (ceil), not (floor), or either. Ids stay whole
    Python numbers, so two that differ only above bit 31, or are above 2^63, stay different. Raises FieldError.
    """
    if not isinstance(value, list):
        raise FieldError(f"{name} is {shown(value)}; it must be a list of block ids.")
    full, part = divmod(tokens, block)
    counts = {"ceil": (full + (part > 0),), "floor": (full,), "either": (full, full + (part > 0))}[rounding]
    if len(value) not in counts:
        raise FieldError(
            f"{name} has {len(value)} ids; {tokens} tokens in blocks of {block} make {' or '.join(map(str, counts))} "
            f"({rounding})."
        )
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) >= 2**64):
        wrong = next(one for one in value if type(one) is not int or not 0 <= one < 2**64)
        raise FieldError(f"{name} holds {shown(wrong)}; ids must be whole numbers from 0 and below 2^64.")
    if len(set(value)) != len(value):
        raise FieldError(f"{name} holds an id twice; an id stands for its block and all before it, so none can recur.")
    return tuple(value)
