"""`octavo compare` runs the real engine on a tiny model and writes what the table shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.kv.strategies import STRATEGIES


def test_compare_gives_every_strategy_the_same_bytes_and_work(capsys, monkeypatch, tmp_path: Path) -> None:
    from tests.runner.tiny import tiny_module

    tiny_module("llama").save_pretrained(tmp_path / "tiny")
    work = tmp_path / "work.jsonl"
    line = json.dumps({"arrival": 0.0, "prompt_tokens": 30, "output_tokens": 8})
    work.write_text((line + "\n") * 12)
    report = tmp_path / "out" / "report.html"
    arguments = ["--workload", work, "--kv-memory", 64 * 12288, "--max-model-len", 512, "--report", report, "--json"]
    monkeypatch.setattr(sys, "argv", ["octavo", "compare", str(tmp_path / "tiny"), *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(report.with_suffix(".json").read_text())
    assert report.read_text().startswith("<!doctype html>")
    runs = {run["summary"]["strategy"]: run["summary"] for run in printed["runs"]}
    assert tuple(runs) == STRATEGIES
    assert {run["pool_bytes"] for run in runs.values()} == {64 * 12288}
    assert {run["output_tokens"] for run in runs.values()} == {12 * 8}
    assert runs["reserve-max"]["peak_running"] == 64 * 16 // 512
    assert runs["paged"]["peak_running"] == 12
    for run in runs.values():
        assert abs(sum(run["kv_mean"].values()) - 1) < 1e-9
        assert run["refused"] == 0
