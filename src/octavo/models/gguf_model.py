"""From a GGUF file to a transformers module.

The names and layouts of tensors are undone by transformers' own tables (`GGUF_CONFIG_MAPPING`, tensor processors),
which know llama.cpp's converter; only the reading is ours (`gguf_file.py`), because transformers' own entry point
needs `accelerate` and parses the vocabulary three times.
"""

from __future__ import annotations

from typing import Any

import torch

from octavo.models.errors import ModelError
from octavo.models.gguf_file import read_tensor
from octavo.models.gguf_header import GgufHeader
from octavo.models.tokenizer import first_line

# llama.cpp's name → transformers' model_type, for the decoders whose layout the tables cover in full
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "starcoder2": "starcoder2",
}
_MAPPING_NAMES = {"gemma3_text": "gemma3"}
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of the one size whose attention scale is not that of its head_dim
_MORE_EOS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def build_from_gguf(file: GgufHeader, dtype: torch.dtype) -> tuple[Any, set[int]]:
    """The model with dequantised weights in `dtype`, and the ids that end a generation. Raises ModelError."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from octavo.models.shapes import check_supported

    config = gguf_config(file)
    check_supported(config, str(file.path))
    with no_init_weights():
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensors = _tensors(file, module, dtype)
    result = module.load_state_dict(tensors, strict=False, assign=True)
    module.tie_weights()
    tied = set(getattr(module, "all_tied_weights_keys", None) or ())
    if missing := [name for name in result.missing_keys if name not in tied]:
        raise ModelError(
            f"{file.path} lacks {len(missing)} of the weights of a {file.architecture} model (first: {missing[0]})."
        )
    _apply_rope_factors(file, module)
    return module, {int(file.metadata[key]) for key in _MORE_EOS if key in file.metadata}


def gguf_config(file: GgufHeader) -> Any:
    """The transformers config that the metadata describes. Raises ModelError for what cannot be expressed."""
    from transformers import AutoConfig
    from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    arch, meta = file.architecture, file.metadata
    model_type = ARCHITECTURES.get(arch)
    if model_type is None:
        raise ModelError(
            f"{file.path}: GGUF architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)}."
        )
    scaling = meta.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelError(f"{file.path}: rope scaling {scaling!r} in a GGUF file is not supported; use safetensors.")
    values: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(model_type, {}))
    renames: Any = GGUF_CONFIG_MAPPING[_MAPPING_NAMES.get(model_type, model_type)]
    for key, name in renames.items():
        if name is not None and f"{arch}.{key}" in meta:
            values[name] = meta[f"{arch}.{key}"]
    values.setdefault("vocab_size", len(meta.get("tokenizer.ggml.tokens", ())))
    if arch in _GEMMA_27B:  # llama.cpp's rule: the file does not say
        wide = values["num_hidden_layers"] == _GEMMA_27B[arch]
        per_head = values["hidden_size"] // values["num_attention_heads"]
        values["query_pre_attn_scalar"] = per_head if wide else values["head_dim"]
    values["tie_word_embeddings"] = all(t.name != "output.weight" for t in file.tensors)
    for name in ("bos", "eos", "padding"):
        if (token := meta.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            values[f"{'pad' if name == 'padding' else name}_token_id"] = token
    try:
        return AutoConfig.for_model(model_type, **values)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{file.path}: its metadata is no {model_type} config: {first_line(error)}") from error


def _tensors(file: GgufHeader, module: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors under the module's names, in the module's layout."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    config = module.config.to_dict()
    processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=config)
    names = _names(file.architecture, module, processor)
    out: dict[str, torch.Tensor] = {}
    parsed = {"config": config, "tensors": out}
    for tensor in file.tensors:
        done = processor.process(
            weights=read_tensor(file, tensor), name=tensor.name, tensor_key_mapping=names, parsed_parameters=parsed
        )
        if done.name in names:
            out[names[done.name]] = torch.from_numpy(done.weights.copy()).to(dtype)
    shapes = {name: value.shape for name, value in module.state_dict().items()}
    for name, value in out.items():
        if name in shapes and shapes[name] != value.shape:
            raise ModelError(f"{file.path}: {name} is {tuple(value.shape)}; the config says {tuple(shapes[name])}.")
        out[name] = value.to(dtype)
    return out


def _names(architecture: str, module: Any, processor: Any) -> dict[str, str]:
    """GGUF tensor name → the module's, from the `gguf` package's table."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(arch, module.config.num_hidden_layers)
    names: dict[str, str] = {}
    for full in module.state_dict():
        name = processor.preprocess_name(full)
        stem, dot, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, dot, suffix = name, "", ""
        if (stored := table.get_name(stem)) is None:
            processor.perform_fallback_tensor_mapping(names, dot + suffix, "", name)
        else:
            names[stored + dot + suffix] = name
    return names


def _apply_rope_factors(file: GgufHeader, module: Any) -> None:
    """Llama 3.1 files carry their rope scaling as one divisor per frequency (tensor `rope_freqs.weight`)."""
    for tensor in file.tensors:
        if tensor.name == "rope_freqs.weight":
            factors = torch.from_numpy(read_tensor(file, tensor).copy())
            rotary = module.get_decoder().rotary_emb
            rotary.inv_freq.div_(factors)
            if hasattr(rotary, "original_inv_freq"):
                rotary.original_inv_freq.copy_(rotary.inv_freq)
