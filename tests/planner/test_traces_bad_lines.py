"""What may be wrong with the lines of a trace (cases.md, X3), their order, and that memory stays flat."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.planner.traces import TraceError, TraceRequest, open_trace
from octavo.planner.traces.file_trace import WINDOW
from octavo.planner.traces.objects import write_octavo
from octavo.planner.traces.transforms import Listed

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
MOONCAKE = {"timestamp": 0, "input_length": 1024, "output_length": 3, "hash_ids": [1, 2]}
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def mooncake(tmp_path: Path, *changes: dict[str, object]) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(MOONCAKE | change) + "\n" for change in changes))
    return str(path)


def vidur(path: Path, times: list[float]) -> Path:
    rows = (f"{time},{10 + index % 90},5\n" for index, time in enumerate(times))
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(rows))
    return path


def test_ids_that_differ_only_above_bit_31_never_share(tmp_path: Path) -> None:
    ids = [[7, 2**31 + 7], [2**32 + 7, 2**63 + 7], [2**33 + 7, 2**64 - 1]]
    requests = list(open_trace(mooncake(tmp_path, *({"hash_ids": each} for each in ids))))
    assert [list(request.hashes) for request in requests] == ids
    assert len({each for request in requests for each in request.hashes}) == 6


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"input_length": 20}, "hash_ids has 2 ids; 20 tokens in blocks of 512 make 1 (ceil)."),
        ({"input_length": 1025}, "hash_ids has 2 ids; 1025 tokens in blocks of 512 make 3 (ceil)."),
        ({"hash_ids": []}, "hash_ids has 0 ids; 1024 tokens in blocks of 512 make 2 (ceil)."),
        (
            {"hash_ids": [1, 2**64]},
            "hash_ids holds 18446744073709551616; ids must be whole numbers from 0 and below 2^64.",
        ),
        ({"hash_ids": [1, -2]}, "hash_ids holds -2; ids must be"),
        ({"hash_ids": [1, "2"]}, "hash_ids holds '2'; ids must be"),
        ({"hash_ids": [True, 2]}, "hash_ids holds True; ids must be"),
        ({"hash_ids": [4, 4]}, "hash_ids holds an id twice"),
        ({"hash_ids": "none"}, "hash_ids is 'none'; it must be a list of block ids."),
        ({"hash_ids": None}, "hash_ids is None; it must be a list"),
        ({"input_length": 0}, "input_length is 0; it must be a whole number of at least 1."),
        ({"output_length": 0}, "output_length is 0; it must be a whole number of at least 1."),
        ({"output_length": -4}, "output_length is -4; it must be a whole number of at least 1."),
        ({"output_length": None}, "output_length is None; it must be a whole number of at least 1."),
        ({"output_length": 3.5}, "output_length is 3.5; it must be"),
        ({"output_length": 10**12}, "output_length is 1000000000000; it must be at most 1000000000 tokens."),
        ({"timestamp": -1}, "timestamp is -1; it must be a time"),
        ({"timestamp": float("nan")}, "timestamp is nan; it must be a time"),
        ({"timestamp": 10**400}, "timestamp is 1000"),
        ({"timestamp": "0"}, "timestamp is '0'; it must be a time"),
    ],
)
def test_a_bad_line_is_left_out_and_reported(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    trace = open_trace(mooncake(tmp_path, {}, change, {}))
    assert [request.id for request in trace] == ["1", "3"]
    (bad,) = trace.bad_lines
    assert (trace.bad_count, bad.line) == (1, 2)
    assert bad.reason.startswith(reason)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("1.5,0,5", "num_prefill_tokens is 0"),
        ("1.5,7,-5", "num_decode_tokens is -5; it must be a whole number of at least 1."),
        ("1.5,7,", "num_decode_tokens is missing."),
        ("1.5,7", "num_decode_tokens is missing; each line needs arrived_at"),
        ("1.5,7.5,5", "num_prefill_tokens is '7.5'"),
        ("1.5,1_000,5", "num_prefill_tokens is '1_000'"),
        ("1.5,٣,5", "num_prefill_tokens is '٣'"),
        ("-1,7,5", "arrived_at is '-1'; it must be seconds"),
        ("inf,7,5", "arrived_at is 'inf'"),
        (",7,5", "arrived_at is missing."),
        ('"1.5,7,5', "not CSV (unexpected end of data); correct the line."),
        ("\x00", "num_prefill_tokens is missing"),
    ],
)
def test_a_bad_row_is_left_out_and_reported(tmp_path: Path, row: str, reason: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"arrived_at,num_prefill_tokens,num_decode_tokens\n1,7,5\n{row}\n2,8.0,5\n", encoding="utf-8")
    trace = open_trace(path)
    assert [(request.id, request.prompt_tokens) for request in trace] == [("2", 7), ("4", 8)]
    assert [bad.line for bad in trace.bad_lines] == [3]
    assert trace.bad_lines[0].reason.startswith(reason)


def test_one_bad_line_in_a_thousand_costs_that_line(tmp_path: Path) -> None:
    changes: list[dict[str, object]] = [{"timestamp": 10 * number} for number in range(1000)]
    changes[617]["output_length"] = 0
    trace = open_trace(mooncake(tmp_path, *changes))
    assert sum(1 for _ in trace) == 999
    assert [bad.line for bad in trace.bad_lines] == [618]


def test_bad_lines_beyond_a_hundred_are_counted(tmp_path: Path) -> None:
    trace = open_trace(mooncake(tmp_path, *({} for _ in range(200)), *({"input_length": 0} for _ in range(150))))
    assert sum(1 for _ in trace) == 200
    assert (trace.bad_count, len(trace.bad_lines)) == (150, 100)


def test_a_file_that_is_mostly_bad_is_an_error_before_anything_is_yielded(tmp_path: Path) -> None:
    path = mooncake(tmp_path, {}, {}, *({"output_length": -1} for _ in range(3)))
    with pytest.raises(
        TraceError, match=r"3 of 5 lines cannot be used, the first is line 3: output_length is -1.*mooncake"
    ):
        next(iter(open_trace(path)))
    with pytest.raises(TraceError, match="has no requests"):
        list(open_trace(vidur(tmp_path / "empty.csv", [])))


def test_a_prompt_longer_than_any_model_is_kept_as_it_is(tmp_path: Path) -> None:
    ids = list(range(2000))
    (request,) = open_trace(mooncake(tmp_path, {"input_length": 1_024_000, "hash_ids": ids}))
    assert (request.prompt_tokens, len(request.hashes)) == (1_024_000, 2000)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_line_ends_byte_order_mark_and_gzip_make_no_difference(
    tmp_path: Path, mark: bytes, end: bytes, last: bool, packed: bool
) -> None:
    tables = (AZURE, "2023-11-16 18:15:46.6805900,374,44", "", "2023-11-16 18:15:50.9951690,396,109")
    lines = (json.dumps(MOONCAKE), json.dumps(MOONCAKE | {"timestamp": 4314}))
    for content, wanted in ((tables, [374, 396]), (lines, [1024, 1024])):
        raw = mark + end.join(line.encode() for line in content) + (end if last else b"")
        path = tmp_path / "trace"  # told by content, not by its name
        path.write_bytes(gzip.compress(raw) if packed else raw)
        requests = list(open_trace(path))
        assert [request.prompt_tokens for request in requests] == wanted
        assert requests[1].arrival == pytest.approx(4.314, abs=0.001)


# -- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("disorder", [0, 50, 3 * WINDOW])
def test_rows_out_of_order_are_sorted_and_ties_keep_their_order(tmp_path: Path, disorder: int) -> None:
    """None, neighbours only, and worse than the window that is held: the last is sorted on disk."""
    rng = random.Random(1)
    times = [float((index + rng.randint(0, disorder)) // 4) for index in range(4 * WINDOW)]
    requests = list(open_trace(vidur(tmp_path / "trace.csv", times)))
    wanted = sorted(range(len(times)), key=times.__getitem__)  # stable
    assert [int(request.id) - 2 for request in requests] == wanted
    earliest = min(times)
    assert [request.arrival for request in requests] == [times[index] - earliest for index in wanted]


@QUICK
@given(times=st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_any_order_comes_out_stably_sorted(tmp_path: Path, times: list[int]) -> None:
    requests = list(open_trace(vidur(tmp_path / "trace.csv", [float(time) for time in times])))
    wanted = sorted(range(len(times)), key=times.__getitem__)
    assert [int(request.id) - 2 for request in requests] == wanted


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("disorder", "many"), [(0, 200_000), (100, 60_000)])
def test_memory_is_flat_in_the_length_of_the_trace(tmp_path: Path, disorder: int, many: int) -> None:
    def peak(rows: int) -> int:
        rng = random.Random(2)
        path = vidur(tmp_path / f"{rows}.csv", [index + rng.randint(0, disorder) for index in range(rows)])
        tracemalloc.start()
        try:
            assert sum(1 for _ in open_trace(path)) == rows
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    small, large = peak(20_000), peak(many)
    assert large < 1.1 * small + 100_000
    assert large < 10e6


# -- anything ---------------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
REQUESTS = st.builds(
    TraceRequest,
    arrival=st.floats(0, 1e6),
    prompt_tokens=st.integers(1, 100_000),
    output_tokens=st.integers(1, 100_000),
    id=TEXTS,
    max_tokens=st.none() | st.integers(0, 10**6),
    cached_tokens=st.none() | st.integers(0, 10**6),
    session=TEXTS,
)


@QUICK
@given(requests=st.lists(REQUESTS, min_size=1, max_size=20), data=st.data())
def test_what_is_written_is_read_back(tmp_path: Path, requests: list[TraceRequest], data: st.DataObject) -> None:
    written = []
    for request in sorted(requests, key=lambda request: request.arrival):
        block = data.draw(st.integers(1, 64))
        most = min(5, -(-(request.prompt_tokens + request.output_tokens) // block))
        ids = tuple(data.draw(st.lists(st.integers(0, 2**64 - 1), max_size=most, unique=True)))
        arrival = request.arrival - min(one.arrival for one in requests)
        written.append(replace(request, arrival=arrival, hashes=ids, hash_block=block if ids else 0))
    path = tmp_path / "trace.jsonl"
    assert write_octavo(path, Listed("drawn", tuple(written))) == len(written)
    assert list(open_trace(path)) == written


@pytest.mark.parametrize(
    "good",
    [
        "2023-11-16 18:15:46.6805900,374,44",
        json.dumps(MOONCAKE),
        '{"arrival": 1, "prompt_tokens": 3, "output_tokens": 1, "hashes": [4], "hash_block": 2}',
        '{"metadata": {"request_start_ns": 5}, "metrics": {"input_sequence_length": {"value": 3}, '
        '"output_sequence_length": {"value": 3}}}',
        '{"timestamp": 1, "event": {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": '
        '{"input_tokens": 1, "output_tokens": 1, "request_received_ms": 1}}}',
        '{"request_id": "a", "input_toks": 3, "output_toks": 3, "queued_ts": 2.5}',
        '{"input_toks": 3, "output_toks": 3, "arrival_time_ns": 2, "hash_ids": []}',
    ],
)
@QUICK
@given(garbage=st.lists(st.one_of(st.binary(max_size=40), TEXTS.map(str.encode)), max_size=6), data=st.data())
def test_garbage_never_stops_the_reading_and_is_always_counted(
    tmp_path: Path, good: str, garbage: list[bytes], data: st.DataObject
) -> None:
    """Random bytes, and good lines with a piece cut out."""
    for _ in range(data.draw(st.integers(0, 2))):
        start = data.draw(st.integers(0, len(good) - 2))
        garbage.append((good[:start] + good[start + data.draw(st.integers(1, 5)) :]).encode())
    is_table = good.startswith("2023")
    lines = [line.translate(None, b"\r\n") for line in garbage]
    lines = [line for line in lines if line.decode("utf-8-sig", "surrogateescape").strip()]
    path = tmp_path / "trace"
    head = [AZURE.encode(), good.encode()] if is_table else [good.encode()]
    path.write_bytes(b"\n".join(head + [good.encode()] * len(lines) + lines) + b"\n")
    trace = open_trace(path)
    read = sum(1 for _ in trace)
    assert read >= 1 + len(lines)
    told = read + trace.bad_count
    assert told <= 1 + 2 * len(lines)
    if "request_end" not in good:  # a Dynamo event of another type is no request, and not bad
        assert told == 1 + 2 * len(lines)
