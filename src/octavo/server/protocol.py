"""What clients send: the bodies of the OpenAI API with the extensions that vLLM's clients know, checked by pydantic.

Types are strict ("5" is no number), unknown fields are ignored, null means the default. What a value may be (ranges,
combinations) is checked where the engine checks it: `SamplingParams`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from octavo.server.errors import ApiError

MOST_PROMPTS = 2048  # in one request; what OpenAI takes
MOST_CHOICES = 128  # n
MOST_STOPS = 64  # stop strings: all are looked for in every step
LONGEST_STOP = 1024  # characters
MOST_BIASES = 10_000  # token ids in logit_bias

Token = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Stop = Annotated[str, Field(max_length=LONGEST_STOP)]
Prompt = str | list[Token] | Annotated[list[str] | list[list[Token]], Field(max_length=MOST_PROMPTS)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(Body):
    """vLLM's way to ask for a form: one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Common(Body):
    """Fields of both completions and chats."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(le=MOST_CHOICES)] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Count | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=MOST_BIASES)] | None = None
    seed: Count | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: list[Token] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    max_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: Count | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    return_token_ids: bool | None = None
    user: str | None = None

    @property
    def usage_wanted(self) -> tuple[bool, bool]:
        """Whether usage is wanted (at the end of a stream, with each of its chunks)."""
        options = self.stream_options
        each = bool(options and options.continuous_usage_stats)
        return each or bool(options and options.include_usage), each


class CompletionBody(Common):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Count | None = None
    best_of: Count | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class ChatBody(Common):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Token]


B = TypeVar("B", bound=Body)


def parse(model: type[B], raw: bytes) -> B:
    """The body as `model`. Raises ApiError naming the field and what it was given."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        first = problems[0]
        if first["type"] in ("json_invalid", "json_type"):
            raise ApiError(400, f"the body is no valid JSON: {first['msg']}.", code="invalid_json") from None
        where = _field(first["loc"])
        given = _short(first["input"])
        what = first["msg"][:1].lower() + first["msg"][1:]
        if first["type"] == "missing":
            raise ApiError(400, f"{where} is missing; give it a value.", code="missing_field", param=where) from None
        raise ApiError(400, f"{where} is {given}: {what}.", code="invalid_type", param=where) from None


def _field(loc: tuple[int | str, ...]) -> str:
    """A field as clients would write it: pydantic also names the member of a union that it tried."""
    parts: list[str] = []
    for part in loc:
        if isinstance(part, int):
            parts.append(f"[{part}]")
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            parts.append(f".{part}" if parts else part)
    return "".join(parts) or "body"


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, (dict, list)) else f"a {type(value).__name__} of {len(value)}"
    return text if len(text) <= 80 else f"{text[:77]}..."
