"""What can be changed about a deployment: each knob one step away from where it stands, with the flags that turn it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from octavo.kv.budget import MemoryPlan
from octavo.planner.deployment import Deployment, Resolved
from octavo.planner.traces.api import TraceRequest

MOST_UTILIZATION = Decimal("0.95")
PAGE = 1024  # max_model_len is offered in whole multiples of this


@dataclass(frozen=True, slots=True)
class Knob:
    """One change of a deployment.

    name     as people say it: "fp8 KV"
    setting  which knob it is; two changes of one knob do not combine
    changes  fields of `Deployment` and their new values
    octavo, vllm  the flags that do it; "" where the engine has none
    """

    name: str
    setting: str
    changes: Mapping[str, Any]
    octavo: str
    vllm: str

    def apply(self, deployment: Deployment) -> Deployment:
        return replace(deployment, **self.changes)


def knobs_for(resolved: Resolved, requests: Sequence[TraceRequest], devices: Iterable[str] = ()) -> tuple[Knob, ...]:
    """Every knob worth trying on a deployment that serves `requests`; `devices`: others that could be had."""
    return (
        *_layout(resolved),
        *_memory(resolved, requests),
        *_batch(resolved),
        *_policies(resolved),
        *_hardware(resolved, devices),
    )


def twice_the_pool(resolved: Resolved) -> Knob:
    """Not for sale, but it tells whether memory is the bottleneck."""
    changes = {"num_blocks": 2 * resolved.pages, **_length(resolved)}
    return Knob("twice the KV memory", "probe", changes, "", "")


def _layout(resolved: Resolved) -> Iterator[Knob]:
    """Where KV goes."""
    deployment = resolved.deployment
    if deployment.strategy != "paged":
        yield Knob("paging", "strategy", {"strategy": "paged"}, "--strategy paged", "")
    for size in (deployment.block_size // 2, deployment.block_size * 2):
        if size >= 8:
            flag = f"--block-size {size}"
            yield Knob(f"blocks of {size}", "block_size", {"block_size": size, **_bytes(resolved)}, flag, flag)
    if deployment.prefix_caching:
        flag = "--no-enable-prefix-caching"
        yield Knob("no prefix cache", "prefix_caching", {"prefix_caching": False}, flag, flag)
    else:
        flag = "--enable-prefix-caching"
        yield Knob("prefix cache", "prefix_caching", {"prefix_caching": True}, flag, flag)


def _memory(resolved: Resolved, requests: Sequence[TraceRequest]) -> Iterator[Knob]:
    """How many bytes KV has, and takes."""
    deployment = resolved.deployment
    if resolved.plan is not None and (share := _share(resolved.plan)) < MOST_UTILIZATION:
        more = min(MOST_UTILIZATION, share + Decimal("0.05"))
        given: dict[str, Any] = {"utilization": str(more)}
        if deployment.num_blocks is not None or deployment.kv_memory is not None:  # the measured pool, and the rest
            extra = int(resolved.plan.total.low * (more - share))
            given |= {"kv_memory": resolved.pages * resolved.block_bytes + extra, "num_blocks": None}
        flags = (f"--utilization {more}", f"--gpu-memory-utilization {more}")
        yield Knob(f"{more * 100:.0f} % of the device", "utilization", given | _length(resolved), *flags)
    if not deployment.kv_dtype.startswith(("fp8", "int8", "int4", "q8")):
        changes = {"kv_dtype": "fp8", **_bytes(resolved), **_length(resolved)}
        yield Knob("fp8 KV", "kv_dtype", changes, "--kv-dtype fp8", "--kv-cache-dtype fp8")
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    length = -(-(longest + 1) // PAGE) * PAGE
    if length < resolved.scheduler.max_model_len:
        flag = f"--max-model-len {length}"
        name = f"longest sequence {length:,} (the longest request has {longest:,})"
        yield Knob(name, "max_model_len", {"max_model_len": length}, flag, flag)


def _batch(resolved: Resolved) -> Iterator[Knob]:
    """How much runs at once, and is computed in a step."""
    settings = resolved.scheduler
    seqs, tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    for count in (2 * seqs, seqs // 2):
        if count >= 1:
            flag, changes = f"--max-num-seqs {count}", {"max_num_seqs": count}
            if count > tokens:  # a step must be able to give every sequence its token
                flag, changes = f"{flag} --max-num-batched-tokens {count}", changes | {"max_num_batched_tokens": count}
            yield Knob(f"up to {count:,} sequences", "max_num_seqs", changes, flag, flag)
    for budget in (4 * tokens, 2 * tokens, tokens // 2):
        if budget >= seqs:
            flag = f"--max-num-batched-tokens {budget}"
            name = f"{budget:,} tokens a step"
            yield Knob(name, "max_num_batched_tokens", {"max_num_batched_tokens": budget}, flag, flag)


def _policies(resolved: Resolved) -> Iterator[Knob]:
    """Who is let in, and who goes. vLLM's are fixed: prompt, newest, no skipping."""
    settings = resolved.scheduler
    for admission, what in (("prompt", "the prompt"), ("ceiling", "prompt + max_tokens"), ("peak", "the future peak")):
        if admission != settings.admission:
            flag = f"--admission {admission}"
            yield Knob(f"admission charges {what}", "admission", {"admission": admission}, flag, "")
    victims = "newest" if settings.victims == "cheapest" else "cheapest"
    yield Knob(f"preempt the {victims}", "victims", {"victims": victims}, f"--victims {victims}", "")
    skips = 0 if settings.max_skips else 8
    name = f"may be passed {skips} times" if skips else "strict order"
    yield Knob(name, "max_skips", {"max_skips": skips}, f"--max-skips {skips}", "")


def _hardware(resolved: Resolved, devices: Iterable[str]) -> Iterator[Knob]:
    """More or other devices; a measured pool is not theirs, so it is planned anew."""
    deployment = resolved.deployment
    planned = {"kv_memory": None, "num_blocks": None, "calibration": None, **_length(resolved)}
    if deployment.gpu is not None:
        tp = 2 * deployment.tp
        flags = (f"--tp {tp}", f"--tensor-parallel-size {tp}")
        yield Knob(f"{tp} devices (tensor parallel)", "tp", planned | {"tp": tp}, *flags)
    for device in devices:
        if device != deployment.gpu:
            yield Knob(device, "gpu", planned | {"gpu": device, "memory": None}, f"--gpu '{device}'", "")


def _share(plan: MemoryPlan) -> Decimal:
    return Decimal(plan.utilization.numerator) / plan.utilization.denominator


def _length(resolved: Resolved) -> dict[str, Any]:
    """More memory is not spent on longer sequences: that would be a second change."""
    return {"max_model_len": resolved.scheduler.max_model_len}


def _bytes(resolved: Resolved) -> dict[str, Any]:
    """A pool that was given as a number of blocks keeps its bytes when blocks change their size."""
    if resolved.deployment.num_blocks is None:
        return {}
    return {"num_blocks": None, "kv_memory": resolved.pages * resolved.block_bytes}
