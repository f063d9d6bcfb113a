"""The server's settings: frozen dataclasses, validated in sentences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from numbers import Integral, Real
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import OctavoError

TOOL_PARSERS = ("auto", "hermes", "llama3", "none")
MIB = 1 << 20


class ServerConfigError(OctavoError, ValueError):
    """A setting of the server is out of its limits."""


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """An API key and whose it is. Neither the key nor the salt is ever shown.

    key           what the client sends as `Authorization: Bearer KEY`
    tenant        name under which its requests are counted; several keys may share one
    priority      of its requests, where `order` is priority: lower runs first
    quota_blocks  most KV blocks that the tenant's requests may hold together; None: no limit
    weight        share of the tenant where `order` is fair: 2 gets twice as much as 1
    salt          forced on its prefixes, so that they are shared only with keys of the same salt
    operator      may see all tenants' requests and ask what-if; others see their own. Where all keys are of one tenant,
                  each is an operator's
    """

    key: str = field(repr=False)
    tenant: str = ""
    priority: int = 0
    quota_blocks: int | None = None
    weight: float = 1
    salt: str | None = field(default=None, repr=False)
    operator: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.operator, bool):
            raise ServerConfigError(f"operator of tenant {self.tenant!r} is {self.operator!r}; use true or false.")
        if not isinstance(self.key, str) or not self.key or not all("!" <= letter <= "~" for letter in self.key):
            raise ServerConfigError(
                "an API key is empty or has letters that no HTTP header carries; use visible ASCII."
            )
        if not isinstance(self.tenant, str) or len(self.tenant) > 64 or not self.tenant.isprintable():
            raise ServerConfigError(f"tenant is {self.tenant!r}; it must be printable text of at most 64 letters.")
        if not _whole(self.priority):
            raise ServerConfigError(f"priority of tenant {self.tenant!r} is {self.priority!r}; use a whole number.")
        if self.quota_blocks is not None and not (_whole(self.quota_blocks) and self.quota_blocks >= 1):
            raise ServerConfigError(
                f"quota_blocks of tenant {self.tenant!r} is {self.quota_blocks!r}; "
                "it must be a whole number of at least 1, or nothing for no limit."
            )
        if not _number(self.weight) or not 0 < self.weight < inf:
            raise ServerConfigError(f"weight of tenant {self.tenant!r} is {self.weight!r}; it must be above 0.")
        if self.salt is not None and not (isinstance(self.salt, str) and self.salt):
            raise ServerConfigError(f"salt of tenant {self.tenant!r} must be text that is not empty, or left out.")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """
    engine             what is served: see `EngineConfig`
    host, port         where the server listens; port 0: one that is free
    served_model_name  names by which clients may ask for the model; none: the model as it was given
    api_keys           keys that are let in, and whose they are; none: everybody is
    max_body_bytes     largest request body
    max_queue_seconds  a request that was not admitted after so long is refused; None: it waits
    cors_origins       origins whose pages may call the server; none: only its own page
    vllm_metrics       also give the figures under the names that vLLM's dashboards read
    metrics_compat     and under older ones of these
    access_log         one JSON line per request on stderr
    otlp_endpoint      where OpenTelemetry traces go; None: nowhere
    drain_seconds      how long running requests may go on after SIGTERM
    stall_seconds      unhealthy when no step ran for so long with work waiting
    max_unread_tokens  tokens kept for a client that does not read; then its request is aborted
    page               serve the page at /
    chat_template      file with a Jinja template that replaces the model's own
    tool_parser        how the model writes tool calls: one of `TOOL_PARSERS`
    """

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_keys: tuple[TenantConfig, ...] = ()
    max_body_bytes: int = 8 * MIB
    max_queue_seconds: float | None = None
    cors_origins: tuple[str, ...] = ()
    vllm_metrics: bool = True
    metrics_compat: bool = False
    access_log: bool = True
    otlp_endpoint: str | None = None
    drain_seconds: float = 30.0
    stall_seconds: float = 10.0
    max_unread_tokens: int = 4096
    page: bool = True
    chat_template: str | None = None
    tool_parser: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host.strip():
            raise ServerConfigError(f"host is {self.host!r}; give an address such as 127.0.0.1, or 0.0.0.0 for all.")
        if not _whole(self.port) or not 0 <= self.port <= 65535:
            raise ServerConfigError(f"port is {self.port!r}; it must be from 1 to 65535, or 0 for one that is free.")
        for name in ("max_body_bytes", "max_unread_tokens"):
            value = getattr(self, name)
            if not _whole(value) or value < 1:
                raise ServerConfigError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        self._check_seconds()
        self._check_texts()
        if self.tool_parser not in TOOL_PARSERS:
            raise ServerConfigError(f"tool_parser is {self.tool_parser!r}; use one of {', '.join(TOOL_PARSERS)}.")
        _check_keys(self.api_keys)

    def _check_seconds(self) -> None:
        for name, least in (
            ("max_queue_seconds", "above 0"),
            ("stall_seconds", "above 0"),
            ("drain_seconds", "0 or more"),
        ):
            value = getattr(self, name)
            if name == "max_queue_seconds" and value is None:
                continue
            if not _number(value) or not 0 <= value < inf or (value == 0 and least == "above 0"):
                raise ServerConfigError(f"{name} is {value!r}; it must be a number of seconds, {least}.")

    def _check_texts(self) -> None:
        for name in ("served_model_name", "cors_origins"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(text, str) and text.strip() for text in value):
                raise ServerConfigError(f"{name} is {value!r}; it must be a tuple of texts that are not empty.")
            if twice := _twice(value):
                raise ServerConfigError(f"{name} has {value[twice[0]]!r} twice; once is enough.")
        for origin in self.cors_origins:
            scheme, _, rest = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not rest or "/" in rest):
                raise ServerConfigError(
                    f"cors_origins has {origin!r}; an origin is such as https://chat.example.org, without a path, or *."
                )
        endpoint = self.otlp_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ServerConfigError(f"otlp_endpoint is {endpoint!r}; it must begin with http:// or https://.")


def _check_keys(keys: tuple[TenantConfig, ...]) -> None:
    """No key twice, and all keys of a tenant agree on what is the tenant's."""
    if twice := _twice(entry.key for entry in keys):
        first, second = (index + 1 for index in twice)
        raise ServerConfigError(f"api_keys {first} and {second} are the same key; every key belongs to one tenant.")
    for name in ("quota_blocks", "weight"):
        known: dict[str, Any] = {}
        for entry in keys:
            value = getattr(entry, name)
            if known.setdefault(entry.tenant, value) != value:
                raise ServerConfigError(
                    f"{name} of tenant {entry.tenant!r} is {known[entry.tenant]!r} at one key and {value!r} at "
                    "another; it counts for the tenant: give all its keys the same."
                )


def _twice(values: Iterable[str]) -> tuple[int, int] | None:
    """Indexes of the first value that came before, and of where."""
    seen: dict[str, int] = {}
    for index, value in enumerate(values):
        if seen.setdefault(value, index) != index:
            return seen[value], index
    return None


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
