"""Engine profiles: an engine's defaults, rules and memory costs beside weights and KV, per version where measured.

`data/engines.json` holds one entry per engine and first version; `source` names the measurements. vLLM's defaults
of the step budget follow the device (`EngineArgs.get_batch_defaults`: 70 GiB or more, A100 excepted since PR 17885).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from octavo.errors import OctavoError
from octavo.kv.budget import GIB, Amount, activation_allowance, workspace_allowance
from octavo.planner.catalogue import Device

_DATA = Path(__file__).parent / "data" / "engines.json"
_LARGE_DEVICE = 70 * GIB


class EngineError(OctavoError, ValueError):
    """An engine that has no profile."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """
    name            as in the data: "octavo", or "vllm-" and the first version it was measured on
    mla             how multi-head latent attention is cached: "latent" or "expanded"
    kv_dtypes       what the engine can store K and V in
    utilization     default share of the device
    shrinks_length  whether a default max_model_len that does not fit is lowered (else the engine refuses to start)
    caps_pool       whether the pool is never larger than max_num_seqs full sequences
    max_preemptions after which a sequence is protected
    whole_prompts   whether a step takes whole prompts, so that its budget is at least max_model_len (vLLM V0)
    costs           the memory figures of the data, None: Octavo's own estimates
    """

    name: str
    mla: str
    kv_dtypes: tuple[str, ...]
    utilization: str
    admission: str
    victims: str
    max_skips: int
    max_preemptions: int
    caps_pool: bool
    shrinks_length: bool
    whole_prompts: bool
    source: str
    batch: dict[str, list[int]]
    costs: dict[str, Any] | None

    @property
    def is_vllm(self) -> bool:
        return self.name.startswith("vllm")

    def kv_dtype(self, name: str) -> str:
        """The storage format that this engine means: vLLM's fp8 has one scale per tensor."""
        return "fp8_per_tensor" if self.is_vllm and name.strip().lower() == "fp8" else name

    def step_limits(self, device: Device | None, memory: int | None, longest: int | None) -> tuple[int, int]:
        """Default (max_num_batched_tokens, max_num_seqs) of the API server on a device, or on so many bytes, for a
        max_model_len of `longest`."""
        room = device.memory_bytes if device is not None else memory or 0
        large = room >= _LARGE_DEVICE and (device is None or "a100" not in device.name.lower())
        tokens, seqs = self.batch["large" if large else "small"]
        return max(tokens, longest or 0) if self.whole_prompts else tokens, seqs


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What activations depend on. `mlp_widths`: the least and the most channels of an MLP."""

    hidden: int
    vocab: int
    mlp_widths: tuple[int, int]


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Memory of one rank beside weights and KV. `graphs` counts only what lies within the utilization; `logits`:
    bytes of the sampler's part of the activations, at their high end."""

    activations: Amount
    workspace: Amount
    graphs: Amount
    logits: int


def find_engine(name: str) -> tuple[EngineProfile, str | None]:
    """The profile of `name` ("octavo", "vllm" for the newest, "vllm-0.19.1"), and a note if it stands for a version
    that was not measured itself. Raises EngineError with the known names."""
    wanted = name.strip().lower().replace("==", "-").replace("_", "-")
    if wanted in _profiles():
        return _profiles()[wanted], None
    found = re.fullmatch(r"vllm(?:-v?(\d+)(?:\.(\d+))?(?:\.\w+)*)?", wanted)
    if found is None:
        known = ", ".join([*_profiles(), "vllm"])
        raise EngineError(f"engine is {name!r}; it must be one of {known}, or vllm- and another version.")
    versions = {_version(key): key for key in _profiles() if key.startswith("vllm")}
    if found[1] is None:
        newest = _profiles()[versions[max(versions)]]
        return newest, f"No vLLM version was given: {newest.name} is taken."
    asked = (int(found[1]), int(found[2] or 0))
    chosen = max((version for version in versions if version <= asked), default=min(versions))
    profile = _profiles()[versions[chosen]]
    note = f"vLLM {asked[0]}.{asked[1]} was not measured: memory costs and defaults are those of {profile.name}."
    return profile, None if chosen == asked else note


