"""Octavo's own figures: where every byte is, why requests wait, what preemption and cache misses cost."""

from __future__ import annotations

from octavo import __version__
from octavo.build import BuiltEngine
from octavo.scheduler.explain import Cause
from octavo.server.metrics_counts import MISSES, Tallies
from octavo.server.metrics_families import Families
from octavo.server.metrics_reading import Reading
from octavo.types import FinishReason

_RESOURCES = ("memory", "slots", "tokens", "quota", "none")
_REFUSALS = (
    "context_length_exceeded",
    "never_fits",
    "over_quota",
    "queue_full",
    "queue_tokens_full",
    "invalid_request",
)
_CAUSES = tuple(cause.value for cause in Cause if cause is not Cause.STALLED)


def add_octavo(out: Families, reading: Reading, built: BuiltEngine) -> None:
    _add_memory(out, reading, built)
    _add_waiting(out, reading)
    _add_requests(out, reading)
    _add_costs(out, reading)
    _add_steps(out, reading)


def _add_memory(out: Families, reading: Reading, built: BuiltEngine) -> None:
    ledger, pool, config = reading.head.ledger, reading.head.pool, built.config
    says = "Bytes by line of the ledger; the lines sum to octavo_memory_budget_bytes."
    out.gauges("octavo_memory_bytes", says, "line", ledger.lines)
    out.gauge("octavo_memory_budget_bytes", "Bytes that the lines of the ledger sum to.", ledger.budget)
    blocks = {state: pool[state] for state in ("pinned", "cached", "free")}
    says = "Blocks by state, summing to octavo_kv_pool_blocks; pinned: live requests refer to them."
    out.gauges("octavo_kv_blocks", says, "state", blocks)
    out.gauge("octavo_kv_pool_blocks", "Blocks in the pool.", pool["blocks"])
    facts = {
        "version": __version__,
        "strategy": config.kv_strategy,
        "block_size": str(built.engine.scheduler.kv.block_size),
        "kv_dtype": built.kv_dtype,
        "admission": config.admission,
        "order": config.order,
        "max_model_len": str(built.max_model_len),
        "max_num_seqs": str(config.max_num_seqs),
        "max_num_batched_tokens": str(config.max_num_batched_tokens),
    }
    out.info("octavo_info", "What the engine was built as.", facts)


def _add_waiting(out: Families, reading: Reading) -> None:
    out.gauge("octavo_requests_running", "Requests any of whose samples runs.", reading.running)
    waiting = {cause: reading.waiting.get(cause, 0) for cause in _CAUSES}
    says = "Requests none of whose samples runs, by what for; with those running they are all live requests."
    out.gauges("octavo_requests_waiting", says, "reason", waiting)
    running, in_line = reading.samples
    says = "Samples that hold memory, and samples that stand in the line."
    out.gauges("octavo_samples", says, "state", {"running": running, "waiting": in_line})
    waited = {cause: reading.tallies.waited[cause] for cause in _CAUSES}
    says = "Seconds that samples have waited, by what for, up to the end of the last step."
    out.counters("octavo_request_waited_seconds", says, "reason", waited)
    limiting = {resource: int(resource == reading.head.limiting[0]) for resource in _RESOURCES}
    says = "1 for what most of those who wait wait for; none: nobody waits for more than the next step."
    out.gauges("octavo_limiting_resource", says, "resource", limiting)


def _add_requests(out: Families, reading: Reading) -> None:
    totals, tallies = reading.totals, reading.tallies
    says = "Requests taken: finished + expired + running + waiting."
    out.counter("octavo_requests_accepted", says, totals.accepted)
    says = "Requests that the engine refused at submit, by code."
    out.counters("octavo_requests_refused", says, "code", dict.fromkeys(_REFUSALS, 0) | tallies.refused)
    says = "Requests whose time to be admitted ran out."
    out.counter("octavo_requests_expired", says, totals.expired)
    finished = {reason.value: tallies.finished[reason.value] for reason in FinishReason}
    finished["error"] -= totals.expired
    says = "Requests that have ended, by why; those that expired are not among them."
    out.counters("octavo_requests_finished", says, "reason", finished)
    for name, counted, text in (
        ("time_to_first_token", "ttft", "Time from arrival to the first token."),
        ("inter_token_latency", "itl", "Time between two steps that gave a sample tokens."),
        ("request_latency", "e2e", "Time from arrival to the end, of requests that ended by stop or length."),
        ("request_queue_time", "queue", "Time from arrival to the first memory, of the same requests."),
    ):
        out.histogram(f"octavo_{name}_seconds", text, tallies.histograms[counted])


def _add_costs(out: Families, reading: Reading) -> None:
    totals, tallies = reading.totals, reading.tallies
    out.counter("octavo_preemptions", "Samples whose memory was taken back.", totals.preemptions)
    says = "Computed tokens that preemptions threw away, or left to the prefix cache."
    out.counter("octavo_preemption_discarded_tokens", says, totals.discarded)
    says = "Tokens that had to be computed again because of it."
    out.counter("octavo_preemption_recomputed_tokens", says, totals.recomputed)
    says = "Prompt tokens of admitted requests; once for a prompt."
    out.counter("octavo_prefix_cache_query_tokens", says, totals.query_tokens)
    out.counter("octavo_prefix_cache_hit_tokens", "Those that the prefix cache served.", totals.hit_tokens)
    _add_misses(out, tallies)
    says = "Cached blocks that were given to somebody else."
    out.counter("octavo_prefix_cache_evicted_blocks", says, totals.evicted)
    out.counter("octavo_compactions", "Times that holes between regions were joined.", totals.compactions)
    out.counter("octavo_copied_blocks", "Blocks copied by forks, moves and compactions.", tallies.copied_blocks)


def _add_misses(out: Families, tallies: Tallies) -> None:
    says = "Prompts of which the prefix cache did not serve all whole blocks, by why."
    out.counters("octavo_prefix_cache_misses", says, "reason", {reason: tallies.misses[reason] for reason in MISSES})
    says = "Prompt tokens that a cached prompt shares behind the last whole block: a smaller block would serve them."
    out.counter("octavo_prefix_cache_unusable_tokens", says, tallies.unusable_tokens)


def _add_steps(out: Families, reading: Reading) -> None:
    totals, tallies = reading.totals, reading.tallies
    out.counter("octavo_steps", "Steps that computed or copied something.", tallies.steps)
    out.counter("octavo_step_seconds", "Seconds spent in them.", tallies.step_seconds)
    says = "Times that the runner could not run a step, or a request's part of one: each ended those in it."
    out.counter("octavo_step_failures", says, tallies.failures)
    out.counter("octavo_computed_tokens", "Tokens computed, drafts among them.", totals.computed)
    out.counter("octavo_generated_tokens", "Tokens generated.", totals.generated)
    out.counter("octavo_drafted_tokens", "Tokens drafted ahead.", totals.drafted)
    out.counter("octavo_drafts_accepted_tokens", "Drafted tokens that were right.", totals.drafts_accepted)
