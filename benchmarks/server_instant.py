"""The server with a runner that takes no time, for `server_overhead.py`: everything but the model is the real thing.

python benchmarks/server_instant.py demo --profile profile.json
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.runner.api import StepPlan, StepResult
from octavo.server import access, inspector, metrics
from octavo.server.app import build, create_app
from octavo.server.config import ServerConfig
from octavo.server.lifecycle import DrainingServer, address_of, bind, listen
from octavo.types import Sequence

TEXT = " The quick brown fox jumps over the lazy dog, and then walks home through the long grass by the river."
#: What can be left out, to see what it costs.
OPTIONAL = ("access log", "inspector", "metrics")
#: Parts of the server by what their files' paths contain; the first that fits.
PARTS = (
    ("access log", ("octavo/server/access", "/logging/", "/json/", "datetime")),
    ("inspector", ("server/inspector", "server/lives", "server/timeline", "server/traffic", "server/snapshot")),
    ("inspector", ("server/ledger", "server/waits", "planner/")),
    ("metrics", ("server/metrics", "prometheus_client")),
    ("tokenising", ("models/tokenizer", "models/plain_tokenizer", "transformers/", "tokenizers/")),
    ("detokenising, outputs", ("octavo/detokenize", "octavo/text", "octavo/outputs")),
    ("engine step", ("octavo/engine", "octavo/scheduler/", "octavo/kv/", "octavo/types", "octavo/events", "/runner/")),
    ("engine step", ("server_instant", "octavo/clock")),
    ("hand-over", ("octavo/aio", "queue", "threading")),
    ("body validation", ("server/protocol", "pydantic")),
    ("SSE", ("server/sse",)),
    ("requests", ("octavo/server/",)),
    ("routing", ("starlette/", "fastapi/", "anyio", "contextlib", "inspect", "/typing")),
    ("HTTP", ("uvicorn/", "httptools", "h11")),
    ("event loop", ("asyncio/", "uvloop")),
)


class InstantRunner:
    """Says the same text to everybody, at once, or after a pause in which nobody computes."""

    def __init__(self, tokens: list[int], pause: float) -> None:
        self._tokens, self._pause = tokens, pause

    def run(self, plan: StepPlan) -> StepResult:
        if self._pause:
            time.sleep(self._pause)
        tokens, count = self._tokens, len(self._tokens)
        return StepResult(tuple(tuple(tokens[seq.generated % count] for seq in work.samples) for work in plan.work))

    def forget(self, seq: Sequence) -> None:
        """Nothing is kept per sequence."""


class Profiling:
    """One profile of the event loop's thread and one of the engine's, in CPU time of the thread, started and ended by
    signals."""

    def __init__(self, app: Any, file: Path) -> None:
        self._engine = app.state.octavo.engine
        self._file = file
        self._profiles = {name: cProfile.Profile(time.thread_time) for name in ("event loop", "engine")}
        self._began: dict[str, float] = {}
        self._cpu: dict[str, float] = {}

    def arm(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: asyncio.ensure_future(self._start()))
        loop.add_signal_handler(signal.SIGUSR2, lambda: asyncio.ensure_future(self._stop()))

    async def _start(self) -> None:
        await self._engine.call(lambda _: self._begin("engine"))
        asyncio.get_running_loop().call_soon(self._begin, "event loop")

    async def _stop(self) -> None:
        await self._engine.call(lambda _: self._end("engine"))
        self._end("event loop")
        parts = {name: parts_of(profile, self._cpu[name]) for name, profile in self._profiles.items()}
        tops = {name: tops_of(profile) for name, profile in self._profiles.items()}
        self._file.write_text(json.dumps({"cpu": self._cpu, "parts": parts, "tops": tops}))

    def _begin(self, name: str) -> None:
        self._began[name] = time.thread_time()
        self._profiles[name].enable()

    def _end(self, name: str) -> None:
        self._profiles[name].disable()
        self._cpu[name] = time.thread_time() - self._began[name]


def part_of(file: str) -> str | None:
    return next((part for part, words in PARTS if any(word in file for word in words)), None)


def parts_of(profile: cProfile.Profile, cpu: float) -> dict[str, float]:
    """Own seconds by part. Functions written in C count for the part that called them; what no function of Python
    had is the event loop's own C code and its system calls."""
    found: Counter[str] = Counter()
    for (file, _, name), (_, _, own, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if (part := part_of(file)) is not None:
            found[part] += own
            continue
        for (caller, _, _), (_, _, share, _) in callers.items():
            found[part_of(caller) or f"other: {name}"] += share
    found["event loop in C, system calls"] = max(0.0, cpu - sum(found.values()))
    return dict(found)


def tops_of(profile: cProfile.Profile, count: int = 40) -> list[tuple[str, int, float, float]]:
    """Functions by own seconds: where, calls, own, with what they call."""
    rows = []
    for (file, line, name), (_, calls, own, whole, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        short = "/".join(file.split("/")[-3:])
        rows.append((f"{short}:{line} {name}" if file != "~" else name, calls, own, whole))
    return sorted(rows, key=lambda row: -row[2])[:count]


def leave_out(parts: list[str]) -> None:
    """Make parts of the server do nothing."""

    def nothing(*arguments: Any) -> None:
        """Instead of a method."""

    for part in parts:
        owner = {"inspector": inspector.Inspector, "metrics": metrics.Metrics}.get(part)
        if owner is not None:
            owner.on_event = owner.on_step = owner.on_finish = nothing  # type: ignore[method-assign, assignment]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--without", action="append", default=[], choices=OPTIONAL)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that every step takes, without computing")
    parser.add_argument("--switch-interval", type=float, help="seconds after which a thread must hand on the GIL")
    given = parser.parse_args()
    if given.switch_interval is not None:
        sys.setswitchinterval(given.switch_interval)
    leave_out(given.without)
    engine = EngineConfig(given.model, kv_memory=256 << 20, max_num_seqs=64, max_num_batched_tokens=1024)
    config = ServerConfig(engine, port=0, access_log="access log" not in given.without)
    if config.access_log:
        access.access_logger(open("/dev/null", "w"))  # noqa: SIM115  the lines are written, and nobody stores them
    built = build(config)
    assert built.engine.loaded.tokenizer is not None
    words = built.engine.loaded.tokenizer.encode(TEXT, add_special_tokens=False)
    built.engine.engine.runner = InstantRunner(words, given.pause)
    app = create_app(config, built)
    address = bind(config.host, config.port)
    listen(address)

    def ready() -> None:
        if given.profile is not None:
            Profiling(app, given.profile).arm()
        print(f"serving {address_of(address)}", flush=True)

    DrainingServer(app, ready).run([address])


if __name__ == "__main__":
    main()
