"""`octavo size` from the outside: where models are found, what is printed, JSON keys, errors and exit codes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo.errors import OctavoError
from octavo.models.config_source import find_source
from octavo.planner.catalogue import find_device, find_model, similar_models

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Run:
    """What one call of `octavo size` left behind."""

    code: int
    out: str
    err: str


def run(*arguments: str) -> Run:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["octavo", "size", *arguments])
        try:
            main()
        except SystemExit as leaving:
            return Run(int(leaving.code or 0), out.getvalue(), err.getvalue())
    return Run(0, out.getvalue(), err.getvalue())


def answer(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def refusal(*arguments: str) -> str:
    """The one sentence of a failed run."""
    result = run(*arguments)
    assert result.code == 1
    assert result.out == ""
    assert len(result.err.strip().splitlines()) == 1
    return result.err.strip()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


# --- where models are found ------------------------------------------------------------------------------------------


def test_file_and_directory(model: Path) -> None:
    for path in (model, model / "config.json"):
        data = answer(str(path))
        assert data["bytes_per_token"] == {"growing": 1024, "windowed": 0, "total": 1024}
        assert data["source"] == str(model / "config.json")


def test_measured_safetensors_beat_the_count(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 5_000_000}}))
    weights = answer(str(model), "--memory", "4GiB")["memory"]["weights"]
    assert weights == {
        "low": 5_000_000,
        "high": 5_000_000,
        "source": "model.safetensors.index.json, metadata.total_size",
    }
    assert answer(str(model), "--memory", "4GiB", "--tp", "2")["memory"]["weights"]["low"] == 2_500_000
    (model / "model.safetensors.index.json").unlink()
    (model / "model.safetensors").write_bytes((100).to_bytes(8, "little") + bytes(100 + 6000))
    assert answer(str(model), "--memory", "4GiB")["memory"]["weights"]["low"] == 6000
    (model / "model.safetensors").write_bytes((100).to_bytes(8, "little"))
    assert "truncated safetensors" in refusal(str(model))


def test_hub_id_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--acme--tiny"
    for revision, layers in (("aaa", 2), ("bbb", 4)):
        snapshot = folder / "snapshots" / revision
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("bbb")
    assert answer("acme/tiny")["layers"]["total"] == 4


def test_hub_id_without_the_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "huggingface_hub is not installed to fetch it" in refusal("acme/not-in-any-catalogue")


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("LLAMA-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("llama-3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("opt-13b", "facebook/opt-13b"),
        ("qwen3-0.6b", "Qwen/Qwen3-0.6B"),
        ("gemma-3-27b", "google/gemma-3-27b-it"),
        ("deepseek-v3", "deepseek-ai/DeepSeek-V3"),
        ("deepseek-v3.2", "deepseek-ai/DeepSeek-V3.2"),
        ("gpt-oss-20b", "openai/gpt-oss-20b"),
        ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1"),
    ],
)
def test_catalogue_names(name: str, entry: str) -> None:
    found = find_model(name)
    assert found is not None
    assert found.name == entry


def test_names_that_are_wrong_or_stand_for_several() -> None:
    assert find_model("acme/llama-3.1-8b") is None  # another owner's model is not this one
    assert find_model("lama-3.1-8b") is None
    assert "meta-llama/Llama-3.1-8B" in similar_models("lama-3.1-8b")
    assert "did you mean meta-llama/Llama-3.1-8B" in refusal("lama-3.1-8b")
    several = refusal("mistral-7b")
    assert "mistralai/Mistral-7B-v0.1, mistralai/Mistral-7B-v0.3; name one of them" in several


def test_devices() -> None:
    assert find_device("rtx-4090").reported_bytes == 25_250_627_584
    assert find_device("A100 SXM 80GB").reported_bytes == 84_986_665_369
    with pytest.raises(OctavoError, match="stands for several devices: H100 PCIe 80GB, H100 SXM 80GB"):
        find_device("H100")
    with pytest.raises(OctavoError, match="is not in the catalogue"):
        find_device("Voodoo 2")


def test_a_device_whose_driver_total_is_unknown_is_an_interval() -> None:
    total = answer("qwen3-0.6b", "--gpu", "H200")["memory"]["total"]
    assert total["high"] == 151_397_597_184
    assert total["low"] == total["high"] * 91 // 100
    assert answer("qwen3-0.6b", "--gpu", "RTX 4090")["memory"]["total"]["low"] == 25_250_627_584


def test_the_engine_is_an_option() -> None:
    """Its defaults and costs; Octavo's where none is named."""
    memory = answer("llama-3.1-8b", "--gpu", "H100 SXM", "--engine", "vllm-0.21")["memory"]
    assert (memory["utilization"], memory["chunk"]) == (0.92, 8192)
    assert 0 < memory["graphs"]["low"] < memory["graphs"]["high"]
    ours = answer("llama-3.1-8b", "--gpu", "H100 SXM")["memory"]
    assert (ours["utilization"], ours["chunk"], ours["graphs"]["high"]) == (0.9, 512, 0)
    assert "engine is 'orca'; it must be one of octavo" in refusal("llama-3.1-8b", "--engine", "orca")


