"""The text side of a running request: detokenising, stop strings, logprobs, and the output it shows."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from copy import copy
from typing import Protocol

from octavo.detokenize import Detokenizer, StopChecker
from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.runner.api import StepResult, TokenLogprobs
from octavo.scheduler.scheduler import Progress
from octavo.types import FinishReason, Request, Sequence, Status


class TextCodec(Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Seq[int], *, skip_special_tokens: bool = True) -> str: ...


class _Sample:
    """Text state of one sequence."""

    def __init__(self, seq: Sequence, codec: TextCodec | None) -> None:
        params = seq.request.params
        self.seq = seq
        self._tokens = 0  # taken so far: the sequence may already have more of the same step
        self.text = ""
        self.delta = ""
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.stop_reason: str | int | None = None
        self.reason: FinishReason | None = None
        self._detokenizer = codec and Detokenizer(
            codec, seq.request.prompt, skip_special_tokens=params.skip_special_tokens
        )
        include = params.include_stop_str_in_output
        self._stops = StopChecker(params.stop, include=include) if params.stop else None
        self.total = 0.0  # of the chosen tokens' logprobs

    def add(self, token: int, *, ends: bool) -> bool:
        """Take one token; True if a stop string is complete. `ends`: it is the stop token, which shows no text."""
        self._tokens += 1
        if self._detokenizer is None:
            return False
        return self._emit("" if ends else self._detokenizer.feed((token,)))

    def length_to_stop(self, tokens: Seq[int]) -> int:
        """How many of `tokens`, which may come next, come before a stop string is complete, with the one that
        completes it; changes nothing."""
        params = self.seq.request.params
        if self._detokenizer is None or self._stops is None:
            return len(tokens)
        detokenizer, stops = self._detokenizer.twin(), copy(self._stops)
        for count, token in enumerate(tokens, 1):
            piece = detokenizer.feed((token,))
            if self._tokens + count <= params.min_tokens:
                continue
            if token in self.seq.request.stop_token_ids or stops.feed(piece).match is not None:
                return count
        return len(tokens)

    def _emit(self, piece: str) -> bool:
        if self._stops is None or self._tokens <= self.seq.request.params.min_tokens > 0:
            self._show(piece)  # before min_tokens a stop string has no effect: its text passes through
            return False
        stopped = self._stops.feed(piece)
        self._show(stopped.text)
        self.stop_reason = stopped.match
        return stopped.match is not None

    def _show(self, text: str) -> None:
        self.delta += text
        self.text += text

    def end(self) -> None:
        """Nothing more comes: let go of what was held back, unless that completes a stop string."""
        if self.stop_reason is None and self._detokenizer is not None:
            self._emit(self._detokenizer.flush())
        if self.stop_reason is None:
            if self._stops is not None:
                self._show(self._stops.flush())
            self.stop_reason = self.seq.stop_match
            self.reason = self.seq.finish_reason
        else:
            self.reason = FinishReason.STOP


class LiveRequest:
    """A request between submit and its last token."""

    def __init__(self, request: Request, prompt: str | None, seqs: list[Sequence], codec: TextCodec | None) -> None:
        self.request = request
        self.seqs = seqs
        self._prompt = prompt
        self._samples = {seq.id: _Sample(seq, codec) for seq in seqs}
        self._token_times: list[float] = []
        self._finished: float | None = None
        self._blocks = 0
        wants = request.params.prompt_logprobs is not None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = [None] * len(request.prompt) if wants else None

    def length_to_stop(self, seq: Sequence, tokens: Seq[int]) -> int:
        """How many of the tokens that a sequence is about to gain it may have before a stop string ends it."""
        return self._samples[seq.id].length_to_stop(tokens)

    def advance(self, item: Progress, result: StepResult, now: float) -> bool:
        """Take what a sequence got out of a step; True if one of its stop strings is complete."""
        seq, sample = item.seq, self._samples[item.seq.id]
        matched = False
        if item.token is not None:
            if seq.index == 0:
                self._token_times.append(now)
            if sample.logprobs is not None and seq.id in result.logprobs:
                chosen = result.logprobs[seq.id][item.nth]
                sample.logprobs.append(chosen)
                sample.total += chosen.logprob
            matched = sample.add(item.token, ends=item.finished is FinishReason.STOP)
        if matched or item.finished is not None:
            sample.end()
            if all(other.reason is not None for other in self._samples.values()):
                self._finished = now
        return matched

    def close(self, now: float) -> None:
        """Nothing more comes for this request: let go of the text that was held back."""
        for sample in self._samples.values():
            if sample.reason is None:
                sample.end()
        self._finished = now

    def take_prompt_logprobs(self, start: int, values: Seq[TokenLogprobs]) -> None:
        """Logprobs of the prompt tokens at positions start+1 and on."""
        if self._prompt_logprobs is not None:
            for i, value in enumerate(values, start + 1):
                if i < len(self._prompt_logprobs):
                    self._prompt_logprobs[i] = value

    def output(self, error: str | None = None, code: str = "engine_error") -> RequestOutput:
        """The request as of now, with the error that it ended with; clears the deltas."""
        first, *others = self.seqs
        generated, preemptions, drafted = first.generated, first.preemptions, first.drafted
        accepted, finished = first.drafts_accepted, first.status is Status.FINISHED
        for seq in others:
            generated += seq.generated
            preemptions += seq.preemptions
            drafted += seq.drafted
            accepted += seq.drafts_accepted
            finished &= seq.status is Status.FINISHED
        if error is None and first.stop_match == "deadline":
            error, code = (
                "the request's deadline passed before there was room for it; nothing was computed",
                "queue_timeout",
            )
        return RequestOutput(
            request_id=self.request.id,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt,
            outputs=tuple([self._completion(sample) for sample in self._samples.values()]),
            finished=finished,
            metrics=RequestMetrics(
                arrival=self.request.arrival,
                admitted=first.admitted_at,
                first_token=self._token_times[0] if self._token_times else None,
                finished=self._finished,
                token_times=tuple(self._token_times),
                cached_tokens=first.reused,
                preemptions=preemptions,
                drafted_tokens=drafted,
                accepted_tokens=accepted,
            ),
            prompt_logprobs=None if self._prompt_logprobs is None else tuple(self._prompt_logprobs),
            error=error,
            error_code=None if error is None else code,
            usage={
                "prompt_tokens": len(self.request.prompt),
                "completion_tokens": generated,
                "cached_tokens": first.reused,
            },
        )

    def _completion(self, sample: _Sample) -> CompletionOutput:
        delta, sample.delta = sample.delta, ""
        seq, logprobs = sample.seq, sample.logprobs
        return CompletionOutput(
            index=seq.index,
            text=sample.text,
            tokens=seq.tokens,
            span=(seq.prompt_length, len(seq.tokens)),
            delta=delta,
            finish_reason=sample.reason or seq.finish_reason,
            stop_reason=sample.stop_reason,
            logprobs=None if logprobs is None else tuple(logprobs),
            cumulative_logprob=None if logprobs is None else sample.total,
        )
