"""Bad input ends in one clear sentence that names what is wrong, and exit code 1; never in a traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from octavo.cli import main


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A directory laid out like a hub snapshot: config, safetensors, no tokenizer."""
    from tests.runner.tiny import tiny_module

    tiny_module("llama").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "work.jsonl"
    path.write_text(
        "".join(json.dumps({"arrival": 0, "prompt_tokens": 9, "output_tokens": 4}) + "\n" for _ in range(3))
    )
    return path


def failing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    """Run the command line; returns its message."""
    monkeypatch.setattr(sys, "argv", ["octavo", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    text = capsys.readouterr().err.strip()
    assert "Traceback" not in text
    message = text.splitlines()[-1]  # bars of a model that loads may stand before it
    assert message.startswith(f"octavo {arguments[0]}: ")
    return message


def compare(model: object, workload: object, tmp_path: Path, *more: object) -> tuple[object, ...]:
    report = tmp_path / "report.html"
    return ("compare", model, "--workload", workload, "--report", report, "--max-num-seqs", 8, *more)


def test_missing_model(capsys, monkeypatch) -> None:
    assert "model 'nowhere' does not exist" in failing(capsys, monkeypatch, "run", "nowhere", "hi")


def test_truncated_gguf(capsys, monkeypatch, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00\x10\x00")
    assert "cut.gguf" in failing(capsys, monkeypatch, "run", path, "hi")


def test_wrong_dtype(capsys, monkeypatch, tiny_model: Path) -> None:
    message = failing(capsys, monkeypatch, "run", tiny_model, "hi", "--dtype", "float17")
    assert "dtype is 'float17'; it must be auto, float32, bfloat16, float16" in message


def test_text_prompt_without_tokenizer(capsys, monkeypatch, tiny_model: Path) -> None:
    message = failing(capsys, monkeypatch, "run", tiny_model, "hi", "--kv-memory", "4MiB")
    assert "no tokenizer" in message


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("{oops", "line 2: not JSON"),
        (
            '{"prompt_tokens": 0, "output_tokens": 1}',
            "line 2: prompt_tokens is 0; it must be a whole number of at least 1",
        ),
        ('{"prompt_tokens": 3}', "line 2: output_tokens is None"),
        ('{"prompt_tokens": 3, "output_tokens": 1, "arrival": -1}', "line 2: arrival is -1"),
        ("[1]", "line 2: a JSON object is wanted"),
    ],
)
def test_workload_with_a_bad_line(capsys, monkeypatch, tmp_path: Path, line: str, wanted: str) -> None:
    path = tmp_path / "work.jsonl"
    path.write_text('{"prompt_tokens": 3, "output_tokens": 1}\n' + line + "\n")
    message = failing(capsys, monkeypatch, *compare("demo", path, tmp_path, "--kv-memory", "1MiB"))
    assert wanted in message


def test_missing_workload(capsys, monkeypatch, tmp_path: Path) -> None:
    message = failing(capsys, monkeypatch, *compare("demo", tmp_path / "no.csv", tmp_path, "--kv-memory", "1MiB"))
    assert "no.csv does not exist" in message


def test_azure_file_with_other_columns(capsys, monkeypatch, tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    message = failing(capsys, monkeypatch, *compare("demo", path, tmp_path, "--kv-memory", "1MiB"))
    assert "TIMESTAMP, ContextTokens, GeneratedTokens" in message


def test_kv_budget_below_one_block(capsys, monkeypatch, tiny_model: Path, workload: Path, tmp_path: Path) -> None:
    message = failing(capsys, monkeypatch, *compare(tiny_model, workload, tmp_path, "--kv-memory", "100"))
    assert "kv_memory is 100 bytes, less than one block: 16 tokens need 12288 bytes" in message
    assert "raise kv_memory or lower block_size" in message


def test_kv_memory_that_is_no_size(capsys, monkeypatch, tiny_model: Path, workload: Path, tmp_path: Path) -> None:
    message = failing(capsys, monkeypatch, *compare(tiny_model, workload, tmp_path, "--kv-memory", "lots"))
    assert "kv_memory is 'lots'; it must be a positive size such as 512MiB" in message


def test_max_length_above_the_models(capsys, monkeypatch, tiny_model: Path, workload: Path, tmp_path: Path) -> None:
    message = failing(
        capsys, monkeypatch, *compare(tiny_model, workload, tmp_path, "--kv-memory", "1MiB", "--max-model-len", 513)
    )
    assert "max_model_len is 513" in message
    assert "takes at most 512 tokens" in message


def test_max_length_above_the_pool(capsys, monkeypatch, tiny_model: Path, workload: Path, tmp_path: Path) -> None:
    """K10: the needed and the possible length, and both remedies."""
    message = failing(
        capsys, monkeypatch, *compare(tiny_model, workload, tmp_path, "--kv-memory", 4 * 12288, "--max-model-len", 65)
    )
    assert "max_model_len is 65 tokens, which need 61440 bytes of KV; there are 49152, enough for 64 tokens" in message
    assert "set max_model_len to 64 or less, or raise kv_memory to 61440" in message


def test_unknown_strategy(capsys, monkeypatch, tiny_model: Path, workload: Path, tmp_path: Path) -> None:
    message = failing(
        capsys, monkeypatch, *compare(tiny_model, workload, tmp_path, "--kv-memory", "1MiB", "--strategies", "best")
    )
    assert "'best'; choose from reserve-max, reserve-pow2, reserve-oracle, growing, paged, or all" in message


def test_a_strategy_named_twice(capsys, monkeypatch, workload: Path, tmp_path: Path) -> None:
    more = ("--kv-memory", "1MiB", "--strategies", "paged, paged")
    message = failing(capsys, monkeypatch, *compare("demo", workload, tmp_path, *more))
    assert "strategies names 'paged' 2 times; name each one once" in message


def test_bad_outputs_are_told_before_the_model_is_loaded(capsys, monkeypatch, workload: Path, tmp_path: Path) -> None:
    kept = workload.read_text()
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "taken.json").mkdir()
    (tmp_path / "file").write_text("x")
    as_json = tmp_path / "work.json"
    as_json.write_text(kept)
    (tmp_path / "linked.json").symlink_to(workload)
    (tmp_path / "logs").mkdir()
    log_work = tmp_path / "logs" / "paged.jsonl"
    log_work.write_text(kept)
    for work, more, wanted in (
        (workload, ("--report", tmp_path / "report.txt"), "report.txt'; its name must end in .html"),
        (workload, ("--report", tmp_path / "report"), "its name must end in .html"),
        (workload, ("--report", tmp_path / "folder.html"), "folder.html', which is a folder"),
        (workload, ("--report", tmp_path / "taken.html"), "taken.json', which is a folder"),
        (as_json, ("--report", tmp_path / "work.html"), "report would overwrite the workload"),
        (workload, ("--report", tmp_path / "linked.html"), "report would overwrite the workload"),
        (workload, ("--report", tmp_path / "file" / "x.html"), "which cannot be made"),
        (workload, ("--report", tmp_path / ("x" * 300 + ".html")), "report cannot be written to"),
        (workload, ("--report", tmp_path / "a.html", "--log", tmp_path / "a.json"), "rename one"),
        (workload, ("--report", tmp_path / "a.html", "--log", tmp_path / "a.html" / "logs"), "rename one"),
        (workload, ("--log", tmp_path / "file"), "file', which is a file"),
        (log_work, ("--log", tmp_path / "logs"), "would overwrite the workload"),
    ):
        arguments = ("--workload", work, "--report", tmp_path / "good.html", "--kv-memory", "1MiB", *more)
        message = failing(capsys, monkeypatch, "compare", "nowhere", *arguments)
        assert wanted in message, more
    assert workload.read_text() == kept
    assert sorted(path.name for path in tmp_path.glob("*.html")) == ["folder.html"]


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("--requests", 0, "requests is 0"),
        ("--length-scale", "nan", "length_scale is nan"),
        ("--time-scale", "nan", "time_scale is nan"),
    ],
)
def test_scales(capsys, monkeypatch, workload: Path, tmp_path: Path, option: str, value: object, wanted: str) -> None:
    message = failing(
        capsys, monkeypatch, *compare("nowhere", workload, tmp_path, "--kv-memory", "1MiB", option, value)
    )
    assert wanted in message


def test_step_budget_below_the_sequences(capsys, monkeypatch, tiny_model: Path, workload: Path, tmp_path: Path) -> None:
    message = failing(
        capsys,
        monkeypatch,
        *compare(tiny_model, workload, tmp_path, "--kv-memory", "1MiB", "--max-num-batched-tokens", 4),
    )
    assert "max_num_batched_tokens is 4, less than max_num_seqs (8)" in message


def test_unknown_command(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["octavo", "fly"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "there is no command 'fly'" in capsys.readouterr().err
