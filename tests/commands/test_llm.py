"""`LLM` as users of vLLM call it: odd inputs are told in a sentence, and nothing of a failed call stays behind."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, OctavoError, RequestError, SamplingParams
from octavo.log import replay
from octavo.types import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.runner.tiny import tiny_module

    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny_module("llama").save_pretrained(path)
    return path


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(str(folder), kv_memory="1MiB", max_num_seqs=8, check=True)


def generate(llm: LLM, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


def test_prompts_in_every_form_give_the_same_tokens(llm: LLM) -> None:
    (plain,) = generate(llm, [5, 6, 7])
    forms = [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7]), [np.int64(5), 6, 7], {"prompt_token_ids": [5, 6, 7]}]
    for output in generate(llm, forms):
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    (single,) = generate(llm, {"prompt_token_ids": [5, 6, 7]})
    assert single.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.parametrize("bad", [None, [], [True], [1.5], [-1], [199], 5, "text", {"x": 1}])
def test_one_bad_prompt_leaves_nothing_of_the_call_behind(llm: LLM, bad: object) -> None:
    with pytest.raises(RequestError):
        generate(llm, [[5, 6], bad])
    assert not llm.engine.busy
    assert len(generate(llm, [[5, 6]])) == 1


def test_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.engine.step
    calls = []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, [[5, 6], [7, 8]])
    assert not llm.engine.busy
    assert len(generate(llm, [[5, 6]])[0].outputs[0].token_ids) == 6


def test_generate_beside_requests_of_the_step_api(llm: LLM) -> None:
    other = llm.engine.submit([9, 9], GREEDY)
    assert len(generate(llm, [[5, 6]])[0].outputs[0].token_ids) == 6
    while llm.engine.busy:
        llm.engine.step()
    assert other not in llm.engine.scheduler.requests


def test_interleaved_streams_get_all_of_their_own(llm: LLM) -> None:
    wanted = [output.outputs[0].token_ids for output in generate(llm, [[5, 6], [7, 8]])]
    streams = [llm.stream([5, 6], GREEDY), llm.stream([7, 8], GREEDY)]
    lengths: list[list[int]] = [[], []]
    last = [None, None]
    for _ in range(6):
        for i, stream in enumerate(streams):
            last[i] = next(stream)
            lengths[i].append(len(last[i].outputs[0].token_ids))
    assert lengths == [[1, 2, 3, 4, 5, 6]] * 2
    assert [output.outputs[0].token_ids for output in last] == wanted


def test_closed_stream_gives_its_memory_back(llm: LLM) -> None:
    stream = llm.stream([5, 6], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    kv = llm.engine.scheduler.kv
    assert not llm.engine.busy
    assert kv.free + kv.evictable == kv.capacity


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", 5.5),
        ("max_tokens", -1),
        ("max_tokens", math.inf),
        ("min_tokens", 1.5),
        ("temperature", "0.5"),
        ("temperature", math.nan),
        ("temperature", -1),
        ("top_k", 1.5),
        ("top_p", 0),
        ("min_p", 2),
        ("n", 2.0),
        ("seed", "x"),
        ("seed", 2**70),
        ("logprobs", 1.5),
        ("logprobs", 21),
        ("logit_bias", {1.5: 1}),
        ("logit_bias", {"5": 1}),
        ("logit_bias", {5: 1000}),
        ("stop", [1]),
        ("stop", b"x"),
        ("stop", ""),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [1.5]),
        ("repetition_penalty", 1e-300),
        ("frequency_penalty", 3),
    ],
)
def test_sampling_parameter_out_of_its_limits_is_named(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as refused:
        SamplingParams(**{field: value})
    assert refused.value.field in (field, f"{field}[5]")


def test_none_means_what_it_means_in_vllm() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None, top_k=None, seed=np.int64(3))
    assert (params.stop, params.stop_token_ids, params.logit_bias, params.top_k) == ((), (), {}, 0)


def test_tiny_temperature_is_greedy(llm: LLM) -> None:
    (greedy,) = generate(llm, [5, 6, 7])
    tiny = SamplingParams(temperature=1e-46, max_tokens=6, ignore_eos=True)
    assert generate(llm, [5, 6, 7], tiny)[0].outputs[0].token_ids == greedy.outputs[0].token_ids


def test_failed_step_is_raised_and_the_next_call_works(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self, plan):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(llm.engine.runner), "run", fail)
        with pytest.raises(OctavoError, match="out of memory"):
            generate(llm, [[5, 6], [7, 8]])
    assert len(generate(llm, [[5, 6]])[0].outputs[0].token_ids) == 6


def test_own_ids_never_collide_with_given_ones(llm: LLM) -> None:
    for number in range(1, 5):
        llm.engine.submit([5, 6], GREEDY, request_id=f"request-{number}")
    names = {llm.engine.submit([5, 6], GREEDY) for _ in range(4)}
    assert len(names) == 4
    assert len(llm.engine.drain()) == 8


def test_decision_log_of_a_real_run_replays(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.msgpack"
    llm = LLM(str(folder), kv_memory="128KiB", max_model_len=64, max_num_seqs=4, decision_log=path, admission="prompt")
    sampled = SamplingParams(n=2, temperature=1.0, seed=4, max_tokens=20, ignore_eos=True)
    generate(llm, [[5, 6, 7], [8] * 20, [9] * 12], [GREEDY, sampled, sampled])
    stream = llm.stream([5, 6], GREEDY)
    next(stream)
    stream.close()
    llm.built.log.close()
    outcome = replay(path)
    assert outcome.difference is None
    assert outcome.events > 50


def test_settings_of_the_wrong_kind_are_named(folder: Path) -> None:
    for name, value in (
        ("block_size", "16"),
        ("block_size", 2.5),
        ("kv_memory", 1e6),
        ("max_num_seqs", 1.5),
        ("max_queue", 0),
    ):
        with pytest.raises(OctavoError, match=name):
            LLM(str(folder), **{"kv_memory": "1MiB", name: value})


def test_deadlines_of_ended_requests_are_forgotten(llm: LLM) -> None:
    import gc

    from octavo.types import Sequence

    for _ in range(300):
        request_id = llm.engine.submit([5, 6], GREEDY, deadline=1e9)
        llm.engine.abort(request_id)
    gc.collect()
    assert sum(isinstance(thing, Sequence) for thing in gc.get_objects()) < 150
    with pytest.raises(RequestError, match="deadline"):
        llm.engine.submit([5, 6], GREEDY, deadline=math.nan)


def test_aborted_request_shows_all_its_tokens(llm: LLM) -> None:
    request_id = llm.engine.submit([5, 6], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    for _ in range(4):
        llm.engine.step()
    output = llm.abort(request_id)
    assert output.outputs[0].finish_reason is FinishReason.ABORT
    assert len(output.outputs[0].token_ids) == 4
    assert output.metrics.finished is not None
    assert llm.abort(request_id) is None
