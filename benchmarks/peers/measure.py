"""What every driver shares: its arguments, the order of a measurement, memory, statistics, one JSON line a result."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import workload
from client import Trace
from workload import Ask

Play = Callable[[list[Ask], int], Trace]  # run these requests at this concurrency
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Ready:
    """An engine that can serve: how to play requests on it, and what it is (printed with every result)."""

    play: Play
    facts: dict[str, Any]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The arguments that all drivers have in common."""
    new = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument("--model", type=Path, required=True, help="the checkpoint, converted for this engine")
    new.add_argument("--workload", type=Path, required=True)
    new.add_argument("--out", type=Path, required=True, help="JSON lines are appended here")
    new.add_argument("--stamps", type=Path, help="the time of every token is appended here, a JSON line a result")
    new.add_argument("--mode", choices=["single", "batch", "all"], default="all")
    new.add_argument("--concurrency", type=_numbers, default=[64], help="comma list, for batch mode")
    new.add_argument("--kv-mib", type=int, default=4096, help="memory for KV, where the engine lets it be set")
    new.add_argument("--limit", type=int, help="only the first N requests")
    new.add_argument("--clip", type=int, help="cut prompts and outputs to N tokens, to try a driver out")
    new.add_argument("--single-prompt", type=int, default=512)
    new.add_argument("--single-output", type=int, default=128)
    new.add_argument("--threads", type=int, default=os.cpu_count())
    return new


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def measure(args: argparse.Namespace, build: Callable[[], Ready]) -> None:
    """Build the engine, warm it up, then the single stream, then the batch at each concurrency, highest first.

    The loading times count from the start of this process, so imports, conversion and compilation are all in them.
    """
    asks = workload.load(args.workload, args.limit)
    with MemoryWatch() as memory:
        ready = build()
        loading = {"load_s": round(process_age(), 2)}
        loading["first_token_s"] = round(loading["load_s"] + _warm_up(ready.play, asks), 2)
        for mode, concurrency, chosen in _stages(args, asks):
            trace = ready.play(chosen, concurrency)
            figures = _single_figures(trace) if mode == "single" else _batch_figures(trace)
            what = dict(mode=mode, concurrency=concurrency, kv_mib=args.kv_mib, requests=len(chosen))
            lengths = [[len(ask.prompt), ask.max_tokens] for ask in chosen]
            _append(args.out, what | ready.facts | loading | figures | dict(peak_rss_mib=memory.peak_mib, asks=lengths))
            if args.stamps:
                _append(args.stamps, what | ready.facts | _relative(trace))


def _warm_up(play: Play, asks: list[Ask]) -> float:
    """One short request, then four at once. Returns the seconds to the first token of the first."""
    first = play([workload.single_ask(asks, 64, 8)], 1)
    play([workload.single_ask(asks, 64, 8, i) for i in range(4)], 4)
    return first.stamps[0][0] - first.start


def _stages(args: argparse.Namespace, asks: list[Ask]) -> Iterable[tuple[str, int, list[Ask]]]:
    if args.mode != "batch":
        yield "single", 1, [workload.single_ask(asks, args.single_prompt, args.single_output)]
    if args.mode != "single":
        asks = workload.clip(asks, args.clip) if args.clip else asks
        for concurrency in sorted(args.concurrency, reverse=True):
            yield "batch", concurrency, workload.for_concurrency(asks, concurrency)


def process_age() -> float:
    """Seconds since the kernel started this process, the interpreter's own start included."""
    after_name = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_name[19]) / os.sysconf("SC_CLK_TCK")


class MemoryWatch:
    """Peak resident memory of this process and all its descendants. Pages that two processes share count twice."""

    def __init__(self, every: float = 0.2) -> None:
        self._every = every
        self._peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.is_set():
            self._peak = max(self._peak, resident_bytes(os.getpid()))
            self._stop.wait(self._every)

    @property
    def peak_mib(self) -> int:
        self._peak = max(self._peak, resident_bytes(os.getpid()))
        return self._peak // MIB

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def resident_bytes(pid: int) -> int:
    """Of a process and its descendants; one that ends meanwhile counts 0."""
    total, todo = 0, [pid]
    while todo:
        process = Path("/proc") / str(todo.pop())
        try:
            total += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            for task in (process / "task").iterdir():
                todo += [int(child) for child in (task / "children").read_text().split()]
        except (OSError, ValueError):
            continue
    return total


def kv_bytes_per_token(checkpoint: Path, bytes_per_value: float) -> float:
    """Of all layers, K and V, from the checkpoint's config.json."""
    config = json.loads((checkpoint / "config.json").read_text())
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * width * bytes_per_value


def percentile(values: list[float], share: float) -> float:
    """With linear interpolation between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _single_figures(trace: Trace) -> dict[str, Any]:
    """Prefill speed counts up to the first token, decode speed from the first to the last."""
    ask, times = trace.asks[0], trace.stamps[trace.asks[0].id]
    first = times[0] - trace.submitted[ask.id]
    figures = dict(
        ttft_s=round(first, 4),
        prefill_tok_s=round(len(ask.prompt) / first, 1),
        out_tokens=len(times),
        wanted=ask.max_tokens,
    )
    if len(times) > 1:
        figures["decode_tok_s"] = round((len(times) - 1) / (times[-1] - times[0]), 2)
    return figures


def _batch_figures(trace: Trace) -> dict[str, Any]:
    """Time to first token counts from the moment the client put the request in flight."""
    first = [times[0] - trace.submitted[i] for i, times in trace.stamps.items() if times]
    gaps = [b - a for times in trace.stamps.values() for a, b in pairwise(times)]
    out_tokens = sum(len(times) for times in trace.stamps.values())
    peak, mean, source = trace.running()
    figures = dict(
        wall_s=round(trace.end - trace.start, 3),
        out_tokens=out_tokens,
        wanted=sum(ask.max_tokens for ask in trace.asks),
        out_tok_s=round(out_tokens / (trace.end - trace.start), 2),
        running_peak=peak,
        running_mean=round(mean, 2),
        running_by=source,
    )
    for share in (50, 99):
        figures[f"ttft_p{share}_s"] = round(percentile(first, share / 100), 3)
        figures[f"itl_p{share}_ms"] = round(percentile(gaps, share / 100) * 1000, 2)
    return figures


def _relative(trace: Trace) -> dict[str, Any]:
    """Every stamp in whole milliseconds since the start."""
    return dict(
        submitted_ms={i: round((at - trace.start) * 1000) for i, at in trace.submitted.items()},
        stamps_ms={i: [round((at - trace.start) * 1000) for at in times] for i, times in trace.stamps.items()},
    )


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
