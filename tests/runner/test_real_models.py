"""SmolLM2-135M and Gemma 3 270M in float32 against generate with the same dequantised weights."""

from __future__ import annotations

import pytest
from driver import Driver, reference

from octavo.models.loader import LoadedModel, load_model
from octavo.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
TEXT = (
    "The lighthouse keeper climbed the stairs every evening, counting the steps aloud, and every evening he came "
    "to another number. He wrote them down in a green book. When the book was full he sent it to the ministry. "
)
NEW = 24


def _prompts(model: LoadedModel, lengths: tuple[int, ...]) -> list[list[int]]:
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(TEXT * 12)
    assert len(ids) >= max(lengths)
    return [ids[:n] for n in lengths]


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize(
    ("name", "lengths"),
    [("demo", (1, 15, 16, 17, 64, 120, 200, 333)), ("gemma3-270m", (2, 15, 16, 17, 64, 200, 500, 530))],
)
def test_real_model_equals_generate(name: str, lengths: tuple[int, ...]) -> None:
    model = load_model(name, dtype="float32", device="cpu", implementation="transformers")
    prompts = _prompts(model, lengths)
    wanted = [reference(model.module, p, NEW) for p in prompts]
    for block_size, chunk, batch in ((16, 64, 8), (4, 512, 8), (16, 512, 1)):
        driver = Driver(model, block_size, num_blocks=10_000 // block_size * (6 if name != "demo" else 1))
        seqs = [driver.new(i, p, GREEDY) for i, p in enumerate(prompts)]
        got = []
        for i in range(0, len(seqs), batch):
            got += driver.generate(seqs[i : i + batch], NEW, chunk)
        assert got == wanted, f"block size {block_size}, chunk {chunk}, batch {batch}"


@pytest.mark.real_model
def test_demo_answers_a_question() -> None:
    # In bfloat16: with the file's 4-bit blocks two first words are nearly tied (log probabilities -1.88 and -1.96).
    model = load_model("demo", dtype="bfloat16", device="cpu")
    assert model.tokenizer is not None
    assert model.has_chat_template
    assert model.max_positions == 8192
    assert len(model.layers) == 30
    ids = model.tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    driver = Driver(model, 16, 64)
    seq = driver.new(0, ids, GREEDY)
    while seq.tokens[-1] not in model.eos_ids and seq.generated < 20:
        driver.step([seq], 64)
    assert model.tokenizer.decode(seq.output) == "The capital of France is Paris."
