"""The clients that people have: the official `openai` one, and curl as the README shows it."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.server.config import TenantConfig
from tests.server.serving import ScriptedRunner, Serving, saying, serving, write_checkpoint
from tests.server.talking import COMPLETIONS, Stepping, Wire, events

NAME = "tiny"
HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one(model: Path) -> Iterator[Serving]:
    server = {"served_model_name": (NAME, "alias"), "access_log": False}
    with serving(model, runner=ScriptedRunner(saying("Hi there!"), delay=0.001), server=server) as made:
        yield made


@pytest.fixture(scope="module")
def real(model: Path) -> Iterator[Serving]:
    """With the tiny model itself, for logprobs and seeds."""
    with serving(model, server={"served_model_name": (NAME,), "access_log": False}) as made:
        yield made


def client_of(one: Serving, key: str = "none", retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{one.url}/v1", api_key=key, max_retries=retries, timeout=30)


# -- openai -----------------------------------------------------------------------------------------------------------


def test_models(one: Serving) -> None:
    client = client_of(one)
    assert [model.id for model in client.models.list()] == [NAME, "alias"]
    assert client.models.retrieve("alias").id == "alias"
    assert client.models.retrieve(NAME).max_model_len == 1024  # type: ignore[attr-defined]


def test_a_chat(one: Serving) -> None:
    answer = client_of(one).chat.completions.create(model=NAME, messages=HELLO, max_completion_tokens=20)
    assert answer.model == NAME
    assert answer.choices[0].message.content == "Hi there!"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    assert answer.usage.prompt_tokens_details is not None


def test_a_chat_as_a_stream(one: Serving) -> None:
    chunks = list(
        client_of(one).chat.completions.create(
            model="alias", messages=HELLO, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hi there!"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10


def test_completions(one: Serving) -> None:
    client = client_of(one)
    answer = client.completions.create(model=NAME, prompt=["a", "b"], max_tokens=5, n=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["aHi th", "aHi th", "bHi th", "bHi th"]
    pieces = client.completions.create(model=NAME, prompt="a", max_tokens=20, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "Hi there!"


def test_a_stream_that_is_closed_ends_the_request(one: Serving) -> None:
    with client_of(one).chat.completions.create(
        model=NAME, messages=HELLO, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    ) as pieces:
        next(iter(pieces))
    one.quiet()


def test_many_at_once_with_the_async_client(one: Serving) -> None:
    async def scenario() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="x", max_retries=0) as client:

            async def plain() -> str:
                answer = await client.chat.completions.create(model=NAME, messages=HELLO)
                return answer.choices[0].message.content or ""

            async def streamed() -> str:
                pieces = await client.chat.completions.create(model=NAME, messages=HELLO, stream=True)
                return "".join([piece.choices[0].delta.content or "" async for piece in pieces if piece.choices])

            return await asyncio.gather(*(plain() if i % 2 else streamed() for i in range(20)))

    assert asyncio.run(scenario()) == ["Hi there!"] * 20


def test_samples_logprobs_and_seeds(real: Serving) -> None:
    client = client_of(real)
    ask: dict[str, Any] = dict(model=NAME, messages=HELLO, max_tokens=6, seed=5, n=3, logprobs=True, top_logprobs=2)
    first, second = (client.chat.completions.create(**ask) for _ in range(2))
    assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]
    assert len({c.message.content for c in first.choices}) == 3
    logprobs = first.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in logprobs.content)
    text = client.completions.create(model=NAME, prompt="abc", max_tokens=4, logprobs=2, temperature=0)
    assert text.choices[0].logprobs is not None
    assert len(text.choices[0].logprobs.token_logprobs or ()) == len(text.choices[0].logprobs.tokens or ()) > 0


def test_errors_have_their_classes(one: Serving) -> None:
    client = client_of(one)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=NAME, messages=HELLO, temperature=-1)
    assert bad.value.param == "temperature"
    assert bad.value.status_code == 400
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=NAME, prompt="x" * 2000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nope", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        list(client.chat.completions.create(model=NAME, messages=[], stream=True))


def test_keys(model: Path) -> None:
    keys = (TenantConfig("secret-a", "a"), TenantConfig("secret-b", "b"))
    server = {"api_keys": keys, "served_model_name": (NAME,)}
    with serving(model, runner=ScriptedRunner(), server=server) as one:
        assert client_of(one, "secret-b").completions.create(model=NAME, prompt="a").choices[0].text
        for wrong in ("secret-c", "secret-", "secret-aa"):
            client = client_of(one, wrong)
            for call in (
                client.models.list,
                lambda client=client: client.chat.completions.create(model=NAME, messages=HELLO),
                lambda client=client: client.completions.create(model=NAME, prompt="a", stream=True),
            ):
                with pytest.raises(openai.AuthenticationError) as refusal:
                    call()
                assert refusal.value.code == "invalid_api_key"
                assert wrong not in str(refusal.value)
        assert one.client.get("/health").status_code == one.client.get("/metrics").status_code == 200
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/reset_prefix_cache"):
            assert one.client.post(path, content=b"{").status_code == 401


def test_a_full_queue_is_a_rate_limit(model: Path) -> None:
    runner = Stepping()
    server = {"served_model_name": (NAME,)}
    with serving(model, runner=runner, server=server, max_queue=1, max_num_seqs=1) as one:
        client, both = client_of(one), []
        for live in (1, 2):
            both.append(Wire(one, COMPLETIONS, {"prompt": "a", "max_tokens": 5, "stream": True}))
            one.until(lambda live=live: one.state.engine.live == live)
            runner.to_step(one, runner.steps + 1)
        with ThreadPoolExecutor(1) as pool:
            third = pool.submit(client.completions.create, model=NAME, prompt="a")
            one.until(lambda: one.state.engine.live == 3 or third.done())
            runner.allow()
            with pytest.raises(openai.RateLimitError) as refusal:
                third.result()
        assert refusal.value.code == "queue_full"
        assert int(refusal.value.response.headers["retry-after"]) >= 1
        runner.gate.set()
        for client_wire in both:
            client_wire.answer()
            client_wire.close()


def test_an_error_in_a_stream_is_raised(model: Path) -> None:
    def fault(plan: Any) -> None:
        if runner.steps >= 5:
            raise RuntimeError("the device is on fire")

    runner = ScriptedRunner()
    runner.fault = fault
    with serving(model, runner=runner, server={"served_model_name": (NAME,)}) as one:
        pieces = client_of(one).chat.completions.create(model=NAME, messages=HELLO, max_tokens=50, stream=True)
        with pytest.raises(openai.APIError, match="on fire"):
            list(pieces)


# -- curl -------------------------------------------------------------------------------------------------------------

JSON = '-H "Content-Type: application/json"'
CHATTING = '"messages": [{"role": "user", "content": "hi"}]'
EXAMPLES = (
    "curl -s URL/v1/models",
    f"""curl -s URL/v1/chat/completions {JSON} -d '{{"model": "tiny", {CHATTING}}}'""",
    f"""curl -sN URL/v1/chat/completions {JSON} -d '{{"stream": true, {CHATTING}}}'""",
    f"""curl -s URL/v1/completions {JSON} -d '{{"prompt": "Once", "max_tokens": 4}}'""",
    f"""curl -s URL/tokenize {JSON} -d '{{"prompt": "Once"}}'""",
    f"""curl -s URL/detokenize {JSON} -d '{{"tokens": [100, 101]}}'""",
    "curl -s URL/health",
    "curl -s URL/version",
    "curl -s URL/metrics",
    "curl -s -X POST URL/reset_prefix_cache",
)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("example", EXAMPLES)
def test_curl(one: Serving, example: str) -> None:
    command = example.replace("URL", one.url)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    if "stream" in example:
        assert events(done.stdout)[-1] == "[DONE]"
    elif "metrics" in example:
        assert "octavo_requests_accepted_total" in done.stdout
    else:
        assert "error" not in json.loads(done.stdout)
