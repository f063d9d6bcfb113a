"""What a model needs of a device besides the KV cache: measured by running one full step, not guessed. The native code
says exactly what a step takes; there only the drawing of tokens is measured, on a few rows."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.kv.api import View
from octavo.kv.groups import page_layout
from octavo.kv.prefix import KeyChain
from octavo.models.errors import ModelError
from octavo.models.loader import LoadedModel
from octavo.models.shapes import cache_dtype, cache_layers
from octavo.runner.api import SeqWork, StepPlan
from octavo.runner.choice import make_runner
from octavo.runner.native_runner import NativeRunner
from octavo.runner.torch_runner import TorchRunner
from octavo.types import Request, SamplingParams, Sequence

_BLOCK = 16
_FEW = 8  # rows whose drawing is measured for the native code
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """Bytes of a device. `total` is what this process may come to hold there, weights included.

    activations  peak of live tensors in the profiling step beyond weights and KV
    workspace    what the process took beyond that in the step: kernels' scratch and the allocator's rounding; of the
                 native code the scratch memory that it asks for
    """

    weights: int
    activations: int
    workspace: int
    total: int

    @property
    def kv(self) -> int:
        """Bytes left for the KV cache; negative if the model does not fit."""
        return self.total - self.weights - self.activations - self.workspace


def measure(
    loaded: LoadedModel,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int | None = None,
    kv_dtype: str = "auto",
) -> DeviceBudget:
    """Run steps of `max_num_batched_tokens` tokens with `max_num_seqs` sampled rows and read the peaks.

    The first step, which also checks the KV shapes against the model, is not measured: it allocates what stays. Raises
    ModelError for limits below 1 or a model whose shapes are not those of its config.
    """
    longest = min(max_model_len or loaded.max_positions, loaded.max_positions)
    for name, value in (("max_num_batched_tokens", max_num_batched_tokens), ("max_num_seqs", max_num_seqs)):
        if value < 1:
            raise ModelError(f"{name} is {value}; it must be at least 1.")
    counts = _counts(max_num_batched_tokens, max_num_seqs, longest)
    if loaded.native is not None:
        counts = [1] * min(_FEW, len(counts))
    layout = page_layout(cache_layers(loaded.layers, cache_dtype(kv_dtype, loaded.dtype)), _BLOCK)
    pages = len(layout.groups) * sum(-(-n // _BLOCK) for n in counts)
    runner = make_runner(loaded, layout, pages, kv_dtype=kv_dtype)
    plan = _profile_plan(counts, len(layout.groups))
    if isinstance(runner, NativeRunner):
        rows = min(max_num_seqs, max_num_batched_tokens)
        drawing = _drawing_peak(runner, plan) * -(-rows // len(counts))
        scratch = runner.scratch_bytes(max_num_batched_tokens, rows, rows)
        return DeviceBudget(loaded.weight_bytes, drawing, scratch, device_total(loaded))
    runner.run(_profile_plan([1], len(layout.groups)))
    on_cuda = loaded.device.type == "cuda"
    activations, workspace = _cuda_peak(runner, plan) if on_cuda else _cpu_peak(runner, plan)
    return DeviceBudget(loaded.weight_bytes, activations, workspace, device_total(loaded))


def device_total(loaded: LoadedModel) -> int:
    """CPU: what is available now plus the weights that are already there, within the control group's limit. CUDA: free
    memory plus what torch already holds."""
    if loaded.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(loaded.device)
        return free + torch.cuda.memory_reserved(loaded.device)
    available = _meminfo()["MemAvailable"] + loaded.weight_bytes
    texts = [Path(p).read_text().strip() for p in _CGROUP_LIMITS if Path(p).is_file()]
    return min([available, *(int(text) for text in texts if text.isdigit())])  # "max": no limit


def device_capacity(loaded: LoadedModel) -> int | None:
    """Memory of the device, whoever uses it now; None if that cannot be told."""
    if loaded.device.type == "cuda":
        return int(torch.cuda.mem_get_info(loaded.device)[1])
    return _meminfo()["MemTotal"] if Path("/proc/meminfo").is_file() else None


def _counts(tokens: int, seqs: int, longest: int) -> list[int]:
    """Tokens per sequence: as long as allowed, while every sampled row gets a sequence of its own if tokens last."""
    seqs = min(seqs, tokens)
    counts: list[int] = []
    for left in range(seqs, 0, -1):
        count = min(longest, tokens - sum(counts) - (left - 1))
        counts.append(count)
    return counts


def _profile_plan(counts: list[int], groups: int) -> StepPlan:
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=0, logprobs=1)
    work, next_block = [], 0
    for number, count in enumerate(counts):
        need = -(-count // _BLOCK)
        tables = tuple(list(range(next_block + g * need, next_block + (g + 1) * need)) for g in range(groups))
        next_block += need * groups
        request = Request(f"profile-{number}", (0,) * count, params)
        tokens = [0] * count
        seq = Sequence(-1 - number, request, 0, tokens, count, KeyChain(tokens, _BLOCK, b""), view=View(tables))
        work.append(SeqWork(seq, 0, count, (seq,)))
    return StepPlan(0, (), tuple(work))


def _cuda_peak(runner: NativeRunner | TorchRunner, plan: StepPlan) -> tuple[int, int]:
    """Not run on a GPU yet. Peak of allocated bytes, and of reserved bytes beyond it."""
    device = runner.loaded.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    runner.run(plan)
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before
    return activations, max(0, torch.cuda.max_memory_reserved(device) - reserved - activations)


def _cpu_peak(runner: NativeRunner | TorchRunner, plan: StepPlan) -> tuple[int, int]:
    """Peak of live tensors, and growth of the resident set beyond it: two runs, as each measure disturbs the other."""
    runner.store.buffer.fill_(0)  # makes every page of the cache resident: it must not count as growth
    resident = _restart_peak()
    runner.run(plan)
    growth = _status("VmHWM") - resident
    with _LiveBytes() as live:
        runner.run(plan)
    return live.peak, max(0, growth - live.peak)


def _drawing_peak(runner: NativeRunner, plan: StepPlan) -> int:
    """Peak of live tensors in a native step: logits and what the sampler makes of them, both in proportion to rows."""
    with _LiveBytes() as live:
        runner.run(plan)
    return live.peak


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations return and that are still alive. Views and in-place results share a
    storage and count once; weights and KV are never new storages."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._seen.setdefault(tensor.untyped_storage(), 0)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._seen:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._seen[storage] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, size)

    def _remove(self, size: int) -> None:
        self.live -= size


def _restart_peak() -> int:
    """Start a new peak of the resident set (VmHWM) where the kernel allows it; returns the resident bytes now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _status("VmHWM")  # an older, higher peak stays: growth is then understated, never invented
    return _status("VmRSS")


def _status(field: str) -> int:
    return _kilobytes(Path("/proc/self/status"))[field]


def _meminfo() -> dict[str, int]:
    return _kilobytes(Path("/proc/meminfo"))


def _kilobytes(path: Path) -> dict[str, int]:
    """The `name: number kB` lines of a /proc file, in bytes."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {w[0].rstrip(":"): int(w[1]) * 1024 for w in lines if len(w) == 3 and w[2] == "kB"}
