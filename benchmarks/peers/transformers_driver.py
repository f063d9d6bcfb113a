"""Continuous batching of Hugging Face transformers (--model is the checkpoint's folder).

Its manager runs in a thread and stamps the tokens itself; the KV budget becomes `num_blocks` pages of 32 tokens.
A manager is started for each list of requests (its batch size is fixed), and one short request makes sure that it has
set up its cache before the measured time begins.
"""

from __future__ import annotations

import argparse
import os
from time import perf_counter
from typing import Any

from client import Trace
from measure import MIB, Ready, kv_bytes_per_token, measure, parser
from workload import Ask

PAGE_TOKENS = 32
NOBODY = 10**9  # the id of a request that is not measured


def play(model: Any, settings: dict[str, int], asks: list[Ask], concurrency: int) -> Trace:
    import torch
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    config = ContinuousBatchingConfig(max_requests_per_batch=concurrency, allow_block_sharing=False, **settings)
    generation = GenerationConfig(max_new_tokens=256, do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.continuous_batching_context_manager(generation_config=generation, continuous_batching_config=config)
    with torch.inference_mode(), manager as running:
        _serve(running, [Ask(NOBODY, asks[0].prompt[:8], 1)], 1)
        return _serve(running, asks, concurrency)


def _serve(manager: Any, asks: list[Ask], concurrency: int) -> Trace:
    trace = Trace(asks)
    waiting, live = asks[::-1], 0
    while waiting or live:
        while waiting and live < concurrency:
            _submit(manager, waiting.pop(), trace)
            live += 1
        result = manager.get_result(timeout=1.0)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the manager stopped; its log says why")
        elif result.is_finished():
            if result.error:
                raise RuntimeError(f"request {result.request_id} failed: {result.error}")
            trace.stamps[int(result.request_id)] = list(result.timestamps)
            trace.spans.append(result.lifespan)
            live -= 1
    trace.end = perf_counter()
    return trace


def _submit(manager: Any, ask: Ask, trace: Trace) -> None:
    trace.submitted[ask.id] = perf_counter()
    manager.add_request(
        ask.prompt,
        request_id=str(ask.id),
        max_new_tokens=ask.max_tokens,
        record_timestamps=True,
        eos_token_id=-1,
    )


def build(args: argparse.Namespace) -> Ready:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    blocks = int(args.kv_mib * MIB // (kv_bytes_per_token(args.model, 2) * PAGE_TOKENS))
    settings = dict(page_size=PAGE_TOKENS, num_blocks=blocks, max_batch_tokens=args.batched_tokens)
    facts = dict(engine="transformers", version=transformers.__version__, settings=settings)
    return Ready(lambda asks, concurrency: play(model, settings, asks, concurrency), facts)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--batched-tokens", type=int, default=512)
    args = arguments.parse_args()
    measure(args, lambda: build(args))


if __name__ == "__main__":
    main()
