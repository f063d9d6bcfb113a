"""API keys and whose they are.

Prefixes of a prompt are shared only under the same identity. The operator's salt of a key and the `cache_salt` of a
client's request are two pairs of different kinds in it: a client's salt narrows sharing further, and no value of it
can replace the operator's or equal another key's.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from hashlib import sha256

from octavo.config import EngineConfig
from octavo.server.config import ServerConfig, TenantConfig
from octavo.server.errors import ApiError

Identity = tuple[tuple[str, str], ...]
OPERATOR_SALT, CLIENT_SALT = "operator salt", "salt"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who sends a request. `salt`: the operator's; `quota`: most KV blocks together; `operator`: whether it may see
    what is other tenants'."""

    name: str = ""
    priority: int = 0
    salt: str | None = field(default=None, repr=False)
    weight: float = 1
    quota: int | None = None
    operator: bool = True


class Tenants:
    """Who may use the server: everybody where no keys are configured, and then all are one tenant without a name."""

    def __init__(self, config: ServerConfig) -> None:
        alone = len({entry.tenant for entry in config.api_keys}) == 1
        self._keys = tuple((_digest(entry.key), _tenant(entry, alone)) for entry in config.api_keys)

    @property
    def required(self) -> bool:
        """Whether a key is needed."""
        return bool(self._keys)

    def identify(self, authorization: str | None) -> Tenant:
        """Whose request has this `Authorization` header. Raises ApiError 401 if no key fits.

        Every key is compared, to its end, whatever the header is: the time taken tells nothing about the keys.
        """
        if not self._keys:
            return Tenant()
        scheme, _, key = (authorization or "").strip().partition(" ")
        sent, found = _digest(key.strip()), None
        for digest, tenant in self._keys:
            if hmac.compare_digest(sent, digest):
                found = tenant
        if found is None or scheme.lower() != "bearer":
            what = "no API key was sent" if authorization is None else "the API key is not one of this server's"
            raise ApiError(401, f"{what}; send the header 'Authorization: Bearer KEY'.", code="invalid_api_key")
        return found


def identity_for(tenant: Tenant, client_salt: str | None) -> Identity:
    """The identity of a request's prefixes: the operator's salt, then the client's, each a kind of its own."""
    pairs = ((OPERATOR_SALT, tenant.salt), (CLIENT_SALT, client_salt))
    return tuple((kind, salt) for kind, salt in pairs if salt is not None)


def engine_config(config: ServerConfig) -> EngineConfig:
    """The engine's settings with the quotas and weights of the keys' tenants, which beat those of the same names."""
    engine, keys = config.engine, config.api_keys
    quotas = {entry.tenant: entry.quota_blocks for entry in keys if entry.quota_blocks is not None}
    weights = {entry.tenant: entry.weight for entry in keys if entry.weight != 1}
    return replace(engine, quotas={**engine.quotas, **quotas}, tenant_weights={**engine.tenant_weights, **weights})


def shown(keys: Iterable[TenantConfig]) -> str:
    """How many keys there are: all that is ever said about them."""
    count = len(tuple(keys))
    return f"{count} key{'' if count == 1 else 's'}"


def _tenant(entry: TenantConfig, alone: bool) -> Tenant:
    operator = entry.operator or alone
    return Tenant(entry.tenant, entry.priority, entry.salt, entry.weight, entry.quota_blocks, operator)


def _digest(key: str) -> bytes:
    """Equal lengths for the comparison, so that not even a key's length is told."""
    return sha256(key.encode(errors="surrogatepass")).digest()