def test_quantised_checkpoints_are_not_sized_as_16_bit() -> None:
    """DeepSeek-R1 is published in FP8: it serves on 8 x H200, which a 16-bit reading calls impossible."""
    weights = answer("deepseek-r1", "--gpu", "H200", "--tp", "8")["memory"]["weights"]
    assert 82e9 < weights["high"] < 86e9


# --- what is answered ------------------------------------------------------------------------------------------------


def test_an_unknown_mlp_width_makes_the_activations_an_interval() -> None:
    """Nemotron-NAS has another width in every block, which its shape in the catalogue does not give."""
    data = answer("llama-3_3-nemotron-super-49b-v1", "--memory", "160GiB")
    known = answer("llama-3.3-70b", "--memory", "400GiB")["memory"]["activations"]  # same hidden size and vocabulary
    unknown = data["memory"]["activations"]
    assert unknown["low"] < known["low"] < known["high"] < unknown["high"]
    assert any("intermediate_size is missing" in note for note in data["notes"])


def test_json_keys() -> None:
    data = answer("gemma-3n-e4b")
    assert data["bytes_per_token"]["growing"] == 8192
    assert data["bytes_per_token"]["windowed"] == 32768
    assert data["window_tokens"] == 512
    assert data["fixed_bytes_per_sequence"] == 0
    assert [group["kind"] for group in data["groups"]] == ["window", "full"]
    assert data["groups"][0]["cap_bytes"] == 16777216
    assert data["layers"]["own_a_cache"] == 20
    assert data["layers"]["shared"]["34"] == 19
    assert data["sources"]["num_key_value_heads"] == "text_config.num_key_value_heads"
    state = answer("qwen3-next-80b-a3b")
    assert state["fixed_bytes_per_sequence"] == 39518208
    assert state["window_tokens"] is None
    mla = answer("deepseek-v3", "--mla", "expanded")["mla"]
    assert (mla["form"], mla["latent"], mla["expanded"]) == ("expanded", 70272, 4997120)


def test_budget_in_json() -> None:
    memory = answer("qwen3-0.6b", "--kv-memory", "4GiB", "--block-size", "128")["memory"]
    assert memory["blocks"] == {"low": 292, "high": 292}
    assert memory["longest"] == {"low": 37376, "high": 37376}
    eight = next(row for row in memory["concurrency"] if row["length"] == 8192)
    assert eight["users"] == {"low": 4, "high": 4}
    assert eight["ratio"] == {"low": 4.56, "high": 4.56}


