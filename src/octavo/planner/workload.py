"""Workloads: what requests arrive when, from our JSONL format or the Azure trace's CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octavo.errors import OctavoError

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


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
    """Read a JSONL or Azure CSV file, in order of arrival.

    JSONL lines: {"arrival": seconds, "prompt": text | "prompt_tokens": n, "output_tokens": n}. The Azure CSV has
    naive UTC timestamps. Raises WorkloadError naming the line.
    """
    path = Path(path)
    if not path.is_file():
        raise WorkloadError(f"workload {path} does not exist; give a .jsonl file or an Azure trace .csv.")
    with path.open(newline="", encoding="utf-8") as file:
        items = list(_read_azure(path, file) if path.suffix == ".csv" else _read_jsonl(path, file))
    if not items:
        raise WorkloadError(f"workload {path} has no requests.")
    items.sort(key=lambda item: item.arrival)
    first = items[0].arrival
    return [replace(item, arrival=item.arrival - first) for item in items]


def _read_jsonl(path: Path, lines: Iterable[str]) -> Iterator[WorkItem]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise WorkloadError(f"{where}: not JSON ({error.msg} at column {error.colno}).") from error
        if not isinstance(record, dict):
            raise WorkloadError(f"{where}: a JSON object is wanted, not {line.strip()[:40]}.")
        yield _item(record, where)


def _item(record: dict[str, Any], where: str) -> WorkItem:
    prompt = record.get("prompt")
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise WorkloadError(f"{where}: prompt is {prompt!r}; it must be a non-empty text.")
    length = 0 if prompt is not None else _count(record, "prompt_tokens", 1, where)
    arrival = record.get("arrival", 0.0)
    if not isinstance(arrival, (int, float)) or not 0 <= arrival < float("inf"):
        raise WorkloadError(f"{where}: arrival is {arrival!r}; it must be seconds, 0 or more.")
    return WorkItem(float(arrival), _count(record, "output_tokens", 1, where), prompt, length)


def _count(record: dict[str, Any], name: str, least: int, where: str) -> int:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise WorkloadError(f"{where}: {name} is {value!r}; it must be a whole number of at least {least}.")
    return value


def _read_azure(path: Path, lines: Iterable[str]) -> Iterator[WorkItem]:
    rows = csv.DictReader(lines)
    if rows.fieldnames is None or not set(AZURE_COLUMNS) <= set(rows.fieldnames):
        raise WorkloadError(
            f"{path}: the columns are {rows.fieldnames}; an Azure trace has {', '.join(AZURE_COLUMNS)}."
        )
    for number, row in enumerate(rows, 2):
        where = f"{path}, line {number}"
        try:
            when = datetime.fromisoformat(row["TIMESTAMP"]).replace(tzinfo=UTC).timestamp()
            counts = {name: int(row[name]) for name in AZURE_COLUMNS[1:]}
        except (ValueError, TypeError) as error:
            raise WorkloadError(f"{where}: {error}.") from error
        prompt = _count(counts, "ContextTokens", 1, where)
        yield WorkItem(when, _count(counts, "GeneratedTokens", 1, where), prompt_tokens=prompt)


def scale(
    items: Iterable[WorkItem], *, lengths: float = 1.0, time: float = 1.0, limit: int | None = None
) -> list[WorkItem]:
    """Multiply token counts by `lengths` (rounded up) and arrival times by `time`; keep the first `limit` requests.

    Prompt texts are left as they are.
    """
    for name, value in (("length scale", lengths), ("time scale", time)):
        if not 0 <= value < float("inf") or (name == "length scale" and value == 0):
            raise WorkloadError(f"{name} is {value}; it must be a positive number.")
    kept = list(items)[:limit]
    return [
        replace(
            item,
            arrival=item.arrival * time,
            prompt_tokens=-(-int(item.prompt_tokens * lengths * 1000) // 1000),
            output_tokens=max(1, -(-int(item.output_tokens * lengths * 1000) // 1000)),
        )
        for item in kept
    ]
