"""`octavo serve MODEL`: the engine behind the OpenAI API, with a report of what it starts with."""

from __future__ import annotations

import inspect
import os
import socket
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer

from octavo.commands import options
from octavo.commands.outputs import make_folder, try_writing
from octavo.errors import OctavoError
from octavo.server.settings import Settings, flag_of, read_settings
from octavo.server.values import SIZES, Setting, all_settings

if TYPE_CHECKING:
    from octavo.build import BuiltEngine

#: What each extra brings: the modules that serving needs.
_NEEDED = {"engine": ("torch", "transformers"), "serve": ("fastapi", "uvicorn", "prometheus_client", "yaml")}
_METAVARS: Mapping[Any, str] = {int: "N", float: "NUMBER", str: "TEXT"}


def serve(config: str | None = None, log: Path | None = None, verbose: bool = False, **given: Any) -> None:
    """Serve MODEL over HTTP: the OpenAI API, /metrics, and the page that says where memory is and why requests wait.

    Flags beat OCTAVO_* variables (OCTAVO_MAX_NUM_SEQS=64), these beat the settings file, and that beats the defaults.
    """
    _check_installed()
    flags = {name: value for name, value in given.items() if value is not None and value != []}
    settings = read_settings(flags, os.environ, config)
    _check_early(settings, log)
    from octavo.server.lifecycle import bind

    address = bind(settings.config.host, settings.config.port)
    try:
        _serve(settings, address, log, verbose)
    except KeyboardInterrupt:  # while the model is being loaded
        raise SystemExit(130) from None


def _serve(settings: Settings, address: socket.socket, log: Path | None, verbose: bool) -> None:
    """Load, report, and answer until a signal comes."""
    from octavo.server.app import build, create_app
    from octavo.server.lifecycle import DrainingServer, address_of, listen

    built = build(settings.config, decision_log=log)
    app = create_app(settings.config, built)
    _report(settings, built.engine, endpoints_of(app, settings.config.page), verbose)
    listen(address)
    DrainingServer(app, lambda: print(f"serving {address_of(address)}", file=sys.stderr, flush=True)).run([address])


def _report(settings: Settings, engine: BuiltEngine, endpoints: list[str], verbose: bool) -> None:
    from rich.console import Console

    from octavo.server.startup import print_start_up, start_up

    # A pipe has no width of its own.
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 120)
    print_start_up(start_up(settings, engine, endpoints), console, verbose=verbose)


def endpoints_of(app: Any, page: bool) -> list[str]:
    """The paths that the app answers, the page first."""
    return (["/"] if page else []) + list(app.openapi()["paths"])


def _check_installed() -> None:
    missing = {extra: [name for name in names if find_spec(name) is None] for extra, names in _NEEDED.items()}
    if any(missing.values()):
        names = ", ".join(name for names in missing.values() for name in names)
        raise OctavoError(f"serving needs what is not installed ({names}); run: pip install 'octavo[engine,serve]'")


def _check_early(settings: Settings, log: Path | None) -> None:
    """What would otherwise be found only after the model has been loaded."""
    template = settings.config.chat_template
    if template is not None and not Path(template).is_file():
        raise OctavoError(
            f"chat_template is {template!r} ({settings.sources['chat_template']}), which is no file; "
            "name a file with a Jinja template."
        )
    if log is not None:
        make_folder(log.parent, "log")
        try_writing(log, "log")


def _parameters() -> list[inspect.Parameter]:
    """The command's parameters: one for each setting, whatever fields the dataclasses have."""
    config = Annotated[str | None, typer.Option(metavar="FILE", help="YAML file with settings by the same names.")]
    log = Annotated[Path | None, typer.Option(metavar="FILE", help="Decision log, as JSON lines or .msgpack.")]
    verbose = Annotated[bool, typer.Option("--verbose", help="Report the defaults too.")]
    model = Annotated[str | None, typer.Argument(help=options.help_of(options.Model))]
    settings = all_settings()
    order = [name for name in options.SETTINGS if name in settings]
    order += [name for name in settings if name not in order and name != "model"]
    return [
        _parameter("model", model),
        _parameter("config", config),
        *(_parameter(name, _option(settings[name])) for name in order),
        _parameter("log", log),
        _parameter("verbose", verbose, False),
    ]


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option(setting: Setting) -> Any:
    """The flag of a setting. All take text, which is read as that of a variable or a file is."""
    wording = options.SETTINGS.get(setting.name, options.Wording(""))
    words = f"{wording.help} {_default(setting)}".strip()
    flag = flag_of(setting.name)
    if setting.kind is bool:
        return Annotated[bool | None, typer.Option(f"{flag}/{flag_of(setting.name, False)}", help=words)]
    metavar = "BYTES" if setting.name in SIZES else "NAME=N,..." if get_origin(setting.kind) else ""
    metavar = metavar or _METAVARS[setting.kind]
    names = dict.fromkeys((flag, *wording.names))
    if setting.many:
        return Annotated[list[str] | None, typer.Option(*names, metavar="TEXT", help=words)]
    return Annotated[str | None, typer.Option(*names, metavar=metavar, help=words)]


def _default(setting: Setting) -> str:
    """The default in words, where there is one that says something."""
    value = setting.default
    if setting.many or value is None or get_origin(setting.kind):
        return ""
    if isinstance(value, bool):
        value = "on" if value else "off"
    return f"Default: {f'{value >> 20}MiB' if setting.name in SIZES else value}."


serve.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
