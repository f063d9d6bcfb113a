"""Soak of `octavo serve`: twice the load that it can sustain, clients that hang up, every request accounted for.

Finds the sustainable rate with a closed loop, then sends twice that for --minutes: mixed lengths, streams and whole
answers, completions and chats, two tenants, 30 % of the accepted requests losing their client at a random moment, queue
caps set. Scrapes /metrics every second. Checked at the end, with exit code 1 if one does not hold:
  no 5xx but 503 with code queue_timeout; no error in the server's log
  accepted + refused + never read = sent, finished + expired = accepted: client, access log and /metrics agree
  quiet: nothing runs or waits, every block of the pool is free or cached
  RSS within 5 % over the second half; the ledger's lines sum to the budget exactly at every scrape

    python benchmarks/server_soak.py --minutes 10
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server_client import STAY, Answer, Client, Leave
from server_process import ServerProcess, by_label, octavo_serve, parse_metrics, running, total, work_folder

TENANTS = ("ada", "bob")
SETTINGS = {
    "kv_memory": "64MiB",
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "max_queue": 24,
    "max_queued_tokens": 6000,
    "max_queue_seconds": 4,
    "order": "fair",
    "api_keys": [{"key": f"key-of-{name}", "tenant": name} for name in TENANTS],
}
IN_FLIGHT = 40  # of the closed loop: more than run at once
RSS_BAR = 0.05
LEAVING_BAR = 0.3
METRICS = ("/metrics", "/kv/ledger", "/kv/requests")


@dataclass(frozen=True, slots=True)
class Planned:
    """One request: what is sent where, and when its client hangs up."""

    label: str
    tenant: str
    path: str
    body: Mapping[str, Any]
    leave: Leave = STAY


@dataclass(slots=True)
class Books:
    """What the client saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    left: list[str] = field(default_factory=list)  # labels of those that hung up
    odd: list[str] = field(default_factory=list)  # answers that should not be
    latency: float = 2.0  # of finished requests, smoothed; hanging up happens within it
    ttft: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in TENANTS})


@dataclass(slots=True)
class Scrapes:
    """What /metrics and the kernel said, once a second."""

    rss: list[tuple[float, int]] = field(default_factory=list)
    count: int = 0
    wrong: list[str] = field(default_factory=list)  # sums that are not the budget
    stale: int = 0
    causes: Counter[str] = field(default_factory=Counter)  # scrapes at which somebody waited for it


class Traffic:
    """Draws requests: lognormal lengths, ids as prompts so that lengths are exact."""

    def __init__(self, model: str, seed: int, leaving: float) -> None:
        self._rng = random.Random(seed)
        self._model, self.leaving = model, leaving
        self._count = 0

    def draw(self, latency: float) -> Planned:
        rng = self._rng
        self._count += 1
        prompt = min(600, max(1, round(60 * rng.lognormvariate(0.0, 0.9))))
        if rng.random() < 0.01:
            prompt = 20_000  # refused: longer than the model can take
        output = min(200, max(1, round(40 * rng.lognormvariate(0.0, 0.7))))
        fields: dict[str, Any] = {"model": self._model, "max_tokens": output, "temperature": rng.choice((0, 0.8))}
        fields |= {"stream": rng.random() < 0.7, "ignore_eos": True}
        if rng.random() < 0.05:
            fields |= {"n": 2, "temperature": 1.0}
        path = "/v1/completions"
        if rng.random() < 0.2:
            path = "/v1/chat/completions"
            fields["messages"] = [{"role": "user", "content": "word " * min(prompt, 600)}]
        else:
            fields["prompt"] = [rng.randrange(100, 40_000) for _ in range(prompt)]
        leave = STAY
        if rng.random() < self.leaving:
            leave = self._when(fields["stream"], output, latency)
        return Planned(f"soak-{self._count}", rng.choice(TENANTS), path, fields, leave)

    def _when(self, stream: bool, output: int, latency: float) -> Leave:
        """At once, at a moment within the usual time, or after some packets of a stream."""
        rng = self._rng
        reset = rng.random() < 0.5
        kind = rng.random()
        if stream and kind < 0.4:
            return Leave(packets=rng.randint(1, output), reset=reset)
        return Leave(seconds=0.0 if kind > 0.95 else rng.random() * 0.9 * latency, reset=reset)


async def send(clients: Mapping[str, Client], planned: Planned, books: Books) -> None:
    client = clients[planned.tenant]
    answer = await client.post(planned.path, planned.body, planned.leave, planned.label)
    outcome = outcome_of(answer, bool(planned.body["stream"]))
    books.outcomes[outcome] += 1
    if outcome == "left":
        books.left.append(planned.label)
    elif outcome == "finished":
        books.latency += 0.05 * (answer.last - answer.sent - books.latency)
        if answer.first is not None and planned.body["stream"]:
            books.ttft[planned.tenant].append(answer.first - answer.sent)
    elif outcome.startswith("odd"):
        books.odd.append(f"{planned.label}: {answer.status} {answer.error} {b''.join(answer.packets)[-300:]!r}")


