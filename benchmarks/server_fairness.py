"""Two tenants, one flooding: what the other's time to first token becomes under `--order fair`.

Measures, in alternating rounds on one `octavo serve`: TTFT of bob's steady small requests while he is alone, and while
ada floods the server (always more requests than run and may wait; refused ones come again at once). Prints p50 and p99
of both, ada's throughput, and why bob's requests waited, as /kv/requests says it. Against the bar: bob's p99 under the
flood at most twice that alone, and no reason that speaks of memory, slots or capacity without numbers.
Needs a quiet machine.

    python benchmarks/server_fairness.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from server_client import Client
from server_process import octavo_serve, running, work_folder

SETTINGS = {
    "kv_memory": "128MiB",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "max_queue": 32,
    "order": "fair",
    "api_keys": [{"key": f"key-of-{name}", "tenant": name} for name in ("ada", "bob")],
}
FLOOD = 72  # requests that ada always wants to have in the server: more than run and wait
BAR = 2.0
LACKS = ("memory", "slots", "quota")  # causes that have to have numbers, as everything that speaks of capacity has


@dataclass(slots=True)
class Phase:
    """What bob saw in one phase, and what ada got."""

    ttft: list[float] = field(default_factory=list)
    refused: int = 0  # bob's
    flood_tokens: int = 0
    flood_refused: int = 0
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    sentences: dict[str, str] = field(default_factory=dict)  # cause -> an example
    bare: list[str] = field(default_factory=list)  # reasons without numbers

    def percentile(self, share: float) -> float:
        ordered = sorted(self.ttft)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


class House:
    """Both clients of one server."""

    def __init__(self, url: str, model: str, given: argparse.Namespace) -> None:
        self.ada, self.bob = Client(url, "key-of-ada"), Client(url, "key-of-bob")
        self._given, self._model = given, model
        self._rng = random.Random(11)
        self._count = 0

    def _body(self, prompt: int, output: int) -> bytes:
        ids = [self._rng.randrange(100, 40_000) for _ in range(prompt)]
        fields = {"model": self._model, "prompt": ids, "max_tokens": output, "temperature": 0, "ignore_eos": True}
        return json.dumps(fields | {"stream": True}).encode()

    async def phase(self, seconds: float, flooded: bool) -> Phase:
        seen = Phase()
        stop = asyncio.Event()
        flood = [asyncio.create_task(self._flood(seen, stop)) for _ in range(FLOOD)] if flooded else []
        await asyncio.sleep(3.0 if flooded else 0.5)  # until the queue is full
        tokens, start = seen.flood_tokens, time.monotonic()
        tasks = []
        for i in range(int(seconds / self._given.interval)):
            await asyncio.sleep(max(0.0, start + i * self._given.interval - time.monotonic()))
            tasks.append(asyncio.create_task(self._ask(seen, looks=flooded)))
        await asyncio.gather(*tasks)
        seen.seconds, seen.flood_tokens = time.monotonic() - start, seen.flood_tokens - tokens
        stop.set()
        await asyncio.gather(*flood)
        return seen

    async def _ask(self, seen: Phase, looks: bool) -> None:
        """One of bob's requests; now and then he asks why it waits."""
        self._count += 1
        label = f"bob-{self._count}"
        look = asyncio.create_task(self._look(seen, label)) if looks and self._count % 2 else None
        answer = await self.bob.post("/v1/completions", self._body(self._given.prompt, 16), label=label)
        if answer.status == 200 and answer.first is not None and answer.complete:
            seen.ttft.append(answer.first - answer.sent)
        elif answer.status == 429:
            seen.refused += 1
        else:
            raise SystemExit(f"{label}: {answer.status} {answer.error} {b''.join(answer.packets)[:300]!r}")
        if look is not None:
            await look

    async def _look(self, seen: Phase, label: str) -> None:
        await asyncio.sleep(0.01)
        answer = await self.bob.get(f"/kv/requests/{label}")
        wait = answer.json().get("wait") if answer.status == 200 else None
        if wait is None:
            seen.reasons["runs" if answer.status == 200 else "not submitted yet"] += 1
            return
        seen.reasons[wait["cause"]] += 1
        seen.sentences.setdefault(wait["cause"], wait["sentence"])
        if not has_numbers(wait):
            seen.bare.append(wait["sentence"])

    async def _flood(self, seen: Phase, stop: asyncio.Event) -> None:
        while not stop.is_set():
            answer = await self.ada.post("/v1/completions", self._body(self._rng.randint(50, 300), 64))
            if answer.status == 429:
                seen.flood_refused += 1
                await asyncio.sleep(self._given.again)
            elif answer.status == 200 and answer.complete:
                seen.flood_tokens += 64
            else:
                raise SystemExit(f"ada: {answer.status} {answer.error} {b''.join(answer.packets)[:300]!r}")


