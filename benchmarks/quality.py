"""What weights and KV in fewer bits cost in quality.

Reads one text (benchmarks/data/kv_quality.txt, written for this purpose) through the engine once per variant, in
chunks, so that attention reads the stored K and V, and compares all logits with those of float32 weights and float32
KV. Prints a Markdown table.

    python benchmarks/quality.py --model demo
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.build import build_engine
from octavo.config import EngineConfig
from octavo.runner import native_runner
from octavo.types import SamplingParams

TEXT = Path(__file__).parent / "data" / "kv_quality.txt"
VARIANTS: Mapping[str, Mapping[str, str]] = {
    "float32": {"dtype": "float32"},
    "KV float16": {"dtype": "float32", "kv_dtype": "float16"},
    "KV bfloat16": {"dtype": "float32", "kv_dtype": "bfloat16"},
    "KV int8": {"dtype": "float32", "kv_dtype": "int8"},
    "KV fp8": {"dtype": "float32", "kv_dtype": "fp8"},
    "bfloat16": {"dtype": "bfloat16"},
    "as the file has them": {},
    "weights int8": {"dtype": "bfloat16", "weights": "int8"},
    "weights int8_group": {"dtype": "bfloat16", "weights": "int8_group"},
    "weights int4": {"dtype": "bfloat16", "weights": "int4"},
    "weights int4_affine": {"dtype": "bfloat16", "weights": "int4_affine"},
    "weights int8, KV int8": {"dtype": "bfloat16", "weights": "int8", "kv_dtype": "int8"},
}


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes of the weights; logits [tokens, vocabulary] after each token of the text but the last."""

    name: str
    weight_bytes: int
    perplexity: float
    logits: torch.Tensor


def read(model: str, text: str, name: str, chunk: int) -> Reading:
    """The text as a prompt of the engine, whose log probabilities are asked for."""
    config = EngineConfig(
        model=model,
        kv_memory=1 << 30,
        max_num_seqs=1,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=False,
        implementation="native",
        **VARIANTS[name],  # type: ignore[arg-type]
    )
    built = build_engine(config)
    parts: list[torch.Tensor] = []
    describe = native_runner.describe

    def keep(logits: torch.Tensor, *rest: Any) -> Any:
        parts.append(logits.clone())
        return describe(logits, *rest)

    native_runner.describe = keep
    try:
        built.engine.submit(text, SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0))
        (output,) = built.engine.drain()
    finally:
        native_runner.describe = describe
    known = [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
    logits = torch.cat(parts)
    assert len(known) == len(logits)
    return Reading(name, built.loaded.weight_bytes, math.exp(-sum(known) / len(known)), logits)


def row(reading: Reading, first: Reading) -> str:
    distance = (reading.logits - first.logits).abs()
    same = (reading.logits.argmax(-1) == first.logits.argmax(-1)).float().mean()
    change = reading.perplexity / first.perplexity - 1
    return (
        f"| {reading.name} | {reading.weight_bytes / 1e6:.0f} | {reading.perplexity:.3f} | {change:+.2%} "
        f"| {distance.max():.2f} | {distance.mean():.4f} | {same:.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--chunk", type=int, default=128, help="tokens in a step")
    options = parser.parse_args()
    text = options.text.read_text()
    print(f"{options.model}, {options.text.name} in chunks of {options.chunk} tokens\n")
    print("| variant | weights MB | perplexity | change | largest logit distance | mean | same top token |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    first: Reading | None = None
    for name in VARIANTS:
        reading = read(options.model, text, name, options.chunk)
        first = first or reading
        print(row(reading, first), flush=True)
    assert first is not None
    print(f"\nThe logits have a standard deviation of {first.logits.std():.2f}.")


if __name__ == "__main__":
    main()
