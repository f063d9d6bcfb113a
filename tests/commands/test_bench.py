"""`octavo bench` measures the real engine; its figures agree with each other, and bad input is told before any work."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median

import pytest

from octavo.benching.costs import Attention, model_cost, pairs_of, visible
from octavo.benching.figures import Spread, median_of
from octavo.benching.meter import REST, RUNNER, SCHEDULER, StepRecord
from octavo.benching.plan import BenchOptions, BenchPlan, make_plan, make_prompts
from octavo.benching.result import SCHEMA, VERSION, BenchResult
from octavo.benching.roofline import Limits, step_kinds
from octavo.benching.run import run_bench
from octavo.build import build_engine
from octavo.cli import main
from octavo.config import EngineConfig
from octavo.errors import OctavoError
from octavo.native import calls
from tests.commands.test_bad_input import failing

OPTIONS = BenchOptions(concurrency="1,3", input_len=40, output_len=6, num_prompts=7, rounds=3)
ROUNDING = 1 + 1e-9


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.runner.tiny import tiny_module

    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny_module("llama").save_pretrained(path)
    return path


class FixedProbe:
    """A machine that is always the same."""

    bandwidth_by, flops_by = "a fixed figure", "another"

    def __init__(self, device: object) -> None:
        self.asked = 0

    def __call__(self) -> Limits:
        return Limits(bandwidth=1e9, flops=1e11)


def settings(model: Path, plan: BenchPlan, **more: object) -> EngineConfig:
    chosen = {"kv_memory": 1 << 20, "enable_prefix_caching": False, "max_num_seqs": plan.concurrency} | more
    return EngineConfig(str(model), **chosen)  # type: ignore[arg-type]


def measured(model: Path, options: BenchOptions, **more: object) -> BenchResult:
    plan = make_plan(options)
    return run_bench(plan, settings(model, plan, **more), command="octavo bench", make_probe=FixedProbe)


@pytest.fixture(scope="module")
def result(tiny: Path) -> BenchResult:
    return measured(tiny, OPTIONS)


def test_without_a_mode_the_single_stream_comes_first_and_the_sweep_behind_it(result: BenchResult) -> None:
    assert [(point.mode, point.concurrency) for point in result.points] == [("latency", 1), ("sweep", 1), ("sweep", 3)]
    assert result.single is result.points[0]
    assert result.batches == result.points[1:]


def test_every_request_runs_to_its_length(result: BenchResult) -> None:
    for point, requests in zip(result.points, (1, 6, 7), strict=True):
        for figures in point.rounds:
            assert (figures.requests, figures.prompt_tokens) == (requests, 40 * requests)
            assert figures.output_tokens == 6 * requests
            assert figures.peak_running == min(point.concurrency, requests)
            assert 0 < figures.mean_running <= figures.peak_running * ROUNDING
            assert 0 < figures.mean_kv_utilisation <= figures.peak_kv_utilisation * ROUNDING
            assert figures.peak_kv_utilisation <= 1


def test_rates_are_tokens_over_seconds(result: BenchResult) -> None:
    for point in result.points:
        for f in point.rounds:
            assert f.output_tokens_per_second * f.seconds == pytest.approx(f.output_tokens)
            assert f.total_tokens_per_second * f.seconds == pytest.approx(f.output_tokens + f.prompt_tokens)
            assert f.requests_per_second * f.seconds == pytest.approx(f.requests)
    for f in result.points[0].rounds:
        assert f.ttft is not None
        assert f.e2e is not None
        assert f.tpot is not None
        assert f.itl is not None
        assert f.seconds == pytest.approx(f.e2e.mean)
        assert f.prefill_tokens_per_second == pytest.approx(40 / f.ttft.mean)
        assert f.decode_tokens_per_second == pytest.approx(1 / f.tpot.mean)
        assert f.ttft.mean + 5 * f.itl.mean == pytest.approx(f.e2e.mean)


def test_medians_are_medians_figure_by_figure(result: BenchResult) -> None:
    for point in result.points:
        assert len(point.rounds) == 3
        rounds = [asdict(one) for one in point.rounds]
        for name, value in asdict(point.median).items():
            column = [one[name] for one in rounds]
            if isinstance(value, dict):
                assert value == {key: median(one[key] for one in column) for key in value}
            else:
                assert value == (None if None in column else median(column))


def test_a_median_of_an_even_number_lies_between_and_nothing_stays_nothing() -> None:
    assert median_of([Spread(1, 2, 3, 4), Spread(3, 4, 5, 6)]) == Spread(2, 3, 4, 5)
    assert Spread.of([]) is None


def test_parts_sum_to_the_step(result: BenchResult) -> None:
    for point in result.points:
        assert any(kind.decode for kind in point.kinds)
        for kind in point.kinds:
            assert sum(part.seconds for part in kind.parts) == pytest.approx(kind.seconds)
            assert {SCHEDULER, REST} < {part.name for part in kind.parts}
            out = kind.to_json()
            assert sum(part["share"] for part in out["parts"]) == pytest.approx(1)  # type: ignore[attr-defined]
            assert sum(part["bytes"] for part in out["parts"]) == pytest.approx(out["bytes"])  # type: ignore[attr-defined]


def test_kinds_are_the_fullest_decode_and_the_prompts(result: BenchResult) -> None:
    single = result.points[0].kinds
    assert [kind.name for kind in single] == ["decode at batch 1", "prompt chunk of 40 tokens"]
    assert [kind.steps for kind in single] == [3 * 5, 3]
    assert result.points[2].kinds[0].name == "decode at batch 3"


def test_the_floor_is_the_larger_of_reading_and_computing() -> None:
    limits = Limits(bandwidth=100.0, flops=1000.0)
    assert limits.floor(50, 10) == 0.5
    assert limits.floor(50, 5000) == 5
    assert Limits(100.0, 0.0).floor(50, 5000) == 0.5


def test_disturbed_steps_do_not_colour_a_kind() -> None:
    def step(seconds: float) -> StepRecord:
        return StepRecord(seconds, {RUNNER: seconds}, {}, 1, 1, 1, 9, 0.1, False)

    (kind,) = step_kinds([step(1.0) for _ in range(6)] + [step(100.0)], Limits(1.0, 1.0))
    assert (kind.seconds, kind.steps) == (1.0, 7)


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_tokens_seen_and_pairs_counted_one_by_one(window: int | None) -> None:
    for start in range(12):
        for count in range(1, 12):
            queries = range(start, start + count)
            sees = [{k for k in range(q + 1) if window is None or k > q - window} for q in queries]
            assert visible(start, count, window) == len(set().union(*sees))
            assert pairs_of(start, count, window) == sum(map(len, sees))
            need = Attention(window, 4.0, 10.0).need([(start, count), (0, 1)])
            assert need == (4.0 * (len(set().union(*sees)) + 1), 10.0 * (sum(map(len, sees)) + 1))


def test_the_native_code_must_read_all_weights_but_the_embedding(tiny: Path) -> None:
    if calls.kernels() is None:
        pytest.skip("the native code is not there")
    built = build_engine(settings(tiny, make_plan(OPTIONS), implementation="native"))
    cost = model_cost(built)
    needs = cost.needs([(40, 1), (7, 1)], rows=2)
    native = built.loaded.native
    assert native is not None
    embedding = 4 * native.spec.hidden * -(-native.spec.vocabulary // 32) * 32  # float32, in panels of 32 rows
    read = sum(need.bytes for need in needs.values())
    token = 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, dim, bytes
    assert read == native.weight_bytes - embedding + (41 + 8) * token
    assert cost.needs([(0, 30)], rows=0)["head"].bytes == 0


def test_a_runner_without_a_profile_shows_what_can_be_shown(tiny: Path) -> None:
    options = BenchOptions(mode="latency", input_len=20, output_len=4, rounds=1)
    result = measured(tiny, options, implementation="transformers")
    decode = result.points[0].kinds[0]
    assert [part.name for part in decode.parts] == [RUNNER, SCHEDULER, REST]
    assert decode.floor > 0
    assert decode.flops == 0
    assert "the runner does not tell its parts apart" in result.verdict[0]
    assert any("transformers' code" in caution for caution in result.cautions)


def test_the_prefix_cache_is_empty_at_the_beginning_of_each_round(tiny: Path) -> None:
    options = BenchOptions(mode="throughput", concurrency="2", input_len=40, output_len=2, num_prompts=4, rounds=2)
    result = measured(tiny, options, enable_prefix_caching=True)
    assert [figures.cached_tokens for figures in result.points[0].rounds] == [0, 0]


def test_requests_are_the_same_for_the_same_seed() -> None:
    plans = [make_plan(BenchOptions(mode="throughput", num_prompts=20, seed=seed)) for seed in (7, 7, 8)]
    assert plans[0] == plans[1] != plans[2]
    items = plans[0].points[0].items
    assert all(32 <= item.prompt_tokens <= 512 and 16 <= item.output_tokens <= 256 for item in items)
    prompts = make_prompts(items, 49152, 7)
    assert [len(prompt) for prompt in prompts] == [item.prompt_tokens for item in items]
    assert prompts == make_prompts(items, 49152, 7)
    assert all(0 <= token < 199 for prompt in make_prompts(items, 199, 7) for token in prompt)  # type: ignore[union-attr]


def test_a_sweep_measures_low_concurrency_on_the_first_requests() -> None:
    plan = make_plan(BenchOptions(mode="sweep"))
    assert [(point.concurrency, len(point.items)) for point in plan.points] == [
        (1, 6), (2, 8), (4, 16), (8, 32), (16, 64), (32, 64), (64, 64)
    ]  # fmt: skip


SPREAD = dict.fromkeys(("mean", "p50", "p90", "p99"), float)
FIGURES = {
    **dict.fromkeys(("seconds", "requests_per_second", "output_tokens_per_second", "total_tokens_per_second"), float),
    **dict.fromkeys(("requests", "prompt_tokens", "output_tokens", "steps", "peak_running", "preemptions"), int),
    **dict.fromkeys(("cached_tokens", "drafted_tokens", "accepted_tokens"), int),
    **dict.fromkeys(("prefill_tokens_per_second", "decode_tokens_per_second"), (float, None)),
    **dict.fromkeys(("mean_running", "mean_kv_utilisation", "peak_kv_utilisation"), float),
    **dict.fromkeys(("ttft", "itl", "tpot", "e2e"), SPREAD),
}
LIMITS = {"bandwidth": float, "flops_per_second": float}
PART = {"name": str, **dict.fromkeys(("seconds", "share", "bytes", "flops", "floor_seconds"), float)}
KIND = {
    **dict.fromkeys(("name", "bound"), str),
    **dict.fromkeys(("decode", "profiled"), bool),
    "steps": int,
    **dict.fromkeys(("sequences", "tokens", "context", "seconds", "bytes", "flops", "floor_seconds", "ratio"), float),
    **LIMITS,
    "parts": [PART],
}
POINT = {
    "name": str,
    "mode": str,
    "concurrency": int,
    "probe": {"before": LIMITS, "after": LIMITS},
    "foreign_cpu_share": (float, None),
    "median": FIGURES,
    "rounds": [FIGURES],
    "step_kinds": [KIND],
}
MACHINE = {
    **dict.fromkeys(("device", "isa", "system", "python", "bandwidth_by", "flops_by"), str),
    **dict.fromkeys(("cores", "threads", "memory_bytes"), int),
    "packages": dict,
}
DOCUMENT = {
    "schema": str,
    "version": int,
    **dict.fromkeys(("title", "command", "model", "workload", "warm_up"), str),
    "facts": {"model": dict, "engine": dict, "rounds": int, "seed": int},
    "load_seconds": dict,
    "machine": MACHINE,
    "points": [POINT],
    "verdict": [str],
    "cautions": [str],
}


def fits(value: object, shape: object, where: str = "$") -> None:
    """Fail where a JSON value has other keys or kinds than the shape."""
    if isinstance(shape, dict):
        assert isinstance(value, dict), where
        assert set(value) == set(shape), where
        for key, inner in shape.items():
            fits(value[key], inner, f"{where}.{key}")
    elif isinstance(shape, list):
        assert isinstance(value, list), where
        for i, item in enumerate(value):
            fits(item, shape[0], f"{where}[{i}]")
    elif isinstance(shape, tuple):
        assert value is None or isinstance(value, (shape[0], int)), where
    else:
        kinds = (float, int) if shape is float else (shape,)
        assert isinstance(value, kinds), f"{where} is {value!r}"  # type: ignore[arg-type]


def test_the_json_has_the_keys_of_its_version(result: BenchResult) -> None:
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    fits(document, DOCUMENT)
    assert (document["schema"], document["version"]) == (SCHEMA, VERSION) == ("octavo.bench", 1)
    assert document["machine"]["packages"]["torch"]
    assert document["facts"]["engine"]["kv_bytes"] > 0


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["octavo", "bench", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0


def test_the_command_prints_json_and_writes_the_page(capsys, monkeypatch, tiny: Path, tmp_path: Path) -> None:
    report = tmp_path / "out" / "bench.html"
    lengths = ("--random-input-len", 9, "--random-output-len", 3, "--num-prompts", 4, "--max-concurrency", 2)
    run(monkeypatch, tiny, "--mode", "throughput", *lengths, "--rounds", 1, "--kv-memory", "1MiB", "--report", report,
        "--json", "-")  # fmt: skip
    document = json.loads(capsys.readouterr().out)
    fits(document, DOCUMENT)
    assert [point["median"]["output_tokens"] for point in document["points"]] == [12]
    assert document["points"][0]["probe"]["before"]["bandwidth"] > 0
    assert report.read_text().startswith("<!doctype html>")


def test_the_command_shows_tables_for_a_workload(capsys, monkeypatch, tiny: Path, tmp_path: Path) -> None:
    work, out = tmp_path / "work.jsonl", tmp_path / "bench.json"
    work.write_text('{"arrival": 50, "prompt_tokens": 9, "output_tokens": 3}\n' * 3)
    run(monkeypatch, tiny, "--mode", "sweep", "--concurrency", "1,2", "--workload", work, "--rounds", 1,
        "--kv-memory", "1MiB", "--json", out)  # fmt: skip
    printed = capsys.readouterr().out
    for words in ("at once", "output", "ITL", "TTFT", "whole step", "decode at batch 2", "3 requests of work.jsonl"):
        assert words in printed
    assert json.loads(out.read_text())["points"][0]["median"]["requests"] == 3


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (("--mode", "fast"), "mode is 'fast'; it must be one of latency, throughput, sweep"),
        (("--concurrency", "0"), "concurrency is '0'; it must be a whole number from 1 to"),
        (("--concurrency", "1,x"), "concurrency is '1,x'; it must be a whole number"),
        (("--concurrency", "2,2"), "concurrency names 2 2 times"),
        (("--mode", "throughput", "--concurrency", "1,2"), "mode throughput takes one number: use mode sweep"),
        (("--mode", "latency", "--concurrency", "2"), "leave it out or use mode throughput"),
        (("--concurrency", "600"), "concurrency is 600, more than max_num_batched_tokens (512)"),
        (("--input-len", 0), "input_len is 0; it must be from 1 to 1000000"),
        (("--rounds", 0), "rounds is 0; it must be from 1 to"),
        (("--seed", -1), "seed is -1; it must be 0 or more"),
        (("--threads", 0), "threads is 0; it must be from 1 to"),
        (("--kv-memory", "lots"), "kv_memory is 'lots'; it must be a positive size"),
        (("--weights", "int3"), "weights is 'int3'; it must be one of"),
        (("--report", "bench.txt"), "report is 'bench.txt'; its name must end in .html"),
        ((), "model 'nowhere' does not exist"),
    ],
)
def test_bad_options_are_told_before_the_model_is_looked_for(
    capsys, monkeypatch, more: tuple[object, ...], wanted: str
) -> None:
    assert wanted in failing(capsys, monkeypatch, "bench", "nowhere", *more)


def test_files_that_cannot_be_written_are_told_before_any_work(capsys, monkeypatch, tmp_path: Path) -> None:
    work = tmp_path / "work.jsonl"
    work.write_text('{"prompt_tokens": 9, "output_tokens": 3}\n')
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder.html").mkdir()
    same = tmp_path / "same.html"
    for more, wanted in (
        (("--json", tmp_path), "which is a folder"),
        (("--json", tmp_path / "file" / "x.json"), "which cannot be made"),
        (("--json", tmp_path / ("x" * 300)), "json cannot be written to"),
        (("--json", work), "json would overwrite the workload"),
        (("--report", tmp_path / "folder.html"), "which is a folder"),
        (("--report", same, "--json", same), "json and report are both"),
    ):
        assert wanted in failing(capsys, monkeypatch, "bench", "nowhere", "--workload", work, *more)
    assert work.read_text().startswith("{")
    assert not same.exists()


def test_an_empty_workload_is_told(capsys, monkeypatch, tmp_path: Path) -> None:
    work = tmp_path / "work.jsonl"
    work.write_text("\n")
    assert "has no requests" in failing(capsys, monkeypatch, "bench", "nowhere", "--workload", work)
    with pytest.raises(OctavoError, match="has no requests"):
        make_plan(BenchOptions(items=(), source="nothing"))


def test_lengths_beyond_the_model_are_told_with_both_numbers(tiny: Path) -> None:
    with pytest.raises(OctavoError, match="500 prompt and 13 output tokens, 513 together; max_model_len is 512 here"):
        measured(tiny, BenchOptions(mode="latency", input_len=500, output_len=13))
