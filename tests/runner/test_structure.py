"""Structured output: the answer fits what was asked for, whatever else happens to the request; what cannot be followed
is refused at submit; whoever asks for nothing is left alone."""

from __future__ import annotations

import json
import random
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from driver import make_sequence
from tests.equivalence.harness import Subject, engine_for, random_prompts
from tests.equivalence.test_answers_do_not_depend_on_neighbours import answers, essence
from tests.native.needs import needs_native
from tiny import tiny_module

from octavo.build import build_engine
from octavo.config import EngineConfig
from octavo.errors import OctavoError
from octavo.llm import LLM
from octavo.log import replay
from octavo.models.loader import loaded
from octavo.models.tokenizer import Tokenizer
from octavo.outputs import RequestOutput
from octavo.runner.structure import Structures
from octavo.types import FinishReason, RequestError, SamplingParams, Sequence, Structure

pytest.importorskip("llguidance")
EOS, VOCABULARY = 2, 199
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22, 333]}, "tag": {"enum": ["a", "bc", "d e"]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": ""},  # random models would write white space to the end
}
REGEX = r"(cat|dog){1,3}-\d{2}"
CHOICES = ["yes", "no", "yes please"]
LARK = 'start: word (", " word){1,2}\nword: /[a-c]{1,3}/'
STRUCTURES = {
    "json_schema": Structure("json_schema", json.dumps(SCHEMA)),
    "regex": Structure("regex", REGEX),
    "choice": Structure("choice", json.dumps(CHOICES)),
    "grammar": Structure("grammar", LARK),
}
FITS = {
    "json_schema": lambda text: fits_schema(json.loads(text)),
    "regex": lambda text: re.fullmatch(REGEX, text) is not None,
    "choice": lambda text: text in CHOICES,
    "grammar": lambda text: re.fullmatch(r"[a-c]{1,3}(, [a-c]{1,3}){1,2}", text) is not None,
}
SAMPLED = SamplingParams(temperature=1.5, max_tokens=70)
GREEDY = SamplingParams(temperature=0.0, max_tokens=70)
PARAMS = [
    replace(SAMPLED, seed=1, structure=STRUCTURES["json_schema"]),
    replace(SAMPLED, seed=2, structure=STRUCTURES["regex"], n=3),
    replace(GREEDY, ignore_eos=True),
    replace(GREEDY, structure=STRUCTURES["json_schema"]),
    replace(SAMPLED, seed=3, structure=STRUCTURES["grammar"], logprobs=2),
    replace(SAMPLED, seed=4, ignore_eos=True, max_tokens=30),
    replace(SAMPLED, seed=5, structure=STRUCTURES["choice"], repetition_penalty=1.4, top_k=5),
    replace(GREEDY, structure=STRUCTURES["regex"], logit_bias={9: 100.0, EOS: 100.0}),
]


def fits_schema(value: object) -> bool:
    assert isinstance(value, dict)
    known = {"ok": (True, False), "n": (1, 22, 333), "tag": ("a", "bc", "d e")}
    return {"ok", "n"} <= value.keys() and all(value[key] in known[key] for key in value)


@cache
def tokenizer() -> Tokenizer:
    """Bytes of ASCII and some longer tokens, 199 in all."""
    import tokenizers as tk
    from transformers import PreTrainedTokenizerFast

    letters = [*(chr(code) for code in range(33, 127)), "Ġ", "Ċ"]
    words = ["ca", "cat", "do", "dog", "ye", "yes", "tr", "ue", "true", "fa", "ls", "fals", "false", '":', '{"', ",Ġ"]
    pairs = [a + b for a in "abcdefghij" for b in "aeiou0123"]
    entries = list(dict.fromkeys(["<pad>", "<s>", "</s>", *letters, *words, *pairs]))[:VOCABULARY]
    assert len(entries) == VOCABULARY
    splits = [(word[:cut], word[cut:]) for word in entries[3:] for cut in range(1, len(word))]
    merges = [(a, b) for a, b in splits if a in entries and b in entries]
    backend = tk.Tokenizer(tk.models.BPE({entry: i for i, entry in enumerate(entries)}, merges))
    backend.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tk.decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


