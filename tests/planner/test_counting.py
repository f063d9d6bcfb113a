"""Published figures that follow from counting alone, through `resolve` and the KV managers that serve.

Start-up lines of real engines (shared/facts/kv_log_oracles.json), Orca (Max) of the PagedAttention paper, the page
waste of vAttention, and Gemma-3-27B with and without freeing what left a window.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.planner.test_size_logs import OUTSIDE
from tests.simulation import Bench

from octavo.kv.api import Ask, KVManager
from octavo.kv.budget import GIB, BudgetError
from octavo.kv.strategies import make_manager
from octavo.planner.deployment import Deployment, Resolved, resolve

KIB, MIB = 1 << 10, 1 << 20
#: A device that holds any model of these tests; its times do not matter here.
ROOMY = "MI355X"


YI_6B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 11008,
    "vocab_size": 64000,
    "max_position_embeddings": 200_000,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    wanted = {"interval_line": "blocks_interval_from_kv_gib", "concurrency_line": "concurrency_from"}
    for name, check in wanted.items():
        if name in metafunc.fixturenames:
            path = Path(metafunc.config.getoption("--shared")) / "facts" / "kv_log_oracles.json"
            if not path.exists():
                skip = pytest.mark.skip(reason=f"no logs at {path}; name the folder of shared/ with --shared")
                metafunc.parametrize(name, [pytest.param(None, marks=skip)])
                continue
            logs = json.loads(path.read_text())["logs"]
            lines = [line for line in logs if any(key.startswith(check) for key in line["check"])]
            if name == "interval_line":
                lines = [line for line in lines if line["model_id"] is not None]
            metafunc.parametrize(name, lines, ids=[line["id"] for line in lines])


def manager(resolved: Resolved, windows: tuple[int | None, ...] | None = None) -> KVManager:
    config = resolved.scheduler
    return make_manager(
        resolved.deployment.strategy,
        resolved.pages,
        resolved.deployment.block_size,
        max_model_len=config.max_model_len,
        windows=windows or resolved.windows,
        chunk=config.max_num_batched_tokens,
    )


def grow(kv: KVManager, tokens: int, chunk: int, seq: int = 1) -> None:
    """Compute a sequence of `tokens` in steps of `chunk`."""
    for done in range(0, tokens, chunk):
        upto = min(tokens, done + chunk)
        kv.commit(kv.quote(Ask(seq, upto, tokens, tokens, tokens)))
        kv.seal(seq, upto, ())


class TestStartUpLines:
    def test_blocks(self, interval_line: Mapping[str, Any]) -> None:
        """The printed GiB become the blocks that the engine logged, up to the rounding of the GiB."""
        line = interval_line
        resolved = resolve(
            Deployment(
                line["model_id"],
                gpu=ROOMY,
                engine="vllm",
                tp=line["tp"],
                kv_dtype="fp8" if line["kv_dtype"] == "fp8" else "bf16",
                block_size=line["block_size"],
                kv_memory=round(line["kv_gib"] * GIB),
                max_model_len=64,
            )
        )
        assert resolved.block_bytes == line["block_size"] * line["kv_bytes_per_token_per_gpu"]
        low, high = line["check"]["blocks_interval_from_kv_gib"]
        assert low <= resolved.pages <= high
        assert (low <= line["check"]["blocks_logged"] <= high) == (line["id"] not in OUTSIDE)

    def test_concurrency(self, concurrency_line: Mapping[str, Any]) -> None:
        """Measured blocks over the blocks of one request print as the engine printed them."""
        line = concurrency_line
        blocks = line["gpu_blocks"] or line["kv_tokens"] // line["block_size"]
        deployment = Deployment(
            "llama-3.1-8b", gpu=ROOMY, engine="vllm", block_size=line["block_size"], num_blocks=blocks, max_model_len=64
        )
        kv = manager(resolve(deployment))
        needed = kv.ceiling_blocks(line["max_model_len"], line["max_model_len"])
        assert f"{kv.capacity / needed:.2f}" == f"{line['max_concurrency']:.2f}"

    def test_l02_is_refused_with_the_longest_length(self) -> None:
        """vllm issue 10517: 29,000 tokens were asked for, 23,648 fitted."""
        with pytest.raises(BudgetError, match="longest possible length is 23648"):
            resolve(Deployment("llama-3.1-8b", gpu=ROOMY, engine="vllm", num_blocks=1478, max_model_len=29_000))

    def test_l46_hybrid(self) -> None:
        """Gemma-4-31B, TP 2, 10.12 GiB: one request of 163,840 tokens fits 1.03 times."""
        resolved = resolve(
            Deployment(
                "gemma-4-31b",
                gpu=ROOMY,
                engine="vllm",
                tp=2,
                kv_memory=round(10.12 * GIB),
                max_model_len=163_840,
                max_num_batched_tokens=8192,
            )
        )
        kv = manager(resolved)
        assert kv.capacity / kv.ceiling_blocks(163_840, 163_840) == pytest.approx(1.036, abs=0.001)


def test_orca_max_runs_seven() -> None:
    """OPT-13B in 12 GiB at 2,048 tokens, as in the PagedAttention paper: 7 regions, 7 requests at once."""
    resolved = resolve(
        Deployment(
            "opt-13b",
            gpu="A100 SXM 40GB",
            strategy="reserve-max",
            kv_memory=12 * GIB,
            max_num_batched_tokens=4096,
            admission="prompt",
        )
    )
    assert resolved.pages == 983
    config = resolved.scheduler
    assert config.max_model_len == 2048
    settings = {name: getattr(config, name) for name in config.__slots__}
    bench = Bench("reserve-max", pages=resolved.pages, block=16, config=settings, watched=False)
    for _ in range(20):
        bench.add(161, 338)  # ShareGPT's means
    peak = 0
    while bench.scheduler.busy:
        plan, _ = bench.step()
        peak = max(peak, len(plan.work))
    assert peak == 7


class TestVAttention:
    """vAttention (ASPLOS 2025, arXiv 2405.04437): Table 8 and section 7.4, "64KB page size results in a maximum
    theoretical waste of only 4-15MB per request which increases to 16-60MB for 256KB"; blocks of 32 (Yi-34B TP-1) to
    128 tokens (Yi-6B TP-2) at 64 KB. Every layer has a K and a V tensor, each of which takes whole pages on
    each worker.
    """

    @pytest.fixture
    def model(self, request: pytest.FixtureRequest, tmp_path: Path) -> str:
        if request.param != "yi-6b":
            return str(request.param)
        (tmp_path / "config.json").write_text(json.dumps(YI_6B))
        return str(tmp_path)

    @pytest.mark.parametrize(
        ("model", "kv_heads", "tp", "tokens", "waste"),
        [
            ("yi-6b", 4, 1, 64, 4),
            ("yi-6b", 4, 2, 128, 8),
            ("meta-llama-3-8b", 8, 1, 32, 4),
            ("meta-llama-3-8b", 8, 2, 64, 8),
            ("yi-1.5-34b", 8, 1, 32, 7.5),
            ("yi-1.5-34b", 8, 2, 64, 15),
        ],
        indirect=["model"],
    )
    @pytest.mark.parametrize("pages", [1, 4, 32], ids=["64KiB", "256KiB", "2MiB"])
    def test_a_page_more_than_needed(
        self, model: str, kv_heads: int, tp: int, tokens: int, waste: float, pages: int
    ) -> None:
        block = pages * 64 * KIB // (kv_heads // tp * 128 * 2)  # a page of one K tensor, in tokens
        assert block == pages * tokens
        resolved = resolve(Deployment(model, gpu=ROOMY, tp=tp, block_size=block, kv_memory=8 * GIB))
        assert tp * resolved.block_bytes == pages * waste * MIB
        kv = manager(resolved)
        grow(kv, block + 1, 512)  # one token in the second page of every tensor
        ledger = kv.ledger()
        assert (ledger.live, ledger.slack) == (block + 1, block - 1)
        assert kv.capacity - kv.free == 2

    def test_the_published_range(self) -> None:
        """4 to 15 MB with pages of 64 KB, 16 to 60 MB with 256 KB: the ends of the rows above."""
        ends = {}
        for size, pages in ((64, 1), (256, 4)):
            wasted = []
            for model, heads in (("meta-llama-3-8b", 8), ("yi-1.5-34b", 8)):
                for tp in (1, 2):
                    block = size * KIB // (heads // tp * 128 * 2)
                    resolved = resolve(Deployment(model, gpu=ROOMY, tp=tp, block_size=block, kv_memory=8 * GIB))
                    wasted.append(tp * resolved.block_bytes / MIB)
            ends[size] = (min(wasted), max(wasted))
            assert pages == size // 64
        assert ends == {64: (4, 15), 256: (16, 60)}


class TestGemma3WithAndWithoutWindows:
    """One sequence of 32,768 tokens of Gemma-3-27B: 2.91 GiB when blocks that left the window are freed, 15.5 GiB when
    all layers keep everything, as a tool says that drops the window."""

    WANTED = Deployment("gemma-3-27b", gpu=ROOMY, kv_memory=20 * GIB, max_model_len=32_768)

    @pytest.mark.parametrize(("engine", "layers", "gib"), [("octavo", 52, 2.906), ("vllm", 60, 2.969)])
    def test_windows_freed(self, engine: str, layers: int, gib: float) -> None:
        """What the manager holds at the end of the sequence: vLLM pads the 52 windowed layers to six groups of ten."""
        resolved = resolve(replace(self.WANTED, engine=engine, max_num_batched_tokens=512))
        kv = manager(resolved)
        grow(kv, 32_768, 512)
        held = (kv.capacity - kv.free) * resolved.block_bytes
        assert held == (10 * 32_768 + layers * 1024) * 8192
        assert round(held / GIB, 3) == gib

    @pytest.mark.parametrize(("engine", "gib"), [("octavo", 2.913), ("vllm", 2.976)])
    def test_windows_freed_anywhere_in_a_block(self, engine: str, gib: float) -> None:
        """The most that decoding holds: the window may begin within a block."""
        wanted = replace(self.WANTED, engine=engine, max_num_batched_tokens=1, max_num_seqs=1)
        resolved = resolve(wanted)
        blocks = manager(resolved).ceiling_blocks(32_768, 32_768)
        assert round(blocks * resolved.block_bytes / GIB, 3) == gib

    def test_pages_shared_by_all_layers(self) -> None:
        resolved = resolve(self.WANTED)
        kv = manager(resolved, (None,) * len(resolved.windows))
        grow(kv, 32_768, 512)
        assert (kv.capacity - kv.free) * resolved.block_bytes == resolved.spec.bytes_unwindowed(32_768)
        assert (kv.capacity - kv.free) * resolved.block_bytes / GIB == 15.5
