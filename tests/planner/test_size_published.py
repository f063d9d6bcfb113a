"""KV bytes of every verified model of shared/facts/models.json, read from configs written as their makers write them.

`published_config` turns a shape of the facts into a config.json with the family's own names and omissions (no layer
list where the published config has none), so that `spec_from_config` has to find the layer kinds by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from octavo.kv.params import count_parameters
from octavo.kv.spec import ConfigError, KVSpec, LayerKind, spec_from_config
from octavo.planner.catalogue import find_model, model_names

Config = dict[str, Any]
NAMES = {"F": "full_attention", "S": "sliding_attention", "C": "chunked_attention", "L": "linear_attention"}


def base(m: Mapping[str, Any]) -> Config:
    """The fields that llama-like configs share; `head_dim` only where hidden_size / heads differs."""
    config = {
        "model_type": m["model_type"],
        "num_hidden_layers": m["num_hidden_layers"],
        "hidden_size": m["hidden_size"],
        "num_attention_heads": m["num_attention_heads"],
        "num_key_value_heads": m["num_key_value_heads"],
        "intermediate_size": m["intermediate_size"],
        "vocab_size": m["vocab_size"],
        "max_position_embeddings": m["max_position_embeddings"],
        "torch_dtype": m["torch_dtype"],
        "tie_word_embeddings": m["tie_word_embeddings"],
    }
    if m["head_dim"] is not None and m["head_dim"] * m["num_attention_heads"] != m["hidden_size"]:
        config["head_dim"] = m["head_dim"]
    for part in ("mla", "moe"):
        for key, value in (m[part] or {}).items():
            if key != "shared_experts":
                config[key] = value
    return {key: value for key, value in config.items() if value is not None}


def renamed(m: Mapping[str, Any], names: Mapping[str, str], **more: Any) -> Config:
    """`base` under the family's own field names; a name of None drops the field."""
    config = {names.get(key, key): value for key, value in base(m).items() if names.get(key, key)}
    return {**config, **more}


def nested(kind: str, text: Config, *, key: str = "text_config") -> Config:
    """A multimodal wrapper whose vision tower has other dimensions under the same names."""
    tower = {"model_type": "vision", "num_hidden_layers": 27, "hidden_size": 1152, "num_attention_heads": 16}
    return {"model_type": kind, key: text, "vision_config": tower}


def layer_types(m: Mapping[str, Any], pattern: str | None = None) -> list[str]:
    return [NAMES[k] for k in pattern or m["layer_kinds"]]


GPT2 = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "",
}


def gemma3(m: Mapping[str, Any]) -> Config:
    text = {**base(m), "model_type": "gemma3_text", "sliding_window": m["sliding_window"]}
    if "270m" in m["id"]:
        return {**text, "layer_types": layer_types(m)}
    if "1b" in m["id"]:
        return {**text, "sliding_window_pattern": 6}
    for name in ("vocab_size", "max_position_embeddings", "tie_word_embeddings"):
        text.pop(name)
    if "4b" in m["id"]:  # published without any head count
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
            text.pop(name, None)
    return nested("gemma3", text)


def gemma3n(m: Mapping[str, Any]) -> Config:
    full = [NAMES["F"] if (i + 1) % 5 == 0 else NAMES["S"] for i in range(m["num_hidden_layers"])]
    shared = m["kv_sharing"]["num_kv_shared_layers"]
    text = {**base(m), "layer_types": full, "num_kv_shared_layers": shared, "sliding_window": m["sliding_window"]}
    return nested("gemma3n", text)


