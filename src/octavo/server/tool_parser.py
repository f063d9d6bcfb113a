"""Finds tool calls in what a model writes, as it writes it.

Nothing is given as content that turns out to be part of a call: text that may begin one is held back until that is
certain. A call is given whole, once its JSON is known to be right; what looked like a call and is none is content. The
outcome depends on the text alone and not on how it was cut into pieces.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn

_MOST_WRONG = 32  # things that look like calls and are none, after which the rest is content
_SPACE = re.compile(r"\s*")
_SEPARATORS = re.compile(r"[\s;]*")  # Llama puts a semicolon between calls
_OUTSIDE = re.compile(r'["{}]')  # what matters outside of a JSON string
_INSIDE = re.compile(r'["\\]')  # and inside of one


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model writes a call: tags around the JSON ("" for none), the name of the arguments, and whether JSON with
    the name of a tool is a call without any tag where nothing else stands before it."""

    opening: str
    closing: str
    arguments: str
    bare: bool

    def write(self, name: str, arguments: str) -> str:
        call = f'{{"name": {json.dumps(name)}, "{self.arguments}": {arguments}}}'
        return call if self.bare else f"{self.opening}\n{call}\n{self.closing}"


FORMS = {
    "hermes": CallForm("<tool_call>", "</tool_call>", "arguments", bare=False),
    "llama3": CallForm("<|python_tag|>", "", "parameters", bare=True),
}


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(slots=True)
class _Braces:
    """Looks for the end of a JSON object as its text grows."""

    at: int
    depth: int = 0
    quoted: bool = False
    closed: bool = False

    def end(self, text: str) -> int | None:
        """The place behind the closing brace; None if that has not come."""
        while not self.closed and (found := (_INSIDE if self.quoted else _OUTSIDE).search(text, self.at)):
            mark, self.at = found.group(), found.end()
            if mark == "\\":
                if self.at == len(text):  # what it escapes has not come
                    self.at -= 1
                    return None
                self.at += 1
            elif mark == '"':
                self.quoted = not self.quoted
            else:
                self.depth += 1 if mark == "{" else -1
                self.closed = self.depth == 0
        if self.closed:
            return self.at
        self.at = len(text)
        return None


