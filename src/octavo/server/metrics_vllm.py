"""The figures under the names that vLLM's dashboards, gateways and load generators read."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.build import BuiltEngine
from octavo.scheduler.explain import Cause
from octavo.server.metrics_families import Families
from octavo.server.metrics_reading import Reading
from octavo.types import FinishReason

#: What a cause is called here. `capacity` is KV memory alone: what else can be short has a name of its own.
_REASONS = {
    Cause.NEVER: "capacity",
    Cause.FULL: "capacity",
    Cause.FRAGMENTED: "capacity",
    Cause.HELD: "capacity",
    Cause.SLOTS: "max_num_seqs",
    Cause.BUDGET: "token_budget",
    Cause.QUOTA: "quota",
    Cause.BEHIND: "behind",
    Cause.NEXT_STEP: "next_step",
    Cause.STALLED: "stalled",
}
_REFUSALS = ("max_num_queued_reqs", "max_num_queued_tokens")
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "ttft", "Time from arrival to the first token."),
    ("inter_token_latency_seconds", "itl", "Time between two steps that gave a sample tokens."),
    ("request_time_per_output_token_seconds", "tpot", "Mean time for an output token behind the first, per request."),
    ("e2e_request_latency_seconds", "e2e", "Time from arrival to the end."),
    ("request_queue_time_seconds", "queue", "Time from arrival to the first memory."),
    ("request_inference_time_seconds", "inference", "Time from the first memory to the end."),
    ("request_prefill_time_seconds", "prefill", "Time from the first memory to the first token."),
    ("request_decode_time_seconds", "decode", "Time from the first token to the end."),
    ("request_prompt_tokens", "prompt", "Prompt tokens of a request."),
    ("request_generation_tokens", "generation", "Tokens generated for a request, in all of its samples."),
    ("request_max_num_generation_tokens", "max_generation", "Tokens of a request's longest sample."),
    ("request_params_max_tokens", "max_tokens", "max_tokens of a request."),
    ("request_prefill_kv_computed_tokens", "prompt_computed", "Prompt tokens that did not come from the prefix cache."),
    ("request_params_n", "n", "Samples that a request asked for."),
    ("iteration_tokens_total", "step_tokens", "Tokens computed in a step."),
)


def add_vllm(out: Families, reading: Reading, built: BuiltEngine, refusals: Mapping[str, int]) -> None:
    """`refusals`: requests turned away over HTTP, by reason."""
    _add_gauges(out, reading, built)
    _add_counters(out, reading, refusals)
    for name, counted, says in _HISTOGRAMS:
        out.histogram(f"vllm:{name}", says, reading.tallies.histograms[counted])


def _add_gauges(out: Families, reading: Reading, built: BuiltEngine) -> None:
    waiting = dict.fromkeys(_REASONS.values(), 0) | {"deferred": reading.deferred}
    for cause, count in reading.waiting.items():
        waiting[_REASONS[Cause(cause)]] += count
    waiting["behind"] -= reading.deferred
    out.gauge("vllm:num_requests_running", "Requests that hold memory.", reading.running)
    out.gauge("vllm:num_requests_waiting", "Requests that wait for memory.", sum(reading.waiting.values()))
    out.gauges("vllm:num_requests_waiting_by_reason", "Requests that wait, by what for.", "reason", waiting)
    says = "Share of the KV blocks that live requests use; what is only cached does not count."
    out.gauge("vllm:kv_cache_usage_perc", says, reading.usage)
    config, kv = built.config, built.engine.scheduler.kv
    facts = {
        "block_size": str(kv.block_size),
        "cache_dtype": built.kv_dtype,
        "enable_prefix_caching": str(kv.shares),
        "gpu_memory_utilization": str(config.memory_utilization),
        "num_gpu_blocks": str(kv.capacity),
    }
    out.info("vllm:cache_config_info", "The KV cache.", facts)
    states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    out.gauges("vllm:engine_sleep_state", "Octavo never sleeps.", "sleep_state", states)


def _add_counters(out: Families, reading: Reading, refusals: Mapping[str, int]) -> None:
    totals = reading.totals
    computed, cached = totals.query_tokens - totals.hit_tokens, totals.hit_tokens
    out.counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.", totals.query_tokens)
    out.counter("vllm:generation_tokens", "Tokens generated.", totals.generated)
    sources = {"local_compute": computed, "local_cache_hit": cached, "external_kv_transfer": 0}
    out.counters("vllm:prompt_tokens_by_source", "Prompt tokens, by where their KV is from.", "source", sources)
    out.counter("vllm:prompt_tokens_cached", "Prompt tokens from the prefix cache.", cached)
    says = "Cached prompt tokens that were computed all the same: none, what must be computed is never served."
    out.counter("vllm:prompt_tokens_recomputed", says, 0)
    says = "Prompt tokens looked up in the prefix cache; once for a prompt, when it is first admitted."
    out.counter("vllm:prefix_cache_queries", says, totals.query_tokens)
    out.counter("vllm:prefix_cache_hits", "Prompt tokens that the prefix cache served.", cached)
    for cache in ("external_prefix", "mm"):
        out.counter(f"vllm:{cache}_cache_queries", "Octavo has no such cache.", 0)
        out.counter(f"vllm:{cache}_cache_hits", "Octavo has no such cache.", 0)
    out.counter("vllm:num_preemptions", "Preemptions.", totals.preemptions)
    ended = {reason.value: reading.tallies.finished[reason.value] for reason in FinishReason} | {"repetition": 0}
    out.counters("vllm:request_success", "Requests that have ended, by why.", "finished_reason", ended)
    refused = {reason: refusals.get(reason, 0) for reason in _REFUSALS}
    out.counters("vllm:admission_rejections", "Requests turned away because too much waits.", "reason", refused)


def add_compat(out: Families, reading: Reading) -> None:
    """Older names of the same figures."""
    out.gauge("vllm:gpu_cache_usage_perc", "As kv_cache_usage_perc.", reading.usage)
    out.gauge("vllm:cpu_cache_usage_perc", "Octavo has no such cache.", 0)
    out.gauge("vllm:num_requests_swapped", "Octavo does not swap.", 0)
    out.counter("vllm:gpu_prefix_cache_queries", "As prefix_cache_queries.", reading.totals.query_tokens)
    out.counter("vllm:gpu_prefix_cache_hits", "As prefix_cache_hits.", reading.totals.hit_tokens)
    counted = reading.tallies.histograms["itl"]
    out.histogram("vllm:time_per_output_token_seconds", "As inter_token_latency_seconds.", counted)
