"""Every trace format: what is read from a few committed rows, and whole-file facts where the shared files are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.planner.traces import TraceError, TraceRequest, open_trace
from octavo.planner.traces.opening import FORMATS
from octavo.planner.traces.transforms import timed_by

HERE = Path(__file__).parent.parent / "data" / "traces"


def first(path: Path | str, count: int = 5, **options: Any) -> list[TraceRequest]:
    return [request for request, _ in zip(open_trace(path, **options), range(count), strict=False)]


def figures(requests: list[TraceRequest]) -> list[tuple[float, int, int]]:
    return [(round(request.arrival, 7), request.prompt_tokens, request.output_tokens) for request in requests]


def unlimited_hit_share(requests: list[TraceRequest]) -> float:
    """Share of prompt tokens in blocks that an earlier prompt had, with unlimited memory."""
    seen: set[int] = set()
    hits = total = 0
    for request in requests:
        found = sum(each in seen for each in request.hashes)
        hits += min(found * request.hash_block, request.prompt_tokens)
        total += request.prompt_tokens
        seen.update(request.hashes)
    return hits / total


@pytest.mark.parametrize(
    ("name", "kind", "timed", "wanted"),
    [
        ("azure_conv.csv", "azure", True, [(0.0, 374, 44), (4.314579, 396, 109)]),
        ("burstgpt.csv", "burstgpt", True, [(0.0, 472, 18), (40.0, 1087, 230)]),
        ("vidur_splitwise_conv.csv", "vidur", True, [(0.0, 374, 44), (4.314579, 396, 109)]),
        ("vidur_arxiv.csv", "lengths", False, [(0.0, 3772, 54), (0.0, 2015, 156)]),
        ("sarathi_sharegpt.csv", "lengths", False, [(0.0, 74, 918), (0.0, 290, 905)]),
        ("nanoflow_sharegpt.csv", "azure-lengths", False, [(0.0, 42, 285), (0.0, 19, 82)]),
        ("mooncake_conversation.jsonl", "mooncake", True, [(0.0, 6758, 500), (0.0, 7322, 490)]),
        ("vllm_run_requests.jsonl", "vllm-requests", True, [(0.0, 2358, 531), (0.3869025, 1034, 769)]),
        ("vllm_run_requests.csv", "vllm-run", True, [(0.0, 2358, 531), (0.3869, 1034, 769)]),
        ("llmservingsim_derived.jsonl", "llmservingsim", True, [(0.0, 2358, 531), (0.3010121, 1034, 769)]),
        ("llmservingsim_workload.jsonl", "llmservingsim", True, [(0.0, 2358, 531), (0.301012, 1034, 769)]),
    ],
)
def test_a_format_is_told_by_its_content_and_read(
    name: str, kind: str, timed: bool, wanted: list[tuple[float, int, int]]
) -> None:
    trace = open_trace(HERE / name)
    assert trace.name == f"{name} ({kind})"
    assert trace.timed is timed
    requests = list(trace)
    assert figures(requests)[:2] == wanted
    assert trace.bad_lines == ()
    assert len({request.id for request in requests}) == len(requests)
    assert list(trace) == requests, "a trace can be read again"


def test_azure_keeps_all_seven_digits_whatever_the_offset(tmp_path: Path) -> None:
    rows = (
        b"2023-11-16 23:59:59.9999999,1,1",
        b"2023-11-17 00:00:00.0000001,2,1",
        b"2023-11-17 01:00:00.000001+01:00,3,1",
        b"2023-11-17T00:00:01Z,4,1",
    )
    path = tmp_path / "trace.csv"
    path.write_bytes(b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + b"\r\n".join(rows))
    assert [request.arrival for request in open_trace(path)] == pytest.approx([0, 2e-7, 1.1e-6, 1.0000001], abs=1e-10)


def test_burstgpt_is_read_by_name_and_failed_requests_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,7,1.5,ChatGPT,472,18,490,Conversation log\n9,8,0,GPT-4,10,0,10,API log\n11,7,2,GPT-4,20,5,25,API log\n"
    )
    trace = open_trace(path)
    assert [(request.prompt_tokens, request.session) for request in trace] == [(472, "7"), (20, "7")]
    assert [(bad.line, bad.reason) for bad in trace.bad_lines] == [(3, "Response tokens is 0: the request failed.")]


def test_mooncake_blocks_are_512_tokens_and_milliseconds_are_seconds(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(
        '{"timestamp": 500, "input_length": 1025, "output_length": 3, "hash_ids": [1, 2, 3]}\n'
        '{"timestamp": 3553, "input_length": 512, "output_length": 3, "hash_ids": [1]}\n'
        '{"timestamp": 3553, "input_length": 99, "output_length": 3}\n'
    )
    requests = list(open_trace(path))
    assert [request.arrival for request in requests] == pytest.approx([0, 3.053, 3.053])
    assert [(request.hashes, request.hash_block) for request in requests] == [((1, 2, 3), 512), ((1,), 512), ((), 0)]
    with pytest.raises(TraceError, match=r"2 of 3 lines cannot be used.*in blocks of 256 make 5"):
        list(open_trace(f"{path}?hash_block=256"))


def test_dynamo_requests_come_in_order_of_arrival_with_64_bit_ids_and_measured_hits() -> None:
    requests = list(open_trace(HERE / "dynamo_requests.jsonl"))
    assert [request.arrival for request in requests] == pytest.approx([0.0, 66.002, 66.019, 66.039])
    assert all(len(request.hashes) == -(-request.prompt_tokens // 16) for request in requests)
    assert max(max(request.hashes) for request in requests) >= 2**63
    assert requests[0].id == "71491777-4c0d-4d7f-a8a5-54f11a28dde2"
    assert requests[0].session == "manual-noadm:root"
    assert all(request.cached_tokens is not None for request in requests)


def test_llmservingsim_ids_cover_the_prompt_or_prompt_and_answer() -> None:
    prompts, both = (list(open_trace(HERE / f"llmservingsim_{kind}.jsonl")) for kind in ("derived", "workload"))
    assert [len(request.hashes) for request in prompts] == [request.prompt_tokens // 16 for request in prompts]
    assert [len(r.hashes) for r in both] == [(r.prompt_tokens + r.output_tokens) // 16 for r in both]
    assert [request.id for request in both] == ["bench-0", "bench-1", "bench-2"]


def test_measured_arrivals_are_put_on_the_workload_by_id() -> None:
    workload, run = open_trace(HERE / "llmservingsim_workload.jsonl"), open_trace(HERE / "vllm_run_requests.csv")
    joined = list(timed_by(workload, run))
    assert [request.arrival for request in joined] == [request.arrival for request in run]
    assert [request.hashes for request in joined] == [request.hashes for request in workload]
    with pytest.raises(TraceError, match="has no arrival for request bench-1 and 1 others"):
        list(timed_by(workload, open_trace(f"{HERE / 'vllm_run_requests.csv'}?requests=1")))


def test_a_session_file_keeps_its_clock_and_its_sub_agents_have_their_own() -> None:
    requests = list(open_trace(HERE / "sessions" / "trace_0003.json.gz"))
    assert [request.arrival for request in requests] == pytest.approx([0.0, 134.227, 140.227, 153.0])
    assert {request.session for request in requests} == {"trace_0003"}
    assert all(len(request.hashes) == request.prompt_tokens // 64 for request in requests)


def session(name: str, ids: list[int], **more: Any) -> dict[str, Any]:
    request = {"t": 0.0, "type": "s", "in": 64 * len(ids), "out": 5, "hash_ids": ids}
    about = {"id": name, "block_size": 64, "hash_id_scope": "local", "tool_tokens": 130, "system_tokens": 70}
    return {**about, "requests": [request], **more}


def write_sessions(folder: Path, *sessions: dict[str, Any]) -> Path:
    folder.mkdir()
    for number, each in enumerate(sessions):
        (folder / f"{number}.json").write_text(json.dumps(each))
    return folder


def test_ids_of_sessions_never_meet_but_for_the_prefix_that_they_share(tmp_path: Path) -> None:
    """130 tool tokens fill 2 blocks of 64, 130 + 70 fill 3: sessions share 3, with another system prompt 2."""
    folder = write_sessions(
        tmp_path / "sessions",
        session("a", [0, 1, 2, 3, 4]),
        session("b", [0, 1, 2, 3, 4]),
        session("c", [9, 8, 7, 6], system_tokens=80),
        session("d", [0, 1, 2], tool_tokens=131),
    )
    a, b, c, d = (request.hashes for request in open_trace(folder))
    assert [x == y for x, y in zip(a, b, strict=True)] == [True, True, True, False, False]
    assert [x == y for x, y in zip(a, c, strict=False)] == [True, True, False, False]
    assert not set(a) & set(d)
    apart = [request.hashes for request in open_trace(f"{folder}?shared_prefix=0")]
    assert len({each for ids in apart for each in ids}) == 5 + 5 + 4 + 3


def test_a_sub_agent_shares_its_parents_namespace_and_other_heads_stay_their_own(tmp_path: Path) -> None:
    agent = {"t": 10.0, "type": "subagent", "tool_tokens": 64, "system_tokens": 0}
    agent["requests"] = [{"t": 2.5, "in": 192, "out": 1, "hash_ids": [7, 3, 1]}]
    parent = session("a", [0, 1, 2, 3])
    parent["requests"] += [agent, {"t": 11.0, "in": 256, "out": 1, "hash_ids": [50, 51, 52, 53]}]
    other = session("b", [5, 6, 7], tool_tokens=64, system_tokens=0)
    requests = {request.id: request for request in open_trace(write_sessions(tmp_path / "s", parent, other))}
    first_, agents, side, other_ = (requests[each] for each in ("a/1", "a/2", "a/3", "b/1"))
    assert agents.arrival == 12.5
    assert set(agents.hashes) & set(first_.hashes) == {first_.hashes[3], first_.hashes[1]} - {first_.hashes[1]}
    assert agents.hashes[0] == other_.hashes[0], "both have the same 64 tokens of tools"
    assert not set(side.hashes) & set(first_.hashes), "another head of the same session is another prompt"


def test_session_starts_are_drawn_by_rate_and_seed(tmp_path: Path) -> None:
    folder = write_sessions(tmp_path / "sessions", *(session(str(number), [0, 1, 2]) for number in range(200)))
    arrivals = [request.arrival for request in open_trace(f"{folder}?session_rate=2&seed=5")]
    assert arrivals == [request.arrival for request in open_trace(f"{folder}?session_rate=2&seed=5")]
    assert arrivals != [request.arrival for request in open_trace(f"{folder}?session_rate=2&seed=6")]
    assert arrivals[-1] == pytest.approx(100, rel=0.25)
    with pytest.raises(TraceError, match="session_rate is 0"):
        list(open_trace(f"{folder}?session_rate=0"))


def test_servegen_draws_as_many_requests_as_the_rate_says() -> None:
    """Rates 5.1467, 18.7783 and 18.2783 per second in the last three windows of 600 s: 3,088 + 11,267 + 10,967."""
    trace = open_trace(f"{HERE / 'servegen'}?start=84600&end=86400")
    requests = list(trace)
    assert len(requests) == 3088 + 11_267 + 10_967
    assert [request.arrival for request in requests] == sorted(request.arrival for request in requests)
    assert {request.session for request in requests} == {"client-55"}
    assert requests == list(trace)
    again = f"{HERE / 'servegen' / 'chunk-55-trace.csv.gz'}?start=85200&end=86400"
    assert len(list(open_trace(again))) == 11_267 + 10_967
    assert [r.prompt_tokens for r in open_trace(f"{again}&seed=1")] != [r.prompt_tokens for r in open_trace(again)]


def test_servegen_lengths_follow_the_histogram_and_odd_rows_are_bad(tmp_path: Path) -> None:
    (tmp_path / "chunk-1-trace.csv").write_text(
        "0,2,1,Gamma,1,0.5\n600,0,0,,0,0\n1200,1,1,Pareto,1,1\n1800,1,2,Weibull,0.5,9\n"
    )
    histograms = {"0": {"input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{}"}}
    histograms["21600"] = {"input_tokens": "{}", "output_tokens": "{3: 1.0}"}
    (tmp_path / "chunk-1-dataset.json").write_text(json.dumps(histograms))
    trace = open_trace(tmp_path)
    requests = list(trace)
    assert len(requests) == 1200 + 600
    assert {(request.prompt_tokens, request.output_tokens) for request in requests} == {(10, 3), (20, 3)}
    assert sum(request.prompt_tokens == 10 for request in requests) / 1800 == pytest.approx(0.25, abs=0.04)
    assert [bad.line for bad in trace.bad_lines] == [3]
    assert "the family is 'Pareto'" in trace.bad_lines[0].reason


def test_a_histogram_is_never_evaluated_as_code(tmp_path: Path) -> None:
    (tmp_path / "chunk-1-trace.csv").write_text("0,2,1,Gamma,1,0.5\n")
    code = "__import__('os').mkdir('evil')"
    (tmp_path / "chunk-1-dataset.json").write_text(json.dumps({"0": {"input_tokens": code, "output_tokens": "{1: 1}"}}))
    with pytest.raises(TraceError, match="the histogram of input_tokens cannot be read"):
        list(open_trace(tmp_path))


# -- what cannot be read ----------------------------------------------------------------------------------------------


def test_an_unknown_format_lists_those_that_are_known(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("nothing of the kind\n")
    with pytest.raises(TraceError) as caught:
        open_trace(path)
    assert all(kind.name in str(caught.value) for kind in FORMATS)
    with pytest.raises(TraceError, match="format 'csv' is unknown; choose from aiperf"):
        open_trace(path, format="csv")


def test_a_format_can_be_named_where_the_content_hides_it(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nXXX,1,1\nXXX,2,2\n")
    with pytest.raises(TraceError, match="TIMESTAMP is 'XXX'"):
        list(open_trace(path, format="azure"))
    assert len(list(open_trace(f"{path}?format=azure-lengths"))) == 2


def test_text_instead_of_token_counts_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "agent.jsonl"
    path.write_text('{"timestamp": 1760428258635837, "input": "a", "output": "b", "session_id": "x"}\n')
    with pytest.raises(TraceError, match="holds text, not token counts; tokenise it"):
        open_trace(path)


@pytest.mark.parametrize("name", ["absent.csv", "x" * 300, "nul\0", ""])
def test_a_file_that_is_not_there(name: str) -> None:
    with pytest.raises(TraceError, match=r"does not exist|no known format|without ServeGen"):
        open_trace(name)


def test_damaged_gzip_is_an_error_not_a_shorter_trace(tmp_path: Path) -> None:
    whole = gzip.compress((HERE / "vidur_arxiv.csv").read_bytes() * 1000)
    path = tmp_path / "cut.csv.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="damaged gzip"):
        list(open_trace(path))


# -- whole files, where they are --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "requests", "seconds", "prompt", "output"),
    [
        ("azure-llm-2023/AzureLLMInferenceTrace_code.csv", 8819, 3436, 2048, 28),
        ("azure-llm-2023/AzureLLMInferenceTrace_conv.csv", 19_366, 3502, 1155, 211),
        ("mooncake-fast25/conversation_trace.jsonl.gz", 12_031, 3537, 12_035, 343),
        ("mooncake-fast25/synthetic_trace.jsonl.gz", 3993, 1022, 15_325, 149),
        ("ai-dynamo/mooncake_trace_1000.jsonl", 1000, 177, 9792, 199),
        ("ai-dynamo/pi_request_trace.jsonl.gz", 17, 162, 3913, 476),
        ("burstgpt/BurstGPT_1.head5.csv", 5, 209, 704, 277),
        ("vidur/splitwise_conv.csv.gz", 19_366, 3502, 1155, 211),
        ("vidur/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz", 28_257, 0, 2588, 291),
        ("nanoflow/sharegpt.csv.gz", 58_787, 0, 299, 324),
        ("sarathi-serve/sharegpt_8k_filtered_stats_llama2_tokenizer.csv.gz", 30_731, 0, 2340, 439),
        ("llmservingsim-vllm-runs/derived_workload_llama-3.1-8b_blocks16.jsonl.gz", 300, 29, 857, 653),
        ("llmservingsim-vllm-runs/RTX4090/Llama-3.1-8B/requests.jsonl", 300, 29, 857, 653),
    ],
)
def test_whole_files_have_the_figures_of_their_source(
    shared: Path, name: str, requests: int, seconds: float, prompt: float, output: float
) -> None:
    trace = open_trace(shared / "traces" / name)
    read = list(trace)
    assert trace.bad_count == 0
    assert len(read) == requests
    assert read[-1].arrival == pytest.approx(seconds, abs=0.7)
    assert sum(request.prompt_tokens for request in read) / requests == pytest.approx(prompt, abs=0.6)
    assert sum(request.output_tokens for request in read) / requests == pytest.approx(output, abs=0.6)


def test_vidurs_copy_of_the_azure_trace_is_the_same_row_for_row(shared: Path) -> None:
    azure = open_trace(shared / "traces/azure-llm-2023/AzureLLMInferenceTrace_code.csv")
    vidur = open_trace(shared / "traces/vidur/splitwise_code.csv.gz")
    for one, other in zip(azure, vidur, strict=True):
        assert (one.prompt_tokens, one.output_tokens) == (other.prompt_tokens, other.output_tokens)
        assert one.arrival == pytest.approx(other.arrival, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("mooncake-fast25/conversation_trace.jsonl.gz", 0.374),
        ("mooncake-fast25/synthetic_trace.jsonl.gz", 0.651),
        ("ai-dynamo/mooncake_trace_1000.jsonl", 0.391),
        ("ai-dynamo/pi_request_trace.jsonl.gz", 0.717),
        ("llmservingsim-vllm-runs/derived_workload_llama-3.1-8b_blocks16.jsonl.gz", 0.076),
    ],
)
def test_prefix_ids_give_the_ideal_hit_share_of_the_catalogue(shared: Path, name: str, share: float) -> None:
    requests = list(open_trace(shared / "traces" / name))
    assert unlimited_hit_share(requests) == pytest.approx(share, abs=0.0006)


def test_no_mooncake_id_has_two_predecessors(shared: Path) -> None:
    before: dict[int, int] = {}
    for request in open_trace(shared / "traces/mooncake-fast25/conversation_trace.jsonl.gz"):
        for previous, each in zip((-1, *request.hashes), request.hashes, strict=False):
            assert before.setdefault(each, previous) == previous
    assert sorted(before) == list(range(len(before)))


@pytest.mark.slow
def test_the_130_sessions_of_kv_cache_tester(shared: Path) -> None:
    trace = open_trace(f"{shared / 'traces/kv-cache-tester/traces'}?shared_prefix=0")
    sessions: set[str] = set()
    seen: set[int] = set()  # ids are apart without the shared prefix, so one set serves all sessions
    count = hits = total = 0
    for request in trace:
        count += 1
        sessions.add(request.session)
        assert len(request.hashes) == request.prompt_tokens // 64
        hits += 64 * len(seen.intersection(request.hashes))
        total += request.prompt_tokens
        seen.update(request.hashes)
    assert (count, trace.bad_count, len(sessions)) == (10_774 - 3, 3, 130)
    assert all("out is 0" in bad.reason for bad in trace.bad_lines)
    assert hits / total == pytest.approx(0.960, abs=0.0006)


def test_servegen_reproduces_the_mean_rate_of_its_clients(shared: Path) -> None:
    folder = shared / "traces/servegen/data/reason/deepseek-r1"
    counts = sum(
        round(float(line.split(",")[1]) * 600)
        for file in folder.glob("*-trace.csv.gz")
        for line in gzip.decompress(file.read_bytes()).decode().splitlines()
        if 36_000 <= float(line.split(",")[0]) < 37_800
    )
    assert sum(1 for _ in open_trace(f"{folder}?start=36000&end=37800")) == counts