@cache
def subject(native: bool) -> Subject:
    model = loaded("llama", tiny_module("native-llama"), tokenizer(), torch.device("cpu"), native=native)
    assert (model.native is not None) == native
    assert model.eos_ids == {EOS}
    return Subject(model, random_prompts(VOCABULARY, (5, 9, 16, 17, 12, 31, 8, 20)), [], 24)


@cache
def wanted(native: bool) -> dict[int, RequestOutput]:
    return answers(subject(native), PARAMS)


RUNNERS = [False, pytest.param(True, marks=needs_native)]


@pytest.mark.parametrize("native", RUNNERS)
def test_answers_fit_their_structure(native: bool) -> None:
    for number, output in wanted(native).items():
        structure = PARAMS[number].structure
        for sample in output.outputs if structure is not None else ():
            assert sample.finish_reason is FinishReason.STOP
            assert sample.stop_reason == EOS
            assert FITS[structure.kind](sample.text), sample.text
    assert len({sample.text for sample in wanted(native)[1].outputs}) > 1, "samples of one request differ"


@pytest.mark.parametrize("native", RUNNERS)
def test_many_seeds_fit_the_schema(native: bool) -> None:
    params = [replace(PARAMS[0], seed=seed) for seed in range(8)]
    texts = [output.outputs[0].text for output in answers(subject(native), params).values()]
    assert all(fits_schema(json.loads(text)) for text in texts)
    assert len(set(texts)) > 4


@pytest.mark.parametrize("native", RUNNERS)
@pytest.mark.parametrize(
    "setting",
    [
        dict(preempt_every=3),
        dict(preempt_every=4, chunk=8, block=4),
        dict(speculative_tokens=4, speculative_limit=30),
        dict(speculative_tokens=3, speculative_limit=30, preempt_every=5),
        dict(batch=3, order=[7, 2, 5, 0, 1, 6, 4, 3]),
    ],
    ids=str,
)
def test_answers_do_not_depend_on_what_happens_to_them(native: bool, setting: dict[str, object]) -> None:
    got = answers(subject(native), PARAMS, **setting)  # type: ignore[arg-type]
    assert {i: essence(output) for i, output in got.items()} == {
        i: essence(output) for i, output in wanted(native).items()
    }


@pytest.mark.parametrize("native", RUNNERS)
def test_drafts_come_true_within_a_structure(native: bool) -> None:
    """The prompt holds the answer, so that it is found there."""
    ids = tokenizer().encode("abc" * 12)
    params = replace(GREEDY, structure=Structure("regex", "(abc){12}"))
    outputs = []
    for speculative in (0, 4):
        engine = engine_for(subject(native), speculative_tokens=speculative).engine
        engine.submit(ids, params)
        outputs += engine.drain()
    assert essence(outputs[0]) == essence(outputs[1])
    assert outputs[1].outputs[0].text == "abc" * 12
    assert outputs[1].metrics.accepted_tokens > 0


@pytest.mark.parametrize("native", RUNNERS)
def test_neighbours_without_structure_are_left_alone(native: bool) -> None:
    alone = Subject(subject(native).model, [subject(native).prompts[i] for i in (2, 5)], [], 24)
    got = answers(alone, [PARAMS[2], PARAMS[5]])
    assert [essence(got[i]) for i in (0, 1)] == [essence(wanted(native)[number]) for number in (2, 5)]


@pytest.mark.parametrize(
    ("regex", "more", "tokens", "reason"),
    [
        ("no", dict(ignore_eos=True), (3, 3), FinishReason.STOP),
        ("no", dict(min_tokens=9), (10, 10), FinishReason.STOP),  # filled up with ends, which show no text
        ("(ab)+", dict(ignore_eos=True, max_tokens=8), (8, 8), FinishReason.LENGTH),
        ("(ab)+", dict(min_tokens=6, logit_bias={EOS: 100.0}), (7, 69), FinishReason.STOP),
        ("(ab)+", dict(min_tokens=6, ignore_eos=True, max_tokens=8), (8, 8), FinishReason.LENGTH),
        ("(ab){4}", dict(min_tokens=2, ignore_eos=True, stop_token_ids=(5,)), (3, 9), FinishReason.STOP),
    ],
)
def test_an_answer_ends_when_nothing_else_may_follow(
    regex: str, more: dict[str, object], tokens: tuple[int, int], reason: FinishReason
) -> None:
    engine = engine_for(subject(False)).engine
    engine.submit([5, 6, 7], replace(GREEDY, structure=Structure("regex", regex), **more))  # type: ignore[arg-type]
    (output,) = engine.drain()
    (sample,) = output.outputs
    assert sample.finish_reason is reason
    assert tokens[0] <= len(sample.token_ids) <= tokens[1]
    assert reason is not FinishReason.STOP or re.fullmatch(regex, sample.text)


