"""What HTTP costs: the server with a runner that takes no time, and the real model over HTTP against the same offline.

Measures, with the real tokenizer, scheduler, detokenizer, metrics, inspector and access log, and a client in a process
of its own: short streaming requests (16 tokens in, 16 out) per second, per second of server CPU, CPU time per request
and per token by thread, what parts cost (left out one by one), and a profile by part in CPU time of each thread.
With --real: tokens per second of `LLM.generate` and of the server on the same requests, all at once, in alternating
rounds. The bars: 1,500 requests per second and core, or the profile that says why not; 97 % of offline.
Needs a quiet machine.

    python benchmarks/server_overhead.py
    python benchmarks/server_overhead.py --real
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from server_client import Answer, Client
from server_instant import OPTIONAL, TEXT
from server_process import ServerProcess, running, work_folder
from server_real import compare

TOKENS = 16
PAUSE = 0.02  # a step that leaves time to send every token by itself
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Load:
    """What a load of `seconds` cost. Times in seconds; `loop`, `engine`, `rest`: CPU of the server's threads."""

    seconds: float
    requests: int
    events: int
    loop: float
    engine: float
    rest: float
    client: float
    ttft: float

    @property
    def server(self) -> float:
        return self.loop + self.engine + self.rest


def bodies(model: str, count: int = 512) -> list[bytes]:
    """Requests with prompts of `TOKENS` tokens: every word of the text is one."""
    rng = random.Random(5)
    words = TEXT.replace(",", "").replace(".", "").split()
    made = []
    for _ in range(count):
        prompt = " ".join(rng.choices(words, k=TOKENS))
        fields = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "stream": True, "temperature": 0}
        made.append(json.dumps(fields | {"ignore_eos": True}).encode())
    return made


async def press(client: Client, payloads: list[bytes], concurrency: int, seconds: float) -> list[Answer]:
    """Closed loop: each of `concurrency` sends its next request when it has its answer."""
    answers: list[Answer] = []
    end = time.perf_counter() + seconds

    async def one(first: int) -> None:
        at = first
        while time.perf_counter() < end:
            answers.append(await client.post("/v1/completions", payloads[at % len(payloads)]))
            at += concurrency

    await asyncio.gather(*(one(i) for i in range(concurrency)))
    return answers


def by_thread(before: dict[int, float], after: dict[int, float], pid: int) -> tuple[float, float, float]:
    """CPU seconds of the event loop, of the busiest other thread (the engine), and of the rest."""
    spent = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
    loop = spent.pop(pid)
    engine = max(spent.values(), default=0.0)
    return loop, engine, sum(spent.values()) - engine


def load(server: ServerProcess, payloads: list[bytes], concurrency: int, seconds: float, warm_up: float = 1.0) -> Load:
    """`warm_up`: seconds before, for connections and whatever is made at first use."""

    async def run() -> Load:
        client = Client(server.url)
        await press(client, payloads, concurrency, warm_up)
        before, client_before = server.threads(), time.process_time()
        start = time.perf_counter()
        answers = await press(client, payloads, concurrency, seconds)
        wall = time.perf_counter() - start
        parts = by_thread(before, server.threads(), server.pid)
        spent = time.process_time() - client_before
        client.close()
        bad = next((answer for answer in answers if answer.status != 200 or not answer.complete), None)
        if bad is not None:
            raise SystemExit(f"a request failed: {bad.status} {bad.error} {b''.join(bad.packets)[:300]!r}")
        events = sum(b"".join(answer.packets).count(b"data: ") - 1 for answer in answers)
        ttft = median(answer.first - answer.sent for answer in answers if answer.first is not None)
        return Load(wall, len(answers), events, *parts, spent, ttft)

    return asyncio.run(run())


def line(name: str, one: Load) -> str:
    per = 1e6 / one.requests
    return (
        f"{name:<22}{one.requests / one.seconds:>8.0f}{one.requests * TOKENS / one.seconds:>10.0f}"
        f"{one.requests / one.server:>10.0f}{one.loop * per:>9.0f}{one.engine * per:>9.0f}{one.rest * per:>7.0f}"
        f"{one.server * per / TOKENS:>9.1f}{one.server / one.seconds:>8.2f}{one.client * per:>9.0f}"
        f"{one.ttft * 1e3:>9.1f}{one.events / one.requests / TOKENS:>9.2f}"
    )


