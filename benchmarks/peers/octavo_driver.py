"""Octavo itself, through its public engine (run with PYTHONPATH=src and an interpreter that has octavo's needs).

Any field of EngineConfig can be set with --set name=value, so a variant (--set block_size=32) is one line in run.py.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from client import drive
from measure import MIB, Ready, measure, parser
from workload import Ask

if TYPE_CHECKING:
    from octavo.engine import Engine


class Octavo:
    """`Engine` behind the client's protocol."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: dict[str, int] = {}
        self._running = 0
        self.preemptions = 0

    def submit(self, ask: Ask) -> None:
        from octavo import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=ask.max_tokens, ignore_eos=True)
        self._engine.submit(ask.prompt, params, request_id=str(ask.id))
        self._seen[str(ask.id)] = 0

    def step(self) -> Iterable[tuple[int, int]]:
        outputs = self._engine.step()
        self._running = len(self._engine.scheduler.running) + sum(output.finished for output in outputs)
        for output in outputs:
            if output.error:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            first, end = output.outputs[0].span
            new = end - first - self._seen[output.request_id]
            self._seen[output.request_id] += new
            if output.finished:
                self.preemptions += output.metrics.preemptions
            if new:
                yield int(output.request_id), new

    def running(self) -> int:
        return self._running


def setting(text: str) -> tuple[str, Any]:
    """'name=value': the value is read as Python where it is one (16, 0.5, True, None) and else is a string."""
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not name=value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def build(args: argparse.Namespace) -> Ready:
    from octavo.openmp import spin_shortly

    spin_shortly()  # must come before torch, as `octavo.LLM` does it
    import octavo
    from octavo.build import build_engine
    from octavo.config import EngineConfig

    fields: dict[str, Any] = dict(
        model=str(args.model),
        dtype="bfloat16",
        kv_memory=args.kv_mib * MIB,
        max_num_seqs=max(args.concurrency),
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
    )
    fields |= dict(args.set)
    engine = Octavo(build_engine(EngineConfig(**fields)).engine)
    facts = dict(engine="octavo", version=octavo.__version__, settings=dict(args.set))
    return Ready(lambda asks, concurrency: drive(engine, asks, concurrency), facts)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE")
    args = arguments.parse_args()
    measure(args, lambda: build(args))


if __name__ == "__main__":
    main()
