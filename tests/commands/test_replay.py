"""`octavo replay`: figures for every strategy, files where asked for, and nothing written for what cannot work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.kv.strategies import STRATEGIES
from tests.commands.calling import octavo

MODEL = ("--model", "llama-3.1-8b", "--gpu", "H100 SXM 80GB", "--num-blocks", 300, "--max-model-len", 2048)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty requests of uneven lengths in ten seconds."""
    path = tmp_path / "trace.csv"
    rows = [f"{i * 0.25},{200 + 61 * (i % 9)},{20 + 7 * (i % 5)}" for i in range(40)]
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "\n".join(rows) + "\n")
    return path


def test_all_strategies_are_replayed_on_the_same_pool_with_the_bounds_beside(capsys, monkeypatch, trace: Path) -> None:
    assert octavo(monkeypatch, "replay", trace, *MODEL, "--strategy", "all", "--workers", 1, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "octavo.replay/1"
    outcomes = {outcome["strategy"]: outcome for outcome in report["outcomes"]}
    assert tuple(outcomes) == STRATEGIES
    assert {outcome["pool_bytes"] for outcome in outcomes.values()} == {300 * 16 * 131072}
    for outcome in outcomes.values():
        assert outcome["finished"] == 40
        assert outcome["running_peak"] <= outcome["bounds"]["running_peak"]
    assert report["fidelity"]["statement"]
    assert "octavo replay" in report["command"]
    assert "--strategy all" in report["command"]


def test_replaying_twice_writes_the_same_bytes(monkeypatch, tmp_path: Path, trace: Path) -> None:
    """Case X3: a replay is a function of its input; the number of processes is not part of it."""
    written = []
    for name, workers in (("a", 1), ("b", 2)):
        folder = tmp_path / name
        files = ("--report", folder / "r.html", "--csv", folder / "r.csv", "--perfetto", folder / "r.trace.json")
        options = ("--strategy", "paged,growing", "--slo", "ttft<1s@p99", "--workers", workers)
        assert octavo(monkeypatch, "replay", trace, *MODEL, *options, *files) == 0
        written.append({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
    assert set(written[0]) == {"r.html", "r.json", "r.csv", "r.requests.csv", "r.trace.json"}
    assert written[0] == written[1]


def test_the_table_says_where_memory_went_and_how_far_the_times_can_be_trusted(
    capsys, monkeypatch, trace: Path
) -> None:
    assert octavo(monkeypatch, "replay", trace, *MODEL) == 0
    printed = capsys.readouterr().out
    assert "KV, live" in printed
    assert "Fidelity:" in printed


@pytest.mark.parametrize(
    ("options", "requests"),
    [
        (("--requests", 7), 7),
        (("--window", "2:4"), 8),
        (("--window", "2:4", "--requests", 3), 3),
        (("--scale", 4), 40),
        (("--rate", 20, "--seed", 3), 40),
        (("--concurrency", 2), 40),
        (("--known-lengths", "--max-tokens", 64), 40),
    ],
)
def test_parts_of_a_trace_and_other_loads(capsys, monkeypatch, trace: Path, options: tuple, requests: int) -> None:
    assert octavo(monkeypatch, "replay", trace, *MODEL, *options, "--json") == 0
    outcome = json.loads(capsys.readouterr().out)["outcomes"][0]
    assert outcome["requests"] == outcome["finished"] == requests
    if "--concurrency" in options:
        assert outcome["running_peak"] == 2
    if "--scale" in options:
        assert outcome["seconds"] < 5


def test_a_synthetic_workload_needs_no_file(capsys, monkeypatch) -> None:
    assert octavo(monkeypatch, "replay", "synthetic:sharegpt?requests=20&rate=4", *MODEL, "--json") == 0
    assert json.loads(capsys.readouterr().out)["outcomes"][0]["requests"] == 20


def test_requests_that_are_too_long_are_refused_and_listed_not_clipped(capsys, monkeypatch, tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,100,5\n1,5000,5\n2,100,5\n")
    assert octavo(monkeypatch, "replay", path, *MODEL, "--json") == 0
    outcome = json.loads(capsys.readouterr().out)["outcomes"][0]
    assert (outcome["requests"], outcome["finished"], outcome["refused"]) == (3, 2, 1)


def test_bad_lines_are_told_with_their_number(capsys, monkeypatch, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,100,5\n1,-3,5\n2,100,5\n")
    assert octavo(monkeypatch, "replay", path, *MODEL, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [line["line"] for line in report["bad_lines"]] == [3]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--model", "llama-3.1-70b", "--gpu", "L4"), "bytes short"),
        (("--model", "llama-3.1-8b", "--gpu", "L4", "--kv-memory", "64KiB"), "bytes short"),
        (("--model", "llama-3.1-8b", "--gpu", "L4", "--num-blocks", "2", "--max-model-len", "2048"), "bytes"),
        (("--model", "llama-3.1-8b"), "gpu or memory"),
    ],
)
def test_the_impossible_is_refused_in_bytes_and_writes_nothing(
    capsys, monkeypatch, tmp_path: Path, trace: Path, options: tuple, says: str
) -> None:
    report = tmp_path / "out" / "r.html"
    assert octavo(monkeypatch, "replay", trace, *options, "--report", report) == 1
    message = capsys.readouterr().err
    assert message.startswith("octavo replay: ")
    assert says in message
    assert "Traceback" not in message
    assert not report.parent.exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--strategy", "magic"), "strategy names 'magic'"),
        (("--strategy", "paged,paged"), "2 times"),
        (("--slo", "ttft>1s"), "slo"),
        (("--window", "9:2"), "window is '9:2'"),
        (("--window", "soon"), "window is 'soon'"),
        (("--requests", 0), "requests is 0"),
        (("--rate", 0), "rate is 0"),
        (("--scale", -1), "(scale, speed) is -1"),
        (("--concurrency", 0), "concurrency is 0"),
        (("--max-tokens", 0), "max_tokens is 0"),
        (("--workers", 0), "workers is 0"),
        (("--kv-memory", "lots"), "kv-memory is 'lots'"),
        (("--admission", "magic"), "admission is 'magic'"),
        (("--gpu", "abacus"), "abacus"),
        (("--engine", "abacus"), "engine is 'abacus'"),
        (("--report", "r.txt"), "must end in .html"),
    ],
)
def test_bad_options_end_in_a_sentence(
    capsys, monkeypatch, tmp_path: Path, trace: Path, options: tuple, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert octavo(monkeypatch, "replay", trace, *MODEL, *options) == 1
    message = capsys.readouterr().err.strip()
    assert says in message
    assert message.startswith("octavo replay: ")
    assert "\n" not in message


def test_files_must_not_overwrite_the_trace_nor_each_other(capsys, monkeypatch, tmp_path: Path, trace: Path) -> None:
    before = trace.read_bytes()
    for options, says in (
        (("--csv", trace), "overwrite the trace"),
        (("--report", tmp_path / "r.html", "--perfetto", tmp_path / "r.json"), "both be written"),
        (("--perfetto", tmp_path), "which is a folder"),
    ):
        assert octavo(monkeypatch, "replay", trace, *MODEL, *options) == 1
        assert says in capsys.readouterr().err
    assert trace.read_bytes() == before
    assert not (tmp_path / "r.html").exists()


def test_a_trace_without_times_asks_for_a_rate_or_a_closed_loop(capsys, monkeypatch, tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nXXX,100,5\nXXX,120,6\nXXX,90,4\n")
    assert octavo(monkeypatch, "replay", path, *MODEL) == 1
    assert "--rate" in capsys.readouterr().err
    for options in (("--rate", 2), ("--concurrency", 2)):
        assert octavo(monkeypatch, "replay", path, *MODEL, *options, "--json") == 0
        assert json.loads(capsys.readouterr().out)["outcomes"][0]["finished"] == 3


def test_a_trace_of_which_everything_is_refused_is_told_and_fails(capsys, monkeypatch, trace: Path) -> None:
    assert octavo(monkeypatch, "replay", trace, *MODEL[:-1], 20, "--json") == 1
    (outcome,) = json.loads(capsys.readouterr().out)["outcomes"]
    assert (outcome["refused"], outcome["finished"]) == (40, 0)


def test_a_window_without_requests_is_an_error(capsys, monkeypatch, trace: Path) -> None:
    assert octavo(monkeypatch, "replay", trace, *MODEL, "--window", "1e6:2e6") == 1
    assert "has no request" in capsys.readouterr().err


def test_no_strategy_passes_the_bound_beside_it(capsys, monkeypatch, trace: Path) -> None:
    few = (*MODEL[:4], "--num-blocks", 60, "--strategy", "all", "--json")
    assert octavo(monkeypatch, "replay", trace, *few) == 0
    for outcome in json.loads(capsys.readouterr().out)["outcomes"]:
        assert outcome["running_mean"] <= outcome["bounds"]["running_mean"] + 1e-9


def test_a_closed_loop_has_no_rate(capsys, monkeypatch, trace: Path) -> None:
    assert octavo(monkeypatch, "replay", trace, *MODEL, "--concurrency", 4, "--rate", 3) == 1
    assert "concurrency and rate are both given" in capsys.readouterr().err
