"""What one tenant may see and do of another's, and what pages of other origins may make a browser do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.errors import OctavoError
from octavo.server.config import TenantConfig
from tests.server.serving import ScriptedRunner, Serving, serving, write_checkpoint

KEYS = (
    TenantConfig("key-a", "ada", salt="of ada"),
    TenantConfig("key-b", "bob"),
    TenantConfig("key-o", "watch", operator=True),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def one(model: Path) -> Iterator[Serving]:
    """Ada's request runs, Bob's waits for her slot."""
    runner = ScriptedRunner(delay=0.01)
    settings = {"access_log": False, "api_keys": KEYS}
    with serving(model, runner=runner, server=settings, max_num_seqs=1, max_model_len=512) as found:
        threads = []
        for key, label in (("a", "her secret"), ("b", "his question")):
            threads.append(threading.Thread(target=complete, args=(found, key, label), daemon=True))
            threads[-1].start()
            found.until(lambda: len(get(found, "o", "/kv/requests").json()["requests"]) == len(threads))
        yield found
        runner.delay = 0.0
        for thread in threads:
            thread.join(20)


def complete(one: Serving, key: str, label: str) -> None:
    body = {"prompt": label, "max_tokens": 400, "ignore_eos": True}
    headers = {"authorization": f"Bearer key-{key}", "x-request-id": label}
    httpx.post(f"{one.url}/v1/completions", json=body, headers=headers, timeout=60)


def get(one: Serving, key: str, path: str, method: str = "GET", **more: Any) -> httpx.Response:
    return one.client.request(method, path, headers={"authorization": f"Bearer key-{key}"}, **more)


def test_a_tenant_sees_its_own_requests_and_an_operator_all(one: Serving) -> None:
    mine = get(one, "b", "/kv/requests").json()["requests"]
    assert [(row["tenant"], row["label"]) for row in mine] == [("bob", "his question")]
    assert mine[0]["wait"]["cause"] == "slots"
    every = get(one, "o", "/kv/requests").json()["requests"]
    assert {row["tenant"] for row in every} == {"ada", "bob"}
    for name in ("her secret", next(row["id"] for row in every if row["tenant"] == "ada")):
        refused = get(one, "b", f"/kv/requests/{name}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")
        assert get(one, "o", f"/kv/requests/{name}").status_code == 200
    detail = get(one, "b", "/kv/requests/his question").json()
    assert detail["miss"] is None  # what it was compared with may be somebody else's


def test_what_shows_or_changes_other_tenants_things_needs_an_operators_key(one: Serving) -> None:
    asked = [
        ("GET", "/kv/blocks", {}),
        ("GET", "/kv/events", {}),
        ("POST", "/kv/what-if", {"json": {"block_size": 8}}),
        ("POST", "/reset_prefix_cache", {}),
    ]
    for method, path, more in asked:
        refused = get(one, "b", path, method, **more)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operators_only")
    assert get(one, "o", "/kv/blocks").status_code == 200
    assert get(one, "o", "/reset_prefix_cache", "POST").status_code == 200
    assert get(one, "b", "/kv/ledger").json()["running"] == 1


def test_where_all_keys_are_of_one_tenant_each_sees_everything(model: Path) -> None:
    keys = (TenantConfig("key-a", "team"), TenantConfig("key-b", "team"))
    with serving(model, runner=ScriptedRunner(), server={"access_log": False, "api_keys": keys}) as one:
        assert get(one, "b", "/kv/blocks").status_code == 200


def test_a_page_of_another_origin_cannot_make_a_browser_act(model: Path) -> None:
    settings = {"access_log": False, "cors_origins": ("https://chat.example.org",)}
    with serving(model, runner=ScriptedRunner(), server=settings) as one:
        own = one.url
        for origin, status in (("http://evil.example", 403), ("https://chat.example.org", 200), (own, 200)):
            answer = one.client.post("/reset_prefix_cache", headers={"origin": origin})
            assert answer.status_code == status, origin
        assert one.client.get("/kv/ledger", headers={"origin": "http://evil.example"}).status_code == 200


def test_what_the_server_gives_a_template_itself_cannot_be_given_by_a_client(model: Path) -> None:
    with serving(model, runner=ScriptedRunner(), server={"access_log": False}) as one:
        for name in ("self", "tokenize", "chat_template", "conversation"):
            body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {name: 1}, "max_tokens": 2}
            answer = one.client.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")
        assert one.client.head("/health").status_code == 200


def test_settings_that_no_machine_or_template_bears_are_refused_before_serving(model: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(OctavoError, match=r"kv_memory is .* more than the .* bytes of the device"),
        serving(model, kv_memory=100 << 40),
    ):
        pass
    template = tmp_path / "bad.jinja"
    template.write_text("{{ foo")
    with (
        pytest.raises(OctavoError, match=r"chat_template is .*bad\.jinja.* cannot be used"),
        serving(model, server={"chat_template": str(template)}),
    ):
        pass
