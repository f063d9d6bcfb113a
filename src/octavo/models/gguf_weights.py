"""The tensors of a GGUF file under the checkpoint names that `decoder.py` asks for, in the checkpoint's layout.

What llama.cpp's converter does to a checkpoint is undone here: its names; the rows of Q and K of `llama` models, which
it deals anew because its rotary embedding turns neighbours; and Gemma's norms, to which it adds 1.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.models.decoder import DecoderSpec
from octavo.models.errors import ModelError
from octavo.models.gguf_blocks import FLOATS, Rows, blocks_from, dequantised, stored_kind
from octavo.models.gguf_header import GgufHeader, TensorInfo
from octavo.native.blocks import Blocks

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_FACTORS = "rope_freqs.weight"  # Llama 3.1: one divisor for each rotary frequency
_LONG_FACTORS = "rope_factors_long.weight"


def can_read(file: GgufHeader) -> bool:
    """Whether this module knows the layout of the file; transformers' tables do for more."""
    return file.architecture in ARCHITECTURES and _LONG_FACTORS not in file.tensor_names


class GgufWeights:
    """Implements `native.model.Stored`, and `tensor` beside it. The mapped file is read when a tensor is asked for."""

    def __init__(self, file: GgufHeader, spec: DecoderSpec) -> None:
        self._file, self._spec = file, spec
        self._data = np.memmap(file.path, np.uint8, "r")
        self._tensors = {tensor.name: tensor for tensor in file.tensors}
        self._inner = _INNER | _SANDWICH if spec.sandwich else _INNER

    def tensor(self, name: str) -> torch.Tensor | None:
        """A weight or bias in float32."""
        found = self._find(name)
        if found is None:
            return None
        rows = self._rows(name, found)
        return torch.from_numpy(dequantised(rows, found.kind).reshape(found.shape).copy())

    def kind(self, name: str) -> str | None:
        found = self._find(f"{name}.weight")
        return None if found is None else stored_kind(found.kind)

    def blocks(self, name: str) -> Blocks:
        found = self._find(f"{name}.weight")
        assert found is not None
        return blocks_from(self._rows(name, found), found.kind)

    def _find(self, name: str) -> TensorInfo | None:
        stem, _, suffix = name.rpartition(".")
        if stem in _OUTER:
            return self._tensors.get(f"{_OUTER[stem]}.{suffix}")
        _, _, layer, inner = stem.split(".", 3)
        return self._tensors.get(f"blk.{layer}.{self._inner[inner]}.{suffix}")

    def _rows(self, name: str, tensor: TensorInfo) -> Rows:
        """The bytes of a tensor by rows, in the checkpoint's order."""
        count = tensor.shape[0] if len(tensor.shape) > 1 else 1
        rows = self._data[tensor.start : tensor.start + tensor.size].reshape(count, -1)
        order = self._order(name, tensor.shape[0])
        if order is None:
            return rows
        return rows[order] if len(tensor.shape) > 1 else rows.reshape(len(order), -1)[order].reshape(1, -1)

    def _order(self, name: str, rows: int) -> NDArray[np.int64] | None:
        """Where the converter of `llama` models put each row of Q and K: of a head, even places hold its first half."""
        if self._file.architecture != "llama" or not (".q_proj" in name or ".k_proj" in name):
            return None
        layer = self._spec.layers[int(name.split(".")[2])]
        heads = layer.heads if ".q_proj" in name else layer.kv_heads
        if rows != heads * layer.head_dim:
            raise ModelError(f"{self._file.path}: {name} has {rows} rows; the config says {heads * layer.head_dim}.")
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def spec_for(file: GgufHeader, spec: DecoderSpec) -> DecoderSpec:
    """The decoder as this file's weights want it: nothing to add to norms, rotary frequencies with their divisors."""
    spec = replace(spec, norm_offset=0.0)
    tensor = next((t for t in file.tensors if t.name == _FACTORS), None)
    if tensor is None:
        return spec
    if tensor.kind not in FLOATS or any(tensor.shape != f.shape for f in spec.frequencies):
        raise ModelError(f"{file.path}: {_FACTORS} is {tensor.shape}; the config says {spec.frequencies[0].shape}.")
    raw = np.memmap(file.path, np.uint8, "r", tensor.start, (1, tensor.size))
    factors = dequantised(raw, tensor.kind)[0]
    return replace(spec, frequencies=tuple(f / factors for f in spec.frequencies))
