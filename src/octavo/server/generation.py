"""From a checked body to running requests and back: sampling parameters, submitting, and what a step brought as pieces
for the client. Shared by completions and chats."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from octavo.aio import EngineDead, Stream, Submission
from octavo.errors import OctavoError
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.runner.api import TokenLogprobs
from octavo.server.access import facts_of
from octavo.server.errors import ApiError, from_code, from_engine
from octavo.server.protocol import MOST_PROMPTS, Common
from octavo.server.state import ServerState
from octavo.server.tenants import Tenant, identity_for
from octavo.types import FinishReason, SamplingParams, Structure

log = logging.getLogger("octavo.server")
_REASONS = {
    "queue_full": "max_num_queued_reqs",
    "queue_tokens_full": "max_num_queued_tokens",
    "queue_timeout": "queue_timeout",
    "draining": "draining",
}
_SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
)


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one choice. `token_ids` and `logprobs` are those of `text`; they come with it, never before."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class Running:
    """Requests of one HTTP request, in the order of its prompts. `id` is what the client is told."""

    id: str
    streams: tuple[Stream, ...]

    def abort(self) -> None:
        for stream in self.streams:
            stream.abort()


def sampling(
    body: Common,
    max_tokens: int | None,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    structure: Structure | None = None,
) -> SamplingParams:
    """The engine's parameters. Raises RequestError for values out of their limits."""
    given: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if body.logit_bias:
        given["logit_bias"] = {_token(key): bias for key, bias in body.logit_bias.items()}
    return SamplingParams(
        max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, structure=structure, **given
    )


def _token(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 20):
        raise ApiError(400, f"logit_bias has the key {key[:40]!r}; keys are token ids.", param="logit_bias")
    return int(key)


def check_model(state: ServerState, name: str | None) -> None:
    """Raises ApiError for a model that is not served. None means the one there is."""
    if name is not None and name not in state.names:
        raise ApiError(
            404,
            f"model {name[:100]!r} is not served here; use {' or '.join(map(repr, state.names))}.",
            code="model_not_found",
            param="model",
        )


async def read_body(request: Request, limit: int) -> bytes:
    """The raw JSON body. Raises ApiError when it is said to be something else, or is longer than `limit` bytes."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        # Not only for order: a page of another origin may send a body of any other type to us without asking first.
        raise ApiError(
            415,
            f"content-type is {kind[:80]!r}; send JSON with the header 'Content-Type: application/json'.",
            code="unsupported_media_type",
        )
    declared = request.headers.get("content-length", "")
    chunks, size = [], 0
    too_long = declared.isdigit() and int(declared) > limit
    if not too_long:
        async for chunk in request.stream():
            size += len(chunk)
            if too_long := size > limit:
                break
            chunks.append(chunk)
    if too_long:
        raise ApiError(
            413, f"the body is longer than {limit} bytes (max_body_bytes); send less.", code="body_too_large"
        )
    return b"".join(chunks)


async def submit(
    request: Request, state: ServerState, body: Common, prompts: Seq[Seq[int]], params: SamplingParams, kind: str
) -> Running:
    """Queue the prompts: all of them, or none. Raises ApiError."""
    _check_places(state, len(prompts), params.n)
    tenant: Tenant = request.state.tenant
    run_id = f"{kind}-{uuid.uuid4().hex}"
    ids = [run_id if len(prompts) == 1 else f"{run_id}-{i}" for i in range(len(prompts))]
    identity = identity_for(tenant, body.cache_salt)
    # A client may make its request less urgent than its key says, never more.
    priority = body.priority or 0
    priority = max(tenant.priority, priority) if state.tenants.required else priority
    submissions = [
        Submission(
            own,
            prompt,
            params,
            priority=priority,
            tenant=tenant.name,
            identity=identity,
            timeout=state.config.max_queue_seconds,
        )
        for own, prompt in zip(ids, prompts, strict=True)
    ]
    facts_of(request.scope)["requests"] = ids
    if label := request.scope["state"].get("label"):
        state.labels.update(dict.fromkeys(ids, label))
    try:
        state.drain.admit()
        if params.structure is not None:  # it may take long: not on the engine's thread, where all would wait
            await asyncio.to_thread(_compile, state, params.structure)
        max_unread = state.config.max_unread_tokens if body.stream else None
        return Running(run_id, tuple(await state.engine.submit(submissions, max_unread=max_unread)))
    except BaseException as error:
        for own in ids:
            state.labels.pop(own, None)
        if not isinstance(error, OctavoError):
            raise
        refused = _engine_error(error)
        state.metrics.http_rejected(_REASONS.get(refused.code or "", "invalid"))
        raise refused from None


def _check_places(state: ServerState, prompts: int, n: int) -> None:
    """Raises ApiError for a request that the queue could never take, not even an empty one."""
    limit, name = state.built.engine.scheduler.config.max_queue, "max_queue"
    if limit is None or limit > MOST_PROMPTS:
        limit, name = MOST_PROMPTS, "the most in one request"
    if prompts > 1 and prompts * n > limit:
        raise ApiError(
            400,
            f"{prompts} prompts with n = {n} are {prompts * n} sequences, all of which would have to wait; the limit "
            f"is {limit} ({name}): send fewer prompts at a time.",
            param="prompt",
        )


def _compile(state: ServerState, structure: Structure) -> None:
    structures = state.built.engine.structures
    if structures is not None:  # else the engine will say so
        structures.compile(structure)


def _engine_error(error: OctavoError) -> ApiError:
    return from_code("engine_dead", str(error)) if isinstance(error, EngineDead) else from_engine(error)


def raise_if_failed(state: ServerState, output: RequestOutput) -> None:
    """Raises ApiError if the request ended with an error."""
    if output.error is None:
        return
    code = output.error_code or "engine_error"
    if code == "queue_timeout":
        state.metrics.http_rejected("queue_timeout")
        limit = state.config.max_queue_seconds
        raise from_code(
            code, f"no room within {limit} s (max_queue_seconds): the server is overloaded; try again later."
        )
    if code != "engine_error":
        raise from_code(code, output.error)
    log.error("request %s has failed: %s", output.request_id, output.error)
    raise from_code(
        code, f"{output.error.rstrip('.')}; this request has ended with it, the server goes on: try it again."
    )


@asynccontextmanager
async def watched(request: Request, state: ServerState, running: Running) -> AsyncIterator[None]:
    """While inside, a client that goes away takes its requests with it; leaving ends whatever still runs."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        if any(not stream.finished for stream in running.streams):
            facts_of(request.scope)["disconnected"] = True
        running.abort()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watcher.cancel()
        running.abort()
        for stream in running.streams:
            state.labels.pop(stream.request_id, None)


