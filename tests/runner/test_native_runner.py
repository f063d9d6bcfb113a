"""The native runner beside the torch runner: same tokens, log probabilities and draws; what it stores; what it
refuses."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import pytest
import torch
from driver import Driver
from native_logits import small_module
from tests.equivalence.harness import Subject, engine_for, generate, native_subject, random_prompts
from tests.equivalence.test_answers_do_not_depend_on_neighbours import Letters, answers, essence, logprobs
from tests.native.needs import needs_native, python
from tiny import tiny_module

from octavo.kv.api import Copy, View
from octavo.kv.groups import page_layout
from octavo.kv.strategies import STRATEGIES
from octavo.models.errors import ModelError
from octavo.models.loader import LoadedModel, load_model, loaded
from octavo.models.shapes import cache_dtype, cache_layers
from octavo.runner.api import SeqWork, StepPlan
from octavo.runner.native_runner import NativeRunner
from octavo.runner.quantise import stored_dtype
from octavo.runner.store import KVStore
from octavo.runner.torch_runner import TorchRunner
from octavo.types import SamplingParams

pytestmark = needs_native
CPU = torch.device("cpu")
PROMPT = [5, 9, 17, 33, 65, 100, 7, 8, 9, 10, 11, 12, 13]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PARAMS = [
    dataclasses.replace(GREEDY, logprobs=3, prompt_logprobs=2),
    dataclasses.replace(GREEDY, repetition_penalty=1.3, logprobs=0),
    dataclasses.replace(GREEDY, temperature=0.8, seed=3, prompt_logprobs=0),
    dataclasses.replace(GREEDY, temperature=1.0, seed=4, top_p=0.8, frequency_penalty=0.7, logprobs=1),
    dataclasses.replace(GREEDY, logit_bias={7: 5.0, 9: -100.0}, presence_penalty=1.0),
    dataclasses.replace(GREEDY, temperature=0.9, seed=5, top_k=10, n=3, logprobs=1),
    dataclasses.replace(GREEDY, temperature=1.1, seed=6, min_p=0.05, min_tokens=9, stop_token_ids=(5, 6, 7, 8)),
    GREEDY,
]


def packed(name: str) -> LoadedModel:
    model = loaded(name, tiny_module(name), None, CPU, native=True)
    assert model.native is not None, model.not_native
    return model


@cache
def letters(native: bool) -> Subject:
    model = loaded("llama", tiny_module("native-llama"), Letters(), CPU, native=native)
    assert (model.native is not None) == native
    return Subject(model, random_prompts(199, (5, 9, 16, 17, 12, 31, 8, 20)), [], 24)


@pytest.mark.parametrize("more", [{}, dict(speculative_tokens=4, speculative_limit=30), dict(chunk=8, preempt_every=5)])
def test_sampling_penalties_and_logprobs_are_those_of_the_torch_runner(more: dict[str, object]) -> None:
    wanted = answers(letters(False), PARAMS, block=8)
    got = answers(letters(True), PARAMS, block=8, **more)
    for i, output in wanted.items():
        assert essence(got[i]) == essence(output), i
        assert logprobs(got[i]) == pytest.approx(logprobs(output), abs=1e-4)
        if output.prompt_logprobs is not None:
            pairs = zip(output.prompt_logprobs[1:], got[i].prompt_logprobs[1:], strict=True)
            assert all(
                a.token == b.token and a.rank == b.rank and a.logprob == pytest.approx(b.logprob, abs=1e-4)
                and [t for t, _ in a.top] == [t for t, _ in b.top]
                for a, b in pairs
            )  # fmt: skip


def test_copies_come_before_the_work() -> None:
    driver = Driver(packed("native-llama"), 8, 64)
    seq, twin = (driver.new(i, PROMPT, SamplingParams(temperature=0.0, max_tokens=None)) for i in (1, 2))
    driver.step([seq, twin], 64)
    wanted = driver.step([twin], 64).tokens
    table = seq.view.tables[0]
    driver.grow(seq, len(seq.tokens))
    moved = [driver.free.pop() for _ in table]
    copies = tuple(Copy(a, b) for a, b in zip(table, moved, strict=True))
    for block in table:
        assert block not in moved
    table[:] = moved
    assert driver.runner.run(StepPlan(5, copies, (SeqWork(seq, seq.computed, 1, (seq,)),))).tokens == wanted


def test_missing_blocks_are_told_before_anything_is_written() -> None:
    driver = Driver(packed("native-llama"), 4, 64)
    seq = driver.new(7, PROMPT, SamplingParams(temperature=0.0))
    for table in ([], [3, -1, 4, 5]):
        seq.view = View((table,))
        with pytest.raises(ModelError, match="sequence 7: its block table has no block"):
            driver.runner.run(StepPlan(0, (), (SeqWork(seq, 0, len(PROMPT), ()),)))
        assert not driver.runner.store.buffer.any()


@pytest.mark.parametrize("block", [8, 16, 24])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["native-llama", "native-gemma3", "native-mistral"])
def test_what_earlier_holders_left_is_never_seen(name: str, kv_dtype: str, block: int) -> None:
    """Slots beyond a sequence's length hold anything: K no number, V the largest finite one. Slid blocks are spoilt."""
    model, told = packed(name), []
    for garbage in (False, True):
        driver = Driver(model, block, 64 * len(page_layout(model.layers, block).groups), kv_dtype=kv_dtype)
        if garbage and kv_dtype == "int8":
            driver.runner.store.buffer.fill_(0x7E)
        elif garbage:
            for layer in model.layers:
                driver.runner.store.k[layer.layer].fill_(float("nan"))
                driver.runner.store.v[layer.layer].fill_(3e38)
        seqs = [driver.new(i, PROMPT[: 13 - i], SamplingParams(temperature=0.0)) for i in range(3)]
        told.append(driver.generate(seqs, 30, 5))
    assert told[0] == told[1]


