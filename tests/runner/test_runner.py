"""Plans: logprobs of prompts across chunks, samples of one prompt, copies, errors."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from driver import Driver, make_sequence, reference
from tiny import tiny_module

from octavo.kv.api import Copy, View
from octavo.kv.groups import page_layout
from octavo.models.errors import ModelError
from octavo.models.loader import LoadedModel, loaded
from octavo.runner.api import SeqWork, StepPlan, StepResult
from octavo.runner.memory import measure
from octavo.runner.sampler import Draw, Sampler
from octavo.runner.torch_runner import TorchRunner
from octavo.types import SamplingParams

PROMPT = [5, 9, 17, 33, 65, 100, 7, 8, 9, 10, 11, 12, 13]


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return loaded("llama", tiny_module("llama"), None, torch.device("cpu"))


def raw_logprobs(model: LoadedModel, tokens: list[int]) -> torch.Tensor:
    fresh = tiny_module("llama")
    with torch.inference_mode():
        return fresh(torch.tensor([tokens])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("chunk", [1, 4, 5, 64])
def test_prompt_logprobs_across_chunks(llama: LoadedModel, chunk: int) -> None:
    driver = Driver(llama, 4, 64)
    params = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=3, max_tokens=None)
    seq, other = driver.new(1, PROMPT, params), driver.new(2, PROMPT[:3], SamplingParams(temperature=0.0))
    entries, drawn = [], []
    while seq.generated < 3:
        result = driver.step([other, seq], chunk)
        entries += result.prompt_logprobs.get(seq.id, ())
        drawn += result.logprobs.get(seq.id, ())
        assert other.id not in result.prompt_logprobs
        assert other.id not in result.logprobs
    wanted = raw_logprobs(llama, seq.tokens)
    assert [e.token for e in entries] == PROMPT[1:]
    for position, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(wanted[position, entry.token]), abs=1e-4)
        assert entry.rank == 1 + int((wanted[position] > wanted[position, entry.token]).sum())
        assert [t for t, _ in entry.top] == wanted[position].topk(2).indices.tolist()
    for i, entry in enumerate(drawn):
        assert entry.token == seq.output[i]
        assert entry.logprob == pytest.approx(float(wanted[len(PROMPT) - 1 + i, entry.token]), abs=1e-4)
        assert entry.rank == 1


def test_recomputed_output_is_not_reported_as_prompt(llama: LoadedModel) -> None:
    driver = Driver(llama, 4, 64)
    seq = driver.new(1, PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=0, max_tokens=None))
    for _ in range(3):
        driver.step([seq], 64)
    driver.drop(seq)
    result = driver.step([seq], 64)
    assert len(result.prompt_logprobs[seq.id]) == len(PROMPT) - 1


def test_all_samples_of_a_prompt_draw_from_its_last_position(llama: LoadedModel) -> None:
    driver = Driver(llama, 4, 64)
    params = SamplingParams(n=3, temperature=1.0, seed=4, logprobs=0)
    samples = [make_sequence(i, PROMPT, params, index=i) for i in range(3)]
    parent = samples[0]
    parent.view = View(([],))
    driver.grow(parent, len(PROMPT))
    result = driver.runner.run(StepPlan(0, (), (SeqWork(parent, 0, len(PROMPT), tuple(samples)),)))
    assert len(result.tokens[0]) == 3
    assert set(result.logprobs) == {0, 1, 2}
    alone = []
    for i in range(3):
        single = driver.new(9 + i, PROMPT, params.for_sample(i))
        alone.append(driver.step([single], 64).tokens[0][0])
    assert list(result.tokens[0]) == alone


def test_a_chunk_without_samples_draws_nothing(llama: LoadedModel) -> None:
    driver = Driver(llama, 4, 64)
    seq = driver.new(1, PROMPT, SamplingParams(temperature=0.0))
    assert driver.step([seq], 4).tokens == ((),)
    assert driver.runner.run(StepPlan(1, (), ())) == StepResult(())


def test_copies_come_before_the_work(llama: LoadedModel) -> None:
    """A sequence whose blocks move in the very plan that goes on with it is not disturbed."""
    driver = Driver(llama, 4, 64)
    seq, twin = (driver.new(i, PROMPT, SamplingParams(temperature=0.0, max_tokens=None)) for i in (1, 2))
    driver.step([seq, twin], 64)
    wanted = driver.step([twin], 64).tokens
    table = seq.view.tables[0]
    driver.grow(seq, len(seq.tokens))
    moved = [driver.free.pop() for _ in table]
    copies = tuple(Copy(a, b) for a, b in zip(table, moved, strict=True))
    table[:] = moved
    work = SeqWork(seq, seq.computed, 1, (seq,))
    assert driver.runner.run(StepPlan(5, copies, (work,))).tokens == wanted


def test_missing_blocks_are_told_before_anything_is_written(llama: LoadedModel) -> None:
    driver = Driver(llama, 4, 64)
    seq = driver.new(7, PROMPT, SamplingParams(temperature=0.0))
    for table in ([], [3, -1, 4, 5]):
        seq.view = View((table,))
        with pytest.raises(ModelError, match="sequence 7: its block table has no block"):
            driver.runner.run(StepPlan(0, (), (SeqWork(seq, 0, len(PROMPT), ()),)))
        assert not driver.runner.store.buffer.any()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_what_earlier_holders_left_is_never_seen(name: str) -> None:
    """Slots beyond a sequence's length hold anything at all: K no number, V the largest finite one."""
    model = loaded(name, tiny_module(name), None, torch.device("cpu"))
    wanted = reference(tiny_module(name), PROMPT, 6)
    driver = Driver(model, 16, 64)
    for layer in model.layers:
        driver.runner.store.k[layer.layer].fill_(float("nan"))
        driver.runner.store.v[layer.layer].fill_(torch.finfo(torch.float32).max)
    seqs = [driver.new(i, PROMPT[: 13 - i], SamplingParams(temperature=0.0)) for i in range(3)]
    assert driver.generate(seqs, 6, 5)[0] == wanted


