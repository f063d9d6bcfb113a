"""How long a step takes: a roofline with named, calibratable terms."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from octavo.runner.api import StepPlan
from octavo.runner.rates import (
    Coefficients,
    cache_speedup,
    chunked_seconds,
    decode_rate,
    decode_start,
    elementwise_seconds,
    experts_seconds,
    factor_at,
    gemm_seconds,
    pairs,
    reduction_seconds,
)
from octavo.runner.work import ModelWork


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's time depends on.

    chunks    (tokens computed now, tokens computed before) of each prompt chunk
    decodes   sequences that go on by one token
    context   sum over the decodes of the tokens that their query attends to, itself included
    windowed  the same for each window of the model, in the order given: sums of min(context, window)
    samples   sequences that draw a token (rows that reach LM head and sampler)
    copied    blocks copied before the step
    """

    chunks: tuple[tuple[int, int], ...]
    decodes: int
    context: int
    windowed: tuple[int, ...] = ()
    samples: int = 0
    copied: int = 0

    @property
    def tokens(self) -> int:
        """Rows of the flat batch."""
        return self.decodes + sum(count for count, _ in self.chunks)


def shape_of(plan: StepPlan, windows: Seq[int] = ()) -> StepShape:
    """The shape of a plan. `windows`: the model's different window sizes, in the order of the KV manager's."""
    chunks: list[tuple[int, int]] = []
    decodes, context, spans = plan.coasting.sequences, plan.coasting.context, list(plan.coasting.windowed)
    samples = decodes
    spans = spans or [0] * len(windows)
    for _, start, count, draws, _ in plan.work:
        samples += len(draws)
        if count == 1:
            decodes += 1
            context += start + 1
            for i, window in enumerate(windows):
                spans[i] += min(start + 1, window)
        else:
            chunks.append((count, start))
    copied = sum(copy.n for copy in plan.copies) if plan.copies else 0
    return StepShape(tuple(chunks), decodes, context, tuple(spans), samples, copied)


class StepTimer(Protocol):
    """A timing model: the simulated runner asks it once per step."""

    @property
    def windows(self) -> tuple[int, ...]:
        """Window sizes that `StepShape.windowed` must be given for."""

    def seconds(self, shape: StepShape) -> float:
        """How long a step of this shape takes, in seconds."""


