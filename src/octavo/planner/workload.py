"""Workloads: what requests arrive when, from our JSONL format or the Azure trace's CSV."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from octavo.errors import OctavoError
from octavo.planner.traces.api import BadLine, TraceError
from octavo.planner.traces.fields import MOST_TOKENS, FieldError, is_text, seconds, tokens
from octavo.planner.traces.lines import Row, read_objects
from octavo.planner.traces.tables import read_azure


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
    """Read a JSONL or Azure CSV file (UTF-8, a byte order mark and gzip are allowed), in order of arrival.

    JSONL lines: {"arrival": seconds, "prompt": text | "prompt_tokens": n, "output_tokens": n}. Timestamps of the Azure
    CSV are UTC unless they carry an offset. Unlike a trace, which leaves out bad lines and counts them, a workload has
    none: raises WorkloadError naming the line.
    """
    path = Path(path)
    try:
        if not path.exists():
            raise WorkloadError(f"workload {path} does not exist; give a .jsonl file or an Azure trace .csv.")
        is_table = path.name.lower().removesuffix(".gz").endswith(".csv")
        items = list(_items(path, read_azure(path) if is_table else read_objects(path, _item)))
    except (TraceError, OSError, ValueError) as error:  # a name too long; ValueError: a NUL in it
        raise WorkloadError(
            f"workload {path} cannot be read ({getattr(error, 'strerror', None) or error}); give a .jsonl or .csv file."
        ) from error
    if not items:
        raise WorkloadError(f"workload {path} has no requests; give a file with at least one.")
    items.sort(key=lambda item: item.arrival)
    first = items[0].arrival
    return [replace(item, arrival=item.arrival - first) for item in items]


def _items(path: Path, rows: Iterable[Row | WorkItem | BadLine]) -> Iterator[WorkItem]:
    for row in rows:
        if isinstance(row, BadLine):
            raise WorkloadError(f"{path}, line {row.line}: {row.reason}")
        if isinstance(row, Row):
            yield WorkItem(row.seconds, row.output_tokens, prompt_tokens=row.prompt_tokens)
        else:
            yield row


def _item(record: dict[str, Any], number: int) -> WorkItem:
    prompt = record.get("prompt")
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise FieldError(f"prompt is {shown(prompt)}; it must be a non-empty text.")
    if prompt is not None and not is_text(prompt):
        raise FieldError(
            f"prompt is {shown(prompt)}, which has half of a surrogate pair; it must be text that UTF-8 can "
            "write: give both halves or remove it."
        )
    length = 0 if prompt is not None else tokens(record.get("prompt_tokens"), "prompt_tokens")
    arrival = seconds(record.get("arrival", 0.0), "arrival")
    return WorkItem(arrival, tokens(record.get("output_tokens"), "output_tokens"), prompt, length)


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
