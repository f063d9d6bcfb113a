"""Trace files as lines: gz or plain, with any line ends, with or without a byte order mark and a last newline."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar, cast

from octavo.planner.traces.api import BadLine, TraceError
from octavo.planner.traces.fields import FieldError, is_text, json_object

GZIP = b"\x1f\x8b"


class Row(NamedTuple):
    """A request as its file has it: like TraceRequest, but `seconds` count on the file's own clock, in any order."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    id: str
    hashes: tuple[int, ...] = ()
    hash_block: int = 0
    max_tokens: int | None = None
    cached_tokens: int | None = None
    session: str = ""


Rows = Iterator[Row | BadLine]
Made = TypeVar("Made")


def is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == GZIP


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """The file as text, unpacked where its bytes are gzip, whatever its name. Raises TraceError if it cannot be read.

    Bytes that are no UTF-8 become lone surrogates; the checks of the lines report them.
    """
    try:
        with gzip.open(path) if is_gzip(path) else path.open("rb") as file:
            yield TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape")
    except FileNotFoundError:
        raise TraceError(f"trace {path} does not exist; name a file or folder, or synthetic:NAME.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"trace {path} is damaged gzip ({error}); fetch it again.") from error
    except OSError as error:
        raise TraceError(f"trace {path} cannot be read ({error.strerror or error}).") from error


def numbered(file: TextIO) -> Iterator[tuple[int, str]]:
    """Line numbers from 1 and lines without their ends, blank ones left out."""
    for number, line in enumerate(file, 1):
        if not line.isspace():
            yield number, line.rstrip("\n")


def cells(line: str) -> list[str]:
    """The cells of a CSV line. Raises FieldError. (Line by line: a stray quote costs its own line, not the rest.)"""
    if not is_text(line):
        raise FieldError("not UTF-8 text; save the file as UTF-8.")
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise FieldError(f"not CSV ({error}); correct the line.") from error


def picker(header: Sequence[str], columns: Sequence[str]) -> Callable[[Sequence[str]], Sequence[str]]:
    """Takes the cells of `columns` (two or more) from a row, found by the header's names. Raises FieldError."""
    names = [name.strip() for name in header]
    if missing := [name for name in columns if name not in names]:
        raise FieldError(f"column {missing[0]} is missing; the header must name {', '.join(columns)}.")
    places = [names.index(name) for name in columns]
    take = itemgetter(*places)

    def pick(row: Sequence[str]) -> Sequence[str]:
        try:
            return cast(Sequence[str], take(row))
        except IndexError:
            absent = next(name for name, place in zip(columns, places, strict=True) if place >= len(row))
            raise FieldError(f"{absent} is missing; each line needs {', '.join(columns)}.") from None

    return pick


def read_table(
    path: Path, columns: Sequence[str], make: Callable[[Sequence[str], int], Row], *, optional: str = ""
) -> Rows:
    """Rows of a CSV file with a header: `make` gets the cells of `columns`, behind them that of the `optional` column
    if the header has it, and the line's number."""
    with opened(path) as file:
        lines = numbered(file)
        number, header = next(lines, (1, ""))
        try:
            names = cells(header)
            pick = picker(names, (*columns, optional) if optional in names else columns)
        except FieldError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        for number, line in lines:
            try:
                yield make(pick(cells(line)), number)
            except FieldError as error:
                yield BadLine(number, str(error))


def read_objects(path: Path, make: Callable[[dict[str, Any], int], Made | None]) -> Iterator[Made | BadLine]:
    """Rows of a JSON-lines file: `make` gets a line's object and number, and gives None for a line of another kind."""
    with opened(path) as file:
        for number, line in numbered(file):
            try:
                row = make(json_object(line), number)
            except FieldError as error:
                yield BadLine(number, str(error))
                continue
            if row is not None:
                yield row


def read_document(path: Path) -> dict[str, Any]:
    """A file that is one JSON object; it is held in memory whole. Raises TraceError."""
    with opened(path) as file:
        content = file.read()
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not a JSON document ({error}); it may be cut off.") from error
    if not isinstance(document, dict):
        raise TraceError(f"{path} holds no JSON object but {type(document).__name__}.")
    return document


class Head(NamedTuple):
    """The beginning of a file, from which its format is told: name, columns and first cells of a table, or the keys of
    the first JSON object."""

    name: str
    columns: tuple[str, ...]
    first: tuple[str, ...]
    record: dict[str, Any] | None


def head_of(path: Path) -> Head:
    """Raises TraceError where the file cannot be read."""
    with opened(path) as file:
        lines = [line for _, line in islice(numbered(file), 50)]
    if lines and lines[0].strip() == "{":  # a document over many lines
        return Head(path.name, (), (), read_document(path))
    for line in lines:
        if line.lstrip().startswith("{"):
            try:
                return Head(path.name, (), (), json_object(line))
            except FieldError:
                continue  # a bad line: the next may tell
    columns, row = [tuple(cell.strip(' "') for cell in line.split(",")) for line in (*lines, "", "")[:2]]
    return Head(path.name, columns, row, None)
