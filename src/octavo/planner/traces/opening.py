"""Opens a trace by its text: a file or folder of any known format, or a synthetic workload, with options behind `?`.

traces/conv.csv                            the format is told by the content
traces/conv.csv?rate=8&requests=2000       scaled to 8 requests per second, the first 2,000
sharegpt.csv.gz?rate=2&seed=1              a table without times: Poisson arrivals at 2 per second
synthetic:sharegpt?rate=2&requests=1000    lengths from distributions
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from urllib.parse import parse_qsl

from octavo.planner.traces import decisions, objects, results, servegen, sessions, synthetic, tables, transforms
from octavo.planner.traces.api import Trace, TraceError
from octavo.planner.traces.file_trace import FileTrace, Format
from octavo.planner.traces.lines import Head, head_of

FORMATS: tuple[Format, ...] = (
    *tables.FORMATS,
    *decisions.FORMATS,
    *sessions.FORMATS,
    *servegen.FORMATS,
    *objects.FORMATS,
    *results.FORMATS,
)
SYNTHETIC = "synthetic:"
#: Options of any trace, in the order in which they are applied. `seed`, `process` and `cv` belong to `rate`.
STEPS: dict[str, type] = {
    "start": float,
    "end": float,
    "requests": int,
    "lengths": float,
    "spread": bool,
    "speed": float,
    "rate": float,
    "process": str,
    "cv": float,
    "seed": int,
    "resample": int,
}
TRUTHS = {"1": True, "true": True, "yes": True, "": True, "0": False, "false": False, "no": False}
DRAWING = ("process", "cv", "seed")
SHAPES = {"sharegpt": synthetic.sharegpt_like, "alpaca": synthetic.alpaca_like}
SYNTHETIC_OPTIONS: dict[str, type] = {
    "requests": int,
    "rate": float,
    "seed": int,
    "process": str,
    "cv": float,
    "limit": int,
    "prefix": int,
    "prefix_groups": int,
    "prompt": float,
    "output": float,
    "prompt_cv": float,
    "output_cv": float,
}
Options = dict[str, Any]


def open_trace(path: str | Path, *, format: str | None = None) -> Trace:
    """The trace that `path` names, a file, a folder or synthetic:NAME, with options behind a `?`.

    `format` (or ?format=) names the format where the content does not tell it. Options of any trace: start, end
    (seconds), requests (the first so many), lengths (factor), spread=1 (equal arrivals), speed (factor on the rate),
    rate (requests per second: scales recorded arrivals; draws missing ones, or all where a process is named, by
    process, cv and seed), resample (a seed: another draw of the same traffic). Formats have their own besides.
    Nothing is read yet but the beginning, unless the mean rate must be known. Raises TraceError.
    """
    place, given = _split(str(path))
    if place.startswith(SYNTHETIC):
        return _synthetic(place.removeprefix(SYNTHETIC), given)
    kind = _format_of(Path(place), given.pop("format", format))
    own = {name: given.pop(name) for name in list(given) if name in kind.options}
    steps = _typed(given, STEPS, f"{place} ({kind.name})", also=kind.options)
    return _stepped(FileTrace(Path(place), kind, _typed(own, kind.options, kind.name)), steps)


def _split(text: str) -> tuple[str, dict[str, str]]:
    """Place and options; the name of a file that has a `?` itself is a place."""
    place, mark, options = text.partition("?")
    if not mark or _exists(text):
        return text, {}
    try:
        return place, dict(parse_qsl(options, keep_blank_values=True, strict_parsing=True))
    except ValueError as error:
        raise TraceError(f"options {options!r} of {place} cannot be read; write NAME=VALUE&NAME=VALUE.") from error


def _exists(place: str | Path) -> bool:
    try:
        return Path(place).exists()
    except (OSError, ValueError):  # a name too long, or with a NUL
        return False


def _typed(given: dict[str, str], types: Mapping[str, type], where: str, also: Iterable[str] = ()) -> Options:
    """Options as numbers, names and truths. Raises TraceError for an unknown name or a value of another type."""
    typed: Options = {}
    for name, value in given.items():
        if name not in types:
            known = ", ".join(sorted({*types, *also}))
            raise TraceError(f"option {name} is unknown for {where}; choose from {known}.")
        try:
            typed[name] = TRUTHS[value.lower()] if types[name] is bool else types[name](value)
        except (ValueError, KeyError) as error:
            wanted = {int: "a whole number", float: "a number", bool: "0 or 1"}[types[name]]
            raise TraceError(f"option {name} of {where} is {value!r}; it must be {wanted}.") from error
        if isinstance(typed[name], (int, float)) and not -1e15 < typed[name] < 1e15:
            raise TraceError(f"option {name} of {where} is {value}; it must be a number below 1e15.")
    if min(typed.get("seed", 0), typed.get("resample", 0)) < 0:
        raise TraceError(f"a seed of {where} is negative; it must be 0 or above.")
    return typed


# -- formats ----------------------------------------------------------------------------------------------------------


def _format_of(path: Path, name: str | None) -> Format:
    if not _exists(path):
        raise TraceError(f"trace {str(path)!r} does not exist; name a file or folder, or synthetic:NAME.")
    if name is not None:
        found = next((kind for kind in FORMATS if kind.name == name), None)
        if found is None:
            raise TraceError(f"format {name!r} is unknown; choose from {_known()}.")
        if path.is_dir() and not found.folder:
            raise TraceError(f"{path} is a folder; {name} is read from a file.")
        return found
    head = _head(path)
    found = next((kind for kind in FORMATS if kind.matches(head) and (kind.folder or not path.is_dir())), None)
    if found is not None:
        return found
    if head.record is not None and {"input", "output"} <= set(head.record):
        raise TraceError(f"{path} holds text, not token counts; tokenise it and write prompt_tokens and output_tokens.")
    raise TraceError(f"{path} is of no known format; choose one by format: {_known()}.")


def _head(path: Path) -> Head:
    """Of a folder: the head of one of its files, one that a format of folders knows."""
    if not path.is_dir():
        return head_of(path)
    files = sorted(file for file in path.iterdir() if file.is_file())
    for ending in (*servegen.ENDINGS, ".json", ".json.gz"):
        for file in files:
            if file.name.endswith(ending) and not file.name.endswith(("-dataset.json", "-dataset.json.gz")):
                return head_of(file)
    raise TraceError(f"{path} is a folder without ServeGen profiles or session files; name a file in it.")


def _known() -> str:
    return ", ".join(sorted(kind.name for kind in FORMATS))


# -- steps and synthetic traces ---------------------------------------------------------------------------------------


def _stepped(trace: Trace, options: Options) -> Trace:
    """`trace` with the steps that the options ask for."""
    if drawing := [name for name in DRAWING if name in options and "rate" not in options]:
        raise TraceError(f"option {drawing[0]} is for arrivals that are drawn; give rate, too.")
    if "start" in options or "end" in options:
        trace = transforms.window(trace, options.get("start", 0.0), options.get("end", math.inf))
    if "requests" in options:
        trace = transforms.limited(trace, options["requests"])
    if "lengths" in options:
        trace = transforms.lengths_scaled(trace, options["lengths"], options["lengths"])
    if options.get("spread"):
        trace = transforms.spread(trace)
    if "speed" in options:
        trace = transforms.scaled(trace, options["speed"])
    if "rate" in options:
        trace = _at_rate(trace, options)
    if "resample" in options:
        trace = transforms.resampled(trace, options["resample"])
    return trace


def _at_rate(trace: Trace, options: Options) -> Trace:
    if trace.timed and not any(name in options for name in DRAWING):
        return transforms.at_rate(trace, options["rate"])
    drawing = {name: options[name] for name in DRAWING if name in options}
    return transforms.with_arrivals(trace, options["rate"], **drawing)


def _synthetic(name: str, given: dict[str, str]) -> Trace:
    """sharegpt, alpaca, or a shape of lengths: lognormal, gamma, uniform, constant with means prompt and output."""
    options = _typed(given, SYNTHETIC_OPTIONS, SYNTHETIC + name)
    sides = {side: (options.pop(side, None), options.pop(f"{side}_cv", None)) for side in ("prompt", "output")}
    if name in SHAPES:
        base = SHAPES[name]()
    elif name in get_args(synthetic.Shape):
        cv = {"uniform": 0.5}.get(name, 1.0)
        shape: synthetic.Shape = name  # type: ignore[assignment]
        base = synthetic.Synthetic(name, synthetic.Lengths(512, cv, shape), synthetic.Lengths(128, cv, shape))
    else:
        raise TraceError(
            f"synthetic:{name} is unknown; choose from {', '.join((*SHAPES, *get_args(synthetic.Shape)))}."
        )
    lengths = {
        side: replace(
            getattr(base, side),
            **{field: value for field, value in zip(("mean", "cv"), values, strict=True) if value is not None},
        )
        for side, values in sides.items()
    }
    return replace(base, **lengths, **options)
