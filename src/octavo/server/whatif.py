"""`POST /kv/what-if`: the recent traffic again, as configured and changed, replayed in a process beside the engine."""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from pydantic import ConfigDict, Field
from starlette.requests import Request

from octavo.build import BuiltEngine
from octavo.errors import OctavoError
from octavo.kv.prefix import KeyChain
from octavo.kv.strategies import STRATEGIES
from octavo.server.errors import ApiError
from octavo.server.inspector import Inspector
from octavo.server.protocol import Body
from octavo.server.replaying import Job, Settings, work
from octavo.server.traffic import SECONDS, Recorded, trace_hashes
from octavo.types import Sequence

LEAST_STEPS = 64  # timed steps from which step times can be fitted and checked
MOST_PAGES = 1 << 20  # of a pool: beyond that the worker would run out of memory
TIME_LIMIT = 60.0  # seconds of the whole answer
_LOOK = 0.05


class WhatIfBody(Body):
    """What to change; what is left out stays as it is. `window_s`: how far back the traffic goes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    strategy: str | None = None
    block_size: int | None = Field(None, ge=1, le=1 << 16)
    kv_bytes: int | None = Field(None, ge=1, le=1 << 50)
    max_num_seqs: int | None = Field(None, ge=1, le=1 << 20)
    max_num_batched_tokens: int | None = Field(None, ge=1, le=1 << 24)
    window_s: float = Field(300.0, gt=0, le=SECONDS, allow_inf_nan=False)


def settings_of(built: BuiltEngine) -> Settings:
    """The live engine. A recorded request does not say its tenant's rights, and nothing is drafted in a replay."""
    scheduler = built.engine.scheduler.config
    return Settings(
        strategy=built.config.kv_strategy,
        block_size=built.layout.block_size,
        pages=built.pages,
        page_bytes=built.layout.page_bytes,
        windows=built.layout.windows,
        prefix_caching=built.config.enable_prefix_caching,
        scheduler=replace(scheduler, order="fcfs", tenant_weights={}, quotas={}, speculative_tokens=0),
    )


def changed(now: Settings, body: WhatIfBody) -> Settings:
    """Raises ApiError 400, with the numbers, for what no engine could be."""
    wanted = body.model_dump(exclude={"window_s"}, exclude_none=True)
    if not wanted:
        raise ApiError(400, f"nothing is to be changed; give one of {', '.join(_KNOBS)}.", code="nothing_to_change")
    strategy, size = body.strategy or now.strategy, body.block_size or now.block_size
    if strategy not in STRATEGIES:
        raise _impossible("strategy", strategy, f"it must be one of {', '.join(STRATEGIES)}")
    page_bytes = now.page_bytes // now.block_size * size
    kv_bytes = body.kv_bytes or now.kv_bytes
    pages, groups = kv_bytes // page_bytes, len(now.windows)
    if pages > MOST_PAGES:
        limit = f"that is {pages} blocks of {page_bytes} bytes; at most {MOST_PAGES} are simulated"
        raise _impossible("kv_bytes", kv_bytes, limit)
    if pages < groups:
        name = "block_size" if body.kv_bytes is None else "kv_bytes"
        need = (
            f"a block of {size} tokens needs {page_bytes * groups} bytes in {groups} layer groups, there are {kv_bytes}"
        )
        raise _impossible(name, getattr(body, name), need)
    try:
        scheduler = replace(
            now.scheduler,
            max_num_seqs=body.max_num_seqs or now.scheduler.max_num_seqs,
            max_num_batched_tokens=body.max_num_batched_tokens or now.scheduler.max_num_batched_tokens,
        )
    except OctavoError as error:
        raise ApiError(400, str(error), code="impossible_change") from None
    return replace(now, strategy=strategy, block_size=size, pages=pages, page_bytes=page_bytes, scheduler=scheduler)


_KNOBS = ("strategy", "block_size", "kv_bytes", "max_num_seqs", "max_num_batched_tokens")


def _impossible(name: str, value: object, why: str) -> ApiError:
    return ApiError(400, f"{name} is {value!r}; {why}.", code="impossible_change", param=name)


