"""What the native decoder says of every next token of a text, and the same from transformers' own code."""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers as tf
from driver import Driver
from tiny import NATIVE

from octavo.models.loader import loaded
from octavo.types import SamplingParams

VOCABULARY = 19  # so few that prompt_logprobs reports all of them


def small_module(name: str, seed: int = 0, **more: Any) -> Any:
    """A random model of a family of `NATIVE` with a vocabulary that is no multiple of a panel."""
    torch.manual_seed(seed)
    config = NATIVE[name]()
    for field, value in ({"vocab_size": VOCABULARY} | more).items():
        setattr(config, field, value)
    module = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.15) if parameter.dim() > 1 else parameter.data.add_(
            torch.randn_like(parameter) * 0.1
        )
    return module.eval()


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(length)]


def native_logprobs(
    module: Any, tokens: list[int], *, weights: str = "auto", kv_dtype: str = "auto", chunk: int = 512
) -> torch.Tensor:
    """Log probabilities [tokens - 1, vocabulary] as the engine reports them."""
    model = loaded("small", module, None, torch.device("cpu"), native=True, weights=weights)
    assert model.native is not None, model.not_native
    driver = Driver(model, 16, 64, kv_dtype=kv_dtype)
    params = SamplingParams(temperature=0.0, prompt_logprobs=VOCABULARY, max_tokens=None)
    seq = driver.new(0, tokens, params)
    entries = []
    while seq.computed < len(tokens):
        entries += driver.step([seq], chunk).prompt_logprobs.get(seq.id, ())
    out = torch.full((len(entries), VOCABULARY), float("nan"))
    for row, entry in zip(out, entries, strict=True):
        for token, logprob in entry.top:
            row[token] = logprob
    return out


@torch.inference_mode()
def own_logprobs(module: Any, tokens: list[int]) -> torch.Tensor:
    """The same from transformers."""
    return module(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)


def spread(logprobs: torch.Tensor) -> float:
    return float(logprobs.std())


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the difference."""
    assert torch.isfinite(got).all()
    return float((got - wanted).square().mean().sqrt())
