"""Runs prompts through the real engine under any setting and compares greedy tokens with transformers' generate."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, replace
from functools import cache

import torch

from octavo.build import BuiltEngine, build_engine
from octavo.config import EngineConfig
from octavo.kv.groups import page_layout
from octavo.models.loader import LoadedModel, load_model, loaded
from octavo.types import SamplingParams, Status
from tests.runner.tiny import tiny_module

LENGTHS = (1, 3, 4, 15, 16, 17, 33, 60)


def random_prompts(vocab: int, lengths: tuple[int, ...], seed: int = 7) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]


def reference(module: torch.nn.Module, prompt: list[int], new: int) -> list[int]:
    """Greedy continuation by transformers: exactly `new` tokens, no early end."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return out[0, len(prompt) :].tolist()


@dataclass(frozen=True)
class Subject:
    """A model with its prompts and the reference's tokens for them."""

    model: LoadedModel
    prompts: list[list[int]]
    wanted: list[list[int]]
    new: int


@cache
def tiny_subject(name: str, new: int = 24) -> Subject:
    module = tiny_module(name)
    prompts = random_prompts(199, LENGTHS)
    wanted = [reference(module, prompt, new) for prompt in prompts]
    return Subject(loaded(name, module, None, torch.device("cpu")), prompts, wanted, new)


@cache
def native_subject(name: str, new: int = 24) -> Subject:
    """The same for the native code, which must be able to run the model."""
    module = tiny_module(name)
    prompts = random_prompts(199, LENGTHS)
    wanted = [reference(module, prompt, new) for prompt in prompts]
    model = loaded(name, module, None, torch.device("cpu"), native=True)
    assert model.native is not None, model.not_native
    return Subject(model, prompts, wanted, new)


@cache
def real_subject(name: str, lengths: tuple[int, ...], new: int, implementation: str = "transformers") -> Subject:
    """The reference's tokens are computed once, whoever computes the subject's."""
    model = load_model(name, dtype="float32", device="cpu", implementation=implementation)
    if implementation != "transformers":
        return replace(real_subject(name, lengths, new), model=model)
    prompts = random_prompts(model.vocab_size, lengths)
    plain = copy.copy(model.module)
    wanted = [reference(plain, prompt, new) for prompt in prompts]
    return Subject(model, prompts, wanted, new)


def engine_for(
    subject: Subject,
    *,
    strategy: str = "paged",
    block: int = 16,
    chunk: int = 64,
    batch: int = 8,
    pool_tokens: int = 1024,
    max_model_len: int = 128,
    **settings: object,
) -> BuiltEngine:
    layout = page_layout(subject.model.layers, block)
    memory = -(-pool_tokens // block) * len(layout.groups) * layout.page_bytes
    config = EngineConfig(
        model=subject.model.name,
        kv_strategy=strategy,
        block_size=block,
        kv_memory=memory,
        max_model_len=max_model_len,
        max_num_seqs=batch,
        max_num_batched_tokens=chunk,
        check=True,
        **settings,  # type: ignore[arg-type]
    )
    return build_engine(config, loaded=subject.model)


def generate(
    built: BuiltEngine, subject: Subject, *, preempt_every: int = 0, times: int = 2, rounds: int = 1
) -> list[list[list[int]]]:
    """Tokens per round and prompt; each round repeats the same prompts (a warm cache from the second one on).

    `preempt_every`: after so many steps the running requests lose their memory, until each did `times` times.
    """
    engine = built.engine
    params = SamplingParams(temperature=0.0, max_tokens=subject.new, ignore_eos=True)
    out = []
    for _ in range(rounds):
        ids = [engine.submit(prompt, params) for prompt in subject.prompts]
        seqs = {r: engine.scheduler.requests[r][0] for r in ids}
        done: dict[str, list[int]] = {}
        step = 0
        while engine.busy:
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
            step += 1
            if preempt_every and step % preempt_every == 0:
                for request_id, seq in seqs.items():
                    if seq.status is Status.RUNNING and seq.preemptions < times:
                        engine.scheduler.preempt(request_id, engine.clock.now())
        if preempt_every:
            assert all(seq.preemptions >= times for seq in seqs.values()), "every request lost its memory twice"
        out.append([done[request_id] for request_id in ids])
        scheduler = engine.scheduler
        assert scheduler.kv.free + scheduler.kv.evictable == scheduler.kv.capacity
    return out