def structures() -> Structures:
    return Structures(tokenizer(), VOCABULARY, frozenset({EOS}))


def answering(structure: Structure, text: str = "", number: int = 0) -> Sequence:
    seq = make_sequence(number, [7, 8], SamplingParams(structure=structure))
    seq.tokens += tokenizer().encode(text, add_special_tokens=False) if text else []
    return seq


def test_the_end_is_allowed_exactly_where_the_structure_is_complete() -> None:
    for text, end, more in [("", False, True), ("a", False, True), ("aa", True, True), ("aaaa", True, False)]:
        allowed = structures().allowed(answering(Structure("regex", "a{2,4}"), text))
        assert bool(allowed[EOS]) is end, text
        assert bool(allowed.sum() - allowed[EOS]) is more, text


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_what_is_allowed_follows_from_the_tokens_alone(structure: Structure) -> None:
    """One that has followed the sequence to and fro, with good and bad drafts, agrees with one that sees it first."""
    rng, used = random.Random(3), structures()
    seq = answering(structure)
    for _ in range(80):
        fresh = structures().allowed(seq)
        assert (used.allowed(seq) == fresh).all()
        choices = fresh.nonzero()[0].tolist()
        draft: tuple[int, ...] = ()
        for _ in range(rng.randrange(4)):
            draft += (rng.choice([rng.choice(choices), rng.randrange(VOCABULARY)]),)
            assert (used.allowed(seq, draft) == structures().allowed(seq, draft)).all()
        if rng.random() < 0.15:
            del seq.tokens[rng.randint(2, len(seq.tokens)) :]
        elif (token := rng.choice(choices)) != EOS:
            seq.tokens.append(token)


def test_an_answer_that_lost_its_structure_is_told_and_can_begin_anew() -> None:
    one, good = structures(), answering(STRUCTURES["regex"], "cat")
    bad = answering(STRUCTURES["regex"], "cow", number=1)
    assert one.allowed(good).any()
    with pytest.raises(OctavoError, match="cannot follow its structure"):
        one.allowed(bad)
    bad.tokens[2:] = good.tokens[2:]
    assert (one.allowed(bad) == one.allowed(good)).all()


