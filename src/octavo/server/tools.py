"""OpenAI's tools: what a request may ask for, what the model is told of it, and what it must then answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any

from octavo.models.tokenizer import check_messages
from octavo.runner.structure import JSON_OPTIONS
from octavo.server.tool_parser import FORMS, CallForm, ToolParser
from octavo.types import RequestError, Structure

__all__ = ["ToolParser", "ToolUse", "check_tools", "form_for"]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MOST = 128
_MOST_CALLS = 16  # of a model that must call: it could go on for ever
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request asks of its tools.

    for_template  the tools as templates take them
    forced        tools of which one must be called; () if the model decides
    form          how the model writes calls; None: its answers are left as they are
    told          whether the template tells the model of its tools
    """

    for_template: list[dict[str, Any]]
    forced: tuple[str, ...]
    form: CallForm | None
    parallel: bool = True
    told: bool = True

    def parser(self) -> ToolParser | None:
        """One for each answer."""
        names = frozenset(tool["function"]["name"] for tool in self.for_template)
        return None if self.form is None else ToolParser(self.form, names)

    @property
    def structure(self) -> Structure | None:
        """What the answer must look like; None if the model decides."""
        form = self.form
        if not self.forced or form is None:
            return None
        rules = []
        for tool in self.for_template:
            function = tool["function"]
            if function["name"] in self.forced:
                begin, end = form.write(function["name"], "\0").split("\0")
                schema = {
                    "x-guidance": JSON_OPTIONS,
                    "type": "object",
                    **(function.get("parameters") or _NO_PARAMETERS),
                }
                rules.append((json.dumps(begin), json.dumps(schema), json.dumps(end)))
        several = self.parallel and not form.bare
        start = f'start: call ("\\n" call){{0,{_MOST_CALLS - 1}}}' if several else "start: call"
        lines = [start, "call: " + " | ".join(f"call_{i}" for i in range(len(rules)))]
        for i, (begin, schema_text, end) in enumerate(rules):
            lines += [f"call_{i}: {begin} arguments_{i} {end}", f"arguments_{i}: %json {schema_text}"]
        return Structure("grammar", "\n".join(lines))

    def messages(self, messages: Seq[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The conversation as the template should write it: as it is, unless the template knows nothing of tools. Then
        the model is told of them, of its calls and of their results in plain words. Raises RequestError naming the
        message that is wrong."""
        form = self.form
        if self.told or form is None:
            return list(messages)
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in self.for_template]
        how = form.write("NAME", "{ARGUMENTS}").replace('"NAME"', "NAME").replace("{ARGUMENTS}", "ARGUMENTS")
        text = "\n".join(
            ["You can call these functions:", *lines, "To call one, write NAME and ARGUMENTS like this:", how]
        )
        out = [_in_words(message, form) for message in check_messages(messages)]
        if out[0]["role"] == "system":
            return [{**out[0], "content": f"{out[0]['content']}\n\n{text}"}, *out[1:]]
        return [{"role": "system", "content": text}, *out]


def _in_words(message: Mapping[str, Any], form: CallForm) -> Mapping[str, Any]:
    """A message of or for a tool as one of the assistant or the user."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    functions = [call["function"] for call in message.get("tool_calls", ())]
    if message["role"] != "assistant" or not functions:
        return message
    calls = [form.write(f["name"], json.dumps(f["arguments"], ensure_ascii=False)) for f in functions]
    return {"role": "assistant", "content": "\n".join([message["content"], *calls] if message["content"] else calls)}


def form_for(parser: str, template: str) -> CallForm | None:
    """How the model writes calls. `parser`: a name of FORMS, "none", or "auto", which looks at the model's template."""
    if parser == "none":
        return None
    if parser != "auto":
        return FORMS[parser]
    llama = "<tool_call>" not in template and ("<|python_tag|>" in template or "ipython" in template)
    return FORMS["llama3" if llama else "hermes"]


def check_tools(
    tools: object, tool_choice: object, parser: str = "auto", template: str | None = None, *, parallel: bool = True
) -> ToolUse | None:
    """What a request's `tools`, `tool_choice` and `parallel_tool_calls` come to; None if it has no use of tools.

    `template`: the text of the model's chat template, if known. Raises RequestError naming the field.
    """
    if not tools:
        if tool_choice not in (None, "none", "auto"):
            raise _wrong("tool_choice", tool_choice, "left out, none or auto where there are no tools")
        if tools is not None and not isinstance(tools, list):
            raise _wrong("tools", tools, "a list of tools")
        return None
    checked = _check_list(tools)
    names = [tool["function"]["name"] for tool in checked]
    forced = _forced(tool_choice, names)
    if tool_choice == "none":
        return None
    form = form_for(parser, template or "")
    if forced and form is None:
        raise _wrong("tool_choice", tool_choice, "auto or none: the server does not read tool calls (--tool-parser)")
    return ToolUse(checked, forced, form, parallel, told=template is None or "tools" in template)


def _check_list(tools: object) -> list[dict[str, Any]]:
    if not isinstance(tools, list) or len(tools) > _MOST:
        raise _wrong("tools", tools, f"a list of at most {_MOST} tools")
    checked, seen = [], set()
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise _wrong(where, tool, 'like {"type": "function", "function": {"name": …}}')
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise _wrong(f"{where}.function", function, "an object with name, description and parameters")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _wrong(f"{where}.function.name", name, "1 to 64 letters, digits, underscores or hyphens")
        if name in seen:
            raise _wrong(f"{where}.function.name", name, "a name of its own: an earlier tool has it")
        if not isinstance(function.get("description"), (str, type(None))):
            raise _wrong(f"{where}.function.description", function["description"], "a text")
        if not isinstance(function.get("parameters"), (Mapping, type(None))):
            raise _wrong(f"{where}.function.parameters", function["parameters"], "a JSON schema (an object)")
        seen.add(name)
        checked.append({"type": "function", "function": _for_template(function)})
    return checked


def _for_template(function: Mapping[str, Any]) -> dict[str, Any]:
    """What templates write of a function: some fail where a field is absent."""
    parameters = function.get("parameters") or _NO_PARAMETERS
    return {"name": function["name"], "description": function.get("description") or "", "parameters": dict(parameters)}


def _forced(choice: object, names: list[str]) -> tuple[str, ...]:
    """The tools of which one must be called."""
    if choice in (None, "none", "auto"):
        return ()
    if choice == "required":
        return tuple(names)
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        wanted = 'none, auto, required or {"type": "function", "function": {"name": …}}'
        raise _wrong("tool_choice", choice, wanted)
    if name not in names:
        raise _wrong("tool_choice.function.name", name, f"one of the tools: {', '.join(names)[:200]}")
    return (name,)


def _wrong(field: str, value: object, wanted: str) -> RequestError:
    return RequestError(f"{field} is {shown(value)}; it must be {wanted}.", field=field)
