"""`octavo explain RUN|LOG`: which limit bound, second by second and request by request."""

from __future__ import annotations

from typing import Annotated

import typer


def explain(
    source: Annotated[
        str, typer.Argument(help="Decision log (.jsonl, .msgpack) or the JSON of `octavo replay`'s report.")
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
) -> None:
    """Say which limit kept requests waiting, with numbers, and what to change."""
    from octavo.errors import OctavoError
    from octavo.planner.explain import explaining
    from octavo.planner.explain.explained import Question

    if source.startswith(("http://", "https://")):
        raise OctavoError(
            f"source is {source!r}; to explain a running engine a server is needed that can be asked, and this Octavo "
            "has none. Give a decision log or the JSON of a replay's report."
        )
    explanation = explaining.explain(source, Question(start, end, interval, request, worst, strategy))
    if as_json:
        import json

        print(json.dumps(explaining.to_json(explanation), allow_nan=False))
        return
    from octavo.planner.explain.words import report

    print(report(explanation))
