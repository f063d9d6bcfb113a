"""The start-up report: numbers that come true, where settings came from, and no secrets."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from octavo.build import BuiltEngine, build_engine
from octavo.models.loader import LoadedModel, load_model
from octavo.server.config import TenantConfig
from octavo.server.settings import Settings, read_settings
from octavo.server.startup import as_bytes, concurrency, print_start_up, start_up
from octavo.types import SamplingParams


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    from tests.runner.tiny import tiny_module

    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny_module("llama").save_pretrained(path)
    return load_model(str(path))


def settings(*, model: str = "tiny", **flags: object) -> Settings:
    return read_settings({"model": model, **flags}, {})


def built(loaded: LoadedModel, **flags: object) -> BuiltEngine:
    return build_engine(settings(**({"kv_memory": "512KiB"} | flags)).config.engine, loaded=loaded)


def most_together(engine: BuiltEngine, length: int, prompt: int, count: int) -> int:
    """Send `count` requests that come to `length` tokens and return how many were ever running at once."""
    params = SamplingParams(max_tokens=length - prompt, ignore_eos=True, temperature=0.0)
    for number in range(count):
        engine.engine.submit([number % 190 + 3] * prompt, params, request_id=f"{number}")
    most = 0
    while engine.engine.busy:
        engine.engine.step()
        most = max(most, len(engine.engine.scheduler.running))
    return most


@pytest.mark.parametrize("strategy", ["paged", "reserve-max", "reserve-pow2", "growing"])
def test_the_concurrency_that_is_printed_is_what_really_runs_together(loaded: LoadedModel, strategy: str) -> None:
    flags = {"kv_strategy": strategy, "admission": "ceiling", "max_model_len": "128", "max_num_seqs": "64"}
    for entry in concurrency(built(loaded, **flags), lengths=(40, 64)):
        engine = built(loaded, **flags)
        assert most_together(engine, entry.length, prompt=4, count=entry.requests + 8) == entry.requests, entry
        assert engine.engine.scheduler.totals.preemptions == 0
        assert entry.limit == "KV memory"


@pytest.mark.parametrize("length", [40, 64, 128])
def test_with_peak_admission_about_as_many_or_more_run_together(loaded: LoadedModel, length: int) -> None:
    engine = built(loaded, max_model_len="128", max_num_seqs="64")
    entry = concurrency(engine, lengths=(40, 64))[(40, 64, 128).index(length)]
    assert most_together(engine, length, prompt=4, count=entry.requests + 8) >= 0.95 * entry.requests


def test_the_limit_that_binds_is_named(loaded: LoadedModel) -> None:
    flags = {"max_num_seqs": "5", "max_model_len": "128"}
    short, longest = concurrency(built(loaded, **flags), lengths=(16,))
    assert (short.length, short.requests, short.limit) == (16, 5, "max_num_seqs")
    assert longest.length == 128
    assert most_together(built(loaded, **flags), 16, prompt=4, count=9) == 5
    (few,) = concurrency(built(loaded, kv_memory="128KiB", max_model_len="64"), lengths=())
    assert few.limit == "KV memory"


def test_memory_lines_sum_to_the_budget_and_the_pool_is_whole_blocks(loaded: LoadedModel) -> None:
    given = settings(kv_memory="500000", max_model_len="64")
    report = start_up(given, build_engine(given.config.engine, loaded=loaded), ["/v1/models"])
    assert sum(report.memory.values()) == report.budget
    assert report.memory["weights"] == loaded.weight_bytes
    assert report.memory["KV pool"] == report.pool_bytes
    assert report.pool_bytes + report.memory["padding"] == 500_000
    assert report.longest == 64
    assert report.longest_limit == "max_model_len"


def test_it_says_whether_what_lies_beside_the_pool_was_measured(loaded: LoadedModel) -> None:
    given = settings(max_num_seqs="2", max_num_batched_tokens="16", max_model_len="64")
    measured = start_up(given, build_engine(given.config.engine, loaded=loaded), [])
    assert measured.measured
    assert measured.memory["workspace"] > 0
    assert sum(measured.memory.values()) == measured.budget
    assert "they are not measured" in printed(given, loaded)  # there, `kv_memory` is given


def test_what_limits_the_longest_request_is_named(loaded: LoadedModel) -> None:
    for memory, limit in (("64KiB", "KV memory"), ("8MiB", "the model")):
        given = settings(kv_memory=memory)
        report = start_up(given, build_engine(given.config.engine, loaded=loaded), [])
        assert report.longest_limit == limit


def printed(given: Settings, loaded: LoadedModel, *, verbose: bool = False) -> str:
    engine = replace(given.config.engine, kv_memory=1 << 20)
    text = io.StringIO()
    console = Console(file=text, width=120, highlight=False)
    print_start_up(
        start_up(given, build_engine(engine, loaded=loaded), ["/health", "/v1/models"]), console, verbose=verbose
    )
    return text.getvalue()


def test_settings_are_printed_with_where_they_came_from(loaded: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text("max-num-seqs: 7\nmax_body_bytes: 1MiB\n")
    environment = {"OCTAVO_ORDER": "priority", "OCTAVO_PROT": "1"}
    given = read_settings({"model": "tiny", "page": False}, environment, file)
    text = printed(given, loaded)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["max_num_seqs"] == ["7", str(file)]
    assert rows["max_body_bytes"] == ["1", "MiB", str(file)]
    assert rows["order"] == ["priority", "OCTAVO_ORDER"]
    assert rows["page"] == ["off", "--no-page"]
    assert "block_size" not in rows
    assert "warning: OCTAVO_PROT is no setting and is ignored; did you mean OCTAVO_PORT?" in text
    assert "/v1/models" in text
    assert "no API key needed" in text
    rows = {
        line.split()[0]: line.split()[1:] for line in printed(given, loaded, verbose=True).splitlines() if line.strip()
    }
    assert rows["block_size"] == ["16", "default"]


@pytest.mark.parametrize(
    ("flags", "warned"),
    [({}, False), ({"host": "0.0.0.0"}, True), ({"host": "0.0.0.0", "api_keys": ["a"]}, False)],
)
def test_a_server_that_is_open_to_everybody_says_so(
    loaded: LoadedModel, flags: dict[str, object], warned: bool
) -> None:
    assert ("warning: host is 0.0.0.0 and there are no API keys" in printed(settings(**flags), loaded)) is warned


def test_keys_are_counted_and_never_printed(loaded: LoadedModel) -> None:
    given = settings(api_keys=["sk-one", "sk-two"])
    salted = replace(given.config, api_keys=(*given.config.api_keys, TenantConfig("sk-three", salt="pepper")))
    text = printed(replace(given, config=salted), loaded, verbose=True)
    assert "3 keys" in text
    assert "API key needed (3 keys)" in text
    assert "sk-" not in text
    assert "pepper" not in text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1 MiB"), (3 << 29, "1.50 GiB"), (5000, "4.88 KiB")]
)
def test_bytes_are_shown_in_the_largest_unit(value: int, text: str) -> None:
    assert as_bytes(value) == text
