"""What the machine could do at most, from the probe's two numbers and the shape of the model.

A decode step reads every weight and the KV of every running request once: bytes / bandwidth. Prompt and output tokens
need two operations a weight, and attention its own: operations / GEMM speed. Whichever takes longer is the limit.
It is the limit of the weights' width as such (scales are not counted), and its arithmetic is that of bf16.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BITS = {"bf16": 16, "f16": 16, "int8": 8, "u8": 8, "int4": 4}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a dense decoder with tied embeddings that decide bytes and operations."""

    body: int  # weights of all layers
    head: int  # weights of the output projection
    query_width: int  # of all layers: layers x heads x head size
    kv_width: int  # of all layers, K and V

    @classmethod
    def read(cls, checkpoint: Path) -> Shape:
        config = json.loads((checkpoint / "config.json").read_text())
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        size = config.get("head_dim") or hidden // heads
        layer = hidden * size * (2 * heads + 2 * kv_heads) + 3 * hidden * config["intermediate_size"]
        return cls(layers * layer, config["vocab_size"] * hidden, layers * heads * size, 2 * layers * kv_heads * size)

    def weight_bytes(self, weights: str) -> float:
        return (self.body + self.head) * BITS[weights] / 8

    def kv_bytes(self, kv: str, tokens: float) -> float:
        return self.kv_width * tokens * BITS[kv] / 8

    def operations(self, prompt: int, output: int) -> float:
        """Of one request: the last output token is never fed back, and only sampled rows need the head."""
        rows = prompt + output - 1
        attention = 4 * self.query_width * rows * (rows + 1) / 2
        return 2 * self.body * rows + 2 * self.head * output + attention


def limits(row: dict[str, Any], shape: Shape, read_gb_s: float, gemm_gflop_s: float) -> dict[str, float]:
    """The limits that belong to one result: decode and prefill of the single stream, or output of the batch."""
    bandwidth, speed = read_gb_s * 1e9, gemm_gflop_s * 1e9
    asks = row["asks"]
    if row["mode"] == "single":
        prompt, output = asks[0]
        step = shape.weight_bytes(row["weights"]) + shape.kv_bytes(row["kv"], prompt + output / 2)
        return dict(
            limit_decode_tok_s=bandwidth / step, limit_prefill_tok_s=prompt * speed / shape.operations(prompt, 1)
        )
    outputs = [output for _, output in asks]
    steps = max(max(outputs), sum(outputs) / row["concurrency"])
    contexts = sum(output * (prompt + output / 2) for prompt, output in asks)
    read = (steps * shape.weight_bytes(row["weights"]) + shape.kv_bytes(row["kv"], contexts)) / bandwidth
    compute = sum(shape.operations(prompt, output) for prompt, output in asks) / speed
    return dict(limit_out_tok_s=sum(outputs) / max(read, compute))
