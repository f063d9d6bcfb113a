"""What users ask for (`Request`, `SamplingParams`) and the state of one running sample (`Sequence`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import StrEnum
from numbers import Integral, Real
from typing import TYPE_CHECKING

from octavo.errors import OctavoError

if TYPE_CHECKING:
    from octavo.kv.api import View
    from octavo.kv.prefix import KeyChain


class RequestError(OctavoError):
    """A request that is refused: the sentence names the field, its value, the limit and the remedy."""

    def __init__(self, message: str, *, code: str = "invalid_request", field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # end-of-sequence token, stop token id or stop string
    LENGTH = "length"  # max_tokens or the model length reached
    ABORT = "abort"  # the client went away
    ERROR = "error"  # the engine could not go on; the output carries the sentence


def _check(ok: bool, field_name: str, value: object, limit: str) -> None:
    if not ok:
        raise RequestError(f"{field_name} is {value!r}; it must be {limit}.", field=field_name)


STRUCTURES = ("json_object", "json_schema", "regex", "grammar", "choice")


@dataclass(frozen=True, slots=True)
class Structure:
    """What the whole answer must look like. `kind` is one of STRUCTURES; `text` a JSON schema, a regular expression
    (Rust's, from the first character to the last), a grammar (Lark, as llguidance writes it) or a JSON list of texts to
    choose from; nothing for json_object, which is any JSON object."""

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        known = isinstance(self.kind, str) and self.kind in STRUCTURES
        _check(known, "structure.kind", self.kind, f"one of {', '.join(STRUCTURES)}")
        _check(isinstance(self.text, str), "structure.text", self.text, "a text")
        wanted = self.kind != "json_object"
        limit = f"the {self.kind}" if wanted else "empty: json_object needs none"
        _check(bool(self.text.strip()) == wanted, "structure.text", self.text, limit)
        plain = not any("\ud800" <= letter <= "\udfff" for letter in self.text)
        _check(plain, "structure.text", self.text, "text that UTF-8 can write, without halves of surrogate pairs")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. Names and defaults are vLLM's.

    `temperature` 0 means greedy. `top_k` 0 or -1 means all tokens. `seed` makes the sample independent of
    its neighbours in the batch; without it the engine draws a fresh seed. `logprobs` and `prompt_logprobs`
    give the number of alternatives to report (0: only the chosen token). An answer with a `structure` ends where that
    is complete: with `ignore_eos` or before `min_tokens` only once nothing else may follow.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structure: Structure | None = None

    def __post_init__(self) -> None:
        self._normalise()
        for name in ("n", "top_k", "min_tokens"):
            _check(_whole(getattr(self, name)), name, getattr(self, name), "a whole number")
        for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or _whole(value), name, value, "a whole number or None")
        for name in _REALS:
            _check(_real(getattr(self, name)), name, getattr(self, name), "a finite number")
        self._check_ranges()
        _check(isinstance(self.structure, (Structure, type(None))), "structure", self.structure, "a Structure or None")

    def _normalise(self) -> None:
        """None and single values as vLLM takes them; stops as tuples, ids as plain integers."""
        stop = self.stop if self.stop is not None else ()
        stop = (stop,) if isinstance(stop, str) else stop
        _check(isinstance(stop, (list, tuple)), "stop", stop, "a string or a list of strings")
        _check(all(isinstance(text, str) and text for text in stop), "stop", stop, "non-empty strings")
        object.__setattr__(self, "stop", tuple(stop))
        ids = self.stop_token_ids if self.stop_token_ids is not None else ()
        _check(isinstance(ids, (list, tuple, set, frozenset)), "stop_token_ids", ids, "a list of token ids")
        _check(all(_whole(token) for token in ids), "stop_token_ids", ids, "whole numbers")
        object.__setattr__(self, "stop_token_ids", tuple(int(token) for token in ids))
        bias = self.logit_bias if self.logit_bias is not None else {}
        _check(isinstance(bias, Mapping), "logit_bias", bias, "a mapping from token id to bias")
        _check(all(_whole(token) for token in bias), "logit_bias", bias, "keyed by whole token ids")
        object.__setattr__(self, "logit_bias", {int(token): value for token, value in bias.items()})
        if self.top_k is None:
            object.__setattr__(self, "top_k", 0)

    def _check_ranges(self) -> None:
        _check(self.n >= 1, "n", self.n, "at least 1")
        _check(self.temperature >= 0, "temperature", self.temperature, ">= 0")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _check(self.top_k >= -1, "top_k", self.top_k, "-1 or 0 (all tokens) or a positive count")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        penalty = self.repetition_penalty
        _check(1e-3 <= penalty <= 1e3, "repetition_penalty", penalty, "from 0.001 to 1000 (1 changes nothing)")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "in [-2, 2]")
        for token, bias in self.logit_bias.items():
            _check(_real(bias) and -100 <= bias <= 100, f"logit_bias[{token}]", bias, "in [-100, 100]")
        _check(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", self.max_tokens, ">= 0 or None")
        _check(self.min_tokens >= 0, "min_tokens", self.min_tokens, ">= 0")
        if self.max_tokens is not None:
            limit = f"at most max_tokens ({self.max_tokens})"
            _check(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, limit)
        _check(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or 0 <= value <= 20, name, value, "None or 0 to 20")
        if self.greedy and self.n > 1:
            raise RequestError(
                f"n is {self.n} with temperature {self.temperature}: all samples would be equal; "
                "set n to 1 or raise temperature.",
                field="n",
            )

    @property
    def greedy(self) -> bool:
        """Temperatures below 1e-5 count as 0, as in vLLM: divided by them, logits would overflow."""
        return self.temperature < GREEDY_BELOW

    def for_sample(self, index: int) -> SamplingParams:
        """The parameters of sample `index` as a request of its own: same draw as within n samples."""
        seed = None if self.seed is None else derive_seed(self.seed, index)
        return replace(self, n=1, seed=seed)


GREEDY_BELOW = 1e-5
_REALS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def _whole(value: object) -> bool:
    """A whole number of any integer type, numpy's included; True and False are not numbers here."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def derive_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request with `seed`. Sample 0 keeps the request's own seed."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**63 if index else seed


@dataclass(frozen=True, slots=True)
class Request:
    """One immutable request as the scheduler sees it: token ids, limits and identity; no text.

    `identity` holds typed pairs such as ("salt", "x") or ("adapter", "y"): two different identities
    never share KV. `output_length` is the true length when a trace knows it (replay), else None.
    """

    id: str
    prompt: Seq[int]  # a tuple; in simulations, where nobody reads it, bytes
    params: SamplingParams
    arrival: float = 0.0
    priority: int = 0  # lower runs first
    tenant: str = ""
    identity: tuple[tuple[str, str], ...] = ()
    stop_token_ids: frozenset[int] = frozenset()  # end-of-sequence ids (unless ignored) + stop_token_ids
    output_length: int | None = None
    deadline: float | None = None  # engine time by which it must have been admitted


def check_ids(request: Request, vocab_size: int) -> None:
    """Raise RequestError for a token id outside the vocabulary; to be called at submit, because inside a step it
    would fail everybody's."""
    fields: list[tuple[str, Collection[int]]] = [
        ("prompt", request.prompt),
        ("logit_bias", tuple(request.params.logit_bias)),
        ("stop_token_ids", tuple(request.stop_token_ids)),
    ]
    for name, ids in fields:
        if ids and not 0 <= (worst := min(ids) if min(ids) < 0 else max(ids)) < vocab_size:
            raise RequestError(
                f"{name} holds token id {worst}; the model's vocabulary has ids 0 to {vocab_size - 1}.",
                field=name,
            )


class Status(StrEnum):
    """Where a sequence stands. WAITING covers both fresh and preempted sequences."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request: its tokens, and how far their KV has been computed.

    The scheduler is the only writer. `tokens` are all known tokens (prompt, then generated);
    `computed` of them have KV in the cache; `slots` is how many its blocks can hold.
    """

    id: int
    request: Request
    index: int
    tokens: list[int]
    ceiling: int  # most tokens it may ever hold
    keys: KeyChain
    submitted_at: float = 0.0
    view: View | None = None
    status: Status = Status.WAITING
    computed: int = 0
    slots: int = 0
    sealed: int = 0  # tokens whose full blocks the manager has been told of
    reused: int = 0  # prompt tokens that came from the prefix cache at the first admission
    preemptions: int = 0
    forked: bool = False
    draws: tuple[Sequence, ...] = ()  # who draws a token once all known tokens are computed
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    admitted_at: float | None = None
    drafted: int = 0  # tokens drafted for it
    drafts_accepted: int = 0  # and how many of them it would have drawn anyway
    entered: int = 0  # orders the running sequences: rises with every entry
    high_water: int = 0  # most tokens ever computed: what a preemption throws away is measured against it

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]


def phase_of(seqs: Seq[Sequence]) -> str:
    """Where a request stands: queued, prefill, decode, preempted or ended."""
    if len(seqs) == 1 and seqs[0].status is Status.WAITING:
        return "preempted" if seqs[0].preemptions else "queued"
    running = [seq for seq in seqs if seq.status is Status.RUNNING]
    if running:
        decoding = any(seq.generated and len(seq.tokens) - seq.computed <= 1 for seq in running)
        return "decode" if decoding else "prefill"
    waiting = [seq for seq in seqs if seq.status is Status.WAITING]
    if not waiting:
        return "ended"
    return "preempted" if any(seq.preemptions for seq in waiting) else "queued"