def engine_costs(
    profile: EngineProfile, shape: ModelShape, *, tp: int, max_batched_tokens: int, max_num_seqs: int
) -> EngineCosts:
    """Memory that the engine takes beside weights and KV.

    vLLM V1: the larger of the layers' peak and the sampler's, `tokens x (3 x MLP / tp + 3 x hidden) x 2 B` and
    `sequences x vocabulary x bytes per logit`, both over the hidden states that stay, `tokens x hidden x 2 B`, and
    a base. A tp of 2 leaves the measured peak of Qwen3-32B as it is, so the two parts do not add up.
    """
    if profile.costs is None:
        return _octavo_costs(shape, tp, max_batched_tokens, max_num_seqs)
    figures = profile.costs
    ranks = "one" if tp == 1 else "many"
    layers = [max_batched_tokens * (3 * -(-width // tp) + 3 * shape.hidden) * 2 for width in shape.mlp_widths]
    logits = [max_num_seqs * shape.vocab * each for each in figures["logit_bytes"]]
    stays = 0 if figures["activations"] == "step" else max_batched_tokens * shape.hidden * 2
    ends = [max(a, b) + stays + round(c * GIB) for a, b, c in zip(layers, logits, figures["base_gib"], strict=True)]
    source = (
        f"{profile.name}: the larger of {max_batched_tokens} tokens x (3 x {shape.mlp_widths[1]}/{tp} + 3 x "
        f"{shape.hidden}) x 2 B and {max_num_seqs} sequences x {shape.vocab} logits x {figures['logit_bytes'][1]} B, "
        "and a measured base"
    )
    workspace = _range(figures["non_torch_gib"][ranks], f"{profile.name}: measured range outside the allocator")
    graphs = figures["graphs_gib"]
    outside = Amount.exactly(0, "CUDA graphs lie outside the utilization in this version")
    held = outside if graphs is None else _range(graphs[ranks], f"{profile.name}: measured range of CUDA graphs")
    return EngineCosts(Amount(ends[0], ends[1], source), workspace, held, logits[1])


def _octavo_costs(shape: ModelShape, tp: int, max_batched_tokens: int, max_num_seqs: int) -> EngineCosts:
    ends = [
        activation_allowance(
            hidden=shape.hidden,
            mlp_width=width,
            vocab=shape.vocab,
            tp=tp,
            max_batched_tokens=max_batched_tokens,
            max_num_seqs=max_num_seqs,
        )
        for width in shape.mlp_widths
    ]
    none = Amount.exactly(0, "counted in the workspace")
    logits = max_num_seqs * shape.vocab * 12
    return EngineCosts(Amount(ends[0].low, ends[-1].high, ends[-1].source), workspace_allowance(tp), none, logits)


def _range(ends: list[float], source: str) -> Amount:
    low, high = (round(end * GIB) for end in ends)
    return Amount(low, high, source)


def _version(key: str) -> tuple[int, int]:
    major, minor = key.removeprefix("vllm-").split(".")
    return int(major), int(minor)


@cache
def _profiles() -> dict[str, EngineProfile]:
    data: dict[str, dict[str, Any]] = json.loads(_DATA.read_text(encoding="utf-8"))
    return {name: _profile(name, entry) for name, entry in data.items()}


def _profile(name: str, entry: dict[str, Any]) -> EngineProfile:
    return EngineProfile(
        name=name,
        mla=entry["mla"],
        kv_dtypes=tuple(entry["kv_dtypes"]),
        utilization=entry["utilization"],
        admission=entry["admission"],
        victims=entry["victims"],
        max_skips=entry["max_skips"],
        max_preemptions=entry["max_preemptions"],
        caps_pool=entry.get("caps_pool", False),
        shrinks_length=entry.get("shrinks_length", False),
        whole_prompts=entry.get("whole_prompts", False),
        source=entry["source"],
        batch=entry["batch"],
        costs=entry if "logit_bytes" in entry else None,
    )
