"""POST /v1/chat/completions: conversations through the model's own template, with tools."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.outputs import CompletionOutput, RequestOutput
from octavo.server.encoding import encode_chat
from octavo.server.errors import ApiError
from octavo.server.forms import structure_of
from octavo.server.generation import (
    Piece,
    Reader,
    Running,
    check_model,
    ends,
    note_outcome,
    read_body,
    sampling,
    stream_pieces,
    submit,
    told_stop,
    usage,
    watched,
)
from octavo.server.logprobs import TokenTexts, for_chat
from octavo.server.protocol import ChatBody, parse
from octavo.server.sse import DONE, GONE, Chunks, json_bytes, started
from octavo.server.state import ServerState, state_of
from octavo.server.tools import ToolParser, ToolUse, check_tools
from octavo.types import FinishReason, SamplingParams

# What the server says itself when it writes a conversation, and what would change what it gets back; a client may not.
_RESERVED = frozenset(
    [
        "self",
        "conversation",
        "conversations",
        "messages",
        "tools",
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    ]
)


async def create_chat(request: Request) -> Response:
    """The assistant's next message, `n` times."""
    state = state_of(request)
    body = parse(ChatBody, await read_body(request, state.config.max_body_bytes))
    check_model(state, body.model)
    _check_supported(body)
    tools = check_tools(
        body.tools,
        body.tool_choice,
        state.config.tool_parser,
        _template(state),
        parallel=body.parallel_tool_calls is not False,
    )
    prompt = await _prompt(state, body, tools)
    params = _params(body, tools)
    running = await submit(request, state, body, [prompt], params, "chatcmpl")
    answer = _Answer(state, body, prompt, running, tools)
    if body.stream:
        return await started(_events(request, answer))
    async with watched(request, state, running):
        outputs = await ends(state, running)
    note_outcome(request, outputs)
    if not outputs:
        return Response(status_code=GONE)
    return Response(json_bytes(answer.whole(outputs[0])), media_type="application/json")


async def _prompt(state: ServerState, body: ChatBody, tools: ToolUse | None) -> list[int]:
    options = dict(body.chat_template_kwargs or {})
    if reserved := sorted(_RESERVED.intersection(options)):
        raise ApiError(
            400,
            f"chat_template_kwargs has {reserved[0]}, which the server gives itself; leave it out.",
            param="chat_template_kwargs",
        )
    messages: Seq[Mapping[str, Any]] = body.messages
    if tools is not None:
        options["tools"] = tools.for_template
        messages = tools.messages(messages)
    return await encode_chat(state, messages, options)


def _check_supported(body: ChatBody) -> None:
    if body.continue_final_message or body.add_generation_prompt is False:
        name = "continue_final_message" if body.continue_final_message else "add_generation_prompt"
        raise ApiError(
            400, f"{name} is not supported: the model always begins a new message; leave it out.", param=name
        )
    if not 0 <= (body.top_logprobs or 0) <= 20:
        raise ApiError(400, f"top_logprobs is {body.top_logprobs}; it must be from 0 to 20.", param="top_logprobs")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs is given without logprobs; set logprobs to true.", param="top_logprobs")


def _params(body: ChatBody, tools: ToolUse | None) -> SamplingParams:
    most = body.max_completion_tokens
    if most is None:
        most = body.max_tokens
    elif most < 0:
        raise ApiError(400, f"max_completion_tokens is {most}; it must be 0 or more.", param="max_completion_tokens")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    structure = structure_of(body)
    if tools is not None and tools.structure is not None:
        if structure is not None:
            raise ApiError(
                400, "response_format cannot be combined with a tool_choice that forces a call.", param="tool_choice"
            )
        structure = tools.structure
    return sampling(body, most, logprobs=logprobs, structure=structure)


def _template(state: ServerState) -> str:
    codec = state.built.loaded.tokenizer
    return "" if codec is None or not codec.has_chat_template else codec.chat_template


