"""Start-up lines of real engines (shared/facts/kv_log_oracles.json): the blocks and concurrency they printed.

Not checked here, and why: lines without a `check` (nothing printed that arithmetic gives), lines of hybrid models
whose engine counts tokens by its own grouping (L44, L45, L47, L55, L56, L60, L61), and the residual of a whole
budget, which depends on driver and engine version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from octavo.kv.budget import GIB, BudgetError, Pool, require_length
from octavo.kv.spec import KVSpec, spec_from_config
from octavo.planner.catalogue import find_model

#: Lines whose printed blocks lie outside the interval, and why.
OUTSIDE = {"L14": "two lines of different workers: 0.26 % more tokens than the printed GiB allow"}
#: Shapes of lines that name no model of the facts: layers x KV heads x head size, from the source's own words.
SHAPES = {
    "L17": (33, 8, 128),  # Llama-3.1-8B with one draft layer
    "L51": (32, 8, 128),
    "L74": (28, 16, 256),  # labelled Llama-2-7B, but its bytes are GPT-J-6B's
}
#: Concurrency in printed lines is blocks over blocks: any uniform model gives it.
ONE_LAYER = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
ANY_SPEC = spec_from_config(ONE_LAYER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    wanted = {"interval_line": "blocks_interval_from_kv_gib", "blocks_line": "concurrency_from_blocks"}
    wanted |= {"tokens_line": "concurrency_from_tokens", "swap_line": "cpu_blocks_predicted"}
    for name, check in wanted.items():
        if name in metafunc.fixturenames:
            path = Path(metafunc.config.getoption("--shared")) / "facts" / "kv_log_oracles.json"
            if not path.exists():
                skip = pytest.mark.skip(reason=f"no logs at {path}; name the folder of shared/ with --shared")
                metafunc.parametrize(name, [pytest.param(None, marks=skip)])
                continue
            lines = [line for line in json.loads(path.read_text())["logs"] if check in line["check"]]
            metafunc.parametrize(name, lines, ids=[line["id"] for line in lines])


def spec_of(line: Mapping[str, Any]) -> KVSpec:
    dtype = "fp8_per_tensor" if line["kv_dtype"] == "fp8" else "bf16"
    if line["model_id"] is not None:
        entry = find_model(line["model_id"])
        assert entry is not None
        return spec_from_config(entry.config, kv_dtype=dtype, tp=line["tp"])
    layers, heads, width = SHAPES[line["id"]]
    shape = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": width}
    return spec_from_config(shape, kv_dtype=dtype)


def test_blocks_lie_in_the_interval(interval_line: Mapping[str, Any]) -> None:
    """floor(kv bytes / block bytes) for the printed GiB, and the blocks the engine logged."""
    spec = spec_of(interval_line)
    assert spec.bytes_per_token == interval_line["kv_bytes_per_token_per_gpu"]
    low, high = interval_line["check"]["blocks_interval_from_kv_gib"]
    pool = Pool(spec, round(interval_line["kv_gib"] * GIB), interval_line["block_size"])
    assert pool.blocks is not None
    assert low <= pool.blocks <= high
    assert (low <= interval_line["check"]["blocks_logged"] <= high) == (interval_line["id"] not in OUTSIDE)


def test_concurrency_from_blocks(blocks_line: Mapping[str, Any]) -> None:
    """blocks / max_model_len prints as the engine printed it. The ratio does not depend on the model."""
    spec = ANY_SPEC
    size = blocks_line["block_size"]
    pool = Pool(spec, blocks_line["gpu_blocks"] * size * spec.bytes_per_token, size)
    printed = blocks_line["max_concurrency"]
    assert f"{pool.concurrency(blocks_line['max_model_len']):.2f}" == f"{printed:.2f}"


def test_concurrency_from_tokens(tokens_line: Mapping[str, Any]) -> None:
    spec = ANY_SPEC
    pool = Pool(spec, tokens_line["kv_tokens"] * spec.bytes_per_token, tokens_line["block_size"])
    assert f"{pool.concurrency(tokens_line['max_model_len']):.2f}" == f"{tokens_line['max_concurrency']:.2f}"
    if tokens_line["check"].get("tokens_multiple_of_block"):
        assert pool.slots == tokens_line["kv_tokens"]


def test_swap_blocks(swap_line: Mapping[str, Any]) -> None:
    """Host blocks: floor(swap space / block bytes)."""
    pool = Pool(spec_of(swap_line), round(swap_line["swap_space_gib"] * GIB), swap_line["block_size"])
    assert pool.blocks == swap_line["cpu_blocks"] == swap_line["check"]["cpu_blocks_predicted"]


def test_a_refused_start_names_the_longest_length() -> None:
    """L02 (vLLM issue 10517): 29,000 tokens asked for, 23,648 fit."""
    entry = find_model("llama-3.1-8b")
    assert entry is not None
    pool = Pool(spec_from_config(entry.config), 1478 * 16 * 131072)
    with pytest.raises(BudgetError, match="lower the maximum length to 23648"):
        require_length(pool, 29000)


def test_hybrid_concurrency_of_gemma_4() -> None:
    """L46: TP 2, 10.12 GiB, M 163,840, vLLM's step budget of 8,192 tokens: printed 1.03, by hand 1.036."""
    entry = find_model("gemma-4-31b")
    assert entry is not None
    pool = Pool(spec_from_config(entry.config, tp=2), round(10.12 * GIB), 16, chunk=8192)
    in_blocks = 577 * 16  # the 1,023 + 8,192 tokens of the window and a step, wherever they begin in a block
    assert pool.sequence_bytes(163840) == 163840 * 40960 + in_blocks * 409600
    assert pool.concurrency(163840) == pytest.approx(1.036, abs=0.001)