NESTED = {"$defs": {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1100)} | {"d1100": {}}}
REFUSED = {
    "no regex": (Structure("regex", "[a-z"), "unclosed character class"),
    "look-ahead": (Structure("regex", "(?=a)b"), "look-around"),
    "no JSON": (Structure("json_schema", '{"type": "obj'), "EOF"),
    "no type": (Structure("json_schema", '{"type": "objekt"}'), "objekt"),
    "unknown keyword": (Structure("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
    "unsatisfiable": (Structure("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}'), "minLength"),
    "points outside": (Structure("json_schema", '{"$ref": "http://localhost/x.json"}'), "localhost"),
    "endless": (Structure("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'), "cannot be"),
    "deep": (Structure("json_schema", '{"not": ' * 4000 + "{}" + "}" * 4000), "recursion"),
    "no rule": (Structure("grammar", "start: other"), "other"),
    "no list": (Structure("choice", '{"a": 1}'), "JSON list"),
    "no choice": (Structure("choice", "[]"), "JSON list"),
    "empty choice": (Structure("choice", '["a", ""]'), "JSON list"),
    "long": (Structure("regex", "a" * 70_000), "limit is 65536"),
    "takes gigabytes": (Structure("regex", "a?" * 15_000), "too much time, memory or nesting"),
    "takes long": (
        Structure("grammar", "start: R0\n" + "".join(f'R{i}: "a" R{i + 1}\n' for i in range(2500)) + 'R2500: "b"'),
        "too much time, memory or nesting",
    ),
    "overflows the stack": (
        Structure("json_schema", json.dumps({**NESTED, "$ref": "#/$defs/d0"}, separators=(",", ":"))),
        "too much time, memory or nesting",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_and_harms_nobody(name: str) -> None:
    structure, why = REFUSED[name]
    engine = engine_for(subject(False)).engine
    engine.submit(subject(False).prompts[3], PARAMS[3], request_id="3")
    engine.step()
    with pytest.raises(RequestError, match=re.escape(why)) as caught:
        engine.submit([5, 6], replace(GREEDY, structure=structure))
    assert caught.value.field == "structure"
    (output,) = engine.drain()
    assert essence(output) == essence(wanted(False)[3])


def test_a_large_schema_of_good_will_is_taken() -> None:
    names = [f"field_{i}" for i in range(200)]
    schema = {"type": "object", "properties": {name: {"type": "string", "maxLength": 40} for name in names}}
    text = json.dumps(schema | {"required": names})
    assert structures().compile(Structure("json_schema", text)) is not None


@pytest.mark.parametrize(
    ("kind", "text", "field"),
    [
        ("xml", "a", "structure.kind"),
        (["regex"], "a", "structure.kind"),
        ("regex", "", "structure.text"),
        ("regex", 3, "structure.text"),
        ("regex", "a\ud800", "structure.text"),
        ("json_object", "{}", "structure.text"),
    ],
)
def test_structures_say_what_is_wrong_with_them(kind: str, text: str, field: str) -> None:
    with pytest.raises(RequestError, match=re.escape(field)) as caught:
        Structure(kind, text)
    assert caught.value.field == field


def test_sampling_params_take_structures_only() -> None:
    with pytest.raises(RequestError, match="structure is"):
        SamplingParams(structure="json_object")  # type: ignore[arg-type]


def test_without_the_library_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = engine_for(subject(False)).engine
    with pytest.raises(RequestError, match=r"pip install 'octavo\[serve\]'") as caught:
        engine.submit([5, 6], PARAMS[0])
    assert caught.value.code == "unsupported"
    engine.submit([5, 6], PARAMS[2])
    assert len(engine.drain()) == 1


def test_a_model_without_tokenizer_takes_no_structure() -> None:
    model = loaded("llama", tiny_module("llama"), None, torch.device("cpu"))
    engine = engine_for(Subject(model, [], [], 1)).engine
    with pytest.raises(RequestError, match="needs a model with a tokenizer"):
        engine.submit([5, 6], PARAMS[0])


@pytest.mark.parametrize("suffix", [".jsonl", ".msgpack"])
def test_the_decision_log_keeps_structures(tmp_path: Path, suffix: str) -> None:
    config = EngineConfig(model="llama", kv_memory=1 << 20, max_model_len=128, seed=0)
    built = build_engine(config, loaded=subject(False).model, log=tmp_path / f"log{suffix}")
    for i in (0, 2):
        built.engine.submit(subject(False).prompts[i], PARAMS[i])
    built.engine.drain()
    assert built.log is not None
    built.log.close()
    outcome = replay(built.log.path)
    assert outcome.difference is None
    assert outcome.events > 10


QUESTION = [{"role": "user", "content": "Describe a person with a name and an age in JSON."}]


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("speculative", [0, 4])
def test_the_demo_model_answers_in_json(speculative: int) -> None:
    llm = LLM("demo", kv_memory="64MiB", seed=0, speculative_tokens=speculative)
    person = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    schema = Structure("json_schema", json.dumps(person))
    params = [SamplingParams(temperature=t, seed=s, max_tokens=80, structure=schema) for s in range(3) for t in (0, 1)]
    params.append(SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=80, structure=schema))
    for output in llm.chat([QUESTION] * len(params), params, use_tqdm=False):
        for sample in output.outputs:
            value = json.loads(sample.text)
            assert sample.finish_reason is FinishReason.STOP
            assert isinstance(value["name"], str)
            assert len(value["name"]) <= 20
            assert isinstance(value["age"], int)
            assert value.keys() == {"name", "age"}
    free = SamplingParams(temperature=0, max_tokens=200, structure=Structure("json_object"))
    text = llm.chat(QUESTION, free, use_tqdm=False)[0].outputs[0].text
    assert text.startswith("{")
