"""Settings: flags beat variables, these the file, that the defaults; a bad value is told with where it was given."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from octavo.commands import options
from octavo.config import EngineConfig
from octavo.errors import OctavoError
from octavo.server.config import ServerConfig, TenantConfig
from octavo.server.settings import Settings, read_settings
from octavo.server.values import all_settings, convert


def read(tmp_path: Path, text: str | None = None, flags: dict[str, object] | None = None, **variables: str) -> Settings:
    """Settings of a model `m` with this file, these flags and these OCTAVO_ variables."""
    file = None
    if text is not None:
        file = tmp_path / "octavo.yaml"
        file.write_text(text)
    environment = {f"OCTAVO_{name.upper()}": value for name, value in variables.items()}
    return read_settings({"model": "m", **(flags or {})}, environment, file)


def refused(tmp_path: Path, *arguments: object, **variables: str) -> str:
    with pytest.raises(OctavoError) as caught:
        read(tmp_path, *arguments, **variables)  # type: ignore[arg-type]
    return str(caught.value)


def test_each_place_beats_those_after_it(tmp_path: Path) -> None:
    file = "max_num_seqs: 8\nport: 1000\nmax-queue: 5\n"
    settings = read(tmp_path, file, {"max_num_seqs": "32"}, max_num_seqs="16", port="2000")
    assert settings.config.engine.max_num_seqs == 32
    assert settings.config.port == 2000
    assert settings.config.engine.max_queue == 5
    assert settings.config.engine.block_size == EngineConfig("m").block_size
    where = str(tmp_path / "octavo.yaml")
    assert settings.sources["max_num_seqs"] == f"--max-num-seqs, over OCTAVO_MAX_NUM_SEQS, {where}"
    assert settings.sources["port"] == f"OCTAVO_PORT, over {where}"
    assert settings.sources["max_queue"] == where
    assert settings.sources["block_size"] == "default"
    assert settings.sources["model"] == "MODEL"


def test_nothing_given_is_the_dataclasses_defaults(tmp_path: Path) -> None:
    assert read(tmp_path).config == ServerConfig(EngineConfig("m"))


@pytest.mark.parametrize("owner", [EngineConfig, ServerConfig])
def test_every_field_is_a_setting_that_text_can_give(owner: type) -> None:
    for field in fields(owner):
        if field.name == "engine":
            continue
        setting = all_settings()[field.name]
        text = {bool: "yes", int: "1", float: "0.5", str: "auto"}.get(setting.kind, "" if setting.many else "a=1")
        convert(setting, text, "here")


def test_every_setting_has_words_in_the_help() -> None:
    assert set(all_settings()) - set(options.SETTINGS) == {"model"}
    assert all(wording.help for wording in options.SETTINGS.values())


def test_no_field_of_the_server_has_the_name_of_one_of_the_engine() -> None:
    assert not {field.name for field in fields(ServerConfig)} & {field.name for field in fields(EngineConfig)}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("kv_memory", "256MiB", 256 << 20),
        ("kv_memory", "1000000", 1_000_000),
        ("max_body_bytes", "1MiB", 1 << 20),
        ("max_queue", "none", None),
        ("itl_target", "0.05", 0.05),
        ("page", "off", False),
        ("enable_prefix_caching", "FALSE", False),
        ("served_model_name", "a, b", ("a", "b")),
        ("quotas", "alice=40, bob=20", {"alice": 40, "bob": 20}),
        ("max_queued_tokens", "5000", 5000),
    ],
)
def test_a_variable_is_read_as_its_field_is_typed(tmp_path: Path, name: str, text: str, value: object) -> None:
    assert read(tmp_path, **{name: text}).value(name) == value


def test_a_file_takes_both_spellings_and_its_own_types(tmp_path: Path) -> None:
    file = "kv-memory: 64MiB\nmax_num_seqs: 4\nquotas: {alice: 3}\nserved-model-name: [a, b]\npage: false\nmax_queue:\n"
    settings = read(tmp_path, file)
    assert settings.config.engine.kv_memory == 64 << 20
    assert settings.config.engine.quotas == {"alice": 3}
    assert settings.config.served_model_name == ("a", "b")
    assert settings.config.page is False
    assert settings.config.engine.max_queue is None


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("gpu_memory_utilization", "memory_utilization"),
        ("kv_cache_dtype", "kv_dtype"),
        ("quantization", "weights"),
    ],
)
def test_names_of_other_engines_mean_ours(tmp_path: Path, name: str, means: str) -> None:
    value = {"memory_utilization": 0.5, "kv_dtype": "int8", "weights": "int8"}[means]
    assert read(tmp_path, **{name: str(value)}).value(means) == value
    assert read(tmp_path, f"{name}: {value}\n").value(means) == value


def test_the_model_and_the_file_can_be_named_by_variables(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model: demo\nport: 9\n")
    assert read_settings({}, {"OCTAVO_CONFIG": str(file)}).config.engine.model == "demo"
    with pytest.raises(OctavoError, match=r"model is not given.*OCTAVO_MODEL"):
        read_settings({}, {})


def test_a_bad_value_is_told_with_where_it_was_given(tmp_path: Path) -> None:
    assert refused(tmp_path, max_num_seqs="many") == "OCTAVO_MAX_NUM_SEQS is 'many'; it must be a whole number."
    assert refused(tmp_path, None, {"port": "x"}) == "--port is 'x'; it must be a whole number."
    assert f"max_num_seqs in {tmp_path / 'octavo.yaml'} is 2.5;" in refused(tmp_path, "max_num_seqs: 2.5\n")
    assert "OCTAVO_PAGE is 'maybe'; it must be true or false" in refused(tmp_path, page="maybe")
    assert "OCTAVO_KV_MEMORY is 'lots'; it must be a positive size" in refused(tmp_path, kv_memory="lots")
    assert "OCTAVO_QUOTAS is 'alice'; write it as name=number" in refused(tmp_path, quotas="alice")
    assert "put it in quotes" in refused(tmp_path, "host: 5\n")


def test_a_value_out_of_its_limits_is_told_with_where_it_was_given(tmp_path: Path) -> None:
    assert refused(tmp_path, port="70000").endswith("(port: OCTAVO_PORT)")
    assert refused(tmp_path, "max-num-seqs: 0\n").endswith(f"(max_num_seqs: {tmp_path / 'octavo.yaml'})")
    told = refused(tmp_path, None, {"max_num_seqs": "1000"})
    assert told.startswith("max_num_batched_tokens is 512, less than max_num_seqs (1000)")
    assert told.endswith("(max_num_seqs: --max-num-seqs)")


def test_weights_of_keys_need_the_fair_order(tmp_path: Path) -> None:
    assert "set order to 'fair'" in refused(tmp_path, KEYS)
    assert "from 0.001 to 1000" in refused(tmp_path, "order: fair\napi_keys: [{key: a, weight: 5000}]\n")


def test_an_unknown_setting_in_the_file_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    assert "there is no setting 'max-nun-seqs'; did you mean max_num_seqs?" in refused(tmp_path, "max-nun-seqs: 4\n")


def test_one_setting_under_two_names_is_an_error(tmp_path: Path) -> None:
    assert "set twice (as max_num_seqs)" in refused(tmp_path, "max_num_seqs: 4\nmax-num-seqs: 5\n")
    assert "'port' is set twice" in refused(tmp_path, "port: 4\nhost: a\nport: 5\n")
    assert "mean the same setting" in refused(tmp_path, kv_dtype="int8", kv_cache_dtype="fp8")


def test_an_unknown_variable_is_a_warning_with_the_nearest_name(tmp_path: Path) -> None:
    settings = read(tmp_path, max_num_seq="4", native="off", isa="avx2", shared="/x", peers="/y")
    assert settings.warnings == ("OCTAVO_MAX_NUM_SEQ is no setting and is ignored; did you mean OCTAVO_MAX_NUM_SEQS?",)


def test_an_empty_variable_is_not_given(tmp_path: Path) -> None:
    assert read(tmp_path, max_num_seqs="").sources["max_num_seqs"] == "default"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1\n", "is not YAML in line 2"),
        ("- a\n- b\n", "must be a mapping of settings"),
        ("!!python/object/apply:os.system ['true']\n", "is not YAML in line 1"),
    ],
)
def test_a_file_that_is_none_is_told_in_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    assert words in refused(tmp_path, text)


def test_a_file_that_is_not_there_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OctavoError, match=r"config is '.*none.yaml', which cannot be read: No such file"):
        read_settings({"model": "m"}, {}, tmp_path / "none.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OctavoError, match="not UTF-8"):
        read_settings({"model": "m"}, {}, binary)


KEYS = """
api_keys:
  - sk-plain
  - {key: sk-alice, tenant: alice, priority: -1, quota-blocks: 40, weight: 2, salt: secret-salt}