class ToolParser:
    """Content and calls of one answer. Deltas are OpenAI's: index, id, type and function, with all its arguments."""

    def __init__(self, form: CallForm, names: Collection[str], *, new_id: Callable[[], str] = new_call_id) -> None:
        """`names`: of the tools on offer; JSON without a tag is a call only if it names one of them."""
        self._form, self._names, self._new_id = form, names, new_id
        self._text = ""  # undecided
        self._braces: _Braces | None = None  # of the call that `_text` may begin with
        self._space = ""  # content, unless a call comes next
        self._between = False  # nothing but white space has come since the last call
        self._first = form.bare  # a call needs no tag here
        self._wrong = 0
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._count = 0

    @property
    def called(self) -> bool:
        """Whether there has been a call."""
        return self._count > 0

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """What is certain now: more content, and calls."""
        self._text += text
        return self._advance(final=False)

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Nothing more comes: what is left."""
        content, calls = self._advance(final=True)
        if not self._between:
            content += self._space
        self._space = ""
        return content, calls

    def all(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Content and calls, without index, of a whole answer."""
        pieces = [self.feed(text), self.finish()]
        calls = [call for _, some in pieces for call in some]
        return "".join(content for content, _ in pieces), [{k: v for k, v in c.items() if k != "index"} for c in calls]

    def _advance(self, final: bool) -> tuple[str, list[dict[str, Any]]]:
        while self._text and self._step(final):
            pass
        content, calls = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return content, calls

    def _step(self, final: bool) -> bool:
        """Decide about the beginning of the text; False if that has to wait for more."""
        opening = self._form.opening
        if self._wrong >= _MOST_WRONG:
            self._release(len(self._text))
            return True
        if self._first:
            start = self._skip(0, _SEPARATORS if self.called else _SPACE)
            if start == len(self._text) and not final:
                return False
            if self._text.startswith("{", start):
                return self._judge(start, start, final)
        start = self._text.find(opening)
        if start < 0:
            held = 0 if final else _overlap(self._text, opening)
            self._release(len(self._text) - held)
            return False
        if start:
            self._release(start)
        return self._judge(0, len(opening), final)

    def _judge(self, start: int, begin: int, final: bool) -> bool:
        """Whether the text is a call: its tag at `start`, or its object where there is none; `begin`: behind the tag.
        False if that cannot be known yet."""
        place = self._skip(begin)
        if place == len(self._text) and not final:
            return False
        end = None
        if self._text.startswith("{", place):
            self._braces = self._braces or _Braces(place)
            end = self._braces.end(self._text)
            if end is None and not final:
                return False
        call = None if end is None else read_call(self._text[place:end])
        if call is not None and end is not None and (begin > start or call[0] in self._names):
            behind = self._behind(end, final)
            if behind is None:
                return False
            if behind:
                self._emit(*call, behind)
                return True
        self._wrong += 1
        self._release(max(begin, start + 1))
        return True

    def _behind(self, end: int, final: bool) -> int | None:
        """Where the text goes on behind a call whose object ends at `end`: behind its closing tag, before the next
        call, or where it breaks off. 0: something else comes, so that it is no call; None: not known yet."""
        form = self._form
        if not form.closing:
            return end
        place = self._skip(end)
        rest = self._text[place:]
        if rest.startswith(form.closing):
            return place + len(form.closing)
        if rest.startswith(form.opening):
            return place
        if form.closing.startswith(rest) or form.opening.startswith(rest):
            return len(self._text) if final else None
        return 0

    def _emit(self, name: str, arguments: str, end: int) -> None:
        function = {"name": name, "arguments": arguments}
        self._calls.append({"index": self._count, "id": self._new_id(), "type": "function", "function": function})
        self._count += 1
        self._take(end)
        self._space, self._between, self._first = "", True, self._form.bare

    def _release(self, end: int) -> None:
        """The text up to `end` is content; white space next to a call is none."""
        text = self._take(end)
        if self._between:
            text = text.lstrip()
        if not text:
            return
        body = text.rstrip()
        if body:
            self._content.append(self._space + body)
            self._space, self._between, self._first = "", False, False
        self._space += text[len(body) :]

    def _take(self, end: int) -> str:
        text, self._text = self._text[:end], self._text[end:]
        self._braces = None
        return text

    def _skip(self, start: int, what: re.Pattern[str] = _SPACE) -> int:
        found = what.match(self._text, start)
        return start if found is None else found.end()


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that `tag` begins with."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)


def read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments, exactly as written, of a call as JSON; None if it is none."""
    try:
        members = _members(text)
        name = json.loads(members.get("name", "null"))
        arguments = members.get("arguments", members.get("parameters", "{}"))
        if arguments.startswith('"'):  # JSON inside a JSON string
            arguments = json.loads(arguments)
            _members(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(name, str) or not name or not name.isprintable():
        return None
    arguments = "{}" if arguments == "null" else arguments
    return (name, arguments) if arguments.lstrip().startswith("{") else None


def _members(text: str) -> dict[str, str]:
    """The values of a JSON object as they are written. Raises ValueError if it is none."""
    if not isinstance(json.loads(text, parse_constant=_no_number), dict):
        raise ValueError("no object")
    decoder, members = json.JSONDecoder(), {}
    at = _next(text, text.index("{") + 1)
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        start = _next(text, text.index(":", at) + 1)
        _, end = decoder.raw_decode(text, start)
        members[key] = text[start:end]
        at = _next(text, end)
        if text[at] == ",":
            at = _next(text, at + 1)
    return members


def _next(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")
