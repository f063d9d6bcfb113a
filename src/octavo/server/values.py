"""Settings as people write them, as text or as values of a YAML file, turned into what the fields hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from octavo.config import EngineConfig, parse_bytes
from octavo.errors import OctavoError
from octavo.server.config import ServerConfig, TenantConfig

SIZES = frozenset({"kv_memory", "max_body_bytes"})  # also taken as '256MiB'
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class SettingError(OctavoError, ValueError):
    """A setting cannot be read; the sentence names where it was given."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of `ServerConfig` or of its engine. `kind`: its type without None, which `optional` stands for."""

    name: str
    kind: Any
    optional: bool
    of_engine: bool
    default: Any  # MISSING: it has to be given

    @property
    def many(self) -> bool:
        """Whether its value is a tuple: the flag may be repeated, a variable has commas."""
        return get_origin(self.kind) is tuple


@cache
def all_settings() -> Mapping[str, Setting]:
    """Every setting by its name, the engine's first: whatever fields the two dataclasses have."""
    found: dict[str, Setting] = {}
    for owner in (EngineConfig, ServerConfig):
        hints = get_type_hints(owner)
        for field in fields(owner):
            if field.name != "engine":
                found[field.name] = _setting(field, hints[field.name], owner is EngineConfig)
    return found


def _setting(field: Field[Any], hint: Any, of_engine: bool) -> Setting:
    choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    (kind,) = (choice for choice in choices if choice is not NoneType)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return Setting(field.name, kind, NoneType in choices, of_engine, default)


def convert(setting: Setting, value: object, where: str) -> Any:
    """`value` as the field holds it. Raises SettingError naming `where` the value was given."""
    if setting.optional and (value is None or (isinstance(value, str) and value.strip().lower() == "none")):
        return None
    if setting.name in SIZES and isinstance(value, str):
        return parse_bytes(value, where)
    if setting.kind == tuple[TenantConfig, ...]:
        return tuple(_tenant(entry, where) for entry in _listed(value, where, shown="..."))
    if setting.many:
        return tuple(_text(entry, where) for entry in _listed(value, where, shown=repr(value)))
    if get_origin(setting.kind) is Mapping:
        return _mapping(setting, value, where)
    return _READ[setting.kind](value, where)


def _listed(value: object, where: str, shown: str) -> list[object]:
    """Text is split at commas; a list is taken as it is."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list | tuple):
        return list(value)
    raise SettingError(f"{where} is {shown}; it must be a list.")


def _mapping(setting: Setting, value: object, where: str) -> dict[str, Any]:
    """A mapping, or text such as `alice=40,bob=20`."""
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if not all(equals for _, equals, _ in pairs):
            raise SettingError(f"{where} is {value!r}; write it as name=number,name=number.")
        value = {name.strip(): number for name, _, number in pairs}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise SettingError(f"{where} is {value!r}; it must give names their numbers.")
    read = _READ[get_args(setting.kind)[1]]
    return {name: read(number, f"{where}, {name}") for name, number in value.items()}


def _tenant(entry: object, where: str) -> TenantConfig:
    """A key alone, or a mapping with the fields of `TenantConfig`. Says nothing of a key's letters."""
    if isinstance(entry, str):
        return TenantConfig(entry)
    if not isinstance(entry, dict):
        raise SettingError(f"{where} has an entry that is neither text in quotes nor a mapping with 'key'.")
    hints = get_type_hints(TenantConfig)
    known = {field.name: _setting(field, hints[field.name], False) for field in fields(TenantConfig)}
    given = {}
    for name, value in entry.items():
        setting = known.get(str(name).replace("-", "_"))
        if setting is None:
            raise SettingError(f"{where} has an entry with an unknown field {name!r}; known are {', '.join(known)}.")
        if setting.kind is str and value is not None and not isinstance(value, str):
            raise SettingError(f"{where} has an entry whose {name} is not text; put it in quotes.")
        given[setting.name] = convert(setting, value, f"{where}, {name}")
    if "key" not in given:
        raise SettingError(f"{where} has an entry without 'key'; every entry is a key and whose it is.")
    return TenantConfig(**given)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise SettingError(f"{where} is {value!r}; it must be text: put it in quotes.")
    return value


def _whole(value: object, where: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return int(value) if isinstance(value, str) else int("")
    except ValueError:
        raise SettingError(f"{where} is {value!r}; it must be a whole number.") from None


def _number(value: object, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    try:
        return float(value) if isinstance(value, str) else float("")
    except ValueError:
        raise SettingError(f"{where} is {value!r}; it must be a number.") from None


def _switch(value: object, where: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _WORDS:
        return _WORDS[value.strip().lower()]
    raise SettingError(f"{where} is {value!r}; it must be true or false.")


_READ: Mapping[Any, Callable[[object, str], Any]] = {str: _text, int: _whole, float: _number, bool: _switch}
