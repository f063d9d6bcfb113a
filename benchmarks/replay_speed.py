"""How fast traces are replayed, and in how much memory: `python benchmarks/replay_speed.py --traces ../shared/traces`.

Measured is `paged` with prefix hashing on one core, at a load that queues: CPU seconds of `replay` with the requests
already read, the median of three runs. Beside it the same with every sequence looked at in every step (`stepping`),
which has the same outcome, and the peak of allocated memory for a trace and for one ten times as long.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

from octavo.planner.deployment import Deployment, Resolved, resolve
from octavo.planner.replay import ReplayOptions, replay
from octavo.planner.traces.api import TraceRequest
from octavo.planner.traces.opening import open_trace

AZURE = "azure-llm-2023/AzureLLMInferenceTrace_conv.csv"
MOONCAKE = "mooncake-fast25/conversation_trace.jsonl.gz"
H100 = {"gpu": "H100 SXM 80GB", "max_model_len": 16384}
H200 = {"gpu": "H200", "kv_dtype": "fp8"}
CASES = (
    ("Azure conversation, Llama-3.1-8B on H100", AZURE, "rate=20", H100),
    ("the same with blocks of 64", AZURE, "rate=20", H100 | {"block_size": 64}),
    ("Azure conversation, Llama-3.1-8B on RTX 4090", AZURE, "rate=4", {"gpu": "RTX 4090", "max_model_len": 16384}),
    ("Mooncake conversation, Llama-3.1-8B on H200, fp8 KV", MOONCAKE, "", H200),
    ("the same with blocks of 64", MOONCAKE, "", H200 | {"block_size": 64}),
    ("the same with blocks of 512, as the trace hashes them", MOONCAKE, "", H200 | {"block_size": 512}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, help="only the first N")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name, file, extra, settings in CASES:
        given = "&".join(part for part in (extra, options.requests and f"requests={options.requests}") if part)
        requests = list(open_trace(f"{options.traces / file}{'?' + given if given else ''}"))
        resolved = resolve(Deployment("llama-3.1-8b", max_num_batched_tokens=8192, max_num_seqs=256, **settings))
        rows.append(measure(name, requests, resolved, options.repeats))
        print(line(rows[-1]), flush=True)
    requests = list(open_trace(f"{options.traces / AZURE}?rate=20&requests=1500"))
    resolved = resolve(Deployment("llama-3.1-8b", gpu="H100 SXM 80GB", max_model_len=16384))
    memory = [peak(repeated(requests, times), resolved) for times in (1, 10)]
    print(f"memory: {memory[0]:.1f} MiB for 1,500 requests, {memory[1]:.1f} MiB for 15,000")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "memory_mib": memory}, indent=1))


def measure(name: str, requests: list[TraceRequest], resolved: Resolved, repeats: int) -> dict[str, object]:
    """CPU seconds of the replay, and how much of it was work."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        outcome = replay(requests, resolved)
        seconds.append(time.process_time() - start)
    part = requests[: len(requests) // 10]
    start = time.process_time()
    replay(part, resolved, ReplayOptions(stepping=True))
    stepping = time.process_time() - start
    start = time.process_time()
    replay(part, resolved)
    coasting = time.process_time() - start
    return {
        "name": name,
        "requests": len(requests),
        "per_second": len(requests) / statistics.median(seconds),
        "running": outcome.running_mean,
        "waiting": outcome.waiting_mean,
        "steps_per_request": outcome.steps / len(requests),
        "hit_rate": outcome.hit_rate,
        "against_stepping": stepping / coasting,
    }


def line(row: dict[str, object]) -> str:
    return (
        f"{row['name']}: {row['per_second']:,.0f} requests/s; {row['requests']:,} requests, {row['running']:.0f} "
        f"running and {row['waiting']:,.0f} waiting in the mean, {row['steps_per_request']:.2f} steps each, hit rate "
        f"{row['hit_rate']:.1%}; {row['against_stepping']:.1f}x as fast as stepping"
    )


def repeated(requests: list[TraceRequest], times: int) -> Iterable[TraceRequest]:
    """The same requests over and over, each round after the one before."""
    length = requests[-1].arrival + 60
    for round_ in range(times):
        for request in requests:
            arrival = request.arrival + round_ * length
            yield TraceRequest(arrival, request.prompt_tokens, request.output_tokens, f"{request.id}.{round_}")


def peak(requests: Iterable[TraceRequest], resolved: Resolved) -> float:
    """MiB allocated at most while it runs."""
    tracemalloc.start()
    replay(requests, resolved, ReplayOptions(lives=100))
    _, highest = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return highest / 2**20


if __name__ == "__main__":
    main()