def test_the_longest_length_is_never_beyond_the_model() -> None:
    memory = answer("qwen3-0.6b", "--kv-memory", "40GiB")["memory"]
    assert memory["longest"]["low"] == 40960
    assert memory["longest_by_memory"]["low"] > 40960


def test_the_inverse_gives_memory_that_works() -> None:
    asked = answer("llama-3.1-8b", "--users", "32", "--length", "4096")["inverse"]
    assert asked["kv_bytes"] == 32 * 4096 * 131072
    device = str(asked["device"]["high"])
    memory = answer("llama-3.1-8b", "--memory", device, "--max-model-len", "4096")["memory"]
    assert memory["concurrency"][-1]["users"]["low"] == 32


def test_the_inverse_of_a_model_whose_weights_are_unknown() -> None:
    config = find_source("qwen3-next-80b-a3b").config
    assert config["model_type"] == "qwen3_next"
    asked = answer("qwen3-next-80b-a3b", "--users", "2", "--length", "1024")["inverse"]
    assert asked["kv_bytes"] == 2 * (1024 * 24576 + 39518208)
    assert asked["device"]["low"] > 80e9 * 2  # 80 B parameters as published, 16 bits


def test_text_shows_formula_path_and_regimes() -> None:
    text = run("gemma-3-4b").out
    assert "29 window layers x 4 KV heads x 2 x 256 x 2 B = 118784" in text
    assert "family default of gemma3_text in transformers" in text
    assert "text_config.sliding_window" in text
    assert "windows freed" in text
    assert "all layers share pages" in text
    shared = run("gemma-3n-e4b").out
    assert "20 of 35 layers own a cache" in shared
    both = run("deepseek-v3").out
    assert "the latent form is assumed" in both
    assert re.search(r"expanded +61 MLA layers x 128 heads x \(192 \+ 128\) x 2 B = 4997120", both)


def test_a_model_maximum_that_does_not_fit_is_a_note_and_an_asked_one_is_an_error() -> None:
    assert "start with --max-model-len 37440 or less" in run("qwen3-0.6b", "--kv-memory", "4GiB").out
    assert "402653184 bytes short" in refusal("qwen3-0.6b", "--kv-memory", "4GiB", "--max-model-len", "40960")


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["/no/such/config.json"], "There is no file or directory /no/such/config.json"),
        (["absent.gguf"], "There is no file or directory absent.gguf"),
        ([" "], "The model name is empty"),
        (["llama-3.1-8b", "--kv-dtype", "int7"], "KV dtype 'int7' is unknown; use one of float32, bf16"),
        (["llama-3.1-8b", "--weight-dtype", "int7", "--memory", "80GiB"], "Weight dtype 'int7' is unknown"),
        (["llama-3.1-8b", "--tp", "0"], "tp is 0"),
        (["llama-3.1-8b", "--tp", "5"], "num_attention_heads 32 is not a multiple of tp 5"),
        (["llama-3.1-8b", "--mla", "both"], "mla_form is 'both'"),
        (["llama-3.1-8b", "--memory", "much"], "memory is 'much'"),
        (["llama-3.1-8b", "--memory", "24GiB", "--gpu", "RTX 4090"], "give one of them"),
        (["llama-3.1-8b", "--memory", "24GiB", "--utilization", "1.5"], "utilization is '1.5'"),
        (["llama-3.1-8b", "--memory", "24GiB", "--utilization", "most"], "utilization is 'most'"),
        (["llama-3.1-8b", "--memory", "8GiB"], "bytes short"),
        (["llama-3.1-8b", "--kv-memory", "1MiB"], "no length fits, not even one block"),
        (["llama-3.1-8b", "--max-model-len", "131073"], "the model takes at most 131072"),
        (["llama-3.1-8b", "--max-model-len", "0"], "max_model_len is 0"),
        (["llama-3.1-8b", "--users", "1", "--length", "200000"], "above the maximum of 131072"),
        (["llama-3.1-8b", "--length", "200"], "length is 200 and users is not given"),
        (["llama-3.1-8b", "--users", "2"], "users is 2 and length is not given"),
        (["llama-3.1-8b", "--users", "2", "--length", "0"], "length is 0; it must be at least 1"),
        (["llama-3.1-8b", "--utilization", "abc"], "utilization is 'abc'"),
        (["llama-3.1-8b", "--utilization", "2"], "utilization is '2'"),
        (["llama-3.1-8b", "--utilization", "nan"], "utilization is 'nan'"),
        (["llama-3.1-8b", "--utilization", "1e-999999999"], "utilization is '1e-999999999'"),
        (["llama-3.1-8b", "--block-size", "0"], "block_size is 0; it must be at least 1"),
        (["llama-3.1-8b", "--max-num-seqs", "0"], "max_num_seqs is 0; it must be at least 1"),
        (["llama-3.1-8b", "--weight-dtype", "zzz"], "Weight dtype 'zzz' is unknown"),
        (["x" * 5000], "neither a file, a directory"),
        (["llama-3.1-8b", "--users", "0", "--length", "10"], "users is 0"),
        (["llama-3.1-8b", "--kv-memory", "1GiB", "--block-size", "0"], "block_size is 0"),
        (["gemma-3-27b", "--num-blocks", "100"], "blocks of several sizes"),
        (["deepseek-v4-flash"], "model_type deepseek_v4 is not sized by Octavo"),
    ],
)
def test_one_sentence_and_exit_code_one(arguments: list[str], sentence: str) -> None:
    assert sentence in refusal(*arguments)