"""


def test_keys_come_from_a_file_a_variable_or_repeated_flags(tmp_path: Path) -> None:
    plain, alice = read(tmp_path, KEYS, order="fair").config.api_keys
    assert plain == TenantConfig("sk-plain")
    assert alice == TenantConfig("sk-alice", "alice", -1, 40, 2, "secret-salt")
    assert read(tmp_path, api_key="a,b").config.api_keys == (TenantConfig("a"), TenantConfig("b"))
    assert read(tmp_path, None, {"api_keys": ["a", "b"]}).config.api_keys == (TenantConfig("a"), TenantConfig("b"))


def test_no_secret_is_in_what_is_shown_of_the_settings(tmp_path: Path) -> None:
    settings = read(tmp_path, KEYS, order="fair")
    for secret in ("sk-plain", "sk-alice", "secret-salt"):
        assert secret not in repr(settings)


@pytest.mark.parametrize(
    "text",
    [
        "api_keys: 71077345\n",
        "api_keys: [71077345]\n",
        "api_keys: [{key: 71077345}]\n",
        "api_keys: [{tenant: alice}]\n",
        "api_keys: [{key: 's3cr t'}]\n",
        "api_keys: [s3cret, s3cret]\n",
        "api_keys: [{key: s3cret, tenants: x}]\n",
        "api_keys: [{key: s3cret, quota_blocks: many}]\n",
        "api_keys: [{key: s3cret, weight: 0}]\n",
        "api_keys: [{key: a, tenant: t, weight: 1}, {key: s3cret, tenant: t, weight: 2}]\n",
        "api_keys: [{key: a, salt: ''}]\n",
    ],
)
def test_a_bad_key_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    told = refused(tmp_path, text)
    assert "71077345" not in told
    assert "s3cr" not in told


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host", ""),
        ("port", -1),
        ("port", True),
        ("max_body_bytes", 0),
        ("max_queue_seconds", 0),
        ("max_queue_seconds", float("nan")),
        ("drain_seconds", float("inf")),
        ("stall_seconds", 0),
        ("max_unread_tokens", 0),
        ("cors_origins", ("chat.example.org",)),
        ("cors_origins", ("https://chat.example.org/path",)),
        ("served_model_name", ("a", "a")),
        ("served_model_name", "a"),
        ("otlp_endpoint", "localhost:4318"),
        ("tool_parser", "magic"),
    ],
)
def test_a_field_out_of_its_limits_is_told_by_name(field: str, value: object) -> None:
    with pytest.raises(OctavoError, match=field):
        ServerConfig(EngineConfig("m"), **{field: value})  # type: ignore[arg-type]