def test_two_runners_share_one_packed_model_in_turns() -> None:
    model = packed("native-gemma3")
    drivers = [Driver(model, block, 256, seed=block) for block in (4, 16)]
    seqs = [d.new(0, PROMPT, SamplingParams(temperature=0.0)) for d in drivers]
    for _ in range(20):
        for driver, seq in zip(drivers, seqs, strict=True):
            driver.step([seq], 64)
    assert seqs[0].output == seqs[1].output
    alone = Driver(model, 8, 256)
    assert alone.generate([alone.new(0, PROMPT, SamplingParams(temperature=0.0))], 20) == [seqs[0].output]


# --- what the cache holds -------------------------------------------------------------------------------------------


def stored_by_both(kv_dtype: str, k: torch.Tensor, v: torch.Tensor) -> tuple[KVStore, KVStore]:
    """What the native runner and what `KVStore.write` stores for three tokens of a layer whose K and V are known.

    Biases alone make K (without positions) and V: k and v are [KV heads, dim].
    """
    heads, dim = v.shape
    module = small_module(
        "native-smollm3",
        num_hidden_layers=1,
        no_rope_layers=[0],
        layer_types=["full_attention"],
        num_key_value_heads=heads,
        num_attention_heads=heads,
        head_dim=dim,
        attention_bias=True,
    )
    attention = module.model.layers[0].self_attn
    for part, bias in ((attention.k_proj, k), (attention.v_proj, v)):
        part.weight.data.zero_()
        part.bias.data = bias.reshape(-1).clone()
    driver = Driver(loaded("known", module, None, CPU, native=True), 4, 2, kv_dtype=kv_dtype)
    assert isinstance(driver.runner, NativeRunner)
    seq = driver.new(0, [5, 6, 7], SamplingParams(temperature=0.0))
    driver.step([seq], 64)
    block = seq.view.tables[0][0]
    kind = cache_dtype(kv_dtype, torch.float32)
    layers = cache_layers(driver.loaded.layers, kind)
    store = KVStore(layers, page_layout(layers, 4), 2, dtype=stored_dtype(kind), device=CPU)
    at = torch.tensor([block] * 3), torch.arange(3)
    store.write(0, k.expand(3, heads, dim), v.expand(3, heads, dim), *at)
    return driver.runner.store, store


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8", "fp8"])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-6, 1e4, 1e38])
def test_the_cache_holds_the_bytes_that_the_store_would_write(kv_dtype: str, scale: float) -> None:
    torch.manual_seed(1)
    for seed in range(4):
        torch.manual_seed(seed)
        k, v = (torch.randn(2, 32).clamp(-3, 3) * scale for _ in range(2))
        native, wanted = stored_by_both(kv_dtype, k, v)
        assert torch.equal(native.buffer, wanted.buffer)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8", "fp8"])
