"""OpenVINO GenAI's ContinuousBatchingPipeline, stepped from here (--model is the IR folder that optimum-intel wrote).

The KV budget becomes `num_kv_blocks`. `max_num_seqs` is no cap under dynamic_split_fuse: the client keeps the count.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from client import drive
from measure import MIB, Ready, kv_bytes_per_token, measure, parser
from workload import Ask

BLOCK_TOKENS = 32  # the CPU plugin's page
VALUE_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "u8": 1}


class OpenVino:
    """The pipeline behind the client's protocol."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._live: dict[int, tuple[Any, int]] = {}  # id -> (handle, tokens still to come)

    def submit(self, ask: Ask) -> None:
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = ask.max_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.eos_token_id = -1
        prompt = openvino.Tensor(np.array([ask.prompt], dtype=np.int64))
        self._live[ask.id] = self._pipeline.add_request(ask.id, prompt, config), ask.max_tokens

    def step(self) -> Iterable[tuple[int, int]]:
        self._pipeline.step()
        for ask_id, (handle, left) in list(self._live.items()):
            new = 0
            while handle.can_read():
                new += sum(len(output.generated_ids) for output in handle.read().values())
            if new >= left:
                del self._live[ask_id]
            else:
                self._live[ask_id] = handle, left - new
            if new:
                yield ask_id, new

    def running(self) -> int:
        return self._pipeline.get_metrics().scheduled_requests


def kv_blocks(checkpoint: Path, precision: str, budget: int) -> int:
    """How many pages fit in the budget. u8 pages hold a float32 scale and zero point a token and head as well."""
    token = kv_bytes_per_token(checkpoint, VALUE_BYTES[precision])
    if precision == "u8":
        config = json.loads((checkpoint / "config.json").read_text())
        token += 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * 8
    return int(budget // (token * BLOCK_TOKENS))


def build(args: argparse.Namespace) -> Ready:
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = kv_blocks(args.checkpoint, args.kv_precision, args.kv_mib * MIB)
    scheduler.max_num_seqs = max(args.concurrency)
    scheduler.max_num_batched_tokens = args.batched_tokens
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    properties = dict(
        INFERENCE_PRECISION_HINT="bf16", INFERENCE_NUM_THREADS=args.threads, KV_CACHE_PRECISION=args.kv_precision
    )
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(args.model), scheduler, "CPU", properties)
    engine = OpenVino(pipeline)
    facts = dict(
        engine="openvino-genai",
        version=openvino_genai.__version__,
        settings=dict(kv=args.kv_precision, blocks=scheduler.num_kv_blocks, batched_tokens=args.batched_tokens),
    )
    return Ready(lambda asks, concurrency: drive(engine, asks, concurrency), facts)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--checkpoint", type=Path, required=True, help="the original folder, for the KV sizes")
    arguments.add_argument("--kv-precision", choices=sorted(VALUE_BYTES), default="bf16")
    arguments.add_argument("--batched-tokens", type=int, default=512)
    args = arguments.parse_args()
    measure(args, lambda: build(args))


if __name__ == "__main__":
    main()