def test_overflow_of_one_sequence_stays_its_own(llama: LoadedModel) -> None:
    store = Driver(llama, 4, 8).runner.store
    bad = torch.full((1, 2, 16), float("inf"))
    store.write(0, bad, bad * float("nan"), torch.tensor([3]), torch.tensor([1]))
    assert torch.isfinite(store.v[0]).all()
    rows = torch.full((1, 300), float("nan"))
    seq = make_sequence(0, PROMPT, SamplingParams(temperature=1.0, top_p=0.5, seed=1))
    assert 0 <= Sampler().sample(rows, [0], [Draw(seq)])[0][0] < 300


def test_a_wrong_shape_is_an_error_and_not_a_corruption(llama: LoadedModel) -> None:
    wrong = tuple(dataclasses.replace(layer, window=8) for layer in llama.layers)
    model = dataclasses.replace(llama, layers=wrong)
    with pytest.raises(ModelError, match="laid out for"):
        Driver(model, 4, 64)


def test_a_layer_without_its_own_attention_is_an_error(llama: LoadedModel) -> None:
    layers = (*llama.layers, dataclasses.replace(llama.layers[0], layer=3))
    model = dataclasses.replace(llama, layers=layers)
    with pytest.raises(ModelError, match=r"no attention module was found for layers \[3\]"):
        TorchRunner(model, page_layout(layers, 4), 8)


def test_other_architectures_are_refused_in_a_sentence() -> None:
    import transformers as tf

    small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1}
    for config, word in (
        (tf.BloomConfig(**small, n_head=2), "ALiBi"),
        (tf.FalconConfig(**small, num_attention_heads=2, alibi=True), "ALiBi"),
        (tf.MambaConfig(**small), "linear_attention"),
        (tf.GPTNeoConfig(**small, num_heads=2, attention_types=[[["global"], 1]]), "attention interface"),
    ):
        module = tf.AutoModelForCausalLM.from_config(config)
        with pytest.raises(ModelError, match=word):
            Driver(loaded("x", module, None, torch.device("cpu")), 4, 8)


def test_measured_budget_grows_with_the_step(llama: LoadedModel) -> None:
    small = measure(llama, max_num_batched_tokens=16, max_num_seqs=2)
    large = measure(llama, max_num_batched_tokens=512, max_num_seqs=8)
    assert small.weights == large.weights == llama.weight_bytes > 0
    assert 0 < small.activations < large.activations < 64 << 20
    assert large.kv == large.total - large.weights - large.activations - large.workspace
    with pytest.raises(ModelError, match="max_num_seqs is 0"):
        measure(llama, max_num_batched_tokens=16, max_num_seqs=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(llama: LoadedModel, dtype: torch.dtype) -> None:
    model = loaded("half", tiny_module("llama").to(dtype), None, torch.device("cpu"))
    driver = Driver(model, 4, 64)
    seq = driver.new(1, PROMPT, SamplingParams(temperature=0.0, logprobs=0, max_tokens=None))
    got = [entry for _ in range(4) for entry in driver.step([seq], 64).logprobs[1]]
    wanted = raw_logprobs(llama, seq.tokens)
    for i, entry in enumerate(got):
        assert abs(entry.logprob - float(wanted[len(PROMPT) - 1 + i, entry.token])) < 0.25
