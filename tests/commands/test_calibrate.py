"""`octavo calibrate`: bad input in a sentence, no file from a refused fit, and the real thing in small."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from octavo import events as ev
from octavo.cli import main
from octavo.log import LogHeader, LogWriter
from octavo.planner.deployment import Deployment, resolve
from octavo.planner.replay import ReplayOptions, replay
from octavo.planner.timing.calibration import load
from octavo.planner.traces.api import TraceRequest
from octavo.runner.timing import StepShape
from octavo.scheduler.config import SchedulerConfig
from octavo.types import Request, SamplingParams


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """(exit code, what was printed; the message alone if it failed)."""
    monkeypatch.setattr(sys, "argv", ["octavo", "calibrate", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    code = int(stop.value.code or 0)
    return code, shown.err.strip().splitlines()[-1] if code else shown.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("demo", "--shapes", 10), "shapes is 10; it must be from 60 to 5000."),
        (("demo", "--seconds", -1), "seconds is -1.0; it must be a number of seconds, 0 or more."),
        (("demo", "--threads", 9999), "threads is 9999"),
        (("demo", "--kv-memory", "lots"), "kv_memory is 'lots'"),
        (("nowhere",), "model 'nowhere' does not exist"),
    ],
)
def test_bad_input_is_one_sentence(capsys, monkeypatch, tmp_path: Path, arguments: tuple, sentence: str) -> None:
    code, message = call(monkeypatch, capsys, *arguments, "--output", tmp_path / "c.json")
    assert code == 1
    assert sentence in message
    assert not (tmp_path / "c.json").exists()


def test_an_output_that_cannot_be_written_is_refused_first(capsys, monkeypatch, tmp_path: Path) -> None:
    log = steps_log(tmp_path / "run.jsonl", 0.02)
    code, message = call(monkeypatch, capsys, "demo", "-o", tmp_path)
    assert (code, "which is a folder" in message) == (1, True)
    code, message = call(monkeypatch, capsys, "demo", "--from-log", log, "-o", log)
    assert (code, "would overwrite the log" in message) == (1, True)


def steps_log(path: Path, sigma: float, steps: int = 600) -> Path:
    """A decision log of an engine with known step times, and noise: a number of decodes and sometimes a prompt."""
    rng = random.Random(1)
    header = LogHeader(
        "paged", 4096, 16, (None,), True, SchedulerConfig(max_model_len=8192), ("demo", "bfloat16", "int4", "bf16")
    )
    writer = LogWriter(path, header)
    writer(ev.Submitted(0, 0.0, Request("r", (1, 2), SamplingParams()), (1,)))
    now = 0.0
    for step in range(steps):
        work = [(i, rng.randrange(10, 900), 1, 1) for i in range(rng.randrange(1, 40))]
        if step % 3 == 0:
            work.append((99, 0, rng.randrange(4, 400), 1))
        tokens, context = sum(w[2] for w in work), sum(w[1] + 1 for w in work if w[2] == 1)
        writer(ev.PlanBegan(step, now))
        writer(ev.Planned(step, now, tuple(work), ()))
        now += (4e-3 + 4e-4 * tokens + 1e-6 * context) * rng.lognormvariate(0.0, sigma)
        writer(ev.Settled(step, now, ()))
    writer.close()
    return path


@pytest.mark.real_model
def test_a_log_of_the_engine_calibrates_the_planner(capsys, monkeypatch, tmp_path: Path) -> None:
    log, output = steps_log(tmp_path / "run.jsonl", 0.03), tmp_path / "c.json"
    code, printed = call(monkeypatch, capsys, "demo", "--from-log", log, "--output", output)
    assert code == 0
    assert "held-out steps" in printed
    assert str(output) in printed
    resolved = resolve(Deployment(model="demo", calibration=str(output), kv_memory=256 << 20))
    shape = StepShape((), 20, 8000, (), 20)
    assert resolved.timer.seconds(shape) == pytest.approx(4e-3 + 20 * 4e-4 + 8000e-6, rel=0.05)
    outcome = replay([TraceRequest(0.0, 100, 10, "a")], resolved, ReplayOptions(known_lengths=True))
    assert outcome.finished == 1
    assert outcome.ttft.mean == pytest.approx(4e-3 + 100 * 4e-4, rel=0.1)


def test_a_refused_fit_writes_no_file(capsys, monkeypatch, tmp_path: Path) -> None:
    log, output = steps_log(tmp_path / "run.jsonl", 0.9), tmp_path / "c.json"
    code, message = call(monkeypatch, capsys, "demo", "--from-log", log, "--output", output)
    assert code == 1
    assert "The calibration is refused" in message
    assert "the bound is 10% and 25%" in message
    assert not output.exists()


def test_a_short_log_and_what_is_no_log_are_refused(capsys, monkeypatch, tmp_path: Path) -> None:
    output = tmp_path / "c.json"
    short = steps_log(tmp_path / "short.jsonl", 0.0, steps=20)
    code, message = call(monkeypatch, capsys, "demo", "--from-log", short, "-o", output)
    assert (code, "a calibration needs at least 40" in message) == (1, True)
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    code, message = call(monkeypatch, capsys, "demo", "--from-log", tmp_path / "other.jsonl", "-o", output)
    assert (code, "is no Octavo log" in message) == (1, True)
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--from-log", "a", "--from-requests", "b"), "from_log and from_requests are both given"),
        (("--from-log", "a", "--shapes", 99), "shapes is 99, but it belongs to steps that are timed here"),
        (("--from-requests", "a", "--gpu", "H100", "--threads", 1), "threads is 1, but it belongs to steps"),
        (("--tp", 2), "tp is 2, but it belongs to --from-requests"),
        (("--from-requests", "a"), "gpu is missing"),
        (("--from-requests", "none.csv", "--gpu", "RTX 4090"), "none.csv cannot be read"),
    ],
)
def test_options_that_would_be_passed_over_are_refused(
    capsys, monkeypatch, tmp_path: Path, arguments: tuple, sentence: str
) -> None:
    code, message = call(monkeypatch, capsys, "Llama-3.1-8B", *arguments, "-o", tmp_path / "c.json")
    assert code == 1
    assert sentence in message


def test_a_request_log_calibrates_a_device(capsys, monkeypatch, tmp_path: Path) -> None:
    """One request at a time: TTFT and ITL are a step's, and so are known in advance."""
    base = resolve(Deployment(model="Llama-3.1-8B", gpu="RTX 4090", num_blocks=2000, max_model_len=4096)).timer
    lines = ["id,input_toks,output_toks,queued_s,first_token_s,last_token_s"]
    for i in range(60):
        prompt = 100 + 97 * i % 1500
        first = 1.2 * base.seconds(StepShape(((min(prompt, 512), 0),), 0, 0, (), 1)) * -(-prompt // 512)
        decode = 1.2 * base.seconds(StepShape((), 1, prompt, (), 1))
        lines.append(f"r{i},{prompt},20,{i * 5.0},{i * 5.0 + first},{i * 5.0 + first + 19 * decode}")
    log, output = tmp_path / "log.csv", tmp_path / "c.json"
    log.write_text("\n".join(lines) + "\n")
    given = ("--gpu", "RTX 4090", "--num-blocks", 2000, "--max-model-len", 4096)
    code, printed = call(monkeypatch, capsys, "Llama-3.1-8B", "--from-requests", log, *given, "-o", output)
    assert code == 0
    assert "10 held-out requests" in printed
    shape = StepShape((), 1, 500, (), 1)
    resolved = resolve(
        Deployment(model="Llama-3.1-8B", gpu="RTX 4090", num_blocks=2000, max_model_len=4096, calibration=str(output))
    )
    assert resolved.timer.seconds(shape) == pytest.approx(1.2 * base.seconds(shape), rel=0.05)


@pytest.mark.slow
@pytest.mark.real_model
def test_the_real_model_is_timed(capsys, monkeypatch, tmp_path: Path) -> None:
    """Few shapes on whatever this machine does meanwhile: either a file that the planner can use, or a refusal."""
    output = tmp_path / "c.json"
    arguments = ("--shapes", 60, "--seconds", 0, "--kv-memory", "96MiB", "--max-num-batched-tokens", 256)
    code, text = call(monkeypatch, capsys, "demo", *arguments, "-o", output)
    if code:
        assert "The calibration is refused" in text
        assert not output.exists()
        return
    timer = load(output).fit.timer()
    one, many = timer.seconds(StepShape((), 1, 50, (), 1)), timer.seconds(StepShape(((250, 0),), 0, 0, (), 1))
    assert 0 < one < many < 60
    record = json.loads(output.read_text())
    assert record["host"]["rounds"] == 3
    assert record["reach"]["tokens"] <= 256
