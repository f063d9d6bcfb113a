"""Greedy tokens in float32 equal those of transformers' generate, whatever the blocks, chunks and neighbours."""

from __future__ import annotations

import random

import pytest
import torch
from driver import Driver, reference
from tiny import TINY, tiny_module

from octavo.models.loader import loaded
from octavo.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
NEW = 12
LENGTHS = (1, 3, 15, 16, 17, 33, 50, 70)


def prompts(vocab: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in LENGTHS]


@pytest.mark.parametrize("name", list(TINY))
def test_architecture_equals_generate(name: str) -> None:
    module = tiny_module(name)
    wanted = [reference(module, p, NEW) for p in prompts(199)]
    assert len({tuple(w) for w in wanted}) > len(wanted) // 2, "the tiny model is too monotonous to prove anything"
    model = loaded(name, module, None, torch.device("cpu"))
    for block_size, chunk, batch in ((16, 64, 8), (4, 8, 8), (1, 64, 8), (16, 8, 1)):
        driver = Driver(model, block_size, num_blocks=1024 // block_size * len(model.layers) + 64)
        seqs = [driver.new(i, p, GREEDY) for i, p in enumerate(prompts(199))]
        got = []
        for i in range(0, len(seqs), batch):
            got += driver.generate(seqs[i : i + batch], NEW, chunk)
        assert got == wanted, f"{name}: block size {block_size}, chunk {chunk}, batch {batch}"


def test_preempted_and_recomputed_equals_undisturbed() -> None:
    module = tiny_module("gemma3")
    prompt = prompts(199)[5]
    wanted = reference(module, prompt, NEW)
    driver = Driver(loaded("gemma3", module, None, torch.device("cpu")), 4, 128)
    seq = driver.new(0, prompt, GREEDY)
    for stop_at in (0, 3, 7, NEW):
        while seq.generated < stop_at:
            driver.step([seq], 8)
        driver.step([seq], 8) if stop_at < NEW else None  # half a chunk of work is thrown away
        driver.drop(seq)
    assert seq.output[:NEW] == wanted


def test_two_runners_share_one_model_in_turns() -> None:
    module = tiny_module("llama")
    model = loaded("llama", module, None, torch.device("cpu"))
    prompt = prompts(199)[6]
    wanted = reference(module, prompt, NEW)
    drivers = [Driver(model, block, 128, seed=block) for block in (4, 16)]
    seqs = [d.new(0, prompt, GREEDY) for d in drivers]
    for _ in range(NEW):
        for driver, seq in zip(drivers, seqs, strict=True):
            driver.step([seq], 64)
    assert [s.output for s in seqs] == [wanted, wanted]
