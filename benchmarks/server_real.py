"""The real model behind HTTP against `LLM.generate` on the same requests; part of `server_overhead.py --real`."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from server_client import Client
from server_process import ServerProcess, octavo_serve, running

BAR = 0.97
SETTINGS = {"kv_memory": "512MiB", "max_num_seqs": 64, "max_num_batched_tokens": 512}
ARMS = ("offline", "streaming", "whole answers")


def requests_of(round_: int, count: int) -> list[tuple[list[int], int]]:
    """Prompts as token ids and lengths of answers; other prompts in every round, so that none is cached."""
    lengths, words = random.Random(1), random.Random(1000 + round_)
    made = []
    for _ in range(count):
        prompt = min(400, max(8, round(96 * lengths.lognormvariate(0.0, 0.6))))
        output = min(160, max(16, round(64 * lengths.lognormvariate(0.0, 0.4))))
        made.append(([words.randrange(100, 40_000) for _ in range(prompt)], output))
    return made


def offline(model: str) -> None:
    """The offline side: for each line with a round and a count on stdin, a line with seconds on stdout."""
    from octavo.openmp import spin_shortly

    spin_shortly()
    from octavo.config import parse_bytes
    from octavo.llm import LLM
    from octavo.types import SamplingParams

    llm = LLM(model, **SETTINGS | {"kv_memory": parse_bytes(SETTINGS["kv_memory"], "kv_memory")})
    print("ready", flush=True)
    for line in sys.stdin:
        made = requests_of(*map(int, line.split()))
        params = [SamplingParams(max_tokens=output, temperature=0, ignore_eos=True) for _, output in made]
        start = time.perf_counter()
        outputs = llm.generate([prompt for prompt, _ in made], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"seconds": seconds, "tokens": sum(map(len, tokens))}), flush=True)


def served(server: ServerProcess, model: str, made: list[tuple[list[int], int]], stream: bool) -> dict[str, Any]:
    """Send all at once; seconds from the first byte sent to the last one received."""

    async def run() -> dict[str, Any]:
        client = Client(server.url)
        fields = {"model": model, "temperature": 0, "ignore_eos": True, "stream": stream}
        payloads = [json.dumps(fields | {"prompt": prompt, "max_tokens": output}).encode() for prompt, output in made]
        cpu, own = server.cpu(), time.process_time()
        start = time.perf_counter()
        answers = await asyncio.gather(*(client.post("/v1/completions", payload) for payload in payloads))
        seconds = time.perf_counter() - start
        spent = {"server_cpu": server.cpu() - cpu, "client_cpu": time.process_time() - own}
        client.close()
        for answer in answers:
            if answer.status != 200 or not answer.complete:
                raise SystemExit(f"a request failed: {answer.status} {answer.error} {answer.body[:300]!r}")
        return {"seconds": seconds, "tokens": sum(output for _, output in made), **spent}

    return asyncio.run(run())


def compare(model: str, rounds: int, count: int, folder: Path) -> int:
    """Alternating rounds, the first of them unmeasured. Exit code: 0 if the server keeps to the bar."""
    command = [sys.executable, __file__, model]
    settings = {**SETTINGS, "access_log": True}
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker,
        running(octavo_serve(model, settings, folder), folder) as server,
    ):
        assert worker.stdin is not None
        assert worker.stdout is not None
        if worker.stdout.readline().strip() != "ready":
            raise SystemExit("the offline engine did not start")
        rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
        print(f"{count} requests at once; tokens per second by round\n{'':<7}" + "".join(f"{arm:>16}" for arm in ARMS))
        for round_ in range(rounds + 1):
            shift = round_ % len(ARMS)
            found = {}
            for i, arm in enumerate((*ARMS[shift:], *ARMS[:shift])):
                seed = 3 * round_ + i  # other prompts each time: the server's two arms share a prefix cache
                if arm == "offline":
                    print(seed, count, file=worker.stdin, flush=True)
                    found[arm] = json.loads(worker.stdout.readline())
                else:
                    found[arm] = served(server, model, requests_of(seed, count), arm == "streaming")
            if round_:
                for arm, one in found.items():
                    rates[arm].append(one["tokens"] / one["seconds"])
            cells = "".join(f"{found[arm]['tokens'] / found[arm]['seconds']:>16.1f}" for arm in ARMS)
            print(f"{round_ or 'warm':<7}{cells}   client CPU {found['streaming']['client_cpu']:.2f} s", flush=True)
        worker.stdin.close()
    return _verdict(rates)


def _verdict(rates: dict[str, list[float]]) -> int:
    middle = {arm: median(values) for arm, values in rates.items()}
    print(f"{'median':<7}" + "".join(f"{middle[arm]:>16.1f}" for arm in ARMS))
    good = True
    for arm in ARMS[1:]:
        pairs = [served / offline for served, offline in zip(rates[arm], rates["offline"], strict=True)]
        share = middle[arm] / middle["offline"]
        good &= share >= BAR
        print(f"{arm}: {share:.1%} of offline (median of rounds' ratios {median(pairs):.1%}); the bar: {BAR:.0%}")
    return 0 if good else 1


if __name__ == "__main__":
    offline(sys.argv[1])
