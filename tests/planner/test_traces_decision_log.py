"""Our own decision log as a trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.simulation import Bench

from octavo import events as ev
from octavo.log import LogHeader, LogWriter
from octavo.planner.traces import TraceError, open_trace
from octavo.types import RequestError


@pytest.fixture(params=[".jsonl", ".msgpack"])
def recorded(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Bench]:
    """Two requests with the same first two blocks of 4, one of them with two samples; one refused, one unfinished."""
    path = tmp_path / f"octavo{request.param}"
    bench = Bench("paged", pages=30, config={"max_model_len": 64})
    header = LogHeader("paged", 30, 4, (None,), True, bench.scheduler.config)
    writer = LogWriter(path, header)
    bench.scheduler = header.build(lambda event: (writer(event), bench.events.append(event)))
    bench.kv = bench.scheduler.kv
    bench.add(list(range(10)), 7)
    bench.step()
    bench.add([*range(8), 50, 51, 52, 53], 5, n=2)
    with pytest.raises(RequestError):
        bench.add(list(range(100)), 5)
    bench.run()
    bench.add([9, 9, 9], 40)
    for _ in range(6):
        bench.step()
    writer.close()
    return path, bench


def test_requests_are_read_with_what_they_became(recorded: tuple[Path, Bench]) -> None:
    path, bench = recorded
    trace = open_trace(path)
    requests = list(trace)
    assert trace.name.endswith("(octavo-log)")
    assert [(r.prompt_tokens, r.output_tokens, r.max_tokens) for r in requests] == [(10, 7, 7), (12, 5, 5), (12, 5, 5)]
    submitted = [event for event in bench.events if isinstance(event, ev.Submitted)]
    assert [r.arrival for r in requests] == pytest.approx(
        [event.now - submitted[0].now for event in (submitted[0], submitted[1], submitted[1])]
    )
    assert len({request.id for request in requests}) == 3
    assert requests == list(trace)


def test_equal_prefixes_have_equal_ids(recorded: tuple[Path, Bench]) -> None:
    first, sample, other = (request.hashes for request in open_trace(recorded[0]))
    assert (len(first), len(sample)) == (2, 3)
    assert sample == other
    assert sample[:2] == first


def test_refused_and_unfinished_requests_are_reported(recorded: tuple[Path, Bench]) -> None:
    trace = open_trace(recorded[0])
    reasons = [bad.reason for bad in trace.bad_lines]
    assert len(reasons) == 2
    assert reasons[0].startswith("the request was refused:")
    assert reasons[1].endswith("had not finished when the log ended.")


@pytest.mark.parametrize("recorded", [".jsonl"], indirect=True)
def test_a_log_that_is_cut_off_is_an_error(recorded: tuple[Path, Bench]) -> None:
    path, _ = recorded
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(TraceError, match="breaks off"):
        list(open_trace(path))