async def ends(state: ServerState, running: Running) -> list[RequestOutput]:
    """The finished outputs, in order; [] if the client is gone. Raises ApiError if one failed."""
    outputs = []
    for stream in running.streams:
        try:
            output = await stream.end()
        except OctavoError as error:
            raise _engine_error(error) from None
        if output is None:
            return []
        raise_if_failed(state, output)
        outputs.append(output)
    return outputs


def told_stop(sample: CompletionOutput, params: SamplingParams) -> str | int | None:
    """What ended the sample, if the client had asked for it: a stop string, or one of its stop tokens. That a model has
    said its end-of-sequence token is told by the finish reason alone, as in vLLM."""
    reason = sample.stop_reason
    return None if isinstance(reason, int) and reason not in params.stop_token_ids else reason


class Reader:
    """Turns the growing states of one request into pieces: each character, token and logprob once."""

    def __init__(self, stream: Stream, first_index: int) -> None:
        self.stream = stream
        self.last: RequestOutput | None = None
        self._first = first_index
        self._chars = [0] * stream.params.n
        self._tokens = [0] * stream.params.n
        self._ended = [False] * stream.params.n

    def pieces(self, output: RequestOutput) -> list[Piece]:
        self.last = output
        found = [self._piece(sample) for sample in output.outputs if not self._ended[sample.index]]
        return [piece for piece in found if piece is not None]

    def _piece(self, sample: CompletionOutput) -> Piece | None:
        """None as long as there is no text: it may be held back for a stop string, and a client counts chunks."""
        i = sample.index
        text = sample.text[self._chars[i] :]
        if not text and sample.finish_reason is None:
            return None
        seen, (start, end) = self._tokens[i], sample.span
        tokens = tuple(sample.tokens[start + seen : end])
        logprobs = None if sample.logprobs is None else sample.logprobs[seen : end - start]
        self._chars[i] += len(text)
        self._tokens[i] = end - start
        self._ended[i] = sample.finish_reason is not None
        return Piece(
            self._first + i, text, tokens, logprobs, sample.finish_reason, told_stop(sample, self.stream.params)
        )


def stream_pieces(state: ServerState, readers: Seq[Reader]) -> AsyncIterator[list[Piece]]:
    """What each step brought, until all have ended or the client is gone. Raises ApiError if a request failed."""
    return _of_one(state, readers[0]) if len(readers) == 1 else _of_many(state, readers)


async def _of_many(state: ServerState, readers: Seq[Reader]) -> AsyncIterator[list[Piece]]:
    inbox: asyncio.Queue[list[Piece] | ApiError | None] = asyncio.Queue(1)

    async def feed(reader: Reader) -> None:
        try:
            async for pieces in _of_one(state, reader):
                await inbox.put(pieces)
            await inbox.put(None)
        except ApiError as error:
            await inbox.put(error)

    tasks = [asyncio.ensure_future(feed(reader)) for reader in readers]
    try:
        left = len(tasks)
        while left:
            item = await inbox.get()
            if isinstance(item, ApiError):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


async def _of_one(state: ServerState, reader: Reader) -> AsyncIterator[list[Piece]]:
    try:
        async for output in reader.stream:
            raise_if_failed(state, output)
            if pieces := reader.pieces(output):
                yield pieces
    except EngineDead as error:
        raise _engine_error(error) from None
    except OctavoError as error:
        raise from_engine(error) from None


def usage(outputs: Seq[RequestOutput]) -> dict[str, Any]:
    """Tokens of all prompts together; a prompt counts once, whatever n."""
    prompt = sum(output.usage["prompt_tokens"] for output in outputs)
    completion = sum(output.usage["completion_tokens"] for output in outputs)
    cached = sum(output.usage["cached_tokens"] for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def note_outcome(request: Request, outputs: Seq[RequestOutput]) -> None:
    """Tell the access log what came of it."""
    if not outputs:
        return
    first = outputs[0].metrics
    known = facts_of(request.scope)
    known["prompt_tokens"] = sum(output.usage["prompt_tokens"] for output in outputs)
    known["completion_tokens"] = sum(output.usage["completion_tokens"] for output in outputs)
    known["finish"] = ",".join(sorted({s.finish_reason or "" for output in outputs for s in output.outputs}))
    if first.first_token is not None:
        known["ttft"] = round(first.first_token - first.arrival, 4)