def gemma4(m: Mapping[str, Any]) -> Config:
    keys = ("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "sliding_window", "head_dim")
    return nested("gemma4", {**base(m), **{k: m[k] for k in keys}, "layer_types": layer_types(m)})


def qwen2(m: Mapping[str, Any]) -> Config:
    return {**base(m), "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}


def falcon(m: Mapping[str, Any]) -> Config:
    config = renamed(m, {"num_key_value_heads": "num_kv_heads", "intermediate_size": ""}, multi_query=True)
    if m["num_key_value_heads"] == 1:
        config["num_kv_heads"] = m["num_attention_heads"]  # what Falcon-7B really publishes
    return {**config, "new_decoder_architecture": m["num_key_value_heads"] != 1}


def phi3(m: Mapping[str, Any]) -> Config:
    never = m["max_position_embeddings"] > 4096 and m["id"] != "microsoft/phi-4"
    return {**base(m), "sliding_window": 262144 if never else m["sliding_window"]}


def nemotron_h(m: Mapping[str, Any]) -> Config:
    s = m["linear_state"]
    mark = {"L": "M", "F": "*", "N": "E" if m["moe"] else "-"}
    return {
        **base(m),
        "head_dim": m["head_dim"],
        "hybrid_override_pattern": "".join(mark[k] for k in m["layer_kinds"]),
        "mamba_num_heads": s["num_heads"],
        "mamba_head_dim": s["head_dim"],
        "ssm_state_size": s["ssm_state_size"],
        "n_groups": s["n_groups"],
        "conv_kernel": s["conv_kernel"],
    }


def nemotron_nas(m: Mapping[str, Any]) -> Config:
    group = m["num_attention_heads"] // m["num_key_value_heads"]
    blocks = [
        {
            "attention": {
                "n_heads_in_group": group if k == "F" else None,
                "no_op": k != "F",
                "replace_with_linear": False,
            }
        }
        for k in m["layer_kinds"]
    ]
    return {**renamed(m, {"num_key_value_heads": ""}), "block_configs": blocks, "num_key_value_heads": None}


def delta_net(m: Mapping[str, Any]) -> Config:
    s = m["linear_state"]
    text = {
        **base(m),
        "head_dim": m["head_dim"],
        "linear_conv_kernel_dim": s["conv_kernel"],
        "linear_key_head_dim": s["head_dim"],
        "linear_value_head_dim": s["head_dim"],
        "linear_num_key_heads": s["num_key_heads"],
        "linear_num_value_heads": s["num_value_heads"],
        "full_attention_interval": 4,
    }
    if m["model_type"] == "qwen3_next":
        return text
    return nested(m["model_type"].removesuffix("_text"), {**text, "layer_types": layer_types(m)})


def jamba(m: Mapping[str, Any]) -> Config:
    s = m["linear_state"]
    mamba = {"mamba_expand": 2, "mamba_d_state": s["d_state"], "mamba_d_conv": s["d_conv"]}
    return {**base(m), "attn_layer_period": 8, "attn_layer_offset": 4, **mamba}


def granite_hybrid(m: Mapping[str, Any]) -> Config:
    s = m["linear_state"]
    return {
        **base(m),
        "layer_types": ["attention" if k == "F" else "mamba" for k in m["layer_kinds"]],
        "mamba_n_heads": s["num_heads"],
        "mamba_d_head": s["head_dim"],
        "mamba_d_state": s["ssm_state_size"],
        "mamba_n_groups": s["n_groups"],
        "mamba_d_conv": s["conv_kernel"],
    }


def opt(m: Mapping[str, Any]) -> Config:
    return renamed(m, {"num_key_value_heads": "", "intermediate_size": "ffn_dim"}, word_embed_proj_dim=m["hidden_size"])


def mpt(m: Mapping[str, Any]) -> Config:
    names = {"num_hidden_layers": "n_layers", "hidden_size": "d_model", "num_attention_heads": "n_heads"}
    names |= {"num_key_value_heads": "", "max_position_embeddings": "max_seq_len", "intermediate_size": ""}
    return renamed(m, names, attn_config={"attn_type": "multihead_attention", "alibi": True}, expansion_ratio=4)


def llama4(m: Mapping[str, Any]) -> Config:
    return nested("llama4", {**base(m), "head_dim": m["head_dim"], "attention_chunk_size": m["attention_chunk_size"]})


def kimi(m: Mapping[str, Any]) -> Config:
    return nested("kimi_k25", base(m)) if m["id"].endswith("K2.5") else base(m)


def listed(m: Mapping[str, Any]) -> Config:
    return {**base(m), "layer_types": layer_types(m), "sliding_window": m["sliding_window"]}


def with_window(m: Mapping[str, Any]) -> Config:
    return {**base(m), "sliding_window": m["sliding_window"]}


def mimo(m: Mapping[str, Any]) -> Config:
    pattern = [int(k == "S") for k in m["layer_kinds"]]
    keys = [k for k in m if k.startswith("swa_") or k in ("head_dim", "v_head_dim", "sliding_window")]
    return {**base(m), "hybrid_layer_pattern": pattern, **{k: m[k] for k in keys}}


FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], Config]] = {
    **dict.fromkeys(("gemma3", "gemma3_text"), gemma3),
    "gemma2": with_window,
    "gemma3n_text": gemma3n,
    "gemma4_text": gemma4,
    "qwen2": qwen2,
    "falcon": falcon,
    "phi3": phi3,
    "nemotron_h": nemotron_h,
    "nemotron-nas": nemotron_nas,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), delta_net),
    "jamba": jamba,
    "granitemoehybrid": granite_hybrid,
    "opt": opt,
    "mpt": mpt,
    "llama4_text": llama4,
    "kimi_k2": kimi,
    **dict.fromkeys(("gpt_oss", "step3p7"), listed),
    **dict.fromkeys(("mistral", "mixtral", "ministral3", "starcoder2"), with_window),
    "mimo_v2_flash": mimo,
    **dict.fromkeys(("gpt2", "gptj"), lambda m: renamed(m, GPT2)),
    "gpt_neox": lambda m: renamed(m, {"num_key_value_heads": ""}),
    "minimax_text_01": lambda m: {
        **base(m),
        "head_dim": m["head_dim"],
        "attn_type_list": [int(k == "F") for k in m["layer_kinds"]],
    },
    "glm_moe_dsa": lambda m: {**base(m), **(m.get("indexer") or {})},
    "deepseek_v32": lambda m: {**base(m), **(m.get("indexer") or {})},
}