@pytest.mark.parametrize("content", ["{", "[1]", '"text"', "", "[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"])
def test_a_config_that_is_no_object(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    assert str(path) in refusal(str(path))


def test_a_byte_order_mark_is_allowed(model: Path) -> None:
    config = model / "config.json"
    config.write_text("\ufeff" + config.read_text(), encoding="utf-8")
    assert answer(str(model))["bytes_per_token"]["total"] == 1024


def test_a_path_with_brackets_is_shown_as_it_is(model: Path) -> None:
    folder = model / "a[" / "b] [bold]"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shown = run(str(folder))
    assert shown.code == 0
    assert "a[/b] [bold]" in shown.out.replace("\n", "")


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        (
            "num_hidden_layers",
            10**12,
            "num_hidden_layers is 1000000000000; Octavo sizes models of at most 10000 layers",
        ),
        ("hidden_size", 10**30, "hidden_size is 1e+30; it must be at most"),
        ("num_key_value_heads", 3, "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        ("num_key_value_heads", [2, 2, 3, 2], "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        ("layer_types", [["full_attention"]] * 4, "has layers of kind"),
        ("num_nextn_predict_layers", "one", None),
        ("rope_scaling", {"type": "linear", "factor": float("inf")}, "rope_scaling.factor is inf"),
    ],
)
def test_a_field_with_an_impossible_value(model: Path, field: str, value: object, sentence: str | None) -> None:
    config = {**CONFIG, field: value}
    if sentence is None:
        config["layer_types"] = ["full_attention"] * 4
        sentence = "a field holds a value of a kind that Octavo does not expect (TypeError"
    (model / "config.json").write_text(json.dumps(config))
    assert sentence in refusal(str(model))


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    assert "neither config.json nor a .gguf file" in refusal(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert "no config.json but 2 .gguf files" in refusal(str(tmp_path))


def test_nothing_heavy_is_imported() -> None:
    """The calculator must answer at once and on a base install."""
    code = (
        "import sys; from octavo.planner.sizing import SizeRequest, size_model; "
        "from octavo.commands.size_report import print_report; "
        "print_report(size_model(SizeRequest('llama-3.1-8b', gpu='RTX 4090'))); "
        "heavy = {'torch', 'transformers', 'numpy', 'gguf', 'huggingface_hub', 'safetensors', 'pydantic'}; "
        "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
