"""The command line: each command is imported only when it is called, so that `octavo size` never waits for torch."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "run": "Answer a prompt with a model, streaming the text.",
    "serve": "The OpenAI API over HTTP, and a page that says where memory is and why requests wait.",
    "size": "What the KV cache of a model costs, and what fits a device.",
    "compare": "The same requests through the real engine under each placement strategy.",
    "replay": "Recorded traffic on a deployment, under each strategy, without a GPU.",
    "plan": "The largest rate a deployment carries, the cheapest fleet for a rate, and what to change.",
    "explain": "Which limit bound, or binds now in a running server, and why each request waits.",
    "top": "A live view of a running server: its memory, its requests and why they wait.",
    "calibrate": "Time steps on this machine, or fit a running engine's log, so that replays are about it.",
    "validate": "Rerun measured runs of real engines and print how far off the planner is.",
    "bench": "How fast a model runs here, and how far that is from what the machine allows.",
}


def main() -> None:
    """Entry point of `octavo`. Bad input ends in one sentence on stderr and exit code 1."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return
    if arguments[0] == "--version":
        from octavo import __version__

        print(__version__)
        return
    name = arguments[0]
    if name not in COMMANDS:
        print(f"octavo: there is no command {name!r}.\n\n{_usage()}", file=sys.stderr)
        raise SystemExit(2)
    _call(name)


def _usage() -> str:
    lines = [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
    return "Usage: octavo COMMAND [ARGUMENTS]  (octavo COMMAND --help tells more)\n\nCommands:\n" + "\n".join(lines)


def _call(name: str) -> None:
    import typer

    from octavo.errors import OctavoError
    from octavo.openmp import spin_shortly

    spin_shortly()
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name)(getattr(importlib.import_module(f"octavo.commands.{name}"), name))
    try:
        app(args=sys.argv[2:], prog_name=f"octavo {name}")
    except OctavoError as error:
        print(f"octavo {name}: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