def published_config(m: Mapping[str, Any]) -> Config:
    """The config.json of this shape as its family publishes it."""
    return FAMILIES.get(m["model_type"], base)(m)


#: Verified records whose published parameter count is not what the config gives, and why.
COUNT_EXCEPTIONS = {
    "MiniMaxAI/MiniMax-M2.7": "the facts leave out small norms (444,416 of them)",
    "google/gemma-3-4b-it": "the facts take vocabulary 262,144; the config's class has 262,208 rows",
    "google/gemma-3-12b-it": "as gemma-3-4b-it",
    "google/gemma-3-27b-it": "as gemma-3-4b-it",
}


#: Fixture name → which of the verified records it runs over.
SELECTIONS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "record": lambda m: True,
    "counted": lambda m: (m["params"]["method"] or "").startswith("computed"),
    "recurrent": lambda m: "bytes_per_sequence_ssm_fp32_conv_2B" in (m["linear_state"] or {}),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, wanted in SELECTIONS.items():
        if name in metafunc.fixturenames:
            path = Path(metafunc.config.getoption("--shared")) / "facts" / "models.json"
            if not path.exists():
                skip = pytest.mark.skip(reason=f"no facts at {path}; name the folder of shared/ with --shared")
                metafunc.parametrize(name, [pytest.param(None, marks=skip)])
                continue
            chosen = [m for m in json.loads(path.read_text())["models"] if not m["unverified"] and wanted(m)]
            metafunc.parametrize(name, chosen, ids=[m["id"] for m in chosen])


