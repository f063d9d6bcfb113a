"""Text to token ids for a server: long text off the event loop, and text that can never fit not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from octavo.models.tokenizer import Tokenizer
from octavo.server.errors import ApiError
from octavo.server.state import ServerState

LONG = 4096  # characters: longer texts are tokenised in another thread
MOST_PER_TOKEN = 256  # characters; no vocabulary has longer tokens


def codec_of(state: ServerState, field: str) -> Tokenizer:
    """The model's tokenizer. Raises ApiError if it has none."""
    codec = state.built.loaded.tokenizer
    if codec is None:
        raise ApiError(400, "the model has no tokenizer; use token ids.", code="unsupported", param=field)
    return codec


async def encode(
    state: ServerState, text: str, *, special: bool = True, field: str = "prompt", beside: int = 0
) -> list[int]:
    """Token ids of a prompt; `beside`: characters of others in the same body. Raises ApiError or RequestError for what
    is no text or longer than any prompt may be."""
    codec = codec_of(state, field)
    _check_length(state, len(text), field)
    if len(text) + beside > LONG:
        return await asyncio.to_thread(codec.encode, text, add_special_tokens=special)
    return codec.encode(text, add_special_tokens=special)


async def encode_chat(
    state: ServerState, messages: Seq[Mapping[str, Any]], options: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a conversation. Raises ApiError or RequestError naming the message."""
    codec = codec_of(state, "messages")
    if not codec.has_chat_template:
        raise ApiError(
            400,
            "the model has no chat template; use /v1/completions, or start the server with --chat-template FILE.",
            code="unsupported",
            param="messages",
        )
    length = sum(len(str(message.get("content", ""))) for message in messages)
    _check_length(state, length, "messages")
    if length > LONG:
        return await asyncio.to_thread(codec.encode_chat, messages, **(options or {}))
    return codec.encode_chat(messages, **(options or {}))


def _check_length(state: ServerState, characters: int, field: str) -> None:
    """Tokenising megabytes takes seconds, and then the engine would refuse them."""
    limit = state.built.engine.scheduler.longest
    if characters > limit * MOST_PER_TOKEN:
        raise ApiError(
            400,
            f"{field} has {characters} characters, at least {characters // MOST_PER_TOKEN} tokens; max_model_len is "
            f"{limit} tokens for prompt and output together; send less.",
            code="context_length_exceeded",
            param=field,
        )