def outcome_of(answer: Answer, stream: bool) -> str:
    if answer.left:
        return "left"
    if answer.error is not None:
        return "odd: connection"
    if answer.status == 200:
        ended = not stream or (b'"error"' not in (body := answer.body) and body.endswith(b"data: [DONE]\n\n"))
        return "finished" if ended else "odd: stream"
    code = answer.json()["error"]["code"]
    if answer.status == 503 and code == "queue_timeout" and "retry-after" in answer.headers:
        return "expired"
    if answer.status == 429 and "retry-after" in answer.headers:
        return "refused"
    if answer.status == 400 and code == "context_length_exceeded":
        return "refused"
    return f"odd: {answer.status}"


async def sustainable(clients: Mapping[str, Client], traffic: Traffic, books: Books, seconds: float) -> float:
    """Finished requests per second with always `IN_FLIGHT` in flight. The first fifth of the time does not count."""
    start = time.monotonic()
    ended: list[float] = []

    async def one() -> None:
        while time.monotonic() < start + seconds:
            before = books.outcomes["finished"]
            await send(clients, traffic.draw(books.latency), books)
            if books.outcomes["finished"] > before:
                ended.append(time.monotonic())

    await asyncio.gather(*(one() for _ in range(IN_FLIGHT)))
    counted = [at for at in ended if start + seconds / 5 <= at <= start + seconds]
    return len(counted) / (seconds * 4 / 5)


async def press(clients: Mapping[str, Client], traffic: Traffic, books: Books, rate: float, seconds: float) -> None:
    """Open loop: arrivals as a Poisson process, whatever the server does."""
    rng, tasks = random.Random(3), set()
    due = start = time.monotonic()
    while due < start + seconds:
        task = asyncio.create_task(send(clients, traffic.draw(books.latency), books))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    while tasks:
        await asyncio.wait(tasks)


async def scrape_on(server: ServerProcess, client: Client, scrapes: Scrapes) -> None:
    start = time.monotonic()
    while True:
        metrics = await scrape(client)
        scrapes.count += 1
        scrapes.rss.append((time.monotonic() - start, server.rss()))
        lines, budget = total(metrics, "octavo_memory_bytes"), total(metrics, "octavo_memory_budget_bytes")
        if lines != budget:
            scrapes.wrong.append(f"{lines:.0f} is not {budget:.0f}")
        scrapes.stale += total(metrics, "octavo_engine_responding") == 0
        waiting = by_label(metrics, "octavo_requests_waiting", "reason")
        scrapes.causes.update(cause for cause, count in waiting.items() if count)
        await asyncio.sleep(1.0 - (time.monotonic() - start) % 1.0)


async def scrape(client: Client) -> dict[str, dict[str, float]]:
    answer = await client.get("/metrics")
    if answer.status != 200:
        raise SystemExit(f"/metrics answers {answer.status} {answer.error}")
    return parse_metrics(answer.body.decode())


async def quiet(client: Client, patience: float = 15.0) -> str | None:
    """What is wrong with the pool once everybody has gone; None if nothing is."""
    end = time.monotonic() + patience
    while True:
        ledger = (await client.get("/kv/ledger")).json()
        rows = (await client.get("/kv/requests")).json()["requests"]
        pool = ledger["pool"]
        busy = {name: ledger["lines"][name] for name in ("live", "reserved", "slack", "lookahead", "quarantined")}
        still = ledger["running"] == ledger["waiting"] == pool["pinned"] == 0 and not rows and not any(busy.values())
        if still and pool["cached"] + pool["free"] == pool["blocks"]:
            return None
        if time.monotonic() > end:
            return (
                f"running {ledger['running']}, waiting {ledger['waiting']}, pool {pool}, {busy}, {len(rows)} requests"
            )
        await asyncio.sleep(0.2)


def reckon(
    books: Books, metrics: Mapping[str, Mapping[str, float]], log: list[dict[str, Any]]
) -> list[tuple[str, bool]]:
    """Client, access log and /metrics against each other."""
    sent = books.outcomes.total()
    lines = [line for line in log if line["path"] not in METRICS]
    unread = [line for line in lines if "requests" not in line and line.get("disconnected")]
    left = set(books.left)
    gone = Counter(fate_of(line) for line in lines if line["id"] in left)
    accepted, expired = (
        total(metrics, "octavo_requests_accepted_total"),
        total(metrics, "octavo_requests_expired_total"),
    )
    refused = by_label(metrics, "octavo_requests_refused_total", "code")
    ended = by_label(metrics, "octavo_requests_finished_total", "reason")
    print(f"\nclient: {sent} sent: {dict(books.outcomes)}; those that left, by the access log: {dict(gone)}")
    print(f"server: accepted {accepted:.0f}, refused {dict(+refused)}, expired {expired:.0f}, ended {dict(+ended)}")
    print(f"access log: {len(lines)} lines, {len(unread)} of them of clients gone before their body was read")
    finished = ended["stop"] + ended["length"]
    return [
        (f"{sent} sent = {len(lines)} in the access log", sent == len(lines)),
        (
            f"accepted + refused + never read = {accepted + refused.total() + len(unread):.0f} = sent",
            accepted + refused.total() + len(unread) == sent,
        ),
        (
            f"finished + aborted + expired = {ended.total() + expired:.0f} = accepted",
            ended.total() + expired == accepted,
        ),
        (f"no request ended with an error ({ended['error']})", ended["error"] == 0),
        (
            f"{books.outcomes['finished']} answers complete, {finished} finished on the server, "
            f"{finished - books.outcomes['finished']} of them after their client had left",
            0 <= finished - books.outcomes["finished"] <= len(left),
        ),
        (
            f"refusals: the client's {books.outcomes['refused']} and {gone['refused']} that left = {refused.total()}",
            books.outcomes["refused"] + gone["refused"] == refused.total(),
        ),
        (
            f"{gone['aborted or ended'] / accepted:.0%} of the accepted requests lost their client",
            gone["aborted or ended"] >= LEAVING_BAR * accepted,
        ),
        ("no answer that should not be" + "".join(f"\n    {odd}" for odd in books.odd[:5]), not books.odd),
        (
            "no 5xx in the access log but 503",
            not [line for line in lines if (line["status"] or 0) >= 500 and line["status"] != 503],
        ),
    ]


