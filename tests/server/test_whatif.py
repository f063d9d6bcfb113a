"""What-if: the recorded traffic replayed as configured and changed, beside the engine and never in its way."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from octavo.server.errors import ApiError
from octavo.server.replaying import Job, answer
from octavo.server.whatif import Recent, Replays, WhatIfBody, changed, settings_of
from tests.server.looking import Looked
from tests.server.serving import ScriptedRunner, Serving, serving, write_checkpoint


def busy(requests: int = 60, **settings: Any) -> Looked:
    """An engine that has served more than it has room for: a request every 20 ms."""
    one = Looked(**{"pages": 40, "admission": "prompt", "max_num_batched_tokens": 256, **settings})
    for i in range(requests):
        one.add(20 + 7 * i % 31, 10 + 11 * i % 40)
        until = one.engine.clock.now() + 0.02
        while one.engine.clock.now() < until:
            if not one.engine.busy:
                one.engine.clock.wait_until(until)
            one.step()
    one.run()
    return one


def asked(one: Looked, **body: Any) -> dict[str, Any]:
    return answer(Recent(one.built, one.inspector, WhatIfBody(window_s=1800.0, **body)).job())


def test_the_replay_as_configured_is_what_really_happened() -> None:
    """The virtual engine's steps take what they take: fit and replay come to the same times as the engine itself."""
    one = busy()
    found = asked(one, max_num_seqs=2)
    requests, _ = one.inspector.traffic.since(0.0)
    measured = sum(request.ttft or 0.0 for request in requests) / len(requests)
    took = sum(request.took or 0.0 for request in requests) / len(requests)
    assert found["requests"] == len(requests) == 60
    assert found["now"]["ttft_mean"] == pytest.approx(measured, rel=0.1)
    assert found["now"]["e2e_mean"] == pytest.approx(took, rel=0.1)
    assert "All figures are estimates" in found["fidelity"]
    assert f"measured {measured:.3g} s" in found["fidelity"]
    assert found["now"]["preemptions"] == pytest.approx(one.engine.scheduler.totals.preemptions, abs=10)


def test_more_memory_lets_more_run_at_once() -> None:
    one = busy()
    now = settings_of(one.built)
    found = asked(one, kv_bytes=4 * now.kv_bytes)
    assert found["changed"]["kv_bytes"] == 4 * found["now"]["kv_bytes"]
    assert found["changed"]["concurrency_mean"] > found["now"]["concurrency_mean"]
    assert found["difference"]["ttft_mean"] < 0
    assert found["difference"]["ttft_mean"] == pytest.approx(
        found["changed"]["ttft_mean"] - found["now"]["ttft_mean"], abs=1e-6
    )
    waiting = [sum(found[side]["waiting_by_cause_s"].values()) for side in ("now", "changed")]
    assert waiting[1] < waiting[0]
    assert "KV bytes" in found["sentence"]


def test_reserving_for_the_longest_lets_fewer_run_at_once() -> None:
    one = busy(max_model_len=96)
    found = asked(one, strategy="reserve-max")
    assert found["changed"]["strategy"] == "reserve-max"
    assert found["changed"]["concurrency_mean"] < found["now"]["concurrency_mean"]
    assert found["changed"]["used_share"] < found["now"]["used_share"]


def test_shared_prefixes_are_shared_in_the_replay_with_another_block_size_too() -> None:
    one = Looked(pages=64, max_num_batched_tokens=256)
    prefix = list(range(64))
    for i in range(60):
        one.add([*prefix, *range(1000 * i + 100, 1000 * i + 108 + i % 9)] if i % 4 else 8 + i, 8)
        one.run()
    longer = asked(one, block_size=8)
    none = asked(one, strategy="growing")
    assert longer["changed"]["ttft_mean"] == pytest.approx(longer["now"]["ttft_mean"], rel=0.1)
    assert none["changed"]["ttft_mean"] > 1.2 * none["now"]["ttft_mean"]


def test_a_change_that_changes_nothing_says_so() -> None:
    one = busy()
    found = asked(one, max_num_seqs=settings_of(one.built).scheduler.max_num_seqs)
    assert "nothing would change for these 60 requests" in found["sentence"]
    assert all(value == 0 for value in found["difference"].values())


def test_requests_that_would_not_fit_are_counted() -> None:
    one = busy()
    found = asked(one, kv_bytes=settings_of(one.built).kv_bytes // 4)
    assert found["changed"]["refused"] > 0
    assert "too long for the pool" in found["sentence"]


def test_those_that_still_run_are_replayed_and_their_length_is_said_to_be_a_guess() -> None:
    one = busy()
    one.add(30, 100)
    one.step(3)
    found = asked(one, max_num_seqs=4)
    assert found["requests"] == 61
    assert "1 requests still run" in found["fidelity"]


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"kv_bytes": 100}, "kv_bytes", "a block of 4 tokens needs 256 bytes in 1 layer groups, there are 100"),
        ({"block_size": 60_000}, "block_size", "a block of 60000 tokens needs"),
        ({"strategy": "magic"}, "strategy", "it must be one of reserve-max"),
        ({"max_num_batched_tokens": 4}, None, "less than max_num_seqs"),
        ({}, None, "nothing is to be changed"),
    ],
)
def test_what_no_engine_could_be_is_refused_with_numbers(body: dict[str, Any], param: str | None, said: str) -> None:
    now = settings_of(Looked().built)
    with pytest.raises(ApiError, match=said) as refused:
        changed(now, WhatIfBody(**body))
    assert refused.value.status == 400
    assert refused.value.param == param


