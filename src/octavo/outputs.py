"""What a request gives back. Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.runner.api import TokenLogprobs
from octavo.types import FinishReason


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample. `delta` is the text that came with the latest step; `text` is everything so far, without
    characters that might still turn out to be part of a stop string."""

    index: int
    text: str
    tokens: list[int] = field(repr=False)  # the sequence's own growing list, prompt included: use `token_ids`
    span: tuple[int, int]  # which of `tokens` this output stands for
    delta: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that matched
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens as of this output."""
        return tuple(self.tokens[slice(*self.span)])


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds on the engine's clock, and what the KV cache did for this request."""

    arrival: float
    admitted: float | None
    first_token: float | None
    finished: float | None
    token_times: tuple[float, ...] = ()  # of sample 0
    cached_tokens: int = 0  # prompt tokens served by the prefix cache
    preemptions: int = 0
    drafted_tokens: int = 0  # guessed ahead by speculation, in all samples
    accepted_tokens: int = 0  # and how many of the guesses were right


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request as of now; `finished` when every sample has ended."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: str | None = None
    error_code: str | None = None  # `queue_timeout`, `engine_error`, or that of the RequestError it was
    usage: dict[str, int] = field(default_factory=dict)
