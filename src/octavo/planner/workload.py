"""Workloads: what requests arrive when, from our JSONL format or the Azure trace's CSV."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from reprlib import repr as shown
from typing import Any, TextIO

from octavo.errors import OctavoError

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOST_TOKENS = 10**9  # of one prompt or answer: anything above is a slip, and would be allocated


class WorkloadError(OctavoError):
    """A workload that cannot be read: which file, which line, which field, why."""


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request: seconds after the first arrival; a prompt text or a prompt length in tokens; output tokens."""

    arrival: float
    output_tokens: int
    prompt: str | None = None
    prompt_tokens: int = 0


def read_workload(path: str | Path) -> list[WorkItem]:
    """Read a JSONL or Azure CSV file (UTF-8, a byte order mark is allowed), in order of arrival.

    JSONL lines: {"arrival": seconds, "prompt": text | "prompt_tokens": n, "output_tokens": n}. Timestamps of the Azure
    CSV are UTC unless they carry an offset. Raises WorkloadError naming the line.
    """
    path = Path(path)
    try:
        # Bytes that are no UTF-8 become lone surrogates here and an error with its line in `_checked`.
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            items = list(_read_azure(path, file) if path.suffix.lower() == ".csv" else _read_jsonl(path, file))
    except FileNotFoundError:
        raise WorkloadError(f"workload {path} does not exist; give a .jsonl file or an Azure trace .csv.") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise WorkloadError(
            f"workload {path} cannot be read ({getattr(error, 'strerror', error)}); give a .jsonl or .csv file."
        ) from error
    if not items:
        raise WorkloadError(f"workload {path} has no requests; give a file with at least one.")
    items.sort(key=lambda item: item.arrival)
    first = items[0].arrival
    return [replace(item, arrival=item.arrival - first) for item in items]


def _checked(path: Path, lines: Iterable[str]) -> Iterator[str]:
    """The lines as they are. Raises WorkloadError at the first that was no UTF-8."""
    for number, line in enumerate(lines, 1):
        if not _is_text(line):
            raise WorkloadError(f"{path}, line {number}: not UTF-8 text; save the file as UTF-8.")
        yield line


def _is_text(text: str) -> bool:
    """Whether it has no half of a surrogate pair: tokenizers and files take no such character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_jsonl(path: Path, file: TextIO) -> Iterator[WorkItem]:
    for number, line in enumerate(_checked(path, file), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise WorkloadError(f"{where}: not JSON ({error.msg} at column {error.colno}); correct it.") from error
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
            raise WorkloadError(f"{where}: the JSON cannot be read, {why}; correct it.") from error
        if not isinstance(record, dict):
            raise WorkloadError(f"{where}: a JSON object is wanted, not {shown(record)}.")
        yield _item(record, where)


def _item(record: dict[str, Any], where: str) -> WorkItem:
    prompt = record.get("prompt")
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise WorkloadError(f"{where}: prompt is {shown(prompt)}; it must be a non-empty text.")
    if prompt is not None and not _is_text(prompt):
        raise WorkloadError(
            f"{where}: prompt is {shown(prompt)}, which has half of a surrogate pair; it must be text that UTF-8 can "
            "write: give both halves or remove it."
        )
    length = 0 if prompt is not None else _count(record.get("prompt_tokens"), "prompt_tokens", where)
    arrival = record.get("arrival", 0.0)
    if isinstance(arrival, bool) or not isinstance(arrival, (int, float)) or not 0 <= arrival < 1e15:
        raise WorkloadError(f"{where}: arrival is {shown(arrival)}; it must be seconds, 0 or more and below 1e15.")
    return WorkItem(float(arrival), _count(record.get("output_tokens"), "output_tokens", where), prompt, length)


def _count(value: Any, name: str, where: str) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < 1:
        raise WorkloadError(f"{where}: {name} is {shown(value)}; it must be a whole number of at least 1.")
    if value > MOST_TOKENS:
        raise WorkloadError(f"{where}: {name} is {shown(value)}; it must be at most {MOST_TOKENS} tokens.")
    return int(value)


def _read_azure(path: Path, file: TextIO) -> Iterator[WorkItem]:
    rows = csv.DictReader(_checked(path, file))
    try:
        if rows.fieldnames is None or not set(AZURE_COLUMNS) <= set(rows.fieldnames):
            raise WorkloadError(
                f"{path}, line 1: the columns are {shown(rows.fieldnames)}; an Azure trace has "
                f"{', '.join(AZURE_COLUMNS)}."
            )
        for row in rows:
            yield _azure_item(row, f"{path}, line {rows.line_num}")
    except csv.Error as error:
        raise WorkloadError(f"{path}, line {rows.line_num + 1}: not CSV ({error}); correct the line.") from error


def _azure_item(row: dict[str, Any], where: str) -> WorkItem:
    for name in AZURE_COLUMNS:
        if not (row[name] or "").strip():
            raise WorkloadError(f"{where}: {name} is missing; each line needs {', '.join(AZURE_COLUMNS)}.")
    stamp = row["TIMESTAMP"].strip()
    try:
        when = datetime.fromisoformat(stamp)
        seconds = (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise WorkloadError(
            f"{where}: TIMESTAMP is {shown(stamp)}; it must be a date and time such as 2023-11-16 18:15:46.68."
        ) from error
    counts = []
    for name in AZURE_COLUMNS[1:]:
        try:
            value: Any = int(row[name])
        except ValueError:
            value = row[name]  # which is no number: `_count` says so
        counts.append(_count(value, name, where))
    return WorkItem(seconds, counts[1], prompt_tokens=counts[0])


def scale(
    items: Iterable[WorkItem], *, lengths: float = 1.0, time: float = 1.0, limit: int | None = None
) -> list[WorkItem]:
    """Multiply token counts by `lengths` (rounded up, at least 1) and arrival times by `time`; keep the first `limit`
    requests.

    Prompt texts are left as they are. Raises WorkloadError for a factor or a limit that makes no workload.
    """
    if not 0 < lengths < math.inf:
        raise WorkloadError(f"length_scale is {lengths}; it must be a number above 0 (1 changes nothing).")
    if not 0 <= time < math.inf:
        raise WorkloadError(f"time_scale is {time}; it must be 0 (all at once) or a number above it.")
    if limit is not None and limit < 1:
        raise WorkloadError(f"requests is {limit}; it must be at least 1, or left out to use them all.")
    return [
        replace(
            item,
            arrival=_scaled_arrival(item.arrival, time),
            prompt_tokens=0 if item.prompt is not None else _scaled(item.prompt_tokens, lengths),
            output_tokens=_scaled(item.output_tokens, lengths),
        )
        for item in list(items)[:limit]
    ]


def _scaled(tokens: int, factor: float) -> int:
    exact = tokens * factor
    if exact > MOST_TOKENS:
        raise WorkloadError(
            f"length_scale is {factor}: {tokens} tokens would become more than {MOST_TOKENS}; lower it."
        )
    return max(1, -(-int(exact * 1000) // 1000))


def _scaled_arrival(seconds: float, factor: float) -> float:
    if not math.isfinite(seconds * factor):
        raise WorkloadError(f"time_scale is {factor}: {seconds} seconds would become endless; lower it.")
    return seconds * factor
