"""What storing the KV cache in fewer bits costs in quality.

Reads one text (benchmarks/data/kv_quality.txt, written for this purpose) through the engine once per KV dtype, in
chunks, so that attention reads the stored K and V, and compares all logits with those of the first dtype. The model
itself computes in float32 each time. Prints a Markdown table.

    python benchmarks/kv_quality.py --model demo
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.build import build_engine
from octavo.config import EngineConfig
from octavo.models.loader import LoadedModel, load_model
from octavo.types import SamplingParams

TEXT = Path(__file__).parent / "data" / "kv_quality.txt"
KV_DTYPES = ("float32", "float16", "bfloat16", "int8", "fp8")


@dataclass(frozen=True, slots=True)
class Reading:
    """bytes_per_token of KV; logits [tokens, vocabulary] after each token of the text but the last."""

    kv_dtype: str
    bytes_per_token: int
    perplexity: float
    logits: torch.Tensor


def read(model: LoadedModel, tokens: list[int], kv_dtype: str, chunk: int) -> Reading:
    """The text as a prompt of the engine, whose log probabilities are asked for."""
    config = EngineConfig(
        model=model.name,
        kv_dtype=kv_dtype,
        kv_memory=1 << 30,
        max_num_seqs=1,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=False,
    )
    built = build_engine(config, loaded=model)
    parts: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, logits: torch.Tensor) -> None:
        parts.append(logits[0].clone())

    hook = model.module.get_output_embeddings().register_forward_hook(keep)
    built.engine.submit(tokens, SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0))
    (output,) = built.engine.drain()
    hook.remove()
    known = [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
    logits = torch.cat(parts)
    assert len(known) == len(logits) == len(tokens) - 1
    layout = built.layout
    size = (layout.page_bytes * len(layout.groups) - layout.padding_bytes) // layout.block_size
    return Reading(kv_dtype, size, math.exp(-sum(known) / len(known)), logits)


def row(reading: Reading, first: Reading) -> str:
    distance = (reading.logits - first.logits).abs()
    same = (reading.logits.argmax(-1) == first.logits.argmax(-1)).float().mean()
    share = reading.bytes_per_token / first.bytes_per_token
    change = reading.perplexity / first.perplexity - 1
    return (
        f"| {reading.kv_dtype} | {reading.bytes_per_token:,} ({share:.1%}) | {reading.perplexity:.4f} | {change:+.3%} "
        f"| {distance.max():.4f} | {distance.mean():.5f} | {same:.2%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--kv-dtypes", default=",".join(KV_DTYPES), help="the first one is what others are compared to")
    parser.add_argument("--chunk", type=int, default=128, help="tokens in a step")
    options = parser.parse_args()
    model = load_model(options.model, dtype="float32")
    assert model.tokenizer is not None
    tokens = model.tokenizer.encode(options.text.read_text())
    print(f"{model.name}, float32, {len(tokens)} tokens of {options.text.name} in chunks of {options.chunk}\n")
    print("| KV dtype | bytes per token | perplexity | change | largest logit distance | mean | same top token |")
    print("|---|---|---|---|---|---|---|")
    first: Reading | None = None
    for name in options.kv_dtypes.split(","):
        reading = read(model, tokens, name, options.chunk)
        first = first or reading
        print(row(reading, first), flush=True)
    assert first is not None
    print(f"\nThe logits have a standard deviation of {first.logits.std():.2f}.")


if __name__ == "__main__":
    main()