def check_against(record: Mapping[str, Any], spec: KVSpec) -> None:
    kv = record["kv"]
    assert spec.growing == kv["bytes_per_token_growing"]
    assert spec.windowed == kv["bytes_per_token_windowed"]
    assert spec.bytes_per_token == kv["bytes_per_token_before_window"]
    assert spec.window_tokens == kv["window_tokens"]
    assert (spec.windowed_cap or None) == kv["windowed_cap_bytes_per_sequence"]
    assert (spec.fixed_bytes or None) == kv["fixed_state_bytes_per_sequence_at_2B"]


def test_published_config_gives_the_facts(record: Mapping[str, Any]) -> None:
    config = published_config(record)
    spec = spec_from_config(config)
    check_against(record, spec)
    assert spec.num_layers == record["num_hidden_layers"]
    assert spec.max_positions == record["max_position_embeddings"]


def test_layer_kinds_are_found(record: Mapping[str, Any]) -> None:
    """Each letter of layer_kinds comes out at its own layer."""
    spec = spec_from_config(published_config(record))
    letters = ["K" if i in spec.shared else "N" for i in range(spec.num_layers)]
    of_kind = {LayerKind.FULL: "F", LayerKind.LATENT: "F", LayerKind.WINDOW: "S", LayerKind.CHUNKED: "C"}
    for group in spec.groups:
        for layer in group.layers:
            letters[layer] = of_kind.get(group.kind, "L")
    assert "".join(letters) == record["layer_kinds"]


def test_float32_ssm_state(recurrent: Mapping[str, Any]) -> None:
    """mamba_ssm_dtype float32 doubles the recurrent state and leaves the convolution at 2 B."""
    config = published_config(recurrent)
    config.get("text_config", config)["mamba_ssm_dtype"] = "float32"
    expected = recurrent["linear_state"]["bytes_per_sequence_ssm_fp32_conv_2B"]
    assert spec_from_config(config).fixed_bytes == expected


def test_catalogue_gives_the_facts(record: Mapping[str, Any]) -> None:
    entry = find_model(record["id"])
    assert entry is not None
    check_against(record, spec_from_config(entry.config))
    assert entry.parameters == record["params"]["total"]


def test_parameters_are_counted(counted: Mapping[str, Any]) -> None:
    ours = count_parameters(published_config(counted))
    more = ours.total - counted["params"]["total"]
    if counted["id"] not in COUNT_EXCEPTIONS:
        assert more == 0
        assert ours.doubt == 0
    elif counted["model_type"] == "gemma3":
        assert more == 64 * counted["hidden_size"]
    else:
        assert more == 444_416


def test_every_catalogue_entry_is_sized_or_refused_in_a_sentence() -> None:
    refused = []
    for name in model_names():
        entry = find_model(name)
        assert entry is not None, name
        try:
            assert spec_from_config(entry.config).bytes_per_token > 0, name
        except ConfigError:
            refused.append(name)
    assert refused == ["deepseek-ai/DeepSeek-V4-Flash"]


@pytest.mark.parametrize(
    ("model", "gib"),
    [
        ("meta-llama-3-8b", 4.000),
        ("qwen3-32b", 8.000),
        ("gemma-3-27b", 2.906),
        ("gemma-3-4b", 0.738),
        ("deepseek-v3", 2.145),
        ("gpt-oss-120b", 1.129),
        ("gpt-oss-20b", 0.753),
        ("gemma-4-26b-a4b", 0.820),
    ],
)
def test_one_sequence_of_32768_tokens(model: str, gib: float) -> None:
    """The right values of shared/PLANNER.md, section 5, on which no other calculator agrees for all models."""
    entry = find_model(model)
    assert entry is not None
    spec = spec_from_config(entry.config)
    assert round(spec.bytes_at(32_768) / 2**30, 3) == gib
    if spec.mla is not None:  # the latent is held whole by every rank
        assert spec_from_config(entry.config, tp=8).bytes_at(32_768) == spec.bytes_at(32_768)
