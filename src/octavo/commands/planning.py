"""What `octavo replay` and `octavo plan` share: options to deployments and traces, and files checked before work."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from octavo.commands.outputs import make_folder, same, try_writing

if TYPE_CHECKING:
    from octavo.planner.deployment import Deployment
    from octavo.planner.replay import ReplayOptions
    from octavo.planner.slo import SLO
    from octavo.planner.traces.api import Trace
    from octavo.report.replay_data import ReplayReport

BYTES = ("memory", "kv_memory")
#: Options that say where results go and who computes them, not what they are.
OUTPUTS = ("report", "csv", "perfetto", "as_json", "workers")
LIVES = 500  # requests whose lives a report shows


def deployment_of(options: Mapping[str, Any], **changes: Any) -> Deployment:
    """The deployment that the command's options name; options are called as its fields are."""
    from octavo.config import parse_bytes
    from octavo.planner.deployment import Deployment

    given = {field.name: options[field.name] for field in fields(Deployment) if field.name in options}
    for name in BYTES:
        if given.get(name) is not None:
            given[name] = parse_bytes(given[name], name.replace("_", "-"))
    return Deployment(**{**given, **changes})


def trace_of(options: Mapping[str, Any]) -> Trace:
    """The trace with window, first requests, scale, rate and seed applied, in this order.

    Without recorded times, `rate` draws them by `seed`; with them, `seed` draws another day of the same traffic.
    Raises TraceError.
    """
    from octavo.planner.traces import transforms
    from octavo.planner.traces.api import TraceError
    from octavo.planner.traces.opening import open_trace

    trace = open_trace(options["trace"])
    if options.get("seed") is not None and options["seed"] < 0:
        raise TraceError(f"seed is {options['seed']}; it must be 0 or more.")
    seed, rate = options.get("seed"), options.get("rate")
    if (window := options.get("window")) is not None:
        trace = transforms.window(trace, *_window(window))
    if (requests := options.get("requests")) is not None:
        trace = transforms.limited(trace, requests)
    if not trace.timed:
        if rate is None and options.get("concurrency") is None:
            raise TraceError(
                f"{trace.name} has no arrival times; give --rate to draw them, or --concurrency for a closed loop."
            )
        return trace if rate is None else transforms.with_arrivals(trace, rate, seed or 0)
    if (factor := options.get("scale")) is not None:
        trace = transforms.scaled(trace, factor)
    if rate is not None:
        trace = transforms.at_rate(trace, rate)
    return trace if seed is None else transforms.resampled(trace, seed)


def _window(text: str) -> tuple[float, float]:
    from octavo.errors import OctavoError

    start, colon, end = text.partition(":")
    try:
        times = (float(start or 0), float(end or inf))
    except ValueError:
        times = (0.0, 0.0)
    if not colon or not 0 <= times[0] < times[1]:
        raise OctavoError(f"window is {text!r}; write START:END in seconds, such as 600:1200, 0 <= START < END.")
    return times


def strategies_named(text: str, option: str = "strategy") -> tuple[str, ...]:
    """Strategies by commas, or all. Raises OctavoError naming the option and what is unknown or doubled."""
    from octavo.errors import OctavoError
    from octavo.kv.strategies import STRATEGIES

    if text.strip() == "all":
        return STRATEGIES
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in STRATEGIES:
            raise OctavoError(f"{option} names {name!r}; choose from {', '.join(STRATEGIES)}, or all.")
        if names.count(name) > 1:
            raise OctavoError(f"{option} names {name!r} {names.count(name)} times; name each one once.")
    return names


def command_line(context: typer.Context) -> str:
    """The command that makes this answer again: options that are not at their defaults, without those of output."""
    words = ["octavo", context.info_name.rpartition(" ")[2] if context.info_name else ""]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name in OUTPUTS or value is None or value == parameter.default:
            continue
        if parameter.param_type_name == "argument":
            words.append(str(value))
        elif isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            words += [parameter.opts[0], str(value)]
    return shlex.join(words)


def replay_options(options: Mapping[str, Any], slo: SLO | None, *, keep: bool) -> ReplayOptions:
    """How the trace is replayed. `keep`: lives of requests and the map of the pool are kept for a report."""
    from octavo.errors import OctavoError
    from octavo.planner.replay import ReplayOptions

    for name in ("concurrency", "max_tokens"):
        if (value := options.get(name)) is not None and value < 1:
            raise OctavoError(f"{name} is {value}; it must be at least 1.")
    if options.get("concurrency") is not None and options.get("rate") is not None:
        raise OctavoError("concurrency and rate are both given: a closed loop has no rate of its own; leave one out.")
    return ReplayOptions(
        slo=slo,
        max_tokens=options["max_tokens"],
        concurrency=options.get("concurrency"),
        known_lengths=options["known_lengths"],
        lives=LIVES if keep else 0,
        map=keep,
    )


def check_outputs(outputs: Mapping[str, Path | None], trace: str) -> None:
    """Before any work: each option's file, and those beside it, are no folders, not the trace and not each other."""
    from octavo.errors import OctavoError

    report = outputs.get("report")
    if report is not None and report.suffix.lower() != ".html":
        raise OctavoError(f"report is {str(report)!r}; its name must end in .html (the JSON beside it ends in .json).")
    taken: list[tuple[str, Path]] = []
    for option, path in _files(outputs):
        if os.path.isdir(path):
            raise OctavoError(f"{option} would be written to {str(path)!r}, which is a folder; give another name.")
        if same(path, Path(trace.partition("?")[0])):
            raise OctavoError(f"{option} would overwrite the trace {trace!r}; give another name.")
        for other, earlier in taken:
            if same(path, earlier):
                raise OctavoError(f"{option} and {other} would both be written to {str(path)!r}; rename one.")
        taken.append((option, path))


def prepare_outputs(outputs: Mapping[str, Path | None]) -> None:
    """Make the folders and try the files, once it is known that there will be something to write."""
    for option, path in _files(outputs):
        make_folder(path.parent, option)
        try_writing(path, option)


def write_outputs(report: ReplayReport, outputs: Mapping[str, Path | None]) -> None:
    """Write what was asked for."""
    from octavo.report.perfetto import write_trace
    from octavo.report.replay_csv import write_csv
    from octavo.report.replay_page import write_page

    for option, write in (("report", write_page), ("csv", write_csv), ("perfetto", write_trace)):
        if (path := outputs.get(option)) is not None:
            write(path, report)


def _files(outputs: Mapping[str, Path | None]) -> Iterable[tuple[str, Path]]:
    """Every file that will be written, and for which option."""
    for option, path in outputs.items():
        if path is None:
            continue
        yield option, path
        if option == "report":
            yield option, path.with_suffix(".json")
        if option == "csv":
            yield option, path.with_suffix(".requests.csv")
