"""Tools: what is refused, what the model is told, what it must answer, and how its calls are read."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import OctavoError
from octavo.models.tokenizer import check_messages
from octavo.server.tool_parser import FORMS, ToolParser
from octavo.server.tools import ToolUse, check_tools, form_for
from octavo.types import RequestError

HERMES, LLAMA = FORMS["hermes"], FORMS["llama3"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"$ref": "#/$defs/unit"}},
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["C", "F"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "now"}}
KNOWS = "{% for tool in tools %}<tool_call>{% endfor %}"


def parser(form: str = "hermes") -> ToolParser:
    numbers = itertools.count()
    return ToolParser(FORMS[form], {"get_weather", "now"}, new_id=lambda: f"id{next(numbers)}")


def read(text: str, form: str = "hermes") -> tuple[str, list[tuple[str, str]]]:
    content, calls = parser(form).all(text)
    return content, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


# -- what a request asks for ------------------------------------------------------------------------------------------


def test_no_tools_no_use() -> None:
    assert check_tools(None, None) is None
    assert check_tools([], "auto") is None
    assert check_tools([WEATHER], "none") is None


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ("x", None, "tools"),
        ({"type": "function"}, None, "tools"),
        ([WEATHER] * 129, None, "tools"),
        (["x"], None, "tools[0]"),
        ([WEATHER, {"type": "retrieval"}], None, "tools[1]"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([{"type": "function", "function": {}}], None, "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "x" * 65}}], None, "tools[0].function.name"),
        ([CLOCK, CLOCK], None, "tools[1].function.name"),
        ([{"type": "function", "function": {"name": "a", "description": 3}}], None, "tools[0].function.description"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], None, "tools[0].function.parameters"),
        ([CLOCK], "always", "tool_choice"),
        ([CLOCK], {"type": "tool"}, "tool_choice"),
        ([CLOCK], {"type": "function", "function": {}}, "tool_choice"),
        ([CLOCK], 7, "tool_choice"),
        ([CLOCK], {"type": "function", "function": {"name": "other"}}, "tool_choice.function.name"),
        ([CLOCK], {"type": "function", "function": {"name": ["now"]}}, "tool_choice.function.name"),
        (None, "required", "tool_choice"),
        ([], {"type": "function", "function": {"name": "now"}}, "tool_choice"),
    ],
)
def test_what_is_wrong_is_named(tools: Any, choice: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_tools(tools, choice)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} is ")


def test_a_call_cannot_be_forced_where_nobody_reads_it() -> None:
    with pytest.raises(RequestError, match="tool-parser"):
        check_tools([CLOCK], "required", "none")
    use = check_tools([CLOCK], "auto", "none")
    assert use is not None
    assert use.parser() is None
    assert use.structure is None


def test_templates_get_every_field_of_a_tool() -> None:
    use = check_tools([WEATHER, CLOCK], None)
    assert use is not None
    assert use.for_template[0] == WEATHER
    assert use.for_template[1]["function"]["description"] == ""
    assert use.for_template[1]["function"]["parameters"]["type"] == "object"


@pytest.mark.parametrize(
    ("name", "template", "form"),
    [
        ("auto", "… <tool_call> …", HERMES),
        ("auto", '<|start_header_id|>ipython … "parameters": …', LLAMA),
        ("auto", "<|python_tag|>", LLAMA),
        ("auto", "", HERMES),
        ("llama3", "<tool_call>", LLAMA),
        ("hermes", "<|python_tag|>", HERMES),
        ("none", "<tool_call>", None),
    ],
)
def test_the_form_follows_from_the_template(name: str, template: str, form: object) -> None:
    assert form_for(name, template) is form


# -- what the model is told -------------------------------------------------------------------------------------------

TALK = [
    {"role": "user", "content": "What time is it?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
]


def use_of(tools: list[dict[str, Any]], choice: object = None, **more: Any) -> ToolUse:
    use = check_tools(tools, choice, **more)
    assert use is not None
    return use


def test_templates_with_tools_get_the_conversation_as_it_is() -> None:
    assert use_of([CLOCK], template=KNOWS).messages(TALK) == TALK
    checked = check_messages(TALK)
    assert checked[1]["content"] == ""
    assert checked[1]["tool_calls"][0]["function"]["arguments"] == {"zone": "UTC"}, "templates write it as JSON"
    assert checked[2] == TALK[2]


def test_a_model_whose_template_has_no_tools_is_told_in_words() -> None:
    system, user, assistant, tool = use_of([CLOCK], template="{{ messages }}").messages(TALK)
    assert system["role"] == "system"
    assert '"name": "now"' in system["content"]
    assert '<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>' in system["content"]
    assert user == TALK[0]
    assert read(assistant["content"]) == ("", [("now", '{"zone": "UTC"}')])
    assert tool["role"] == "user"
    assert "12:00" in tool["content"]
    own = [{"role": "system", "content": "Be brief."}, *TALK]
    merged = use_of([CLOCK], template="{{ messages }}").messages(own)
    assert merged[0]["content"].startswith("Be brief.\n\nYou can call")
    assert len(merged) == 4
    assert check_messages(merged)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "user", "content": None, "tool_calls": TALK[1]["tool_calls"]}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": []}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": "now()"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"name": "now"}]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": "[1]"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"role": "tool", "content": None}, "messages[0].content"),
    ],
)
def test_messages_say_what_is_wrong_with_their_calls(message: dict[str, Any], field: str) -> None:
    for check in (check_messages, use_of([CLOCK], template="").messages):
        with pytest.raises(RequestError) as caught:
            check([message])
        assert str(caught.value).startswith(f"{field} is ")


# -- what it answers --------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
NOW = ("now", '{"zone": "UTC"}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello.\n", "Hello.\n", []),
        (CALL, "", [NOW]),
        (f"\n{CALL}\n", "", [NOW]),
        (f"Let me see.\n\n{CALL}\n{CALL} ", "Let me see.", [NOW, NOW]),
        (f"{CALL}\nDone. ", "Done. ", [NOW]),
        (f"One {CALL} two", "Onetwo", [NOW]),
        ('<tool_call>{"name":"now"}</tool_call>', "", [("now", "{}")]),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
        ('<tool_call>{"arguments": {"a" : 1.50} , "name": "now"}</tool_call>', "", [("now", '{"a" : 1.50}')]),
        (r'<tool_call>{"name": "now", "arguments": "{\"a\": 1}"}</tool_call>', "", [("now", '{"a": 1}')]),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', "", [("other", "{}")]),
        ('<tool_call>{"name": "n", "arguments": {"a": "</tool_call>}"}}', "", [("n", '{"a": "</tool_call>}"}')]),
        (r'<tool_call>{"name": "now", "arguments": {"a": "\"{\\"}}</tool_call>', "", [("now", r'{"a": "\"{\\"}')]),
        ('<tool_call>{"name": "now", "arguments": {}}', "", [("now", "{}")]),
        ('<tool_call>{"name": "now", "arguments": {}}\n</tool', "", [("now", "{}")]),
        (f'<tool_call>{{"name": "now"}}\n{CALL}', "", [("now", "{}"), NOW]),
        ('<tool_call>{"name": "now", "argum', '<tool_call>{"name": "now", "argum', []),
        ("<tool_call>now()</tool_call>", "<tool_call>now()</tool_call>", []),
        ('<tool_call>{"name": now}</tool_call>', '<tool_call>{"name": now}</tool_call>', []),
        ('<tool_call>{"name": "now"}}</tool_call>', '<tool_call>{"name": "now"}}</tool_call>', []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>{"name": "a", "arguments": [1]}', '<tool_call>{"name": "a", "arguments": [1]}', []),
        ('<tool_call>{"name": "a", "arguments": {"x": NaN}}', '<tool_call>{"name": "a", "arguments": {"x": NaN}}', []),
        (f'<tool_call>{{"name: 1}}</tool_call>{CALL}', '<tool_call>{"name: 1}</tool_call>', [NOW]),
        ("a < b and <tool", "a < b and <tool", []),
        ('{"name": "now", "arguments": {}}', '{"name": "now", "arguments": {}}', []),
    ],
)  # fmt: skip
def test_hermes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(text) == (content, calls)


BARE = '{"name": "now", "parameters": {"zone": "UTC"}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello.", "Hello.", []),
        (BARE, "", [NOW]),
        (f"\n{BARE} ", "", [NOW]),
        (f"<|python_tag|>{BARE}", "", [NOW]),
        (f"<|python_tag|> {BARE}; {BARE};{BARE}", "", [NOW] * 3),
        (f"I look. <|python_tag|>{BARE}", "I look.", [NOW]),
        (f"I would call {BARE}", f"I would call {BARE}", []),
        ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ('{"age": 3}', '{"age": 3}', []),
        ('{"name": "now", "param', '{"name": "now", "param', []),
        ('<|python_tag|>now.call(x="1")', '<|python_tag|>now.call(x="1")', []),
        (f"{BARE}\nThat is it.", "That is it.", [NOW]),
        ('{"name": "now", "arguments": {"a": 1}}', "", [("now", '{"a": 1}')]),
    ],
)
def test_llama3(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(text, "llama3") == (content, calls)


TAGS = ["<tool_call>", "</tool_call>", "<tool_", "<|python_tag|>", "<|py"]
SCRAPS = ["{", "}", '"', "\\", "\n", " ", ";", "word", "é漢", '{"name": "now"}', '<tool_call>{"name": "n"}</tool']
PIECES = st.sampled_from([CALL, BARE, *TAGS, *SCRAPS, '{"name": "now", "arguments": {"a": "}"}}'])


@given(
    st.lists(PIECES, max_size=14), st.lists(st.integers(1, 9), min_size=1, max_size=30), st.sampled_from(sorted(FORMS))
)
@settings(max_examples=400, deadline=None)
def test_the_cut_of_the_pieces_does_not_matter(pieces: list[str], cuts: list[int], form: str) -> None:
    text = "".join(pieces)
    streaming, content, calls, at = parser(form), "", [], 0
    for size in itertools.cycle(cuts):
        more, some = streaming.feed(text[at : at + size])
        content, calls, at = content + more, calls + some, at + size
        assert [call["index"] for call in calls] == list(range(len(calls)))
        if at >= len(text):
            break
    more, some = streaming.finish()
    content, calls = content + more, calls + some
    whole = parser(form).all(text)
    assert content == whole[0]
    assert [{key: value for key, value in call.items() if key != "index"} for call in calls] == whole[1]
    assert streaming.called is bool(calls)


TEXTS = st.text(max_size=6) | st.sampled_from(['"', "}", "{", "</tool_call>", "<tool_call>", "\\"])
JSON = st.none() | st.integers() | TEXTS | st.lists(TEXTS, max_size=2) | st.dictionaries(TEXTS, TEXTS, max_size=2)
WORDS = st.sampled_from(["", "Hm. ", "é", "I see: "])


@given(
    st.lists(st.tuples(WORDS, st.dictionaries(TEXTS, JSON, max_size=3)), max_size=3), st.integers(1, 7), st.booleans()
)
@settings(max_examples=150, deadline=None)
def test_all_arguments_come_out_as_written(
    parts: list[tuple[str, dict[str, Any]]], size: int, ascii_only: bool
) -> None:
    written = [(words, json.dumps(value, ensure_ascii=ascii_only)) for words, value in parts]
    text = "".join(words + HERMES.write("now", arguments) for words, arguments in written)
    streaming, content, calls = parser(), "", []
    for at in range(0, len(text), size):
        more, some = streaming.feed(text[at : at + size])
        content, calls = content + more, calls + some
    more, some = streaming.finish()
    content, calls = content + more, calls + some
    assert [call["function"]["arguments"] for call in calls] == [arguments for _, arguments in written]
    assert content == "".join(words.strip() for words, _ in written)
    assert [call["id"] for call in calls] == [f"id{i}" for i in range(len(calls))]


def test_a_text_full_of_broken_calls_is_read_in_reasonable_time() -> None:
    text = '<tool_call>{"' * 3_000
    streaming = parser()
    content = "".join(streaming.feed(text[at : at + 5])[0] for at in range(0, len(text), 5))
    assert content + streaming.finish()[0] == text


def test_plain_text_is_given_at_once() -> None:
    streaming = parser()
    assert streaming.feed("Good")[0] == "Good"
    assert streaming.feed(" day <")[0] == " day"
    assert streaming.feed("b>")[0] == " <b>"


# -- what it must answer ----------------------------------------------------------------------------------------------


def follows(use: ToolUse, text: str) -> bool:
    """Whether the structure that the use comes to takes exactly this text."""
    llguidance = pytest.importorskip("llguidance")

    class Bytes:
        tokens = (*(bytes([value]) for value in range(256)), b"\xff<end>")
        eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)

        def __call__(self, text: bytes | str) -> list[int]:
            return list(text.encode() if isinstance(text, str) else text)

    assert use.structure is not None
    words = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
    matcher = llguidance.LLMatcher(words, llguidance.LLMatcher.grammar_from_lark(use.structure.text), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


PARIS = '{"city": "Paris", "unit": "C"}'


@pytest.mark.parametrize("form", FORMS)
def test_a_forced_call_is_in_the_models_own_form_and_fits_its_schema(form: str) -> None:
    write = FORMS[form].write
    named = use_of([WEATHER, CLOCK], {"type": "function", "function": {"name": "get_weather"}}, parser=form)
    assert follows(named, write("get_weather", PARIS))
    assert not follows(named, write("get_weather", '{"city": "Paris", "unit": "K"}'))
    assert not follows(named, write("now", "{}"))
    assert not follows(named, "It is sunny.")
    required = use_of([WEATHER, CLOCK], "required", parser=form)
    assert follows(required, write("get_weather", PARIS))
    assert follows(required, write("now", "{}"))
    assert not follows(required, write("now", '{"a": 1}'))
    assert not follows(required, "")


def test_several_calls_are_forced_only_if_they_may_be() -> None:
    two = "\n".join([HERMES.write("now", "{}"), HERMES.write("get_weather", PARIS)])
    assert follows(use_of([WEATHER, CLOCK], "required"), two)
    assert not follows(use_of([WEATHER, CLOCK], "required", parallel=False), two)
    assert read(two)[1] == [("now", "{}"), ("get_weather", PARIS)]


def test_a_schema_that_cannot_be_followed_is_refused_when_it_is_compiled() -> None:
    from octavo.runner.structure import Structures

    pytest.importorskip("llguidance")
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}
    use = use_of([broken], "required")
    assert use.structure is not None
    with pytest.raises(OctavoError):
        Structures(None, 10, frozenset({2})).compile(use.structure)


def test_the_choice_of_the_model_is_not_forced() -> None:
    assert use_of([WEATHER], "auto").structure is None
    assert use_of([WEATHER], None).structure is None


@pytest.mark.slow
@pytest.mark.real_model
def test_the_demo_model_calls_what_it_must() -> None:
    from octavo.llm import LLM
    from octavo.types import SamplingParams

    llm = LLM("demo", kv_memory="32MiB", seed=0)
    tokenizer = llm.built.loaded.tokenizer
    assert tokenizer is not None
    use = use_of([WEATHER, CLOCK], "required", template=tokenizer.chat_template, parallel=False)
    question = [{"role": "user", "content": "What is the weather in Paris, in Celsius?"}]
    prompt = tokenizer.encode_chat(use.messages(question), tools=use.for_template)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=100, structure=use.structure)
        (sample,) = llm.generate([prompt], params, use_tqdm=False)[0].outputs
        answers = use.parser()
        assert answers is not None
        content, (call,) = answers.all(sample.text)
        assert content == ""
        assert call["function"]["name"] in ("get_weather", "now")
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
