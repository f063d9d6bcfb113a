"""The request list that every engine gets: token ids, so that no tokenizer takes part in a measurement.

64 requests by default, prompt lengths lognormal clipped to [32, 512], output lengths lognormal clipped to [16, 256].
Token ids are uniform in [1000, 40000): below every special token of the vocabularies used (SmolLM2 49,152, Qwen3
151,936), so one list serves both models. No two prompts share a prefix: a prefix cache gives no engine an advantage.

    python workload.py --out FILE [--n 64] [--seed 1234]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: exactly `max_tokens` tokens are wanted after `prompt`; end-of-text is ignored."""

    id: int
    prompt: list[int]
    max_tokens: int


def make(n: int, seed: int, low: int = 1000, high: int = 40000) -> list[Ask]:
    """The same list for the same arguments, on every machine (PCG64)."""
    import numpy as np  # the drivers only load a list; not every engine's environment needs numpy for that

    random = np.random.default_rng(seed)
    prompts = np.clip(np.exp(random.normal(np.log(150), 0.8, n)).round().astype(int), 32, 512)
    outputs = np.clip(np.exp(random.normal(np.log(80), 0.8, n)).round().astype(int), 16, 256)
    lengths = enumerate(zip(prompts, outputs, strict=True))
    return [Ask(i, random.integers(low, high, int(p)).tolist(), int(o)) for i, (p, o) in lengths]


def load(path: Path, limit: int | None = None) -> list[Ask]:
    """The first `limit` requests of the file (None: all)."""
    return [Ask(**row) for row in json.loads(path.read_text())["requests"][:limit]]


def clip(asks: list[Ask], longest: int) -> list[Ask]:
    """Every prompt and output cut to `longest` tokens: for trying a driver out."""
    return [Ask(ask.id, ask.prompt[:longest], min(ask.max_tokens, longest)) for ask in asks]


def save(path: Path, asks: list[Ask], seed: int) -> None:
    path.write_text(json.dumps({"seed": seed, "requests": [asdict(ask) for ask in asks]}))


def single_ask(asks: list[Ask], prompt_tokens: int, output_tokens: int, ask_id: int = 0) -> Ask:
    """One request of an exact length, its prompt joined from the list's prompts."""
    ids = [token for ask in asks for token in ask.prompt]
    if len(ids) < prompt_tokens:
        raise SystemExit(f"the workload holds {len(ids)} prompt tokens, fewer than the {prompt_tokens} asked for")
    return Ask(ask_id, ids[:prompt_tokens], output_tokens)


def for_concurrency(asks: list[Ask], concurrency: int) -> list[Ask]:
    """Low concurrency is slow, so it is measured on the first few requests: 1 -> 6, 4 -> 16, 16 and more -> 64."""
    return asks[: max(6, 4 * concurrency)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    asks = make(args.n, args.seed)
    save(args.out, asks, args.seed)
    prompts, outputs = [len(ask.prompt) for ask in asks], [ask.max_tokens for ask in asks]
    print(f"{len(asks)} requests, {sum(prompts)} prompt tokens (at most {max(prompts)}), {sum(outputs)} output tokens")


if __name__ == "__main__":
    main()