class RooflineTimer:
    """Step times of one model on one device: counted work (`ModelWork`) over fitted rates (`Coefficients`).

    What depends on the number of tokens alone is worked out once per number and kept. For a batch that only decodes
    the time is affine in `context` and in each entry of `windowed`, apart from a host that hides the device.

    block_bytes: bytes of one KV block on one rank, for copies; draws: coefficients refitted to resampled points.
    """

    def __init__(
        self,
        work: ModelWork,
        coefficients: Coefficients,
        block_bytes: float = 0.0,
        draws: tuple[Coefficients, ...] = (),
    ) -> None:
        self.work = work
        self._block_bytes = block_bytes
        self._draws = draws
        self.coefficients = c = coefficients
        self._windows = work.windows
        self._plain: dict[int, float] = {}
        self._decoding: dict[int, float] = {}
        self._ends: dict[int, float] = {}
        # Between two uses of a layer's KV a step reads all other weights: the cache only helps where those fit, too.
        self._gain = cache_speedup(c, work.resident_bytes)
        self._pure = self._rates()
        self._state = 2.0 * work.state_bytes / c.decode_bandwidth
        self._copy = 2.0 * block_bytes / c.copy_bandwidth

    @property
    def windows(self) -> tuple[int, ...]:
        return self._windows

    def seconds(self, shape: StepShape) -> float:
        if shape.chunks:
            device = self._chunked(shape)
        else:
            decodes = shape.decodes
            kept = self._decoding.get(decodes)
            device = self._decode_fixed(decodes) if kept is None else kept
            full, windowed = self._pure
            device += full * shape.context
            for rate, tokens in zip(windowed, shape.windowed):  # noqa: B905 - one entry each, asked for by `windows`
                device += rate * tokens
        samples = shape.samples
        end = self._ends.get(samples)
        device += self._end(samples) if end is None else end
        if shape.copied:
            device += self.coefficients.copy_start + shape.copied * self._copy
        c = self.coefficients
        device += c.host_gap
        host = c.host_start + c.host_sequence * (shape.decodes + len(shape.chunks))
        if c.host_overlaps:
            return device if device > host else host
        return device + host

    def alternatives(self, n: int | None = None) -> list[RooflineTimer]:
        """Up to `n` timers (None: all there are) that differ as the fit is uncertain; empty without resampled fits."""
        return [RooflineTimer(self.work, draw, self._block_bytes) for draw in self._draws[:n]]

    def affine(self, shape: StepShape) -> tuple[float, float]:
        """(seconds now, seconds per further token of context) of a batch that only decodes, windows taken as full."""
        return self.seconds(shape), self._pure[0]

    def breakdown(self, shape: StepShape) -> dict[str, float]:
        """The terms of `seconds(shape)`; they sum to it. `attention_decode` in a step with chunks: what the decodes
        add; `host`: what the device's work does not hide."""
        c, decodes = self.coefficients, shape.decodes
        prompt = sum(self._attention(shape.chunks, 0, 0, (0,) * len(self._windows)))
        if shape.chunks:
            decoding = sum(self._attention(shape.chunks, decodes, shape.context, shape.windowed)) - prompt
        else:
            full, windowed = self._pure
            decoding = (
                self._starts(decodes)
                + full * shape.context
                + sum(r * n for r, n in zip(windowed, shape.windowed, strict=True))
            )
        terms = {
            **self._token_terms(shape.tokens),
            "attention_decode": decoding,
            "attention_prefill": prompt,
            "state": self._state * (decodes + len(shape.chunks)),
            "head": self._head(shape.samples),
            "sampler": self._sampler(shape.samples),
            "copies": c.copy_start + shape.copied * self._copy if shape.copied else 0.0,
        }
        host = c.host_start + c.host_sequence * (decodes + len(shape.chunks))
        busy = sum(terms.values()) + c.host_gap
        terms["host"] = c.host_gap + (max(0.0, host - busy) if c.host_overlaps else host)
        return terms

    def _rates(self) -> tuple[float, tuple[float, ...]]:
        """Seconds per token of context: of the layers that see everything, and of those of each window."""
        c, full, windowed = self.coefficients, 0.0, dict.fromkeys(self._windows, 0.0)
        for kind in self.work.attention:
            rate = kind.layers * decode_rate(c, kind, self._gain) * c.uneven
            if kind.window is None:
                full += rate
            else:
                windowed[kind.window] += rate
        return full, tuple(windowed.values())

    def _decode_fixed(self, decodes: int) -> float:
        """What a step of `decodes` decodes takes beside its KV reads and its end."""
        fixed = 0.0
        if decodes:
            fixed = sum(self._token_terms(decodes).values()) + self._starts(decodes) + self._state * decodes
        self._decoding[decodes] = fixed
        return fixed

    def _starts(self, decodes: int) -> float:
        """Attention of a step that only decodes, beside its KV reads."""
        if not decodes:
            return 0.0
        return sum(kind.layers * float(decode_start(self.coefficients, kind, decodes)) for kind in self.work.attention)

    def _chunked(self, shape: StepShape) -> float:
        """The device's time up to the output matrix in a step with prompt chunks."""
        tokens = shape.tokens
        plain = self._plain.get(tokens)
        if plain is None:
            plain = self._plain[tokens] = sum(self._token_terms(tokens).values())
        plain += self._state * (shape.decodes + len(shape.chunks))
        for seconds in self._attention(shape.chunks, shape.decodes, shape.context, shape.windowed):
            plain += seconds
        return plain

    def _attention(
        self, chunks: tuple[tuple[int, int], ...], decodes: int, context: int, windowed: tuple[int, ...]
    ) -> Iterator[float]:
        """Attention of a step with chunks, for each kind of layer."""
        if not chunks:
            return
        c = self.coefficients
        tile = c.query_tile
        tiled = [(count, start, -(-count // tile)) for count, start in chunks]
        tiles = sum(n for _, _, n in tiled)
        for kind in self.work.attention:
            window = kind.window
            seen = c.uneven * (context if window is None else windowed[self._windows.index(window)])
            queries = longest = 0.0
            for count, start, n in tiled:
                queries += pairs(count, start, window) * (n * tile / count)
                reach = start + count if window is None else min(start + count, window + tile)
                longest = max(longest, reach)
            if kind.latent:  # MLA prompts and decodes run in kernels of their own
                yield kind.layers * chunked_seconds(c, kind, queries, tiles, longest, 0, 0)
                if decodes:
                    yield kind.layers * (decode_start(c, kind, decodes) + seen * decode_rate(c, kind))
                continue
            if decodes:
                longest = max(longest, seen / decodes)
            yield kind.layers * chunked_seconds(c, kind, queries, tiles, longest, decodes, seen)

    def _token_terms(self, tokens: int) -> dict[str, float]:
        """The terms that depend on the number of tokens alone."""
        work, c = self.work, self.coefficients
        if not tokens:
            return dict.fromkeys(("linear", "experts", "elementwise", "communication"), 0.0)
        linear = experts = reduced = 0.0
        small = work.layers * float(elementwise_seconds(c, work.elementwise_bytes / work.layers * tokens))
        for m in work.linears:
            once = gemm_seconds(c, tokens, m.outputs, m.inputs, work.weight_bytes, work.activation_bytes)
            linear += m.times * once
        if (e := work.experts) is not None:
            each, moved = float(e.matrices * work.hidden * e.width), e.activations(work.hidden)
            once = experts_seconds(c, e.touched(tokens, c.moe_skew), tokens * e.active, each, work.expert_bytes, moved)
            experts = e.layers * once
        if work.reductions:
            message = tokens * work.hidden * work.activation_bytes
            reduced = work.reductions * reduction_seconds(c, message, work.tp)
        return {
            "linear": linear * factor_at(c.gemm_factors, tokens),
            "experts": experts,
            "elementwise": small,
            "communication": reduced,
        }

    def _end(self, samples: int) -> float:
        """Output matrix and sampler."""
        end = self._ends[samples] = self._head(samples) + self._sampler(samples)
        return end

    def _head(self, samples: int) -> float:
        work = self.work
        if not samples:
            return 0.0
        dims = work.head.outputs, work.head.inputs
        return float(gemm_seconds(self.coefficients, samples, *dims, work.head_bytes, work.activation_bytes))

    def _sampler(self, samples: int) -> float:
        c = self.coefficients
        return c.sampler_start + 4.0 * self.work.vocab * samples / c.sampler_bandwidth if samples else 0.0
