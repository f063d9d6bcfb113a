"""`octavo explain RUN|LOG|URL`: which limit bound, or which one binds now, and why each request waits."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo.commands.asking import ApiKey


def explain(
    source: Annotated[
        str,
        typer.Argument(
            help="Decision log (.jsonl, .msgpack), JSON of `octavo replay`'s report, or URL of a running server."
        ),
    ],
    request: Annotated[str | None, typer.Argument(help="Tell about this request only.")] = None,
    start: Annotated[float | None, typer.Option("--from", help="Second to begin with.")] = None,
    end: Annotated[float | None, typer.Option("--to", help="Second to end with.")] = None,
    interval: Annotated[
        float | None,
        typer.Option(help="Seconds of one line before like ones are joined; default: 1, less for short runs."),
    ] = None,
    worst: Annotated[int, typer.Option(help="How many of the longest-waiting requests to tell about.")] = 5,
    strategy: Annotated[
        str | None, typer.Option(help="Which strategy of a replay's report; default: the one it is about.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every second.")] = False,
    api_key: ApiKey = None,
) -> None:
    """Say which limit kept requests waiting, with numbers, and what to change."""
    if source.startswith(("http://", "https://")):
        given = {"--from": start, "--to": end, "--interval": interval, "--strategy": strategy}
        _explain_server(source, request, api_key, as_json, [name for name, value in given.items() if value is not None])
        return
    from octavo.planner.explain import explaining
    from octavo.planner.explain.explained import Question

    explanation = explaining.explain(source, Question(start, end, interval, request, worst, strategy))
    if as_json:
        import json

        print(json.dumps(explaining.to_json(explanation), allow_nan=False))
        return
    from octavo.planner.explain.words import report

    print(report(explanation))


def _explain_server(url: str, request: str | None, api_key: str | None, as_json: bool, others: list[str]) -> None:
    """What a running server says at this moment."""
    import json

    from rich.console import Console

    from octavo.commands import live_view
    from octavo.commands.asking import Server
    from octavo.errors import OctavoError

    if others:
        raise OctavoError(
            f"{', '.join(others)} is for logs and reports; a running server tells of this moment: leave it out."
        )
    server = Server(url, api_key)
    if request is not None:
        found = server.request(request)
        parts = [live_view.one_request(found)]
    else:
        ledger, rows = server.get("/kv/ledger"), server.get("/kv/requests")["requests"]
        found = {"ledger": ledger, "requests": rows}
        parts = [live_view.verdict(ledger), "", live_view.ledger_table(ledger), live_view.waiting(rows)]
    if as_json:
        print(json.dumps(found, allow_nan=False))
        return
    console = Console(highlight=False)
    for part in parts:
        console.print(part)
