"""Where settings come from: flags, then OCTAVO_* variables, then a YAML file, then defaults; and which it was."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from octavo.config import EngineConfig
from octavo.errors import OctavoError
from octavo.scheduler.config import SchedulerConfig
from octavo.server.config import ServerConfig
from octavo.server.tenants import engine_config
from octavo.server.values import Setting, SettingError, all_settings, convert

PREFIX = "OCTAVO_"
#: Other names of settings, as users of other engines know them.
ALIASES = {
    "api_key": "api_keys",
    "gpu_memory_utilization": "memory_utilization",
    "kv_cache_dtype": "kv_dtype",
    "quantization": "weights",
}
#: Variables that are read elsewhere: the native library's, the tests' and the benchmarks', and the name of the file.
OTHER_VARIABLES = frozenset({"OCTAVO_NATIVE", "OCTAVO_ISA", "OCTAVO_SHARED", "OCTAVO_PEERS", "OCTAVO_CONFIG"})
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the server runs with. `sources`: where the value of each setting came from; `warnings`: sentences."""

    config: ServerConfig
    sources: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    def value(self, name: str) -> Any:
        """The value of a setting, the engine's or the server's own."""
        return getattr(self.config.engine if all_settings()[name].of_engine else self.config, name)


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as written somewhere. `where` is how a sentence names the place: `--port`, `OCTAVO_PORT`."""

    value: object
    where: str
    source: str  # how the report names it


def read_settings(
    flags: Mapping[str, object], environment: Mapping[str, str], file: str | Path | None = None
) -> Settings:
    """Settings from all four places, each beating those after it.

    `flags`: what was given on the command line, by the settings' names. Raises SettingError, or another OctavoError,
    with a sentence that names the place of the bad value.
    """
    if file is None:
        file = environment.get("OCTAVO_CONFIG") or None
    from_flags = {name: _Given(value, flag_of(name, value), flag_of(name, value)) for name, value in flags.items()}
    from_environment, warnings = _from_environment(environment)
    from_file = {} if file is None else _from_file(Path(file))
    values: dict[str, Any] = {}
    sources = dict.fromkeys(all_settings(), DEFAULT)
    for name, setting in all_settings().items():
        layers = [layer[name] for layer in (from_flags, from_environment, from_file) if name in layer]
        if layers:
            values[name] = convert(setting, layers[0].value, layers[0].where)
            over = ", ".join(given.source for given in layers[1:])
            sources[name] = layers[0].source + (f", over {over}" if over else "")
        elif setting.default is MISSING:
            raise SettingError(
                f"{name} is not given; name it after the command, in {PREFIX}{name.upper()} or the file."
            )
    return Settings(_configure(values, sources), sources, warnings)


def _configure(values: Mapping[str, Any], sources: Mapping[str, str]) -> ServerConfig:
    """The dataclasses; what they refuse is told with where it came from."""
    known = all_settings()
    try:
        engine = EngineConfig(**{name: value for name, value in values.items() if known[name].of_engine})
        config = ServerConfig(engine, **{name: value for name, value in values.items() if not known[name].of_engine})
        _check_scheduler(engine_config(config))
        return config
    except OctavoError as error:
        raise SettingError(with_sources(str(error), sources)) from None


def _check_scheduler(engine: EngineConfig) -> None:
    """What the scheduler would refuse, before the model is loaded."""
    ours, its = get_type_hints(EngineConfig), get_type_hints(SchedulerConfig)
    same = [field.name for field in fields(SchedulerConfig) if ours.get(field.name) == its[field.name]]
    SchedulerConfig(max_model_len=engine.max_model_len or 1, **{name: getattr(engine, name) for name in same})


def with_sources(sentence: str, sources: Mapping[str, str]) -> str:
    """The sentence, and where the settings that it names were given."""
    words = re.findall(r"\w+", sentence)
    places = {name: sources[name] for name in words if sources.get(name, DEFAULT) != DEFAULT}
    return sentence + (f" ({'; '.join(f'{name}: {where}' for name, where in places.items())})" if places else "")


def flag_of(name: str, value: object = None) -> str:
    """The flag of a setting; the model is the command's argument."""
    if name == "model":
        return "MODEL"
    name = "api_key" if name == "api_keys" else name  # repeated, so that each time it is one
    return ("--no-" if value is False else "--") + name.replace("_", "-")


def _from_environment(environment: Mapping[str, str]) -> tuple[dict[str, _Given], tuple[str, ...]]:
    """OCTAVO_* variables that are settings, and a warning for those that are nothing. An empty one is not given."""
    found: dict[str, _Given] = {}
    warnings = []
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or not environment[variable].strip():
            continue
        setting = _known(variable.removeprefix(PREFIX).lower())
        if setting is None or not variable.isupper():
            known = [*(PREFIX + name.upper() for name in _names()), *sorted(OTHER_VARIABLES)]
            warnings.append(f"{variable} is no setting and is ignored{_nearest(variable.upper(), known)}")
        elif setting.name in found:
            raise SettingError(f"{variable} and {found[setting.name].where} mean the same setting; keep one.")
        else:
            found[setting.name] = _Given(environment[variable], variable, variable)
    return found, tuple(warnings)


def _from_file(path: Path) -> dict[str, _Given]:
    """Settings of a YAML file, in snake_case or kebab-case; an unknown one is an error."""
    found: dict[str, _Given] = {}
    for key, value in _load_yaml(path).items():
        setting = _known(str(key).replace("-", "_"))
        if setting is None:
            near = _nearest(str(key).replace("-", "_"), _names())
            raise SettingError(f"{path}: there is no setting {str(key)!r}{near}")
        if setting.name in found:
            raise SettingError(f"{path}: {key!r} is set twice (as {setting.name}); keep one.")
        found[setting.name] = _Given(value, f"{setting.name} in {path}", str(path))
    return found


def _load_yaml(path: Path) -> Mapping[object, object]:
    try:
        import yaml
    except ImportError:
        raise SettingError("a settings file needs PyYAML; install it with: pip install 'octavo[serve]'") from None
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except OSError as error:
        raise SettingError(f"config is {str(path)!r}, which cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise SettingError(f"{path} is not UTF-8 text; write the settings file as YAML.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f" in line {mark.line + 1}"
        raise SettingError(f"{path} is not YAML{line}: {getattr(error, 'problem', None) or error}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingError(f"{path} must be a mapping of settings to values, such as 'max_num_seqs: 64'.")
    keys = [key.value for key, _ in yaml.compose(text, yaml.SafeLoader).value]  # of equal ones only the last is kept
    if len(keys) != len(content):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise SettingError(f"{path}: {twice!r} is set twice; keep one.")
    return content


def _known(name: str) -> Setting | None:
    return all_settings().get(ALIASES.get(name, name))


def _names() -> tuple[str, ...]:
    return (*all_settings(), *ALIASES)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else "."