def fate_of(line: Mapping[str, Any]) -> str:
    """What became of a request whose client left, as the access log says."""
    if "requests" not in line:
        return "never read"
    if line["status"] == 503:
        return "expired"
    if line["status"] in (400, 429):
        return "refused"
    return "aborted or ended"


def flat(scrapes: Scrapes, since: float) -> tuple[str, bool]:
    """RSS over the second half of the load."""
    late = [rss for at, rss in scrapes.rss if at >= since]
    spread = max(late) / min(late) - 1
    first, last = scrapes.rss[0][1] / 2**20, late[-1] / 2**20
    text = f"RSS over the second half: {min(late) / 2**20:.1f} to {max(late) / 2**20:.1f} MiB ({spread:.1%})"
    return f"{text}; {first:.0f} MiB at the start, {last:.0f} at the end", spread <= RSS_BAR


async def soak(server: ServerProcess, given: argparse.Namespace) -> list[tuple[str, bool]]:
    clients = {name: Client(server.url, f"key-of-{name}") for name in TENANTS}
    books, scrapes = Books(), Scrapes()
    traffic = Traffic(given.model, 1, leaving=0.0)
    rate = given.rate or await sustainable(clients, traffic, books, given.probe_seconds)
    print(f"sustainable: {rate:.2f} requests/s; sending {2 * rate:.2f} for {given.minutes:g} minutes", flush=True)
    scraper = asyncio.create_task(scrape_on(server, clients["ada"], scrapes))
    start = time.monotonic()
    cpu, own = server.cpu(), time.process_time()
    # Labels go on where the closed loop's ended: the books are of both.
    traffic.leaving = given.leaving
    await press(clients, traffic, books, 2 * rate, given.minutes * 60)
    wall = time.monotonic() - start
    print(f"CPU: server {(server.cpu() - cpu) / wall:.2f} cores, client {(time.process_time() - own) / wall:.3f}")
    left_behind = await quiet(clients["bob"])
    scraper.cancel()
    metrics = await scrape(clients["bob"])
    for name, times in books.ttft.items():
        times.sort()
        if times:
            print(f"TTFT of {name}: p50 {times[len(times) // 2]:.2f} s, p99 {times[int(len(times) * 0.99)]:.2f} s")
    print(
        f"{scrapes.count} scrapes ({scrapes.stale} stale); scrapes at which somebody waited for: {dict(scrapes.causes)}"
    )
    await asyncio.sleep(0.5)  # the last lines of the access log
    trouble = [line for line in server.others() if "Traceback" in line or "rror" in line]
    return [
        *reckon(books, metrics, server.access_log()),
        ("the server's log has no error" + "".join(f"\n    {line[:200]}" for line in trouble[:5]), not trouble),
        (f"quiet: {left_behind or 'nothing runs, waits or holds a block'}", left_behind is None),
        flat(scrapes, wall / 2),
        (
            f"the ledger's lines sum to the budget at {scrapes.count - len(scrapes.wrong)} of {scrapes.count} scrapes",
            not scrapes.wrong,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, help="sustainable requests per second; default: it is measured")
    parser.add_argument("--probe-seconds", type=float, default=60.0, help="for measuring it")
    parser.add_argument("--leaving", type=float, default=0.45, help="share of clients that mean to; some end before")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the server")
    parser.add_argument("--folder", type=Path, help="for the server's log; default: a new one in /tmp")
    given = parser.parse_args()
    folder = work_folder(given.folder)
    settings = SETTINGS | dict(pair.split("=", 1) for pair in given.set)
    with running(octavo_serve(given.model, settings, folder), folder) as server:
        checks = asyncio.run(soak(server, given))
    print()
    for text, holds in checks:
        print(f"{'ok  ' if holds else 'FAIL'}  {text}")
    (folder / "soak.json").write_text(json.dumps(checks))
    print(f"log: {folder / 'server.log'}")
    raise SystemExit(0 if all(holds for _, holds in checks) else 1)


if __name__ == "__main__":
    main()
