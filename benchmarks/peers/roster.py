"""Who is compared: one entry an engine and setting, and the plans that say what is measured on which model.

A new variant is one line. Octavo's take any field of EngineConfig: `octavo("octavo-b32", "block_size=32")`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import set_up

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"
SMOLLM2, QWEN3 = "smollm2-135m", "qwen3-0.6b-shape"


@dataclass(frozen=True, slots=True)
class Place:
    """Where things are on this machine."""

    peers: Path
    model: str
    octavo_python: str = sys.executable

    @property
    def checkpoint(self) -> Path:
        return self.peers / "models" / self.model

    def python(self, venv: str) -> str:
        return str(self.peers / venv / "bin" / "python")


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine with its settings. `weights` is the class in which it competes; `most` its highest sensible
    concurrency (a slow engine would take hours)."""

    name: str
    weights: str
    kv: str
    command: Callable[[Place], list[str]]
    env: dict[str, str] = field(default_factory=dict)
    pinned: bool = True  # OpenMP threads bound to cores by the environment
    most: int = 64


def octavo(name: str, *settings: str, weights: str = "bf16", kv: str = "bf16") -> Peer:
    def command(place: Place) -> list[str]:
        sets = [part for setting in settings for part in ("--set", setting)]
        return [place.octavo_python, str(HERE / "octavo_driver.py"), "--model", str(place.checkpoint), *sets]

    return Peer(name, weights, kv, command, env={"PYTHONPATH": str(SOURCE)})


def openvino(name: str, weights: str, kv: str) -> Peer:
    def command(place: Place) -> list[str]:
        model = place.peers / "models" / "ov" / f"{place.model}.{weights}"
        driver = [place.python("ov"), str(HERE / "openvino_driver.py"), "--model", str(model)]
        return [*driver, "--checkpoint", str(place.checkpoint), "--kv-precision", kv]

    return Peer(name, weights, kv, command)


def llamacpp(name: str, weights: str, file: str, *more: str) -> Peer:
    def command(place: Place) -> list[str]:
        model = place.peers / "models" / "gguf" / f"{place.model}.{file}.gguf"
        driver = [place.octavo_python, str(HERE / "llamacpp_driver.py"), "--model", str(model)]
        server = ["--server", str(set_up.llama_binary(place.peers, "llama-server"))]
        version = ["--engine-version", set_up.LLAMA_CPP.partition("==")[2]]
        log = ["--log", str(place.peers / "results" / "llama-server.log")]
        return [*driver, "--checkpoint", str(place.checkpoint), *server, *version, *log, *more]

    return Peer(name, weights, "f16", command)


def vllm(name: str, *more: str) -> Peer:
    def command(place: Place) -> list[str]:
        return [place.python("vllm"), str(HERE / "vllm_driver.py"), "--model", str(place.checkpoint), *more]

    return Peer(name, "bf16", "bf16", command, pinned=False)  # vLLM binds its worker's threads itself


def transformers(name: str) -> Peer:
    def command(place: Place) -> list[str]:
        return [place.python("hf"), str(HERE / "transformers_driver.py"), "--model", str(place.checkpoint)]

    return Peer(name, "bf16", "bf16", command, most=16)


_ALL = [
    octavo("octavo"),
    octavo("octavo-int8", "weights=int8", weights="int8"),
    octavo("octavo-int4", "weights=int4", weights="int4"),
    octavo("octavo-int8-kv8", "weights=int8", "kv_dtype=int8", weights="int8", kv="u8"),
    openvino("openvino", "bf16", "bf16"),
    openvino("openvino-kv8", "bf16", "u8"),
    openvino("openvino-int8-kv8", "int8", "u8"),
    openvino("openvino-int4-kv8", "int4", "u8"),
    vllm("vllm"),
    vllm("vllm-512", "--batched-tokens", "512"),
    llamacpp("llamacpp", "bf16", "bf16"),
    llamacpp("llamacpp-unified", "bf16", "bf16", "--unified"),
    llamacpp("llamacpp-q8", "int8", "q8_0"),
    llamacpp("llamacpp-q8-unified", "int8", "q8_0", "--unified"),
    llamacpp("llamacpp-q4", "int4", "q4_0"),
    transformers("transformers"),
]
PEERS = {peer.name: peer for peer in _ALL}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures unless the command line says otherwise."""

    model: str
    peers: str
    concurrency: str
    mode: str = "all"
    kv_mib: tuple[int, ...] = (4096,)


_USUAL = "octavo,openvino,vllm,llamacpp,llamacpp-unified"
_QUANTISED = "openvino-int8-kv8,llamacpp-q8"
PLANS = {
    "smollm2": Plan(SMOLLM2, f"{_USUAL},{_QUANTISED},transformers", "1,4,16,64"),
    "qwen3": Plan(QWEN3, f"{_USUAL},{_QUANTISED}", "1,4,16,64"),
    "qwen3-single": Plan(QWEN3, f"{_USUAL},{_QUANTISED},transformers", "1", mode="single"),
    "kv-smollm2": Plan(SMOLLM2, "octavo,openvino,vllm,llamacpp", "64", mode="batch", kv_mib=(256, 1024)),
    "kv-qwen3": Plan(QWEN3, "octavo,openvino,vllm,llamacpp", "64", mode="batch", kv_mib=(256, 1024)),
}