class _Answer:
    """Writes what came of a request as OpenAI's objects."""

    def __init__(
        self, state: ServerState, body: ChatBody, prompt: Seq[int], running: Running, tools: ToolUse | None
    ) -> None:
        self.state, self.body, self.prompt, self.running, self.tools = state, body, prompt, running, tools
        self._texts = TokenTexts(state.built.loaded.tokenizer)
        self.head = {
            "id": running.id,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.model or state.names[0],
        }

    def parser(self) -> ToolParser | None:
        return None if self.tools is None else self.tools.parser()

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        choices = [self._choice(sample) for sample in output.outputs]
        return {**self.head, "choices": choices, "usage": usage([output])}

    def _choice(self, sample: CompletionOutput) -> dict[str, Any]:
        content: str | None = sample.text
        calls: list[dict[str, Any]] = []
        if (parser := self.parser()) is not None:
            content, calls = parser.all(sample.text)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": sample.index,
            "message": message,
            "logprobs": None if sample.logprobs is None else for_chat(sample.logprobs, self._texts),
            "finish_reason": _finish(sample.finish_reason, called=bool(calls)),
            "stop_reason": told_stop(sample, self.running.streams[0].params),
        }
        if self.body.return_token_ids:
            choice |= {"token_ids": list(sample.token_ids), "prompt_token_ids": list(self.prompt)}
        return choice

    def deltas(self, piece: Piece, parser: ToolParser | None, begins: bool) -> list[dict[str, Any]]:
        """The chunks of a piece: the role before the first one, the text, and the end as one of its own."""
        chunks = [self._chunk(piece.index, {"role": "assistant", "content": ""})] if begins else []
        text = piece.text
        calls: list[dict[str, Any]] = []
        if parser is not None:
            text, calls = parser.feed(piece.text)
            if piece.finish_reason is not None:
                more, last = parser.finish()
                text, calls = text + more, [*calls, *last]
        logprobs = None if not piece.logprobs else for_chat(piece.logprobs, self._texts)
        of_tokens = (logprobs, piece.token_ids)  # they go with the text, or with the end if there is none
        if text or (piece.finish_reason is None and (logprobs or self.body.return_token_ids)):
            chunks.append(self._chunk(piece.index, {"content": text}, *of_tokens))
            of_tokens = (None, ())
        chunks += [self._chunk(piece.index, {"tool_calls": [call]}) for call in calls]
        if piece.finish_reason is not None:
            called = parser is not None and parser.called
            end = self._chunk(piece.index, {}, *of_tokens)
            end |= {"finish_reason": _finish(piece.finish_reason, called=called), "stop_reason": piece.stop_reason}
            chunks.append(end)
        return chunks

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, tokens: Seq[int] = ()
    ) -> dict[str, Any]:
        chunk = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if self.body.return_token_ids and tokens:
            chunk["token_ids"] = list(tokens)
        return chunk


def _finish(reason: FinishReason | None, *, called: bool) -> str | None:
    return "tool_calls" if called and reason is FinishReason.STOP else reason


async def _events(request: Request, answer: _Answer) -> AsyncGenerator[bytes, None]:
    at_end, each = answer.body.usage_wanted
    chunks = Chunks(answer.head, with_usage=at_end)
    reader = Reader(answer.running.streams[0], 0)
    parsers = {i: answer.parser() for i in range(answer.running.streams[0].params.n)}
    begun: set[int] = set()
    async with watched(request, answer.state, answer.running):
        async for pieces in stream_pieces(answer.state, [reader]):
            for piece in pieces:
                begins = piece.index not in begun
                begun.add(piece.index)
                now = usage([reader.last]) if each and reader.last is not None else None
                deltas = answer.deltas(piece, parsers[piece.index], begins)
                if deltas:
                    yield b"".join(chunks.chunk([delta], now) for delta in deltas)
    if reader.last is None or not reader.last.finished:
        return  # the client is gone
    note_outcome(request, [reader.last])
    yield chunks.chunk([], usage([reader.last])) + DONE if at_end else DONE
