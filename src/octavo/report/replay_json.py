"""Frozen dataclasses to plain JSON values and back, by their type hints; what does not fit is named by its path."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from octavo.errors import OctavoError

NUMBERS = {float: (int, float), int: (int,), str: (str,), bool: (bool,)}


class ReportError(OctavoError, ValueError):
    """The JSON is not a replay report that this version can read: which field, what it holds, what it should."""


def to_plain(value: Any) -> Any:
    """Dicts, lists, strings, numbers, None; every field of a dataclass is a key, in the order of its definition."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(entry) for entry in value]
    return value.value if isinstance(value, Enum) else value


def from_plain(kind: Any, value: Any, path: str = "report") -> Any:
    """The inverse of `to_plain` for a value of type `kind`. Raises ReportError. Unknown keys are left out, so that
    newer files can be read."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        inner = next(option for option in get_args(kind) if option is not type(None))
        return None if value is None else from_plain(inner, value, path)
    if origin is tuple:
        return _tuple(get_args(kind), _need(value, list, path), path)
    if origin is not None:  # Mapping[str, X]
        inner = get_args(kind)[1]
        return {key: from_plain(inner, entry, f"{path}.{key}") for key, entry in _need(value, dict, path).items()}
    if is_dataclass(kind):
        return _dataclass(kind, _need(value, dict, path), path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(kind, value, path)
    return _need(value, NUMBERS[kind], path)


def _dataclass(kind: Any, value: Mapping[str, Any], path: str) -> Any:
    hints, found = get_type_hints(kind), {}
    for item in fields(kind):
        if item.name in value:
            found[item.name] = _field(hints[item.name], item.default, value[item.name], f"{path}.{item.name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ReportError(f"{path} has no field {item.name!r}; write the report again with this Octavo.")
    return kind(**found)


def _field(kind: Any, default: object, value: Any, path: str) -> Any:
    """A field whose default is None may be None whatever its hint says."""
    return None if value is None and default is None else from_plain(kind, value, path)


def _tuple(kinds: tuple[Any, ...], value: list[Any], path: str) -> tuple[Any, ...]:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(from_plain(kinds[0], entry, f"{path}[{i}]") for i, entry in enumerate(value))
    if len(kinds) != len(value):
        raise ReportError(f"{path} has {len(value)} entries; it must have {len(kinds)}.")
    return tuple(from_plain(kind, entry, f"{path}[{i}]") for i, (kind, entry) in enumerate(zip(kinds, value)))  # noqa: B905


def _enum(kind: type[Enum], value: Any, path: str) -> Enum:
    known = [member.value for member in kind]
    if value not in known:
        raise ReportError(f"{path} is {value!r}; it must be one of {', '.join(map(repr, known))}.")
    return kind(value)


def _need(value: Any, kinds: Any, path: str) -> Any:
    if isinstance(value, kinds) and (kinds in (dict, list, (bool,)) or not isinstance(value, bool)):
        return value
    wanted = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
    raise ReportError(f"{path} is {value!r:.60}; it must be {wanted}.")
