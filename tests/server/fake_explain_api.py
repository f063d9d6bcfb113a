"""A stand-in for the server's explain and OpenAI routes, with consistent sample data, for the page and its tests.

`python -m tests.server.fake_explain_api PORT SCENE` serves it; scenes are `load`, `empty`, `reserve` and `crowd`.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from octavo.server import page
from octavo.server.errors import ApiError

Json = dict[str, Any]
KIB, MIB = 1024, 1024**2
BLOCK = 16
TOKEN_BYTES = 32 * KIB
PAGES = 1408
FIXED = {
    "weights": 2_364 * MIB,
    "activations": 212 * MIB,
    "workspace": 64 * MIB,
    "padding": 3 * MIB,
    "outside": 480 * MIB,
}
HOSTILE = '<img src=x onerror="document.title=`stolen`"> it’s a label'
SLOTS = 24

#: One waiting request of each kind: (label, tenant, phase, wait).
WAITS: tuple[tuple[str, str, str, Json], ...] = (
    ("needs-a-slot", "search", "queued", {"cause": "slots", "need": 1, "have": 0, "short": 1, "unit": "slots"}),
    ("too-big-now", "chat", "queued", {"cause": "memory: full", "need": 55, "have": 0, "short": 55, "unit": "blocks"}),
    (
        "one-piece",
        "chat",
        "queued",
        {"cause": "memory: fragmented", "need": 64, "have": 80, "short": 23, "unit": "blocks"},
    ),
    ("held-back", "batch", "queued", {"cause": "memory: held", "need": 30, "have": 12, "short": 18, "unit": "blocks"}),
    ("follower", "chat", "queued", {"cause": "behind", "need": 0, "have": 0, "short": 0, "unit": "blocks"}),
    ("over-quota", "batch", "queued", {"cause": "quota", "need": 210, "have": 200, "short": 10, "unit": "blocks"}),
    (HOSTILE, "search", "prefill", {"cause": "step budget", "need": 512, "have": 0, "short": 512, "unit": "tokens"}),
    ("stalled", "search", "queued", {"cause": "no step", "need": 12, "have": 0, "short": 12, "unit": "s"}),
    (
        "taken-back",
        "chat",
        "preempted",
        {"cause": "memory: full", "need": 29, "have": 0, "short": 29, "unit": "blocks"},
    ),
    ("soon", "chat", "queued", {"cause": "next step", "need": 0, "have": 0, "short": 0, "unit": "blocks"}),
)
UNBLOCKS = {
    "slots": "any of the 24 running requests ends",
    "memory: full": "running requests end or give blocks back",
    "memory: fragmented": "two neighbouring regions end, or compaction joins them",
    "memory: held": "running requests end and 18 blocks less are held back for them",
    "behind": "the request before it is admitted",
    "quota": "tenant batch gives 10 blocks back",
    "step budget": "the prompts before it are computed",
    "no step": "the engine takes a step",
    "next step": "the next step",
}


@dataclass
class Fake:
    """What the tests turn: scene, key, failure, chat template; and what they read: aborted, asked."""

    scene: str = "load"
    key: str | None = None
    failing: int | None = None
    chat_template: bool = True
    token_pause: float = 0.01
    slowness: float = 0.0
    tick: int = 0
    aborted: int = 0
    asked: list[Json] = field(default_factory=list)

    @property
    def strategy(self) -> str:
        return "reserve-max" if self.scene == "reserve" else "paged"

    def running(self) -> list[Json]:
        if self.scene == "empty":
            return []
        if self.scene == "reserve":
            return [self._runner(i, 40 + 30 * i, 512, reserve=352) for i in range(4)]
        return [self._runner(i, 300 + 83 * i % 900, 256) for i in range(SLOTS)]

    def _runner(self, index: int, prompt: int, limit: int, reserve: int | None = None) -> Json:
        generated = (self.tick // 2 + 17 * index) % min(limit, 200)
        tokens = prompt + generated
        blocks = reserve or math.ceil(tokens / BLOCK)
        prefill = index % 11 == 10
        computed = prompt // 2 if prefill else tokens
        shared = 8 if index % 3 == 0 and reserve is None else 0
        return {
            **_row(f"req-{index + 101}", f"chat-{index:02d}", ("chat", "search", "batch")[index % 3]),
            "state": "running",
            "phase": "prefill" if prefill else "decode",
            "prompt_tokens": prompt,
            "computed_tokens": computed,
            "generated_tokens": 0 if prefill else generated,
            "max_tokens": limit,
            "blocks": blocks,
            "shared_blocks": shared,
            "slack_tokens": -computed % BLOCK,
            "reserved_tokens": max(0, blocks - math.ceil(computed / BLOCK)) * BLOCK,
            "cached_tokens": shared * BLOCK,
            "age_s": 3.0 + 0.4 * index + 0.1 * self.tick,
            "waited_s": 0.02 * index,
        }

    def waiting(self) -> list[Json]:
        if self.scene == "empty":
            return []
        if self.scene == "reserve":
            first = {"cause": "memory: full", "need": 352, "have": 0, "short": 352, "unit": "blocks"}
            rest = {"cause": "behind", "need": 0, "have": 0, "short": 0, "unit": "blocks"}
            waits = [("", "chat", "queued", first if i == 0 else rest) for i in range(9)]
        elif self.scene == "crowd":
            waits = [("", "batch", "queued", WAITS[0][3])] * 1500
        else:
            waits = list(WAITS)
        return [self._waiter(i, *wait) for i, wait in enumerate(waits)]

    def _waiter(self, index: int, label: str, tenant: str, phase: str, wait: Json) -> Json:
        preempted = phase == "preempted"
        return {
            **_row(f"req-{index + 401}", label, tenant),
            "state": "waiting",
            "phase": phase,
            "prompt_tokens": 96 + 480 * (index % 4),
            "computed_tokens": 48 if phase == "prefill" else 0,
            "generated_tokens": 34 if preempted else 0,
            "max_tokens": 256,
            "preemptions": int(preempted),
            "age_s": 9.5 - 0.4 * min(index, 20) + 0.1 * self.tick,
            "waited_s": 9.0 - 0.4 * min(index, 20) + 0.1 * self.tick,
            "wait": _wait(self._with_room(wait), index),
        }

    def _with_room(self, wait: Json) -> Json:
        """Waits for memory say what the pool has: all that nobody holds."""
        if wait["cause"] != "memory: full":
            return wait
        room = PAGES - sum(row["blocks"] for row in self.running())
        return {**wait, "need": room + wait["short"], "have": room}

    def rows(self) -> list[Json]:
        return self.running() + self.waiting()

    def causes(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for row in self.waiting():
            counts[row["wait"]["cause"]] = counts.get(row["wait"]["cause"], 0) + 1
        return counts

    def blocks(self) -> Json:
        """Requests' regions cut into pieces and dealt through the pool, then cached prefixes, then free blocks."""
        owners = [row["id"] for row in self.running()]
        runs: list[list[Any]] = []
        piece = 352 if self.scene == "reserve" else 13
        left = {i: _block_states(row) for i, row in enumerate(self.running())}
        while any(left.values()):
            for i, states in left.items():
                for state in states[:piece]:
                    if runs and runs[-1][1:] == [state, i]:
                        runs[-1][0] += 1
                    else:
                        runs.append([1, state, i])
                left[i] = states[piece:]
        rest = PAGES - sum(run[0] for run in runs)
        cached = 0 if self.scene == "reserve" else rest * 2 // 3
        runs += [[length, state, -1] for length, state in ((cached, "cached"), (rest - cached, "free")) if length]
        return {"at": self.at, "step": self.step, "pages": PAGES, "block_size": BLOCK, "owners": owners, "runs": runs}

    @property
    def step(self) -> int:
        return 12_000 + 7 * self.tick

    @property
    def at(self) -> float:
        return 1000.0 + self.tick

    def lines(self) -> dict[str, int]:
        pool = dict.fromkeys(("live", "reserved", "slack", "lookahead", "quarantined"), 0)
        for row in self.running():
            pool["live"] += row["computed_tokens"] * TOKEN_BYTES
            pool["slack"] += row["slack_tokens"] * TOKEN_BYTES
            pool["reserved"] += row["reserved_tokens"] * TOKEN_BYTES
        by_state: dict[str, int] = {}
        for length, state, _ in self.blocks()["runs"]:
            by_state[state] = by_state.get(state, 0) + length * BLOCK * TOKEN_BYTES
        free = by_state.get("free", 0)
        held, fragmented = (free // 4, free // 5) if self.scene == "load" else (0, 0)
        spare = {"cached": by_state.get("cached", 0), "free": free - held - fragmented, "fragmented": fragmented}
        return {**FIXED, **pool, **spare, "held back": held}

    def ledger(self) -> Json:
        lines, rows = self.lines(), self.rows()
        blocks = dict.fromkeys(("cached", "free"), 0)
        for length, state, _ in self.blocks()["runs"]:
            if state in blocks:
                blocks[state] += length
        waiting = len(self.waiting())
        return {
            "at": self.at,
            "step": self.step,
            "strategy": self.strategy,
            "block_size": BLOCK,
            "budget": sum(lines.values()),
            "lines": lines,
            "pool": {"blocks": PAGES, "pinned": PAGES - sum(blocks.values()), **blocks},
            "running": len(rows) - waiting,
            "waiting": waiting,
            "waiting_by_cause": self.causes(),
            "limiting": self._limiting(),
            "longest": 8192,
            "max_num_seqs": SLOTS,
            "max_num_batched_tokens": 512,
        }

    def _limiting(self) -> Json:
        if self.scene == "empty":
            return {"resource": "none", "sentence": "Nothing limits: no request waits."}
        if self.scene == "crowd":
            return {"resource": "slots", "sentence": "All 24 sequence slots are taken; 1,500 requests wait for one."}
        if self.scene == "reserve":
            said = "4 requests hold all 1,408 blocks and have written few of them; the next one needs 352."
            return {"resource": "memory", "sentence": said}
        return {
            "resource": "memory",
            "sentence": "The first that waits for memory is 55 blocks short, with 24 requests running.",
        }

    def timeline(self, since: float) -> Json:
        now = self.ledger()
        samples = [self._sample(i, now) for i in range(self.tick - 180, self.tick + 1)] if self.scene != "empty" else []
        return {"interval_s": 1.0, "samples": [sample for sample in samples if sample["at"] > since]}

    def _sample(self, i: int, now: Json) -> Json:
        wave = 0.55 + 0.35 * math.sin(i / 23) + 0.1 * math.sin(i / 5)
        lines = {**now["lines"]}
        freed = int(lines["live"] * (1 - wave))
        lines["live"] -= freed
        lines["cached"] += freed // 2
        lines["free"] += freed - freed // 2
        causes = {cause: max(0, round(count * wave)) for cause, count in now["waiting_by_cause"].items()}
        quiet = 60 < i % 180 < 75
        return {
            "at": 1000.0 + i,
            "lines": lines,
            "running": round(now["running"] * wave),
            "waiting": sum(causes.values()),
            "waiting_by_cause": causes,
            "ttft_p50": None if quiet else 0.18 + 0.3 * wave,
            "ttft_p99": None if quiet else 0.7 + 1.4 * wave**2,
            "itl_p50": None if quiet else 0.021 + 0.006 * wave,
            "itl_p99": None if quiet else 0.042 + 0.04 * wave**2,
            "tokens_per_s": 0.0 if quiet else 640 * wave,
        }

    def detail(self, name: str) -> Json:
        row = next((row for row in self.rows() if name in (row["id"], row["label"])), None)
        if row is None:
            raise ApiError(404, f"No request {name!r} is known.", code="not_found")
        first = 40 * (int(row["id"][4:]) % 40)
        history = [
            {"step": 11_900, "at": 990.0, "event": "Submitted", "text": f"{row['prompt_tokens']} prompt tokens"},
            {"step": 11_901, "at": 990.1, "event": "Blocked", "text": "slots: needs 1, 0 available"},
        ]
        if row["state"] == "running":
            history.append({"step": 11_950, "at": 993.4, "event": "Admitted", "text": f"{row['blocks']} blocks"})
        missed = {"sentence": "The first differing token is at position 16: another system prompt."}
        return {
            **row,
            "block_table": [[*range(first, first + min(13, row["blocks"])), 1900]] if row["blocks"] else [],
            "miss": missed if row["state"] == "running" and not row["cached_tokens"] else None,
            "finish_reason": None,
            "error": None,
            "history": history,
        }


def _row(id: str, label: str, tenant: str) -> Json:
    zeros = ("priority", "blocks", "shared_blocks", "slack_tokens", "reserved_tokens", "cached_tokens", "preemptions")
    return {"id": id, "label": label, "tenant": tenant, "wait": None, **dict.fromkeys(zeros, 0)}


def _block_states(row: Json) -> list[str]:
    written = row["computed_tokens"] // BLOCK
    tail = 1 if row["computed_tokens"] % BLOCK else 0
    return ["live"] * written + ["slack"] * tail + ["reserved"] * (row["blocks"] - written - tail)


def _wait(wait: Json, index: int) -> Json:
    holders = []
    if wait["cause"].startswith("memory"):
        holders = [{"request": f"req-{101 + i}", "amount": 60 - i} for i in (3, 7, 9, 12)]
    behind = f"req-{400 + index}" if wait["cause"] == "behind" else None
    sentence = f"{wait['cause']}: needs {wait['need']} {wait['unit']}, {wait['have']} available, {wait['short']} short"
    if behind:
        sentence = f"behind {behind} (memory: 18 blocks short)"
    elif wait["cause"] == "memory: fragmented":
        sentence = "fragmented: largest run 41, free 80, need 64 blocks"
    elif wait["cause"] == "no step":
        sentence = "no step for 12 s: the engine stands still"
    elif wait["cause"] == "next step":
        sentence = "next step: there is room, it is offered memory in the next step"
    told = {"sentence": sentence, "behind": behind, "holders": holders, "unblocks": UNBLOCKS[wait["cause"]]}
    return {**wait, **told, "eta_s": 3.2 if wait["cause"] == "slots" else None}


def what_if(fake: Fake, changes: Json) -> Json:
    now = {
        "strategy": fake.strategy,
        "block_size": BLOCK,
        "kv_bytes": PAGES * BLOCK * TOKEN_BYTES,
        "concurrency_mean": 18.4,
        "concurrency_max": 24,
        "ttft_mean": 0.82,
        "ttft_p99": 2.31,
        "itl_mean": 0.0261,
        "e2e_mean": 6.4,
        "preemptions": 3,
        "refused": 0,
        "max_num_seqs": SLOTS,
        "max_num_batched_tokens": 512,
        "waiting_by_cause_s": {"memory: full": 214.0, "slots": 61.5},
        "used_share": 0.83,
    }
    better = {"concurrency_mean": 29.7, "concurrency_max": 38, "ttft_mean": 0.34, "ttft_p99": 0.9, "itl_mean": 0.0298}
    relieved = {"e2e_mean": 5.9, "preemptions": 0, "waiting_by_cause_s": {"slots": 12.0}, "used_share": 0.71}
    given = {key: value for key, value in changes.items() if key in now}
    return {
        "requests": 412,
        "window_s": 300.0,
        "now": now,
        "changed": {**now, **better, **relieved, **given},
        "difference": {"concurrency_mean": 11.3},
        "sentence": "With this change 29.7 requests run at once instead of 18.4; the mean TTFT is 0.34 s, not 0.82 s.",
        "fidelity": "Step times are those measured in the last 300 s; on this traffic the replay of now is within 6 %.",
    }


def create_app(fake: Fake) -> FastAPI:
    app = FastAPI()
    app.include_router(page.router())

    @app.exception_handler(ApiError)
    async def told(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, headers=error.headers())

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Response:
        if request.url.path.startswith(("/kv/", "/v1/")):
            if fake.key is not None and request.headers.get("authorization") != f"Bearer {fake.key}":
                return await told(request, ApiError(401, "The API key is missing or wrong.", code="invalid_api_key"))
            if fake.failing is not None:
                return await told(request, ApiError(fake.failing, "The queue is full.", retry_after=1))
        return await call_next(request)

    @app.get("/kv/ledger")
    async def ledger() -> Json:
        await asyncio.sleep(fake.slowness)
        fake.tick += 1
        return fake.ledger()

    @app.get("/kv/requests")
    async def requests() -> Json:
        return {"at": fake.at, "step": fake.step, "requests": fake.rows()}

    @app.get("/kv/requests/{name:path}")
    async def one(name: str) -> Json:
        return fake.detail(name)

    @app.get("/kv/blocks")
    async def blocks() -> Json:
        return fake.blocks()

    @app.get("/kv/timeline")
    async def timeline(since: float = -math.inf) -> Json:
        return fake.timeline(since)

    @app.post("/kv/what-if")
    async def changed(request: Request) -> Json:
        body = await request.json()
        fake.asked.append(body)
        return what_if(fake, body)

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [{"id": "demo-1b", "object": "model", "max_model_len": 8192}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        fake.asked.append(await request.json())
        if not fake.chat_template:
            raise ApiError(400, "The model has no chat template: use /v1/completions.", code="no_chat_template")
        return StreamingResponse(_speak(fake, chat=True), media_type="text/event-stream")

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        fake.asked.append(await request.json())
        return StreamingResponse(_speak(fake, chat=False), media_type="text/event-stream")

    return app


async def _speak(fake: Fake, *, chat: bool) -> AsyncIterator[str]:
    words = ("Light ", "scatters ", "on ", "small ", "molecules, ", "blue ", "<b>most</b>. ")
    asked = fake.asked[-1]["max_tokens"]
    done = False
    try:
        for i in range(asked):
            text = words[i % len(words)]
            part = {"delta": {"content": text}} if chat else {"text": text}
            chunk = {"id": "req-101", "choices": [{"index": 0, "finish_reason": None, **part}]}
            yield f"data: {json.dumps(chunk)}\n\n"
            await asyncio.sleep(fake.token_pause)
        last = {"id": "req-101", "choices": [{"index": 0, "finish_reason": "length", "delta": {}}]}
        usage = {"id": "req-101", "choices": [], "usage": {"prompt_tokens": 6, "completion_tokens": asked}}
        yield f"data: {json.dumps(last)}\n\ndata: {json.dumps(usage)}\n\ndata: [DONE]\n\n"
        done = True
    finally:
        fake.aborted += not done


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(create_app(Fake(scene=sys.argv[2])), port=int(sys.argv[1]), log_level="warning")
