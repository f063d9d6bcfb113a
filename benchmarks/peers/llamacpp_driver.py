"""llama.cpp's llama-server over loopback HTTP, prompts as token ids (--model is the GGUF file).

The KV budget becomes `-c`, the server's number of cells. By default each slot has its own `c / slots` cells, and there
are only as many slots as can hold the longest request; with --unified all slots share the cells, and a request for
which none is left fails ("Context size has been exceeded"): the server does not preempt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import workload
from client import Trace
from measure import MIB, Ready, kv_bytes_per_token, measure, parser
from workload import Ask

VALUE_BYTES = {"f16": 2, "bf16": 2, "q8_0": 34 / 32}
CELLS_STEP = 256  # the server rounds a slot's cells up to this


def cells_and_slots(args: argparse.Namespace) -> tuple[int, int]:
    """How many cells the budget buys (never more than the requests can fill) and over how many slots they go."""
    asks = workload.load(args.workload, args.limit)
    longest = max([len(ask.prompt) + ask.max_tokens for ask in asks] + [args.single_prompt + args.single_output])
    room = -(-(longest + 1) // CELLS_STEP) * CELLS_STEP
    budget = int(args.kv_mib * MIB // kv_bytes_per_token(args.checkpoint, VALUE_BYTES[args.kv_type]))
    slots = max(args.concurrency)
    cells = min(budget, slots * room) // CELLS_STEP * CELLS_STEP
    if args.unified:
        return cells, slots
    slots = max(1, min(slots, cells // room))
    return slots * room, slots


def command(args: argparse.Namespace, port: int) -> list[str]:
    cells, slots = cells_and_slots(args)
    text = f"{args.server} -m {args.model} --host 127.0.0.1 --port {port} -t {args.threads} -tb {args.threads}"
    text += f" -np {slots} -c {cells} -b 2048 -ub 512 -ctk {args.kv_type} -ctv {args.kv_type} -fa on --no-warmup -cb"
    return [*text.split(), "--kv-unified" if args.unified else "--no-kv-unified"]


@contextmanager
def server(args: argparse.Namespace) -> Iterator[int]:
    """A running server; gives its port. Its log goes to --log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with args.log.open("ab") as log:
        process = subprocess.Popen(command(args, port), stdout=log, stderr=log)
    try:
        _wait_healthy(process, port, args.log)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    while True:
        if process.poll() is not None:
            raise SystemExit(f"llama-server ended with {process.returncode} while it loaded; see {log}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
                if b"ok" in reply.read():
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.02)


async def _play(port: int, asks: list[Ask], concurrency: int) -> Trace:
    gate = asyncio.Semaphore(concurrency)
    trace = Trace(asks, stamps={ask.id: [] for ask in asks})

    async def one(ask: Ask) -> None:
        async with gate:
            await _complete(port, ask, trace)

    await asyncio.gather(*map(one, asks))
    trace.end = perf_counter()
    return trace


async def _complete(port: int, ask: Ask, trace: Trace) -> None:
    """One request. A chunk of the stream can stand for several tokens (text that is no whole character is held back),
    so the token ids in it are counted."""
    body = json.dumps(
        dict(
            prompt=ask.prompt,
            n_predict=ask.max_tokens,
            ignore_eos=True,
            stream=True,
            cache_prompt=False,
            temperature=0.0,
            samplers=[],
            return_tokens=True,
        )
    ).encode()
    trace.submitted[ask.id] = perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    await writer.drain()
    try:
        async for line in reader:
            if line.startswith((b"error", b'{"error')):
                raise RuntimeError(f"llama-server refused request {ask.id}: {line.decode().strip()}")
            if line.startswith(b"data: ") and _take(ask, json.loads(line[6:]), trace):
                return
        raise RuntimeError(f"the stream of request {ask.id} ended after {len(trace.stamps[ask.id])} tokens")
    finally:
        writer.close()


def _take(ask: Ask, chunk: dict[str, Any], trace: Trace) -> bool:
    """Stamp what came; at the end of the stream (True) the server says how many tokens there were and when it began."""
    now = perf_counter()
    if "error" in chunk:
        raise RuntimeError(f"request {ask.id} failed: {chunk['error']}")
    stamps = trace.stamps[ask.id]
    if not chunk["stop"]:
        stamps += [now] * len(chunk["tokens"])
        return False
    stamps += [now] * (chunk["tokens_predicted"] - len(stamps))
    timings = chunk["timings"]
    trace.spans.append((now - (timings["prompt_ms"] + timings["predicted_ms"]) / 1000, now))
    return True


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--server", type=Path, required=True, help="the llama-server binary")
    arguments.add_argument("--checkpoint", type=Path, required=True, help="the original folder, for the KV sizes")
    arguments.add_argument("--kv-type", choices=sorted(VALUE_BYTES), default="f16")
    arguments.add_argument("--unified", action="store_true")
    arguments.add_argument(
        "--engine-version", default="", help="for the record; asking the binary would cost load time"
    )
    arguments.add_argument("--log", type=Path, default=Path("/dev/null"))
    args = arguments.parse_args()
    cells, slots = cells_and_slots(args)
    settings = dict(kv=args.kv_type, cells=cells, slots=slots, unified=args.unified)
    facts = dict(engine="llama.cpp", version=args.engine_version, settings=settings)
    with server(args) as port:
        measure(args, lambda: Ready(lambda asks, concurrency: asyncio.run(_play(port, asks, concurrency)), facts))


if __name__ == "__main__":
    main()
