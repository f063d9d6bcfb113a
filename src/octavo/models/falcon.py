"""Falcon's attention computes inside its own forward and not through transformers' interface: hand it over."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from octavo.runner.attention import paged_attention


def adapt_falcon(module: torch.nn.Module) -> None:
    """Give each attention module of a Falcon model a forward that calls `paged_attention`.

    The new decoder architecture spreads K and V over all query heads before attending; here they stay one per group.
    """
    from transformers.models.falcon.modeling_falcon import FalconAttention

    for part in module.modules():
        if isinstance(part, FalconAttention):
            part.forward = MethodType(_forward, part)  # type: ignore[method-assign]


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    assert alibi is None, "refused when the model was loaded"
    assert position_embeddings is not None
    query, key, value = _split(self, self.query_key_value(hidden_states))
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    out, _weights = paged_attention(self, query, key, value, attention_mask, scaling=self.inv_norm_factor)
    return self.dense(out.flatten(2)), None


def _split(self: Any, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fused projection [1, tokens, features] → query, key, value [1, heads or kv_heads, tokens, dim]."""
    lead = fused.shape[:2]
    if self.new_decoder_architecture or not self.multi_query:
        kv_heads = self.num_kv_heads if self.new_decoder_architecture else self.num_heads
        parts = fused.view(*lead, kv_heads, self.num_heads // kv_heads + 2, self.head_dim)
        query, key, value = parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]
    else:
        parts = fused.view(*lead, self.num_heads + 2, self.head_dim)
        query, key, value = parts[:, :, :-2], parts[:, :, -2:-1], parts[:, :, -1:]
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