def test_v_that_is_no_finite_number_is_stored_as_the_store_does(kv_dtype: str) -> None:
    k, v = torch.zeros(2, 32), torch.randn(2, 32)
    v[0, 3], v[0, 5], v[0, 7], v[1] = float("inf"), float("-inf"), float("nan"), 0.0
    stores = stored_by_both(kv_dtype, k, v)
    native, wanted = (store.read(0, torch.arange(2), torch.float32) for store in stores)
    assert all(torch.equal(*pair) for pair in zip(native, wanted, strict=True))
    assert torch.isfinite(native[1]).all()


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_v_beyond_the_caches_range_is_its_largest_number_and_not_infinity(kv_dtype: str) -> None:
    """The next holder of the block multiplies it by 0."""
    v = torch.full((2, 32), torch.finfo(torch.float32).max)
    native, wanted = stored_by_both(kv_dtype, torch.zeros(2, 32), v)
    assert torch.equal(native.v[0], wanted.v[0])
    assert torch.isfinite(native.v[0]).all()


@cache
def undisturbed(name: str, kv_dtype: str) -> list[list[int]]:
    """Each prompt alone, nothing shared."""
    subject = native_subject(name)
    (answer,) = generate(engine_for(subject, batch=1, kv_dtype=kv_dtype, enable_prefix_caching=False), subject)
    return answer


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["native-llama", "native-mistral"])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "bfloat16", "float16"])
def test_strategies_agree_in_every_cache_dtype(name: str, kv_dtype: str, strategy: str) -> None:
    subject = native_subject(name)
    built = engine_for(subject, strategy=strategy, block=8, chunk=16, kv_dtype=kv_dtype)
    for answer in generate(built, subject, rounds=2 if strategy == "paged" else 1):
        assert answer == undisturbed(name, kv_dtype)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_module("native-llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rewrite(path: Path, change: object) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_a_saved_model_runs_natively(saved: Path) -> None:
    model = load_model(str(saved), dtype="float32", device="cpu")
    assert model.native is not None
    assert model.module is None
    subject = native_subject("native-llama")
    built = engine_for(dataclasses.replace(subject, model=model))
    assert generate(built, subject) == [subject.wanted]


def test_transformers_code_can_be_asked_for(saved: Path) -> None:
    model = load_model(str(saved), dtype="float32", device="cpu", implementation="transformers")
    assert model.native is None
    subject = native_subject("native-llama")
    built = engine_for(dataclasses.replace(subject, model=model))
    assert isinstance(built.engine.runner, TorchRunner)
    assert generate(built, subject) == [subject.wanted]


def test_quantised_weights_of_a_model_that_is_not_native_are_refused_with_the_reason(tmp_path: Path) -> None:
    for name, reason in (("wide-gpt2", "model_type gpt2"), ("qwen2", "head sizes 12 and 12")):
        tiny_module(name).save_pretrained(tmp_path / name)
        with pytest.raises(ModelError, match=rf"weights int8 needs the native code.*{reason}"):
            load_model(str(tmp_path / name), dtype="float32", device="cpu", weights="int8")
        with pytest.raises(ModelError, match=rf"implementation native needs the native code.*{reason}"):
            load_model(str(tmp_path / name), dtype="float32", device="cpu", implementation="native")
        assert load_model(str(tmp_path / name), dtype="float32", device="cpu").native is None


@pytest.mark.parametrize("weights", ["int8_group", "int4", "int4_affine"])
def test_inputs_that_are_no_whole_groups_are_refused(saved: Path, weights: str) -> None:
    with pytest.raises(ModelError, match=r"48 inputs; .* multiple of 32"):
        load_model(str(saved), dtype="float32", device="cpu", weights=weights)
    assert load_model(str(saved), dtype="float32", device="cpu", weights="int8").native is not None


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens", "model.norm", "lm_head", "model.layers.1.self_attn.k_proj", "model.layers.2.mlp.down_proj"],
)
def test_a_missing_tensor_is_named(saved: Path, name: str) -> None:
    rewrite(saved, lambda tensors: tensors.pop(f"{name}.weight"))
    with pytest.raises(ModelError, match=rf"no tensor {name}\.weight; it is incomplete or of another architecture"):
        load_model(str(saved), dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("model.embed_tokens", (150, 48), "have 150 rows; the config says 199"),
        ("model.embed_tokens", (199, 32), r"is \(199, 32\); the config says 48 columns"),
        ("model.layers.0.self_attn.q_proj", (64, 48), r"64 \+ 64 \+ 64 rows; the config says 256"),
        ("model.layers.0.self_attn.q_proj", (2048, 48), "has 2048 rows, more than the config says"),
        ("model.layers.0.mlp.up_proj", (48, 48), r"64 \+ 48 rows; the config says 128"),
        ("model.layers.0.mlp.gate_proj", (96, 48), "has 96 rows, more than the config says"),
        ("model.layers.1.input_layernorm", (32,), r"is \(32,\); the config says \(48,\)"),
        ("lm_head", (300, 48), "has 300 rows, more than the config says"),
    ],
)
def test_a_misshapen_tensor_is_named_before_memory_is_touched(
    saved: Path, name: str, shape: tuple[int, ...], said: str
) -> None:
    rewrite(saved, lambda tensors: tensors.update({f"{name}.weight": torch.zeros(shape)}))
    with pytest.raises(ModelError, match=said):
        load_model(str(saved), dtype="float32", device="cpu")