HEAD = (
    f"{'':<22}{'req/s':>8}{'tokens/s':>10}{'req/core':>10}{'loop us':>9}{'engine':>9}{'rest':>7}"
    f"{'us/token':>9}{'cores':>8}{'client':>9}{'TTFT ms':>9}{'ev/tok':>9}"
)


def instant(model: str, folder: Path, *options: str) -> list[str]:
    return [sys.executable, str(HERE / "server_instant.py"), model, *options]


def measure(given: argparse.Namespace, folder: Path) -> None:
    payloads = bodies(given.model)
    print(f"{given.seconds:g} s each; columns in microseconds are CPU time per request\n{HEAD}")
    with running(instant(given.model, folder), folder) as server:
        for concurrency in given.concurrency:
            print(line(f"{concurrency} at once", load(server, payloads, concurrency, given.seconds)), flush=True)
    most = max(given.concurrency)
    with running(instant(given.model, folder, "--pause", str(PAUSE)), folder) as server:
        print(line(f"{most}, steps of {PAUSE * 1e3:g} ms", load(server, payloads, most, given.seconds)), flush=True)
    for part in OPTIONAL if given.parts else ():
        with running(instant(given.model, folder, "--without", part), folder) as server:
            print(line(f"{most}, no {part}", load(server, payloads, most, given.seconds)), flush=True)
    if given.profile:
        _profile(given, folder, payloads, most)


def _profile(given: argparse.Namespace, folder: Path, payloads: list[bytes], concurrency: int) -> None:
    file = folder / "profile.json"
    file.unlink(missing_ok=True)
    with running(instant(given.model, folder, "--profile", str(file), "--pause", str(PAUSE)), folder) as server:
        load(server, payloads, concurrency, 1.0)
        os.kill(server.pid, signal.SIGUSR1)
        one = load(server, payloads, concurrency, given.seconds, warm_up=0.0)
        os.kill(server.pid, signal.SIGUSR2)
        end = time.monotonic() + 30
        while not file.exists() and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(0.5)
    _print_profile(json.loads(file.read_text()), one, given.top)


def _print_profile(found: dict[str, Any], one: Load, top: int) -> None:
    print(
        f"\nCPU time by part with steps of {PAUSE * 1e3:g} ms, under cProfile, which "
        "makes many small functions look dearer than they are"
    )
    names = sorted({name for parts in found["parts"].values() for name in parts})
    whole = sum(found["cpu"].values())
    rows = [(name, [found["parts"][thread].get(name, 0.0) for thread in found["parts"]]) for name in names]
    print(f"{'part':<32}{'share':>8}" + "".join(f"{thread + ' us/req':>20}" for thread in found["parts"]))
    for name, seconds in sorted(rows, key=lambda row: -sum(row[1])):
        if sum(seconds) > 0.004 * whole:
            cells = "".join(f"{value / one.requests * 1e6:>20.0f}" for value in seconds)
            print(f"{name:<32}{sum(seconds) / whole:>8.1%}{cells}")
    for thread, rows in found["tops"].items():
        print(f"\n{thread}: functions by own time\n{'us/req':>8}{'calls/req':>11}{'with calls':>12}")
        for where, calls, own, total in rows[:top]:
            per = 1e6 / one.requests
            print(f"{own * per:>8.1f}{calls / one.requests:>11.1f}{total * per:>12.1f}  {where}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 64])
    parser.add_argument("--parts", action=argparse.BooleanOptionalAction, default=True, help="leave parts out")
    parser.add_argument("--profile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--top", type=int, default=15, help="functions shown of each thread")
    parser.add_argument("--real", action="store_true", help="the real model against offline instead")
    parser.add_argument("--rounds", type=int, default=5, help="of --real")
    parser.add_argument("--requests", type=int, default=64, help="of --real, all at once")
    parser.add_argument("--folder", type=Path, help="for logs; default: a new one in /tmp")
    given = parser.parse_args()
    folder = work_folder(given.folder)
    if given.real:
        raise SystemExit(compare(given.model, given.rounds, given.requests, folder))
    measure(given, folder)


if __name__ == "__main__":
    main()
