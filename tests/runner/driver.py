"""A hand-made driver: block tables of its own, scrambled ids, chunked prefill, one ragged batch per step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from octavo.kv.api import View
from octavo.kv.groups import page_layout
from octavo.kv.prefix import KeyChain
from octavo.models.loader import LoadedModel
from octavo.models.shapes import cache_dtype, cache_layers
from octavo.runner.api import SeqWork, StepPlan, StepResult
from octavo.runner.choice import make_runner
from octavo.runner.native_runner import NativeRunner
from octavo.runner.torch_runner import TorchRunner
from octavo.types import Request, SamplingParams, Sequence


def make_sequence(
    number: int, prompt: list[int], params: SamplingParams, groups: int = 1, index: int = 0, stop: tuple[int, ...] = ()
) -> Sequence:
    request = Request(f"r{number}", tuple(prompt), params, stop_token_ids=frozenset(stop))
    view = View(tuple([] for _ in range(groups)))
    tokens = list(prompt)
    return Sequence(number, request, index, tokens, 10**6, KeyChain(tokens, 16, b""), view=view)


@dataclass
class Driver:
    """Runs sequences to `max_tokens` with `chunk` prompt tokens per sequence and step."""

    loaded: LoadedModel
    block_size: int = 16
    num_blocks: int = 256
    seed: int = 0
    kv_dtype: str = "auto"
    runner: NativeRunner | TorchRunner = field(init=False)
    free: list[int] = field(init=False)
    results: list[StepResult] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        layers = cache_layers(self.loaded.layers, cache_dtype(self.kv_dtype, self.loaded.dtype))
        self.layout = page_layout(layers, self.block_size)
        self.runner = make_runner(self.loaded, self.layout, self.num_blocks, seed=self.seed, kv_dtype=self.kv_dtype)
        self.free = list(range(self.num_blocks))
        random.Random(self.seed).shuffle(self.free)

    def new(self, number: int, prompt: list[int], params: SamplingParams, **kw: object) -> Sequence:
        return make_sequence(number, prompt, params, len(self.layout.groups), **kw)  # type: ignore[arg-type]

    def grow(self, seq: Sequence, upto: int) -> None:
        for table in seq.view.tables:
            while len(table) * self.block_size < upto:
                table.append(self.free.pop())

    def slide(self, seq: Sequence) -> None:
        """Give back blocks no later query can see, and fill them with garbage for the next holder to overwrite."""
        for table, window in zip(seq.view.tables, self.layout.windows, strict=True):
            if window is None:
                continue
            for i in range(max(0, seq.computed + 1 - window) // self.block_size):
                if table[i] >= 0:
                    self.runner.store.buffer[table[i]] = 60
                    self.free.insert(0, table[i])
                    table[i] = -1

    def drop(self, seq: Sequence) -> None:
        for table in seq.view.tables:
            self.free += [b for b in table if b >= 0]
            table.clear()
        seq.computed = 0

    def step(self, seqs: list[Sequence], chunk: int) -> StepResult:
        work = []
        for seq in seqs:
            count = min(chunk, len(seq.tokens) - seq.computed)
            self.grow(seq, seq.computed + count)
            done = seq.computed + count == len(seq.tokens)
            work.append(SeqWork(seq, seq.computed, count, (seq,) if done else ()))
        result = self.runner.run(StepPlan(len(self.results), (), tuple(work)))
        for w, tokens in zip(work, result.tokens, strict=True):
            w.seq.computed += w.count
            w.seq.tokens.extend(tokens)
            self.slide(w.seq)
        self.results.append(result)
        return result

    def generate(self, seqs: list[Sequence], max_tokens: int, chunk: int = 64) -> list[list[int]]:
        while live := [s for s in seqs if s.generated < max_tokens]:
            self.step(live, chunk)
        for seq in seqs:
            self.drop(seq)
        return [seq.output for seq in seqs]


@torch.inference_mode()
def reference(module: torch.nn.Module, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens of transformers' own generate, which is not to stop at an end-of-sequence token."""
    module.generation_config.eos_token_id = None
    out = module.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()