def test_an_engine_with_tenants_is_replayed_as_one_line_and_says_so() -> None:
    one = busy(order="fair", tenant_weights={"a": 2.0})
    found = asked(one, max_num_seqs=4)
    assert "Tenants' order and quotas are not replayed" in found["fidelity"]


def test_with_windows_the_pool_keeps_its_bytes_at_another_block_size() -> None:
    now = settings_of(Looked(windows=(None, 16), pages=64).built)
    after = changed(now, WhatIfBody(block_size=8))
    assert after.pages * after.page_bytes == now.pages * now.page_bytes
    assert after.windows == now.windows


def test_without_traffic_there_is_nothing_to_replay() -> None:
    one = Looked()
    with pytest.raises(ApiError, match="no request has come") as refused:
        asked(one, max_num_seqs=4)
    assert refused.value.status == 409


def test_with_too_few_steps_no_time_can_be_told() -> None:
    one = Looked()
    one.add(8, 10)
    one.run()
    with pytest.raises(ApiError, match="9 steps have been timed and 64 are needed") as refused:
        asked(one, max_num_seqs=4)
    assert refused.value.status == 409


# -- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    model = write_checkpoint(tmp_path_factory.mktemp("model"))
    runner = ScriptedRunner(delay=0.002)
    with serving(model, runner=runner, server={"access_log": False}, max_model_len=512) as found:
        assert found.client.post("/kv/what-if", json={"max_num_seqs": 4}).status_code == 409
        for i in range(12):
            body = {"model": found.state.names[0], "prompt": "x" * (i + 3), "max_tokens": 10 + i, "ignore_eos": True}
            assert found.client.post("/v1/completions", json=body).status_code == 200
        yield found


def test_the_server_answers_while_its_engine_goes_on(one: Serving) -> None:
    answered = one.client.post("/kv/what-if", json={"max_num_seqs": 1, "window_s": 300})
    assert answered.status_code == 200, answered.text
    found = answered.json()
    assert found["requests"] == 12
    assert found["changed"]["max_num_seqs"] == 1
    assert set(found) == {"requests", "window_s", "now", "changed", "difference", "sentence", "fidelity"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"kv_bytes": 1}', "kv_bytes"),
        (b'{"kv_bytes": "many"}', "kv_bytes"),
        (b'{"blocksize": 16}', "blocksize"),
        (b'{"window_s": 1e309, "block_size": 8}', "window_s"),
        (b'{"block_size": 99999999999999999999999}', "block_size"),
        (b"[]", "body"),
        (b"nonsense", None),
    ],
)
def test_a_bad_body_is_refused_with_its_field(one: Serving, body: bytes, param: str | None) -> None:
    answered = one.client.post("/kv/what-if", content=body, headers={"content-type": "application/json"})
    assert answered.status_code == 400, answered.text
    assert answered.json()["error"]["param"] == param


@dataclass
class Client:
    """Whoever waits for the answer, or does not."""

    gone: bool = False

    async def is_disconnected(self) -> bool:
        return self.gone


def job_of(looked: Looked) -> Job:
    return Recent(looked.built, looked.inspector, WhatIfBody(window_s=1800.0, max_num_seqs=4)).job()


def test_one_is_replayed_at_a_time_and_ends_when_its_client_goes_away() -> None:
    job, replays, client = job_of(busy()), Replays(), Client()

    async def scenario() -> None:
        first = asyncio.create_task(replays.run(job, client))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError, match="another what-if") as refused:
            await replays.run(job, Client())  # type: ignore[arg-type]
        assert (refused.value.status, refused.value.retry_after) == (429, 2)
        client.gone = True
        assert await first is None
        assert not multiprocessing.active_children()
        found = await replays.run(job, Client())  # type: ignore[arg-type]
        assert found is not None
        assert found["requests"] == 60

    asyncio.run(scenario())


def test_a_replay_that_takes_too_long_is_ended() -> None:
    with pytest.raises(ApiError, match=r"longer than 0\.1 s") as refused:
        asyncio.run(Replays(time_limit=0.1).run(job_of(busy()), Client()))  # type: ignore[arg-type]
    assert refused.value.status == 503
    assert not multiprocessing.active_children()


def test_steps_whose_times_have_no_reason_give_no_answer() -> None:
    job = job_of(busy())
    noise = random.Random(7)
    steps = tuple((shape, seconds * 10 ** noise.uniform(-2, 2)) for shape, seconds in job.steps)
    with pytest.raises(ApiError, match="held-out steps its error is") as refused:
        asyncio.run(Replays().run(replace(job, steps=steps), Client()))  # type: ignore[arg-type]
    assert (refused.value.status, refused.value.code) == (409, "steps_unexplained")


def test_what_turns_out_impossible_in_the_replay_is_told() -> None:
    job = job_of(busy())
    impossible = replace(job, changed=replace(job.changed, strategy="reserve-max", pages=2))
    with pytest.raises(ApiError, match="nothing could ever run") as refused:
        asyncio.run(Replays().run(impossible, Client()))  # type: ignore[arg-type]
    assert refused.value.status == 400