class Recent:
    """The traffic and the steps of the last `window_s` seconds. Made on the engine's thread, so it copies little;
    `job` does the rest elsewhere."""

    def __init__(self, built: BuiltEngine, inspector: Inspector, body: WhatIfBody) -> None:
        now = built.engine.clock.now()
        requests, self.refused = inspector.traffic.since(now - body.window_s)
        self._running = {
            life.recorded.id: (life.seqs[0], sum(seq.generated for seq in life.seqs) // len(life.seqs))
            for one in requests
            if one.took is None and (life := inspector.lives.live(one.id)) is not None and life.seqs
        }
        self._requests = [replace(one) for one in requests]
        self._steps = tuple(inspector.traffic.steps)
        self._built, self._body = built, body

    def job(self) -> Job:
        """Raises ApiError where too little was seen, and for an impossible change."""
        now = settings_of(self._built)
        wanted = changed(now, self._body)
        if not self._requests:
            raise ApiError(
                409,
                f"no request has come in the last {self._body.window_s:g} s: there is no traffic to replay; send "
                f"some, or give a longer window_s (at most {SECONDS:g}).",
                code="no_traffic",
                param="window_s",
            )
        if len(self._steps) < LEAST_STEPS:
            raise ApiError(
                409,
                f"{len(self._steps)} steps have been timed and {LEAST_STEPS} are needed to fit how long steps take; "
                "let the engine work for longer first.",
                code="too_few_steps",
            )
        requests = tuple(self._told(one) for one in self._requests)
        return Job(requests, now.block_size, self._steps, now, wanted, self._body.window_s, self._notes())

    def _told(self, one: Recorded) -> Recorded:
        """With hashes and tokens so far, if it still runs."""
        if one.id not in self._running:
            return one
        seq, generated = self._running[one.id]
        return replace(one, output=generated, hashes=_prompt_hashes(seq))

    def _notes(self) -> tuple[str, ...]:
        """What the replay leaves out."""
        config, notes = self._built.engine.scheduler.config, []
        if self.refused:
            notes.append(f"{self.refused} requests that were refused meanwhile are not replayed.")
        if config.order != "fcfs" or config.quotas:
            notes.append("Tenants' order and quotas are not replayed: all requests queue in one line.")
        if config.speculative_tokens:
            notes.append("Nothing is drafted in the replay, though this engine drafts.")
        if self._built.config.itl_target is not None:
            notes.append("The replay does not keep to itl_target.")
        if any(one.samples > 1 for one in self._requests):
            notes.append("Samples of one request are replayed as requests of their own, equally long.")
        return tuple(notes)


def _prompt_hashes(seq: Sequence) -> array[int]:
    """As `traffic.hashes_of`, without touching what belongs to the engine's thread."""
    chain = KeyChain(list(seq.request.prompt), seq.keys.block_size, seq.keys.identity)
    return trace_hashes(chain.upto(len(seq.request.prompt)))


class Replays:
    """Runs one what-if at a time."""

    def __init__(self, time_limit: float = TIME_LIMIT) -> None:
        self._limit = time_limit
        self._busy = False

    async def run(self, job: Job, request: Request) -> dict[str, Any] | None:
        """The answer; None if the client has gone. Raises ApiError 429 while another one runs, 503 when it takes too
        long, 400 for what turns out impossible, and 409 for step times that no fit explains."""
        if self._busy:
            raise ApiError(429, "another what-if is being replayed; ask again.", code="what_if_busy", retry_after=2)
        self._busy = True
        try:
            return await self._run(job, request)
        finally:
            self._busy = False

    async def _run(self, job: Job, request: Request) -> dict[str, Any] | None:
        context = get_context("spawn")
        answers, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(theirs, job), daemon=True)
        end = time.monotonic() + self._limit
        try:
            await asyncio.to_thread(process.start)
            theirs.close()
            while not answers.poll():
                if not process.is_alive() and not answers.poll():
                    raise ApiError(
                        503, f"the replay's process ended with exit code {process.exitcode}.", code="what_if_died"
                    )
                if time.monotonic() > end:
                    raise ApiError(
                        503,
                        f"the replay took longer than {self._limit:g} s; give a shorter window_s.",
                        code="what_if_timeout",
                        param="window_s",
                    )
                if await request.is_disconnected():
                    return None
                await asyncio.sleep(_LOOK)
            refused, found = await asyncio.to_thread(_received, answers)
        finally:
            await asyncio.shield(asyncio.to_thread(_end, process))
            answers.close()
        if refused:
            raise ApiError(409 if refused == "steps_unexplained" else 400, found, code=refused)
        return found  # type: ignore[no-any-return]


def _received(answers: Any) -> tuple[str, Any]:
    try:
        return answers.recv()  # type: ignore[no-any-return]
    except EOFError:
        raise ApiError(503, "the replay's process ended without an answer.", code="what_if_died") from None


def _end(process: Any) -> None:
    """Whether it has ended by itself or not."""
    if process.pid is not None:
        process.kill()
        process.join()
        process.close()