def has_numbers(wait: Mapping[str, Any]) -> bool:
    """Whether a reason that speaks of a lack says how much is needed, there and short."""
    if not wait["cause"].startswith(LACKS) and "capacity" not in wait["sentence"].lower():
        return True
    numbers = [wait[name] for name in ("need", "have", "short")]
    behind = wait.get("behind") is not None  # then the numbers are of the one in front
    return behind or (all(isinstance(number, int) for number in numbers) and any(c.isdigit() for c in wait["sentence"]))


def row(name: str, one: Phase) -> str:
    flood = (
        f"ada {one.flood_tokens / one.seconds:.0f} tokens/s, {one.flood_refused} refused" if one.flood_tokens else ""
    )
    return (
        f"{name:<16}{len(one.ttft):>5} answers{one.refused:>4} refused   TTFT p50 {one.percentile(0.5) * 1e3:>7.1f} ms"
        f"   p99 {one.percentile(0.99) * 1e3:>7.1f} ms   {flood}"
    )


async def compare(url: str, given: argparse.Namespace) -> int:
    house = House(url, given.model, given)
    await house.phase(3.0, flooded=False)
    phases: dict[bool, list[Phase]] = {False: [], True: []}
    for round_ in range(given.rounds):
        for flooded in (False, True) if round_ % 2 == 0 else (True, False):
            one = await house.phase(given.seconds, flooded)
            phases[flooded].append(one)
            print(row("under the flood" if flooded else "alone", one), flush=True)
    return verdict(phases)


def verdict(phases: Mapping[bool, list[Phase]]) -> int:
    middle = {
        (flooded, share): median(one.percentile(share) for one in ones)
        for flooded, ones in phases.items()
        for share in (0.5, 0.99)
    }
    ratio = middle[True, 0.99] / middle[False, 0.99]
    print(
        f"medians of rounds: p50 {middle[False, 0.5] * 1e3:.1f} -> {middle[True, 0.5] * 1e3:.1f} ms, "
        f"p99 {middle[False, 0.99] * 1e3:.1f} -> {middle[True, 0.99] * 1e3:.1f} ms: {ratio:.2f} x; the bar: {BAR:g} x"
    )
    reasons: Counter[str] = Counter()
    for one in phases[True]:
        reasons += one.reasons
    print(f"why bob's requests waited 10 ms after they came: {dict(reasons)}")
    for cause, sentence in {c: s for one in phases[True] for c, s in one.sentences.items()}.items():
        print(f"    {cause}: {sentence}")
    bare = [sentence for one in phases[True] for sentence in one.bare]
    for sentence in dict.fromkeys(bare):
        print(f"FAIL  without numbers: {sentence}")
    refused = sum(one.refused for one in phases[True])
    if refused:
        print(f"FAIL  {refused} of bob's requests were refused because ada's filled the queue")
    return 0 if ratio <= BAR and not bare and not refused else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each phase")
    parser.add_argument("--interval", type=float, default=0.8, help="seconds between two of bob's requests")
    parser.add_argument("--prompt", type=int, default=400, help="tokens of bob's prompts")
    parser.add_argument(
        "--again", type=float, default=1.0, help="seconds until refused requests come again (Retry-After: 1)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the server")
    parser.add_argument("--folder", type=Path, help="for the server's log; default: a new one in /tmp")
    given = parser.parse_args()
    folder = work_folder(given.folder)
    settings = SETTINGS | dict(pair.split("=", 1) for pair in given.set)
    with running(octavo_serve(given.model, settings, folder), folder) as server:
        code = asyncio.run(compare(server.url, given))
    raise SystemExit(code)


if __name__ == "__main__":
    main()
