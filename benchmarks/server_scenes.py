"""Pictures of the page while requests wait, one for each reason: `python benchmarks/server_scenes.py`.

For every scene a server with the demo model is started with the settings that make its kind of wait happen, loaded over
HTTP, and looked at in Chromium. A scene whose reason the page does not show fails. Writes
docs/img/server-wait-NAME.png, and from the scene `memory` also server-light.png, server-dark.png, server-phone.png and
server-blocks.png.
"""

from __future__ import annotations

import argparse
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from playwright.sync_api import Browser, sync_playwright

from octavo.config import EngineConfig
from octavo.runner.api import StepPlan, StepResult
from octavo.server.app import build, create_app
from octavo.server.config import ServerConfig, TenantConfig
from server_screenshots import PICTURES, chromium, open_page, take

WORDS = "the cache cuts memory into blocks and hands them out as tokens arrive so that nothing stays empty "
KEY = "scene"


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one kind: so many, sent `every` seconds, each again when it has ended if `again`."""

    name: str
    count: int
    prompt_words: int
    tokens: int
    every: float = 0.05
    again: bool = False


@dataclass(frozen=True, slots=True)
class Scene:
    """`shows`: words of the reason that the list of requests must show. `hold`: stop the runner before looking."""

    name: str
    shows: str
    loads: tuple[Load, ...]
    engine: dict[str, Any] = field(default_factory=dict)
    quota: int | None = None
    hold: bool = False
    wait: float = 4.0


SCENES = (
    Scene(
        "memory",
        "Memory is",
        (Load("chat", 10, 60, 220, again=True), Load("report", 3, 500, 300, every=0.4, again=True)),
        dict(kv_memory=30 << 20, max_num_seqs=32, max_num_batched_tokens=256),
        wait=14.0,
    ),
    Scene(
        "full",
        "Memory is full",
        (Load("long", 6, 300, 400),),
        dict(kv_memory=24 << 20, admission="prompt", max_num_seqs=16, max_skips=8),
    ),
    Scene("held", "Memory is held back", (Load("long", 6, 200, 600),), dict(kv_memory=30 << 20, max_num_seqs=16)),
    Scene(
        "fragmented",
        "Memory is fragmented",
        (Load("short", 5, 20, 40, every=0.15, again=True), Load("long", 3, 200, 700, again=True)),
        dict(kv_memory=45 << 20, kv_strategy="reserve-pow2", max_num_seqs=32),
        wait=6.0,
    ),
    Scene(
        "slots", "All sequence slots are taken", (Load("chat", 6, 40, 400),), dict(kv_memory=256 << 20, max_num_seqs=2)
    ),
    Scene(
        "behind",
        "Behind another request",
        (Load("big", 4, 400, 600), Load("small", 4, 10, 100, every=0.3)),
        dict(kv_memory=30 << 20, max_num_seqs=16, max_skips=0),
    ),
    Scene(
        "budget",
        "token budget is used up",
        (Load("prompt", 6, 1200, 60, every=0.01, again=True),),
        dict(kv_memory=512 << 20, max_num_seqs=32, max_num_batched_tokens=64),
        wait=2.0,
    ),
    Scene("quota", "quota is used up", (Load("tenant", 6, 60, 400),), dict(kv_memory=256 << 20), quota=40),
    Scene(
        "no-step",
        "No step runs",
        (Load("chat", 5, 40, 400),),
        dict(kv_memory=256 << 20, max_num_seqs=2),
        hold=True,
    ),
)


class Held:
    """The model's runner, which can be stopped as a hung device would."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.gate = threading.Event()
        self.gate.set()

    def run(self, plan: StepPlan) -> StepResult:
        self.gate.wait()
        result: StepResult = self._runner.run(plan)
        return result

    def forget(self, seq: Any) -> None:
        self._runner.forget(seq)


@contextmanager
def serving(model: str, scene: Scene) -> Iterator[tuple[str, Held]]:
    """A server for the scene: its address, and its runner."""
    keys = (TenantConfig(KEY, "product", quota_blocks=scene.quota),) if scene.quota else ()
    config = ServerConfig(EngineConfig(model, **scene.engine), api_keys=keys, access_log=False, stall_seconds=2)
    built = build(config)
    held = Held(built.engine.engine.runner)
    built.engine.engine.runner = held
    listener = socket.create_server(("127.0.0.1", 0))
    web = uvicorn.Server(uvicorn.Config(create_app(config, built), log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not web.started:
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", held
    finally:
        held.gate.set()
        web.should_exit = True
        thread.join(20)


@contextmanager
def loaded(url: str, model: str, loads: tuple[Load, ...]) -> Iterator[None]:
    """The loads, for as long as the block runs."""
    over = threading.Event()

    def send(load: Load, i: int) -> None:
        words = (f"Question {i} of {load.name}. " + WORDS * 200).split()
        body = {
            "model": model,
            "prompt": " ".join(words[: load.prompt_words]),
            "max_tokens": load.tokens,
            "ignore_eos": True,
            "temperature": 0.8,
            "stream": True,
        }
        headers = {"x-request-id": f"{load.name}-{i}", "authorization": f"Bearer {KEY}"}
        while not over.is_set():
            try:
                with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
                    for _ in answer.iter_lines():
                        if over.is_set():
                            return
            except httpx.HTTPError as error:
                if not over.is_set():
                    print(f"  {load.name}-{i}: {error!r}")
                return
            if not load.again:
                return

    threads = []
    for load in loads:
        for i in range(load.count):
            threads.append(threading.Thread(target=send, args=(load, i), daemon=True))
            threads[-1].start()
            time.sleep(load.every)
    try:
        yield
    finally:
        over.set()


def look(browser: Browser, url: str, scene: Scene, out: Path, patience: float = 20.0) -> None:
    """Wait until the list shows the reason, and take its picture. Raises SystemExit if it never does."""
    key = KEY if scene.quota else None
    args = argparse.Namespace(url=url, key=key, watch=1.0, out=out, section=["blocks", "waiting"], full=False)
    page = open_page(browser, args, "light")
    part = page.locator("#requests")
    part.scroll_into_view_if_needed()
    end = time.monotonic() + patience
    while scene.shows not in part.inner_text():
        if time.monotonic() > end:
            raise SystemExit(f"scene {scene.name}: the page never said {scene.shows!r}:\n{part.inner_text()}")
        page.wait_for_timeout(200)
    part.screenshot(path=out / f"server-wait-{scene.name}.png")
    print(out / f"server-wait-{scene.name}.png")
    page.close()
    if scene.name == "memory":
        for picture in PICTURES:
            take(browser, args, picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    parser.add_argument("--scene", action="append", help="only this one; may be repeated")
    args = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for scene in SCENES:
            if args.scene and scene.name not in args.scene:
                continue
            with serving(args.model, scene) as (url, held), loaded(url, args.model, scene.loads):
                time.sleep(scene.wait)
                if scene.hold:
                    held.gate.clear()
                    time.sleep(3)
                look(browser, url, scene, args.out)
        browser.close()


if __name__ == "__main__":
    main()
