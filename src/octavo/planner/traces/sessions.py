"""Agentic sessions of kv-cache-tester: one file is one session, a folder many, whose starts are drawn."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from octavo.planner.traces.api import BadLine, TraceError
from octavo.planner.traces.fields import FieldError, hash_ids, seconds, some, tokens
from octavo.planner.traces.file_trace import Format
from octavo.planner.traces.lines import Head, Row, Rows, read_document

Record = dict[str, Any]
LOCAL_BITS = 40  # of an id within its session; the session's number stands above
SHARED = 1 << 63  # ids of prefixes that sessions share


def read_sessions(path: Path, session_rate: float = 1 / 60, seed: int = 0, shared_prefix: bool = True) -> Rows:
    """Session files of kv-cache-tester (a file, or all *.json and *.json.gz of a folder in order of name).

    Times are seconds within a session; a sub-agent's count from its own start. Nobody recorded when sessions began:
    they begin as a Poisson process of `session_rate` per second, drawn with `seed`, the first at 0.

    Block ids are local to a session `id`, sub-agents included, so each session gets numbers of its own. What sessions
    really share, the list of tools and the system prompt at the head of a prompt, is not in the ids; with
    `shared_prefix` it is modelled: full blocks within tool_tokens are one for all sessions with that many, those within
    tool_tokens + system_tokens for all with both equal.

    In memory are the sessions that have begun and not ended. Line numbers are those of a session's requests, counted
    through; an answer of 0 tokens is a bad line.
    """
    names = _Names(shared_prefix)
    waiting = list(zip(_starts(len(files := _files(path)), session_rate, seed), files, strict=True))[::-1]
    running: list[tuple[float, int, Row | BadLine, Iterator[Row | BadLine]]] = []
    opened = 0
    while waiting or running:
        while waiting and (not running or waiting[-1][0] <= running[0][0]):
            start, file = waiting.pop()
            _advance(running, iter(_session(file, start, names, path.is_dir())), start, opened)
            opened += 1
        if running:
            time, order, row, rest = heapq.heappop(running)
            yield row
            _advance(running, rest, time, order)


def _advance(running: list[Any], rows: Iterator[Row | BadLine], time: float, order: int) -> None:
    """The session's next row joins the heap; a bad line keeps the time of the row before it."""
    row = next(rows, None)
    if row is not None:
        heapq.heappush(running, (row.seconds if isinstance(row, Row) else time, order, row, rows))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.gz")))


def _starts(count: int, rate: float, seed: int) -> list[float]:
    if not 0 < rate < 1e9:
        raise TraceError(f"session_rate is {rate}; it must be sessions per second, above 0.")
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return list(map(float, np.cumsum(gaps) - gaps[:1].sum()))


@dataclass
class _Names:
    """Numbers of sessions by their id, and the ids of shared prefixes."""

    shared_prefix: bool
    numbers: dict[str, int] = field(default_factory=dict)
    prefixes: dict[tuple[int, ...], int] = field(default_factory=dict)

    def namespace(self, session: str) -> int:
        return self.numbers.setdefault(session, len(self.numbers)) << LOCAL_BITS

    def shared(self, block: int, tools: int, system: int, index: int) -> int:
        key = (block, tools, index) if (index + 1) * block <= tools else (block, tools, system, index)
        return self.prefixes.setdefault(key, SHARED + len(self.prefixes))


def _session(path: Path, start: float, names: _Names, in_folder: bool) -> Iterable[Row | BadLine]:
    document = read_document(path)
    session, block = document.get("id"), document.get("block_size")
    if not isinstance(session, str) or type(block) is not int or block < 1:
        raise TraceError(f"{path}: id and block_size are missing; it is no session of kv-cache-tester.")
    space = names.namespace(session)
    aliases: dict[int, int] = {}
    where = f"{path.name}: " if in_folder else ""
    seen: set[int] = set()  # owners whose first prompt has been met
    rows: list[tuple[float, int, Row | BadLine]] = []
    for number, (offset, owner, record) in enumerate(_requests(document), 1):
        try:
            row = _row(record, offset, f"{session}/{number}", block)
            if names.shared_prefix and id(owner) not in seen:
                seen.add(id(owner))
                _alias(aliases, row.hashes, block, owner, names)
            rows.append((start + row.seconds, number, row._replace(hashes=array("Q", row.hashes))))  # type: ignore[arg-type]
        except FieldError as error:
            rows.append((rows[-1][0] if rows else start, number, BadLine(number, f"{where}{error}")))
    rows.sort(key=lambda row: row[:2])
    rows.reverse()
    while rows:
        time, _, held = rows.pop()
        if isinstance(held, Row):
            ids = _global(held.hashes, aliases, space)
            held = held._replace(seconds=time, hashes=ids, hash_block=block if ids else 0, session=session)
        yield held


def _global(local: Sequence[int], aliases: dict[int, int], space: int) -> tuple[int, ...]:
    """Ids that are unique in the whole trace: those of the head are perhaps shared."""
    head = len(list(takewhile(aliases.__contains__, local)))
    own = np.array(local[head:], np.uint64) + np.uint64(space)
    return (*(aliases[each] for each in local[:head]), *own.tolist())


def _requests(document: Record) -> Iterator[tuple[Any, Record, Any]]:
    """When its clock started, whose tools and system prompt it carries, and the request."""
    for entry in _list(document):
        if isinstance(entry, dict) and entry.get("type") == "subagent":
            yield from ((entry.get("t"), entry, request) for request in _list(entry))
        else:
            yield 0.0, document, entry


def _list(holder: Record) -> list[Any]:
    found = holder.get("requests")
    return found if isinstance(found, list) else []


def _row(record: Any, offset: Any, name: str, block: int) -> Row:
    if not isinstance(record, dict):
        raise FieldError("a request must be a JSON object.")
    prompt = tokens(record.get("in"), "in")
    hashes = hash_ids(record.get("hash_ids"), "hash_ids", prompt, block, "floor")
    if hashes and max(hashes) >> LOCAL_BITS:
        raise FieldError(f"hash_ids holds {max(hashes)}; ids local to a session must be below 2^{LOCAL_BITS}.")
    when = seconds(offset, "t of the sub-agent") + seconds(record.get("t"), "t")
    return Row(when, prompt, tokens(record.get("out"), "out"), name, hashes)


def _alias(aliases: dict[int, int], hashes: tuple[int, ...], block: int, owner: Record, names: _Names) -> None:
    """The head of a conversation's first prompt gets the names that all sessions use, unless another head of this
    session, which the trace knows to be different, has them."""
    tools, system = (some(owner.get(name), name) or 0 for name in ("tool_tokens", "system_tokens"))
    head = hashes[: (tools + system) // block]
    shared = [names.shared(block, tools, system, index) for index in range(len(head))]
    if head and head[0] not in aliases and shared[0] not in aliases.values():
        aliases.update(zip(head, shared, strict=True))


def _is_session(head: Head) -> bool:
    return head.record is not None and {"hash_id_scope", "requests", "block_size"} <= set(head.record)


FORMATS = (
    Format(
        "kv-cache-tester",
        "kv-cache-tester session JSON, or a folder of them",
        _is_session,
        read_sessions,
        options={"session_rate": float, "seed": int, "shared_prefix": bool},
        folder=True,
    ),
)
