"""`octavo plan`: capacity, fleets and what to change, with error bars, the same every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.commands import replay as replay_command
from octavo.planner.deployment import Deployment, resolve
from octavo.planner.search.knobs import knobs_for
from octavo.planner.traces.api import TraceRequest
from tests.commands.calling import octavo

SMALL = ("--model", "llama-3.1-8b", "--gpu", "H100 SXM 80GB", "--num-blocks", 200, "--max-model-len", 2048)
SLO = ("--slo", "ttft<1s@p95,tpot<60ms@p95")
QUICK = ("--seeds", 2, "--workers", 1)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty requests of uneven lengths in four seconds."""
    path = tmp_path / "trace.csv"
    rows = [f"{i * 0.1},{200 + 61 * (i % 9)},{20 + 7 * (i % 5)}" for i in range(40)]
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "\n".join(rows) + "\n")
    return path


def test_capacity_is_told_per_strategy_with_its_error(capsys, monkeypatch, trace: Path) -> None:
    options = ("--strategy", "paged,reserve-max", "--no-what-if", "--json")
    assert octavo(monkeypatch, "plan", "--trace", trace, *SMALL, *SLO, *QUICK, *options) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["schema"] == "octavo.plan/1"
    assert plan["what_if"] is plan["fleet"] is None
    rates = {curve["strategy"]: curve["capacity"]["rate"] for curve in plan["curves"]}
    assert rates["paged"]["mean"] > rates["reserve-max"]["mean"] > 0
    assert rates["paged"]["count"] == 2
    assert rates["paged"]["error"] >= 0


def test_what_to_change_names_bottleneck_and_flags(capsys, monkeypatch, trace: Path) -> None:
    options = ("--no-capacity", "--scale", 5, "--seeds", 4, "--json")
    assert octavo(monkeypatch, "plan", "--trace", trace, *SMALL, *QUICK, *options) == 0
    found = json.loads(capsys.readouterr().out)["what_if"]
    assert found["bottleneck"] == "KV memory"
    by_flag = {change["vllm"]: change for change in found["changes"]}
    assert "e2e" in by_flag["--kv-cache-dtype fp8"]["better"]
    assert by_flag["--kv-cache-dtype fp8"]["octavo"] == "--kv-dtype fp8"


def test_a_fleet_needs_no_device_to_begin_with_and_is_priced(capsys, monkeypatch, trace: Path) -> None:
    options = ("--rate", 30, "--devices", "L40S,h200", "--price", "l40s=0.9,h200=3.5", "--json")
    asked = ("--model", "llama-3.1-8b", "--max-model-len", 2048, "--busiest", 20)
    assert octavo(monkeypatch, "plan", "--trace", trace, *asked, *SLO, *QUICK, *options) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["curves"] == []
    fleets = plan["fleet"]["fleets"]
    assert {fleet["gpu"] for fleet in fleets} == {"L40S", "H200 SXM 141GB"}
    searched = fleets[: plan["fleet"]["searched"]]
    assert fleets[0]["cost"] == min(fleet["cost"] for fleet in searched)
    for fleet in fleets:
        assert fleet["devices"] == fleet["replicas"] * fleet["tp"]


def test_planning_twice_gives_the_same_bytes(capsys, monkeypatch, tmp_path: Path, trace: Path) -> None:
    """Case X3, and the number of processes is not part of the answer."""
    answers = []
    for name, workers in (("a", 1), ("b", 2)):
        report = tmp_path / name / "plan.html"
        options = ("--seeds", 2, "--workers", workers, "--busiest", 20, "--report", report, "--json")
        assert octavo(monkeypatch, "plan", "--trace", trace, *SMALL, *SLO, *options) == 0
        files = {path.name: path.read_bytes() for path in sorted(report.parent.iterdir())}
        answers.append((capsys.readouterr().out, files))
    assert set(answers[0][1]) == {"plan.html", "plan.json"}
    assert answers[0] == answers[1]
    report = json.loads(answers[0][1]["plan.json"])
    assert report["curves"]
    assert report["changes"]
    assert report["bottleneck"]


def test_the_tables_say_what_was_used_and_how_sure_it_is(capsys, monkeypatch, trace: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    options = ("--busiest", 20, "--scale", 5, "--rate", 9, "--devices", "L40S,T4")
    assert octavo(monkeypatch, "plan", "--trace", trace, *SMALL, *SLO, *QUICK, *options) == 0
    printed = capsys.readouterr().out
    assert "the busiest 20 of 40 requests in a row" in printed
    assert "±" in printed
    assert "The bottleneck is" in printed
    assert "Not T4" in printed
    assert "bytes short" in printed
    assert "Fidelity:" in printed


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--slo", "speed<1s"), "slo bounds 'speed'"),
        (("--seeds", 1), "seeds is 1"),
        (("--busiest", 1), "busiest is 1"),
        (("--rate", 0), "rate is 0"),
        (("--price", "h100"), "price has 'h100'"),
        (("--rate", 5, "--devices", "abacus"), "abacus"),
        (("--strategy", "magic"), "strategy names 'magic'"),
        (("--report", "plan.json"), "must end in .html"),
        (("--gpu", "T4", "--num-blocks", 2), "bytes"),
    ],
)
def test_bad_options_end_in_a_sentence_and_write_nothing(
    capsys, monkeypatch, tmp_path: Path, trace: Path, options: tuple, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert octavo(monkeypatch, "plan", "--trace", trace, *SMALL, *QUICK, *options) == 1
    message = capsys.readouterr().err.strip()
    assert message.startswith("octavo plan: ")
    assert says in message
    assert sorted(tmp_path.iterdir()) == before


def test_the_impossible_is_refused_in_bytes_and_writes_nothing(
    capsys, monkeypatch, tmp_path: Path, trace: Path
) -> None:
    report = tmp_path / "out" / "plan.html"
    asked = ("--model", "llama-3.1-70b", "--gpu", "L4", "--report", report)
    assert octavo(monkeypatch, "plan", "--trace", trace, *asked) == 1
    assert "bytes short" in capsys.readouterr().err
    assert not report.parent.exists()


def test_every_flag_that_is_recommended_for_octavo_is_one_of_its_options() -> None:
    import typer

    app = typer.Typer()
    app.command()(replay_command.replay)
    known = {
        name
        for parameter in typer.main.get_command(app).params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    requests = (TraceRequest(0.0, 100, 10, "a"),)
    for caching in (True, False):
        for strategy in ("paged", "reserve-max"):
            base = Deployment("llama-3.1-8b", gpu="L40S", prefix_caching=caching, strategy=strategy)
            for knob in knobs_for(resolve(base), requests, ("H100 SXM 80GB",)):
                flags = {word for word in knob.octavo.split() if word.startswith("--")}
                assert flags <= known, knob.octavo
                assert flags
