"""The explain API: where memory is, who holds what, why each request waits, and what another setting would do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from octavo.server.authorization import authorized, operators_only, tenant_of
from octavo.server.block_map import take_map
from octavo.server.errors import ApiError, from_code
from octavo.server.generation import read_body
from octavo.server.openapi import errors
from octavo.server.protocol import parse
from octavo.server.snapshot import Absence, Row, take, take_head, take_outside, take_row
from octavo.server.sse import GONE, HEADERS, json_bytes
from octavo.server.state import ServerState, state_of
from octavo.server.whatif import Recent, Replays, WhatIfBody

T = TypeVar("T")
WAIT = 1.5  # seconds to wait for the end of a step before the engine's thread counts as standing still
_KNOWN_STALL = 0.1  # the same when it has stood still for longer than that already
_POLL = 0.2  # seconds between two looks for new decisions
_BEAT = 15.0  # seconds between two comments on a quiet stream


def router() -> APIRouter:
    routes = APIRouter(prefix="/kv", tags=["explain"], dependencies=[Depends(authorized)])
    replays = Replays()

    async def what_if(request: Request) -> Response:
        """Replay the recent traffic with other settings, and say what would change. One at a time."""
        return await _what_if(request, replays)

    all_tenants = [Depends(operators_only)]
    for path, route in (("/ledger", ledger), ("/requests", requests)):
        routes.add_api_route(path, route, methods=["GET"], responses=errors(401, 503))
    routes.add_api_route("/blocks", blocks, methods=["GET"], dependencies=all_tenants, responses=errors(401, 403, 503))
    routes.add_api_route("/timeline", timeline, methods=["GET"], responses=errors(400, 401, 503))
    routes.add_api_route("/requests/{name:path}", one_request, methods=["GET"], responses=errors(401, 404, 503))
    stream: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
    answers = {**stream, **errors(400, 401, 403)}
    routes.add_api_route("/events", events, methods=["GET"], dependencies=all_tenants, responses=answers)
    schema = WhatIfBody.model_json_schema()
    routes.add_api_route(
        "/what-if",
        what_if,
        methods=["POST"],
        dependencies=all_tenants,
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
        responses=errors(400, 401, 403, 409, 413, 415, 429, 503),
    )
    return routes


async def ledger(request: Request) -> Response:
    """Every byte of the budget in one line, who runs, and which resource limits now."""
    state = state_of(request)
    head = await _ask(
        state,
        lambda: take_head(state.built),
        lambda absent: take_outside(state.built, state.labels, state.inspector, absent).head,
    )
    return _json(head.json())


async def requests(request: Request) -> Response:
    """Every request: those that run, then those that wait, each with the reason. Who is no operator sees its own."""
    state = state_of(request)
    found = await _ask(
        state,
        lambda: take(state.built, state.labels, state.inspector),
        lambda absent: take_outside(state.built, state.labels, state.inspector, absent),
    )
    tenant = tenant_of(request)
    if not tenant.operator:
        found = replace(found, rows=tuple(row for row in found.rows if row.tenant == tenant.name))
    return await _large(found.json)


async def blocks(request: Request) -> Response:
    """Who owns each page of the pool, as runs of equal pages."""
    state = state_of(request)
    found = await _ask(state, lambda: take_map(state.built), lambda absent: take_map(state.built))
    return await _large(found.json)


async def timeline(request: Request, since: Annotated[float | None, Query(allow_inf_nan=False)] = None) -> Response:
    """One sample for each of the last 600 seconds, or of those that ended after the time `since`."""
    state = state_of(request)
    built, line = state.built, state.inspector.timeline
    found = await _ask(
        state,
        lambda: line.samples(built, built.engine.clock.now()),
        lambda absent: line.kept(built.engine.clock.now()),
    )
    new = [sample for sample in found if since is None or sample.at > since]
    return await _large(lambda: {"interval_s": 1.0, "samples": [sample.json() for sample in new]})


async def one_request(request: Request, name: str) -> Response:
    """One request, by its id or by what its client called it (X-Request-Id); also for a while after its end."""
    state = state_of(request)
    found = await _ask(state, lambda: _detail(state, name, None), lambda absent: _detail(state, name, absent))
    tenant = tenant_of(request)
    if found is None or not (tenant.operator or found[0].tenant == tenant.name):
        raise ApiError(
            404,
            f"there is no request {name[:200]!r}: no live one and none of the last that ended has this id or label.",
            code="request_not_found",
            param="id",
        )
    if not tenant.operator:  # what a prompt was compared with may be somebody else's
        found[2]["miss"] = None
    return _json(_with_texts(state, found))


async def events(request: Request) -> Response:
    """Decisions as they are made, as server-sent events. A reader that is too slow loses some and is told how many."""
    state = state_of(request)
    last = request.headers.get("last-event-id")
    after = state.inspector.decided
    if last is not None:
        if not last.isascii() or not last.isdigit() or len(last) > 18:
            raise ApiError(400, f"Last-Event-ID is {last[:80]!r}; it must be a number.", param="Last-Event-ID")
        after = min(after, int(last) + 1)
    return StreamingResponse(_events(state, after), media_type="text/event-stream", headers=HEADERS)


async def _events(state: ServerState, after: int) -> AsyncIterator[bytes]:
    quiet = 0.0
    yield b": decisions\n\n"
    while not state.drain.draining:
        found = state.inspector.decisions(after)
        after = found.after
        if found.lost:
            yield b'event: lost\ndata: {"count":%d}\n\n' % found.lost
        if found.entries:
            yield b"".join(
                b"id: %d\nevent: %s\ndata: %s\n\n" % (one.number, one.name.encode(), json_bytes(one.json()))
                for one in found.entries
            )
            quiet = 0.0
            continue
        if quiet >= _BEAT:
            yield b": \n\n"
            quiet = 0.0
        await asyncio.sleep(_POLL)
        quiet += _POLL


async def _what_if(request: Request, replays: Replays) -> Response:
    state = state_of(request)
    body = parse(WhatIfBody, await read_body(request, state.config.max_body_bytes))
    recent = await _ask(state, lambda: Recent(state.built, state.inspector, body), _stands_still)
    job = await asyncio.to_thread(recent.job)
    found = await replays.run(job, request)
    return Response(status_code=GONE) if found is None else _json(found)


# -- asking the engine ------------------------------------------------------------------------------------------------


async def _ask(state: ServerState, ask: Callable[[], T], otherwise: Callable[[Absence], T]) -> T:
    """`ask` between two steps; when the engine's thread does not come back soon, `otherwise` with the seconds for which
    it has not, and whether that is more than a step may take."""
    stalled = state.engine.health().stalled
    waiting = True
    call = state.engine.call(lambda engine: ask() if waiting else None)
    try:
        found = await asyncio.wait_for(call, WAIT if stalled < WAIT else _KNOWN_STALL)
    except TimeoutError:
        seconds = max(stalled, state.engine.health().stalled)
        return _from_outside(lambda: otherwise(Absence(seconds, seconds > state.config.stall_seconds)))
    finally:
        waiting = False  # nobody wants it any more: what stands in the engine's inbox costs nothing later
    return found  # type: ignore[return-value]


def _from_outside(read: Callable[[], T]) -> T:
    """The engine's thread may come back while it is read from another one: then reading starts again."""
    for _ in range(3):
        try:
            return read()
        except (RuntimeError, LookupError):
            continue
    raise from_code("engine_dead", "the engine does not answer between two steps and moves all the same; ask again.")


