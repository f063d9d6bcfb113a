"""Our own decision log as a trace: what was submitted when, and how long each answer became."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from octavo.planner.traces.api import BadLine, TraceError
from octavo.planner.traces.fields import FieldError, seconds, text, tokens
from octavo.planner.traces.file_trace import Format
from octavo.planner.traces.lines import Head, Row, Rows

Record = dict[str, Any]


def read_decisions(path: Path) -> Rows:
    """The requests of a decision log (`octavo ... --log FILE`, JSON lines or msgpack), each when it finished.

    Arrival is when it was submitted. Block ids are hashed from the prompt's tokens and its identity (salt, adapter),
    full blocks of the log's block size. Samples of one request become requests with the same prompt. Refused requests
    and those that had not finished, or failed, are bad lines; a record's number stands for the line's.
    """
    from octavo.log import LogError, read_log  # here, because it brings the scheduler with it

    try:
        header, events = read_log(path)
        live: dict[int, tuple[int, Row]] = {}
        for number, event in enumerate(events, 2):
            try:
                if event["event"] == "Submitted":
                    live.update((seq, (number, row)) for seq, row in _submitted(event, header.block_size))
                elif event["event"] == "Refused":
                    raise FieldError(f"the request was refused: {event['message']}")
                elif event["event"] == "Finished" and event["seq"] in live:
                    yield _finished(event, live.pop(event["seq"])[1])
            except (KeyError, TypeError) as error:
                yield BadLine(number, f"the event cannot be read: {error!r}.")
            except FieldError as error:
                yield BadLine(number, str(error))
    except LogError as error:
        raise TraceError(str(error)) from error
    for number, row in live.values():
        yield BadLine(number, f"request {row.id} had not finished when the log ended.")


def _submitted(event: Record, block: int) -> list[tuple[int, Row]]:
    request, seqs = event["request"], event["seqs"]
    hashes = chained(request["prompt"], block, repr(request["identity"]).encode())
    row = Row(
        seconds(event["now"], "now"),
        tokens(len(request["prompt"]), "prompt"),
        0,
        text(request["id"], "id"),
        hashes,
        block if hashes else 0,
        request["params"]["max_tokens"],
    )
    return [(seq, row if len(seqs) == 1 else row._replace(id=f"{row.id}/{place}")) for place, seq in enumerate(seqs)]


def _finished(event: Record, row: Row) -> Row:
    if event["reason"] == "error":
        raise FieldError(f"request {row.id} failed.")
    return row._replace(output_tokens=tokens(event["tokens"] - row.prompt_tokens, "output"))


def chained(prompt: Sequence[int], block: int, identity: bytes = b"") -> tuple[int, ...]:
    """64-bit ids of the full blocks of `prompt`: BLAKE2b over the id before (or `identity`) and its tokens."""
    out: list[int] = []
    digest = blake2b(identity, digest_size=8).digest()
    for start in range(0, len(prompt) - block + 1, block):
        digest = blake2b(digest + array("q", prompt[start : start + block]).tobytes(), digest_size=8).digest()
        out.append(int.from_bytes(digest, "little"))
    return tuple(out)


def _is_log(head: Head) -> bool:
    return "octavo_log" in (head.record or {}) or head.name.endswith(".msgpack")


FORMATS = (Format("octavo-log", "Octavo decision log", _is_log, read_decisions),)
