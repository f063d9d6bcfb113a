"""POST /v1/completions: prompts as text or token ids, one or many."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.outputs import CompletionOutput, RequestOutput
from octavo.server.encoding import encode
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
from octavo.server.logprobs import TokenTexts, for_completion
from octavo.server.protocol import CompletionBody, parse
from octavo.server.sse import DONE, GONE, Chunks, json_bytes, started
from octavo.server.state import ServerState, state_of
from octavo.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text`: what an echo begins with."""

    ids: Seq[int]
    text: str


async def create_completion(request: Request) -> Response:
    """Complete each prompt `n` times. Choices count through: prompt 0's come first."""
    state = state_of(request)
    body = parse(CompletionBody, await read_body(request, state.config.max_body_bytes))
    check_model(state, body.model)
    _check_supported(body)
    prompts = await _prompts(state, body)
    params = _params(body)
    running = await submit(request, state, body, [prompt.ids for prompt in prompts], params, "cmpl")
    answer = _Answer(state, body, prompts, running)
    if body.stream:
        return await started(_events(request, answer))
    async with watched(request, state, running):
        outputs = await ends(state, running)
    note_outcome(request, outputs)
    if not outputs:
        return Response(status_code=GONE)
    return Response(json_bytes(answer.whole(outputs)), media_type="application/json")


def _check_supported(body: CompletionBody) -> None:
    if body.suffix:
        raise ApiError(400, "suffix is not supported; leave it out.", code="unsupported", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, f"best_of is {body.best_of}; only n itself is supported: leave it out.", param="best_of")


def _params(body: CompletionBody) -> SamplingParams:
    echo = body.logprobs if body.echo else None
    most = 16 if body.max_tokens is None else body.max_tokens
    return sampling(body, most, logprobs=body.logprobs, prompt_logprobs=echo, structure=structure_of(body))


async def _prompts(state: ServerState, body: CompletionBody) -> list[Prompt]:
    prompt = body.prompt
    one: Any = [prompt] if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int) else prompt
    characters = sum(len(item) for item in one if isinstance(item, str))
    return [await _prompt(state, body, item, characters) for item in one]


async def _prompt(state: ServerState, body: CompletionBody, prompt: str | list[int], characters: int) -> Prompt:
    codec = state.built.loaded.tokenizer
    if not isinstance(prompt, str):
        text = codec.decode(prompt, skip_special_tokens=False) if body.echo and codec and _known(state, prompt) else ""
        return Prompt(prompt, text)
    special = body.add_special_tokens is not False
    return Prompt(await encode(state, prompt, special=special, beside=characters - len(prompt)), prompt)


def _known(state: ServerState, ids: Seq[int]) -> bool:
    """Whether all ids are of the vocabulary: if not, the engine refuses them with a sentence."""
    return all(0 <= token < state.built.loaded.vocab_size for token in ids)


class _Answer:
    """Writes what came of a request as OpenAI's objects."""

    def __init__(self, state: ServerState, body: CompletionBody, prompts: Seq[Prompt], running: Running) -> None:
        self.state, self.body, self.prompts, self.running = state, body, prompts, running
        self.n = body.n or 1
        self._texts = TokenTexts(state.built.loaded.tokenizer)
        self._sent: dict[int, int] = {}  # characters of each choice so far
        self.head = {
            "id": running.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or state.names[0],
        }

    def whole(self, outputs: Seq[RequestOutput]) -> dict[str, Any]:
        choices = []
        for i, output in enumerate(outputs):
            for sample in output.outputs:
                choices.append(self._choice(i, output, sample))
        return {**self.head, "choices": choices, "usage": usage(outputs)}

    def _choice(self, i: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        piece = Piece(
            i * self.n + sample.index,
            sample.text,
            sample.token_ids,
            sample.logprobs,
            sample.finish_reason,
            told_stop(sample, self.running.streams[i].params),
        )
        return self.choice(piece, output)

    def choice(self, piece: Piece, output: RequestOutput | None) -> dict[str, Any]:
        """One choice, or what is new of it. An echo goes with the first piece; its logprobs come from `output`."""
        prompt = self.prompts[piece.index // self.n]
        begins = piece.index not in self._sent
        offset = self._sent.get(piece.index, 0)
        text, tokens, logprobs = piece.text, list(piece.token_ids), piece.logprobs
        entries: list[Any] = list(logprobs or ())
        if self.body.echo and begins:
            text = prompt.text + text
            if output is not None and output.prompt_logprobs is not None:
                tokens, entries = [*prompt.ids, *tokens], [*output.prompt_logprobs, *entries]
        self._sent[piece.index] = offset + len(text)
        choice = {
            "index": piece.index,
            "text": text,
            "logprobs": None if logprobs is None else for_completion(tokens, entries, self._texts, offset),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
            choice["prompt_token_ids"] = list(prompt.ids) if begins else None
        return choice


async def _events(request: Request, answer: _Answer) -> AsyncGenerator[bytes, None]:
    at_end, each = answer.body.usage_wanted
    chunks = Chunks(answer.head, with_usage=at_end)
    running, n = answer.running, answer.n
    readers = [Reader(stream, i * n) for i, stream in enumerate(running.streams)]
    async with watched(request, answer.state, running):
        async for pieces in stream_pieces(answer.state, readers):
            for piece in pieces:
                choice = answer.choice(piece, readers[piece.index // n].last)
                yield chunks.chunk([choice], usage([r.last for r in readers if r.last]) if each else None)
    last = [reader.last for reader in readers if reader.last is not None]
    note_outcome(request, last)
    if not all(output.finished for output in last) or len(last) < len(readers):
        return  # the client is gone
    yield chunks.chunk([], usage(last)) + DONE if at_end else DONE