def _stands_still(absent: Absence) -> Recent:
    raise from_code(
        "engine_dead", f"the engine has been in one step for {absent.seconds:.0f} s; ask again when it has ended."
    )


def _detail(
    state: ServerState, name: str, absent: Absence | None
) -> tuple[Row, list[list[int]], dict[str, Any]] | None:
    """(its row, its block tables, the rest)."""
    life = state.inspector.lives.find(name, state.labels)
    if life is None:
        return None
    row, request_id = life.row, life.recorded.id
    if row is None and absent is None:
        row = take_row(state.built, state.labels, state.inspector, request_id)
    elif row is None and absent is not None:
        rows = take_outside(state.built, state.labels, state.inspector, absent).rows
        row = next((one for one in rows if one.id == request_id), None)
    if row is None:
        return None
    views = [seq.view for seq in life.seqs if seq.view is not None]
    tables = [list(table) for table in views[0].tables] if views else []
    return row, tables, life.detail()


def _with_texts(state: ServerState, found: tuple[Row, list[list[int]], dict[str, Any]]) -> dict[str, Any]:
    """With the two tokens at which a prompt and a cached one part as texts, where there is a tokenizer."""
    row, tables, rest = found
    miss, codec = rest["miss"], state.built.loaded.tokenizer
    if miss is not None and codec is not None and miss["here"] is not None and miss["there"] is not None:
        here, there = (codec.decode([miss[side]], skip_special_tokens=False) for side in ("here", "there"))
        sentence = f"{miss['sentence']} ({there!r} and {here!r})"
        rest = {**rest, "miss": {**miss, "sentence": sentence, "here_text": here, "there_text": there}}
    return {**row.json(), "block_table": tables, **rest}


# -- answers ----------------------------------------------------------------------------------------------------------


def _json(value: Any) -> Response:
    return Response(json_bytes(value), media_type="application/json")


async def _large(make: Callable[[], Any]) -> Response:
    """JSON that takes a while to make, beside the event loop."""
    return Response(await asyncio.to_thread(lambda: json_bytes(make())), media_type="application/json")
