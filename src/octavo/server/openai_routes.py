"""The OpenAI API's routes, and those around tokens and models that its clients know from vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.server.authorization import authorized, operators_only
from octavo.server.chat import create_chat
from octavo.server.completions import create_completion
from octavo.server.encoding import codec_of, encode, encode_chat
from octavo.server.errors import ApiError
from octavo.server.generation import check_model, read_body
from octavo.server.openapi import errors, takes
from octavo.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse
from octavo.server.state import ServerState, state_of

BODIES: list[type[BaseModel]] = [CompletionBody, ChatBody, TokenizeBody, DetokenizeBody]
_GENERATING = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}


def router() -> APIRouter:
    routes = APIRouter(tags=["OpenAI"], dependencies=[Depends(authorized)])
    for path, route, body in (
        ("/v1/completions", create_completion, CompletionBody),
        ("/v1/chat/completions", create_chat, ChatBody),
    ):
        answers = {**_STREAM, **errors(*_GENERATING)}
        routes.add_api_route(path, route, methods=["POST"], openapi_extra=takes(body), responses=answers)
    routes.add_api_route("/v1/models", models, methods=["GET"], responses=errors(401))
    routes.add_api_route("/v1/models/{name:path}", model, methods=["GET"], responses=errors(401, 404))
    for path, route, body in (("/tokenize", tokenize, TokenizeBody), ("/detokenize", detokenize, DetokenizeBody)):
        routes.add_api_route(
            path, route, methods=["POST"], openapi_extra=takes(body), responses=errors(400, 401, 403, 404, 413, 415)
        )
    routes.add_api_route("/tokenizer_info", tokenizer_info, methods=["GET"], responses=errors(401, 404))
    routes.add_api_route(
        "/reset_prefix_cache",
        reset_prefix_cache,
        methods=["POST"],
        dependencies=[Depends(operators_only)],
        responses=errors(401, 403, 503),
    )
    return routes


def _card(state: ServerState, name: str) -> dict[str, Any]:
    """A model as clients list it. `max_model_len` is what a request can really have, prompt and answer together."""
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "octavo",
        "root": state.built.loaded.name,
        "parent": None,
        "max_model_len": state.built.engine.scheduler.longest,
        "chat": state.built.loaded.has_chat_template,
    }


async def models(request: Request) -> Response:
    """The model, under each of its names."""
    state = state_of(request)
    return JSONResponse({"object": "list", "data": [_card(state, name) for name in state.names]})


async def model(request: Request, name: str) -> Response:
    """One model by name."""
    state = state_of(request)
    check_model(state, name)
    return JSONResponse(_card(state, name))


async def tokenize(request: Request) -> Response:
    """Token ids of a prompt, or of messages through the chat template."""
    state = state_of(request)
    body = parse(TokenizeBody, await read_body(request, state.config.max_body_bytes))
    check_model(state, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages.", param="prompt")
    codec = codec_of(state, "prompt")
    if body.messages is not None:
        tokens = await encode_chat(state, body.messages)
    else:
        tokens = await encode(state, body.prompt or "", special=body.add_special_tokens is not False)
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": state.built.engine.scheduler.longest,
        "tokens": tokens,
    }
    if body.return_token_strs:
        answer["token_strs"] = await asyncio.to_thread(
            lambda: [codec.decode([token], skip_special_tokens=False) for token in tokens]
        )
    return JSONResponse(answer)


async def detokenize(request: Request) -> Response:
    """Text of token ids."""
    state = state_of(request)
    body = parse(DetokenizeBody, await read_body(request, state.config.max_body_bytes))
    check_model(state, body.model)
    vocabulary = state.built.loaded.vocab_size
    for token in body.tokens:
        if not 0 <= token < vocabulary:
            raise ApiError(400, f"tokens holds {token}; ids are 0 to {vocabulary - 1}.", param="tokens")
    codec = codec_of(state, "tokens")
    return JSONResponse({"prompt": await asyncio.to_thread(codec.decode, body.tokens, skip_special_tokens=False)})


async def tokenizer_info(request: Request) -> Response:
    """What lm-eval asks before it tokenises through the server."""
    state = state_of(request)
    codec = codec_of(state, "tokens")
    hf = codec.hf
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return JSONResponse(
        {
            "tokenizer_class": type(hf).__name__,
            "model_max_length": state.built.engine.scheduler.longest,
            "vocab_size": state.built.loaded.vocab_size,
            **{name: getattr(hf, name, None) for name in names},
            "eos_token_id": codec.eos_token_id,
            "chat_template": getattr(hf, "chat_template", None),
        }
    )


async def reset_prefix_cache(request: Request) -> Response:
    """Forget every cached prefix that nobody uses."""
    freed = await state_of(request).engine.call(lambda engine: engine.scheduler.reset_cache())
    return JSONResponse({"blocks_freed": freed})