def test_parts_that_only_together_have_the_right_size_are_refused(saved: Path) -> None:
    """A gate of 48 rows and an up of 80: 128 together, and each in the wrong place."""
    at = "model.layers.0.mlp."
    halves = {f"{at}gate_proj.weight": torch.zeros(48, 48), f"{at}up_proj.weight": torch.zeros(80, 48)}
    rewrite(saved, lambda tensors: tensors.update(halves))
    with pytest.raises(ModelError, match="config says"):
        load_model(str(saved), dtype="float32", device="cpu")


def test_a_misshapen_bias_is_refused(tmp_path: Path) -> None:
    tiny_module("native-qwen2").save_pretrained(tmp_path / "model")
    rewrite(tmp_path / "model", lambda t: t.update({"model.layers.0.self_attn.k_proj.bias": torch.ones(16)}))
    with pytest.raises(ModelError, match=r"k_proj\.bias is \(16,\)"):
        load_model(str(tmp_path / "model"), dtype="float32", device="cpu")


def test_a_checkpoint_of_another_architecture_is_refused(saved: Path, tmp_path: Path) -> None:
    tiny_module("native-phi3").config.save_pretrained(saved)
    with pytest.raises(ModelError, match=r"config says|no tensor"):
        load_model(str(saved), dtype="float32", device="cpu")


SWITCHED_OFF = """
import sys; sys.path.insert(0, "tests/runner")
import pytest, torch
from octavo.models.errors import ModelError
from octavo.models.loader import load_model
model = load_model(sys.argv[1], dtype="float32", device="cpu")
assert model.native is None and model.module is not None
for more in (dict(weights="int8"), dict(implementation="native")):
    with pytest.raises(ModelError, match="needs the native code"):
        load_model(sys.argv[1], dtype="float32", device="cpu", **more)
print("done")
"""


def test_switched_off_what_needs_the_library_is_refused(saved: Path) -> None:
    code = f"import sys; sys.argv = ['', {str(saved)!r}]\n" + SWITCHED_OFF
    assert python(code, OCTAVO_NATIVE="off") == "done"
