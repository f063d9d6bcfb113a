"""What is refused at submit: whatever can never run, told in tokens."""

from __future__ import annotations

import math
from typing import Protocol

from octavo.kv.api import KVManager
from octavo.scheduler.config import SchedulerConfig
from octavo.types import Request, RequestError


def ceiling_of(request: Request, limit: int, longest: int) -> int:
    """Most tokens the request may come to: prompt + max_tokens, clipped to the model length `limit`; without
    max_tokens, whatever the model length and the pool (`longest`) allow.

    Raises RequestError for an empty prompt and for one that leaves no room in the model length.
    """
    prompt, max_tokens = len(request.prompt), request.params.max_tokens
    if request.deadline is not None and not math.isfinite(request.deadline):
        raise RequestError(f"deadline is {request.deadline}; it must be a finite time.", field="deadline")
    if not prompt:
        raise RequestError("prompt is empty; give at least one token.", field="prompt")
    if prompt > limit or (prompt == limit and max_tokens != 0):
        raise RequestError(
            f"prompt has {prompt} tokens; max_model_len is {limit} tokens for prompt and output together; "
            f"shorten the prompt to at most {limit - 1} tokens or raise max_model_len.",
            code="context_length_exceeded",
            field="prompt",
        )
    if max_tokens is None:
        return min(limit, max(longest, prompt + 1))
    return min(limit, prompt + max_tokens)


def check_room(request: Request, ceiling: int, kv: KVManager, config: SchedulerConfig, longest: int) -> None:
    """Raises RequestError if the request exceeds the whole pool, its tenant's quota or the number of slots."""
    length = request.output_length
    expected = ceiling if length is None else min(ceiling, len(request.prompt) + length)
    need = kv.ceiling_blocks(ceiling, expected)
    if need > kv.capacity:
        raise RequestError(
            f"prompt ({len(request.prompt)} tokens) and max_tokens together need {ceiling} tokens ({need} "
            f"blocks) of KV memory; the whole pool has {longest} tokens ({kv.capacity} blocks), so this can never "
            f"run; ask for at most {min(longest, config.max_model_len)} tokens in all or give the engine more KV "
            "memory.",
            code="never_fits",
            field="max_tokens" if len(request.prompt) < longest else "prompt",
        )
    if request.params.n > config.max_num_seqs:
        raise RequestError(
            f"n is {request.params.n}; at most max_num_seqs ({config.max_num_seqs}) samples can run at once; "
            "lower n or raise max_num_seqs.",
            field="n",
        )
    quota = config.quotas.get(request.tenant)
    if quota is not None and need > quota:
        raise RequestError(
            f"tenant {request.tenant!r} may hold {quota} blocks; this request needs {need}; lower max_tokens or "
            "raise the quota.",
            code="over_quota",
            field="max_tokens",
        )


class Queue(Protocol):
    """What waits now."""

    def load(self, tenant: str) -> tuple[int, int]:
        """(sequences that wait, prompt tokens of those never admitted), as far as they count for a request of the
        tenant: all of them, or under fair share its own. A request counts all of its n samples and its prompt once."""


def check_queue(request: Request, config: SchedulerConfig, queue: Queue) -> None:
    """Raises RequestError if the request is more than the queue takes at all, or more than it takes now."""
    limit, n = config.max_queue, request.params.n
    if limit is not None and n > limit:
        raise RequestError(
            f"n is {n}; at most max_queue ({limit}) sequences may wait; lower n or raise max_queue.", field="n"
        )
    most, tokens = config.max_queued_tokens, len(request.prompt)
    if most is not None and tokens > most:
        raise RequestError(
            f"prompt has {tokens} tokens; at most {most} may wait (max_queued_tokens), so it could never be taken in; "
            "shorten the prompt or raise max_queued_tokens.",
            field="prompt",
        )
    if limit is None and most is None:
        return
    waiting, queued = queue.load(request.tenant)
    whose = f" of tenant {request.tenant!r}" if config.order == "fair" else ""
    if limit is not None and waiting + n > limit:
        raise RequestError(
            f"{waiting} of at most {limit} sequences{whose} wait already (max_queue) and this request needs {n} "
            "places; try again later.",
            code="queue_full",
        )
    if most is not None and queued + tokens > most:
        raise RequestError(
            f"{queued} of at most {most} prompt tokens{whose} wait already (max_queued_tokens) and this request "
            f"has {tokens}; try again later.",
            code="queue_tokens_full",
        )
