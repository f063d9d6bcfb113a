"""The shipped catalogue: configs of well-known models, and devices with what their driver reports.

Each model is a compact config.json that goes through `spec_from_config` like any other; the data are published shapes
collected in `data/models.json`, with what is unverified marked. Devices are in `data/gpus.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from octavo.errors import OctavoError

_DATA = Path(__file__).parent / "data"
#: Endings that name a variant of the same shape.
_VARIANT = re.compile(r"-(instruct|it|chat|base|hf|pt|thinking|bf16|fp8|\d{4})(-v\d+(\.\d+)*)?$|-v\d+(\.\d+)*$")


class CatalogueError(OctavoError, ValueError):
    """A name that is not in the catalogue or stands for several entries."""


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """One model: `parameters` is the published count; `unverified` the fields that no primary source confirms."""

    name: str
    config: Mapping[str, Any]
    parameters: int | None
    unverified: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. `reported_bytes` is what its driver reports as total, None when no source tells."""

    name: str
    memory_bytes: int
    reported_bytes: int | None
    facts: Mapping[str, Any]


@cache
def _models() -> dict[str, dict[str, Any]]:
    data: dict[str, dict[str, Any]] = json.loads((_DATA / "models.json").read_text(encoding="utf-8"))
    return data


@cache
def _devices() -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = json.loads((_DATA / "gpus.json").read_text(encoding="utf-8"))
    return data


def model_names() -> list[str]:
    """All catalogue names, as owner/name."""
    return list(_models())


def find_model(name: str) -> CatalogueModel | None:
    """The entry called `name`: any case, with or without owner, and without endings such as -Instruct.

    None if there is no such entry. Raises CatalogueError if the name stands for entries of different shapes.
    """
    wanted = name.strip().lower()
    for key in (wanted, _shape_name(wanted)):
        found = [entry for entry in _models() if key in _keys(entry)]
        exact = [entry for entry in found if key in (entry.lower(), entry.lower().rpartition("/")[2])]
        chosen = exact or found
        if len(chosen) > 1 and any(_models()[c] != _models()[chosen[0]] for c in chosen):
            raise CatalogueError(f"{name} stands for several models: {', '.join(chosen)}; name one of them.")
        if chosen:
            entry = _models()[chosen[0]]
            unverified = tuple(entry.get("unverified", ()))
            return CatalogueModel(chosen[0], entry["config"], entry.get("parameters"), unverified)
    return None


def _keys(entry: str) -> tuple[str, ...]:
    """The names under which an entry is found, with and without its owner."""
    full = entry.lower()
    owner, _, short = full.rpartition("/")
    shape = _shape_name(short)
    plain = shape.removeprefix("meta-")
    return (full, short, shape, plain, f"{owner}/{shape}", f"{owner}/{plain}")


def _shape_name(name: str) -> str:
    """`name` without the endings that leave the shape as it is."""
    while (shorter := _VARIANT.sub("", name)) != name:
        name = shorter
    return name


def similar_models(name: str) -> list[str]:
    """Up to three catalogue names close to `name`."""
    from difflib import get_close_matches

    short = {entry.lower().rpartition("/")[2]: entry for entry in _models()}
    near = get_close_matches(name.lower().rpartition("/")[2], short, n=3, cutoff=0.6)
    return [short[n] for n in near]


def device_names() -> list[str]:
    """All device names."""
    return [entry["name"] for entry in _devices()]


def find_device(name: str) -> Device:
    """The device called `name`: any case, spaces and dashes alike, or a part that fits one device only.

    Raises CatalogueError naming the candidates.
    """
    wanted = _plain(name)
    entries = {_plain(entry["name"]): entry for entry in _devices()}
    found = [entries[wanted]] if wanted in entries else [e for key, e in entries.items() if wanted and wanted in key]
    if len(found) != 1:
        from difflib import get_close_matches

        known = [e["name"] for e in found] or [entries[k]["name"] for k in get_close_matches(wanted, entries, 3, 0.4)]
        what = "stands for several devices" if found else "is not in the catalogue"
        raise CatalogueError(f"Device {name!r} {what}: {', '.join(known or device_names())}; or give --memory.")
    entry = found[0]
    return Device(entry["name"], entry["memory_bytes"], entry.get("reported_total_memory_bytes"), entry)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
