"""API keys: who is let in, as whom, and that salts of operators and clients never meet."""

from __future__ import annotations

import hmac
import random
import string
from contextlib import suppress

import pytest

from octavo.config import EngineConfig
from octavo.kv.prefix import encode_identity
from octavo.server.config import ServerConfig, TenantConfig
from octavo.server.errors import ApiError
from octavo.server.tenants import Tenant, Tenants, engine_config, identity_for, shown

ALICE = TenantConfig("sk-alice", "alice", priority=-1, quota_blocks=40, weight=2, salt="a")
BOB = TenantConfig("sk-bob", "bob")


def config(*keys: TenantConfig, **engine: object) -> ServerConfig:
    return ServerConfig(EngineConfig("m", **engine), api_keys=keys)  # type: ignore[arg-type]


def test_without_keys_everybody_is_the_tenant_without_a_name() -> None:
    tenants = Tenants(config())
    assert not tenants.required
    for header in (None, "", "Bearer anything", "nonsense"):
        assert tenants.identify(header) == Tenant()


def test_a_key_says_whose_it_is() -> None:
    tenants = Tenants(config(ALICE, BOB))
    assert tenants.required
    assert tenants.identify("Bearer sk-alice") == Tenant("alice", -1, "a", 2, 40, operator=False)
    assert tenants.identify("bearer  sk-bob ") == Tenant("bob", operator=False)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "sk-alice",
        "Basic sk-alice",
        "Bearer sk-alic",
        "Bearer sk-alicee",
        "Bearer sk-é\udc80",
    ],
)
def test_a_missing_or_wrong_key_is_401(header: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        Tenants(config(ALICE, BOB)).identify(header)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert caught.value.headers()["WWW-Authenticate"] == "Bearer"
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize("header", [None, "Bearer sk-alice", "Bearer sk-bob", "Bearer x", "nonsense"])
def test_every_key_is_compared_whatever_is_sent(header: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    compared, compare = [], hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    tenants = Tenants(config(ALICE, BOB))
    with suppress(ApiError):
        tenants.identify(header)
    assert compared == [(32, 32), (32, 32)]


def test_salts_of_operator_and_client_are_different_kinds() -> None:
    forced, free = Tenant("alice", salt="x"), Tenant("bob")
    identities = [
        identity_for(forced, None),
        identity_for(free, "x"),
        identity_for(forced, "x"),
        identity_for(free, None),
    ]
    assert len({encode_identity(identity) for identity in identities}) == 4
    assert identity_for(forced, "x") == identity_for(Tenant("carol", salt="x"), "x")  # sharing is by salt, not by name


def test_a_salt_cut_elsewhere_is_another_identity() -> None:
    assert encode_identity(identity_for(Tenant(salt="a"), "bc")) != encode_identity(
        identity_for(Tenant(salt="ab"), "c")
    )


def test_no_two_pairs_of_salts_have_the_same_identity() -> None:
    draw = random.Random(0)
    salts = [None, *("".join(draw.choices(string.printable, k=draw.randrange(1, 9))) for _ in range(120))]
    pairs = {(a, b) for a in salts for b in salts}
    assert len({encode_identity(identity_for(Tenant(salt=a), b)) for a, b in pairs}) == len(pairs) > 10_000


def test_quotas_and_weights_of_keys_are_the_engines() -> None:
    others = dict(quotas={"alice": 1, "carol": 7}, tenant_weights={"alice": 9, "carol": 3}, order="fair")
    engine = engine_config(config(ALICE, BOB, **others))
    assert engine.quotas == {"alice": 40, "carol": 7}
    assert engine.tenant_weights == {"alice": 2, "carol": 3}


def test_keys_are_only_counted() -> None:
    assert shown([]) == "0 keys"
    assert shown([ALICE]) == "1 key"
    assert shown([ALICE, BOB]) == "2 keys"
    assert "sk-alice" not in repr(config(ALICE))
