"""`octavo top URL`: a live view of a running server."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from octavo.commands.asking import ApiKey


def top(
    url: Annotated[str, typer.Argument(help="Address of a running server, such as http://127.0.0.1:8000.")],
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    api_key: ApiKey = None,
) -> None:
    """Show where memory is, who runs, and why the others wait; Ctrl-C ends it."""
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.text import Text

    from octavo.commands import live_view
    from octavo.commands.asking import Server
    from octavo.errors import OctavoError

    server, console = Server(url, api_key), Console()

    def frame() -> RenderableType:
        ledger, requests = server.get("/kv/ledger"), server.get("/kv/requests")["requests"]
        samples = server.get("/kv/timeline")["samples"]
        rows = len(requests) if once else max(4, console.size.height - 12)
        return Group(
            live_view.verdict(ledger),
            live_view.ledger_bar(ledger),
            live_view.latencies(samples),
            Text(),
            live_view.requests_table(requests, rows),
        )

    first = frame()
    if once:
        console.print(first)
        return
    with Live(first, console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                try:
                    live.update(frame(), refresh=True)
                except OctavoError as error:  # it may come back
                    live.update(Text(f"{error}\nTrying again.", style="bold red"), refresh=True)
        except KeyboardInterrupt:
            return
