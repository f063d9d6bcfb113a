"""The decision log: every input and decision as JSON lines or msgpack, and replaying a log to the same decisions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import IO, Any

import msgpack

from octavo import events as ev
from octavo.errors import OctavoError
from octavo.kv.strategies import make_manager
from octavo.runner.api import StepPlan, StepResult
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler
from octavo.types import FinishReason, Request, RequestError, SamplingParams, Sequence, Structure

VERSION = 4


@dataclass(frozen=True, slots=True)
class LogHeader:
    """What a replay needs to build the same scheduler and KV manager."""

    strategy: str
    pages: int
    block_size: int
    windows: tuple[int | None, ...]
    sharing: bool
    scheduler: SchedulerConfig
    engine_identity: tuple[str, ...] = ()

    def build(self, sink: ev.Sink) -> Scheduler:
        kv = make_manager(
            self.strategy,
            self.pages,
            self.block_size,
            max_model_len=self.scheduler.max_model_len,
            windows=self.windows,
            chunk=self.scheduler.max_num_batched_tokens,
            sharing=self.sharing,
        )
        return Scheduler(self.scheduler, kv, sink, engine_identity=self.engine_identity)


class LogError(OctavoError):
    """The log cannot be read: which file, which record, why."""


class LogCut(LogError):
    """The last record was not written to its end."""


class LogWriter:
    """Writes events as they come; `.msgpack` files in msgpack, all others as JSON lines. Use as a sink."""

    def __init__(self, path: str | Path, header: LogHeader) -> None:
        self.path = Path(path)
        self._binary = self.path.suffix == ".msgpack"
        self._file: IO[Any] = self.path.open("wb" if self._binary else "w")
        self._write({"octavo_log": VERSION, **plain(header)})

    def __call__(self, event: ev.Event) -> None:
        self._write({"event": type(event).__name__, **plain(event)})

    def _write(self, record: dict[str, Any]) -> None:
        if self._binary:
            self._file.write(msgpack.packb(record))
        else:
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()


def plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return value.value if hasattr(value, "value") else value


def read_log(path: str | Path) -> tuple[LogHeader, Iterator[dict[str, Any]]]:
    """The header and the events of a log, as plain records. Raises LogError."""
    records = _records(Path(path))
    try:
        first = next(records)
        if not isinstance(first, dict) or first.get("octavo_log") != VERSION:
            raise LogError(f"{path} is no Octavo log of version {VERSION}: its first record is {str(first)[:80]}.")
        scheduler = SchedulerConfig(**first["scheduler"])
        header = LogHeader(
            first["strategy"],
            first["pages"],
            first["block_size"],
            tuple(first["windows"]),
            first["sharing"],
            scheduler,
            tuple(first["engine_identity"]),
        )
    except StopIteration:
        raise LogError(f"{path} is empty; a log begins with a header record.") from None
    except (KeyError, TypeError) as error:
        raise LogError(f"{path} has no usable header record: {error!r}.") from error
    return header, records


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        what = "is a folder; name a file in it" if path.is_dir() else "does not exist"
        raise LogError(f"log {path} {what}.")
    if path.suffix == ".msgpack":
        yield from _packed(path)
        return
    # Bytes that are no UTF-8 become lone surrogates, which is no JSON that a log would hold.
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                if not line.endswith("\n"):
                    raise LogCut(f"{path}, line {number} breaks off: {error}.") from error
                raise LogError(f"{path}, line {number}: not JSON ({error}).") from error


def _packed(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        unpacker = msgpack.Unpacker(file, strict_map_key=False)
        whole = 0  # bytes of complete records; afterwards the position is that of an incomplete one, too
        try:
            for record in unpacker:
                whole = unpacker.tell()
                yield record
        except (msgpack.UnpackException, ValueError) as error:
            raise LogError(f"{path}, byte {unpacker.tell():,}: not msgpack ({error!r}).") from error
        if whole != path.stat().st_size:
            raise LogCut(f"{path} ends in the middle of a record, at byte {whole:,}; it was cut off.")


@dataclass(frozen=True, slots=True)
class Replay:
    """Outcome of a replay: events compared, and the first pair that differs (recorded, replayed)."""

    events: int
    difference: tuple[dict[str, Any] | None, dict[str, Any] | None] | None


def replay(path: str | Path) -> Replay:
    """Feed a log's inputs to a fresh scheduler and compare every event it makes with the recorded one."""
    header, records = read_log(path)
    made: list[dict[str, Any]] = []
    scheduler = header.build(lambda event: made.append({"event": type(event).__name__, **plain(event)}))
    replayer = Replayer(scheduler)
    count = 0
    for record in records:
        if not made:  # everything recorded so far was re-made: this record is an input, or a difference
            replayer.feed(record)
        if not made or _canonical(made[0]) != _canonical(record):
            return Replay(count, (record, made[0] if made else None))
        made.pop(0)
        count += 1
    return Replay(count, (None, made[0]) if made else None)


def _canonical(record: dict[str, Any]) -> Any:
    return json.loads(json.dumps(record, sort_keys=True))


class Replayer:
    """Turns recorded inputs back into calls. `on_written`, as `Scheduler.settle` takes it."""

    def __init__(self, scheduler: Scheduler, on_written: Callable[[], None] | None = None) -> None:
        self._scheduler = scheduler
        self._on_written = on_written
        self._plan: StepPlan | None = None
        self._seqs: dict[int, Sequence] = {}

    def forget(self, seq: int) -> None:
        """The sequence has ended."""
        self._seqs.pop(seq, None)

    def feed(self, record: dict[str, Any]) -> None:
        """Do what a recorded input says; a recorded decision is nobody's input."""
        kind = record["event"]
        if kind in ("Submitted", "Refused"):
            self._submit(record)
        elif kind == "Stopped" and record["seq"] in self._seqs:
            reason = FinishReason(record["reason"])
            self._scheduler.stop(self._seqs[record["seq"]], reason, record["now"])
        elif kind == "Settled" and self._plan is not None:
            tokens = tuple(tuple(drawn) for drawn in record["tokens"])
            self._scheduler.settle(self._plan, StepResult(tokens), record["now"], self._on_written)
        elif kind == "PlanBegan":
            self._plan = self._scheduler.plan(record["now"], record["budget"])
        elif kind == "Failed" and self._plan is not None:
            lost = tuple(work for work in self._plan.work if work.seq.id in record["seqs"])
            self._scheduler.fail(replace(self._plan, work=lost), record["now"])
        elif kind == "PreemptAsked":
            self._scheduler.preempt(record["request"], record["now"])
        elif kind == "CacheReset":
            self._scheduler.reset_cache()

    def _submit(self, record: dict[str, Any]) -> None:
        fields_ = dict(record["request"])
        params = dict(fields_.pop("params"))
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
        if params.get("structure"):
            params["structure"] = Structure(**params["structure"])
        request = Request(
            **{
                **fields_,
                "prompt": tuple(fields_["prompt"]),
                "params": SamplingParams(**params),
                "identity": tuple(tuple(pair) for pair in fields_["identity"]),
                "stop_token_ids": frozenset(fields_["stop_token_ids"]),
            }
        )
        try:
            for seq in self._scheduler.submit(request, record["now"]):
                self._seqs[seq.id] = seq
        except RequestError:
            return  # the refusal is an event of its own and is compared like any other
