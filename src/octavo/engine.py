"""The engine: submit, step, abort, explain. Owns scheduler and runner; turns tokens into text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Protocol

from octavo.clock import Clock
from octavo.kv.api import Ledger
from octavo.outputs import RequestOutput
from octavo.pacing import Pacer
from octavo.runner.api import Runner, StepPlan, StepResult, TokenLogprobs
from octavo.scheduler.explain import Wait
from octavo.scheduler.scheduler import Progress, Scheduler
from octavo.text import LiveRequest, TextCodec
from octavo.types import FinishReason, Request, RequestError, SamplingParams, Sequence, Status, check_ids

if TYPE_CHECKING:
    from octavo.runner.structure import Structures


class Watcher(Protocol):
    """Something that looks on, such as a recorder. It never changes anything."""

    def on_written(self, scheduler: Scheduler) -> None: ...

    def on_step(
        self, scheduler: Scheduler, plan: StepPlan, progress: Seq[Progress], start: float, end: float
    ) -> None: ...

    def on_finish(self, seq: Sequence, reason: FinishReason, now: float) -> None: ...


class Engine:
    """One engine step is plan, run, settle. Not thread-safe: one caller drives it."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Clock,
        *,
        codec: TextCodec | None = None,
        eos_ids: frozenset[int] = frozenset(),
        vocab_size: int | None = None,
        watchers: Seq[Watcher] = (),
        check: bool = False,
        itl_target: float | None = None,
        structures: Structures | None = None,
    ) -> None:
        """`itl_target`: seconds that a running stream should wait for its next token at most; see `pacing`.
        `structures`: the runner's; without them no answer can be given one."""
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.codec = codec
        self.structures = structures
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._watchers = tuple(watchers)
        self._check = check
        self._pacer = None if itl_target is None else Pacer(itl_target)
        self._drafted = 0  # tokens drafted in the step before
        self._live: dict[str, LiveRequest] = {}
        self._count = 0

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def submit(
        self,
        prompt: str | Seq[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        arrival: float | None = None,
        priority: int = 0,
        tenant: str = "",
        identity: tuple[tuple[str, str], ...] = (),
        output_length: int | None = None,
        deadline: float | None = None,
    ) -> str:
        """Queue a request and return its id. Raises RequestError, with nothing kept, for input that cannot run."""
        text = prompt if isinstance(prompt, str) else None
        tokens = self._encode(prompt)
        now = self.clock.now()
        goes_on = params.ignore_eos and params.structure is None  # a complete structure ends all the same
        stops = frozenset(params.stop_token_ids) | (frozenset() if goes_on else self._eos_ids)
        request = Request(
            id=request_id if request_id is not None else self._new_id(),
            prompt=tokens,
            params=params,
            arrival=now if arrival is None else arrival,
            priority=priority,
            tenant=tenant,
            identity=identity,
            stop_token_ids=stops,
            output_length=output_length,
            deadline=deadline,
        )
        if self._vocab_size is not None:
            check_ids(request, self._vocab_size)
        if params.stop and self.codec is None:
            raise RequestError("stop strings need a model with a tokenizer; use stop_token_ids.", field="stop")
        if params.structure is not None:
            self._structures().compile(params.structure)
        seqs = self.scheduler.submit(request, now)
        try:
            if params.structure is not None:
                self._structures().begin(seqs)
            self._live[request.id] = LiveRequest(request, text, seqs, self.codec)
        except BaseException:
            self.scheduler.abort(request.id, now)
            raise
        return request.id

    def _structures(self) -> Structures:
        if self.structures is None:
            raise RequestError("structured output needs a model with a tokenizer; leave it out.", field="structure")
        return self.structures

    def _new_id(self) -> str:
        while True:
            self._count += 1
            if (name := f"request-{self._count}") not in self._live:
                return name

    def _encode(self, prompt: str | Seq[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.codec is None:
                raise RequestError("the model has no tokenizer; give the prompt as token ids.", field="prompt")
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"prompt is not valid text: {error.reason} at character {error.start}.", field="prompt"
                ) from error
            return tuple(self.codec.encode(prompt))
        try:
            tokens = tuple(prompt)
        except TypeError:
            tokens = (None,)
        if set(map(type, tokens)) <= {int}:  # as good as always, and ten times quicker
            return tokens
        if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in tokens):
            raise RequestError("prompt is neither a text nor a list of token ids (whole numbers).", field="prompt")
        return tuple(int(token) for token in tokens)

    def step(self) -> list[RequestOutput]:
        """One step; returns the requests that moved, with the text that came."""
        start = self.clock.now()
        plan = self.scheduler.plan(start, self._prompt_budget())
        failed: list[RequestOutput] = []
        try:
            result = self.runner.run(plan) if not plan.empty else StepResult(())
        except Exception as error:
            if not plan.work:
                raise
            if plan.copies:  # they may have run or not: the step is lost to everybody in it
                return self._failed(plan, error)
            result, failed = self._apart(plan, error)
        now = self.clock.now()
        if self._pacer is not None and plan.work:
            decode = plan.decode_tokens
            self._pacer.learn(plan.tokens - decode, decode, now - start)
        result = self._cut(plan, result)
        progress = self.scheduler.settle(plan, result, now, self._on_written if self._watchers else None)
        outputs = failed + self._collect(plan, progress, result, now)
        for watcher in self._watchers:
            watcher.on_step(self.scheduler, plan, progress, start, now)
        if self._check:
            self.scheduler.check()
        return outputs

    def _prompt_budget(self) -> int | None:
        """Most prompt tokens for the next step, if anybody decodes in it."""
        if self._pacer is None:
            return None
        decoding = sum(len(seq.tokens) - seq.computed == 1 for seq in self.scheduler.running)
        return self._pacer.budget(decoding + self._drafted) if decoding else None

    def _cut(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Drop what was drawn behind a stop string, so that the request ends where it would have without drafts."""
        drafted = [i for i, work in enumerate(plan.work) if work.draft]
        self._drafted = sum(len(plan.work[i].draft) for i in drafted)
        tokens = list(result.tokens)
        for i in drafted:
            seq = plan.work[i].seq
            if len(tokens[i]) > 1 and seq.request.id in self._live:
                tokens[i] = tokens[i][: self._live[seq.request.id].length_to_stop(seq, tokens[i])]
        return replace(result, tokens=tuple(tokens)) if drafted else result

    def _on_written(self) -> None:
        for watcher in self._watchers:
            watcher.on_written(self.scheduler)

    def _collect(self, plan: StepPlan, progress: Seq[Progress], result: StepResult, now: float) -> list[RequestOutput]:
        for work in plan.work if result.prompt_logprobs else ():
            if work.seq.id in result.prompt_logprobs and work.seq.request.id in self._live:
                values = result.prompt_logprobs[work.seq.id]
                self._live[work.seq.request.id].take_prompt_logprobs(work.start, values)
        moved: dict[str, LiveRequest] = {}
        outputs = []
        for item in progress:
            live = self._live.get(item.seq.request.id)
            if live is None:
                continue  # its text could not be made: it ended with another of its samples
            moved[item.seq.request.id] = live
            try:
                matched = live.advance(item, result, now)
            except Exception as error:  # tokenizers are other people's code
                outputs.append(self._unwritable(moved.pop(item.seq.request.id), error, now))
                continue
            if matched and item.seq.status is not Status.FINISHED:
                self.scheduler.stop(item.seq, FinishReason.STOP, now)
                self._ended(item.seq, FinishReason.STOP, now)
            elif item.finished is not None:
                self.runner.forget(item.seq)
        for request_id, live in moved.items():
            output = live.output()
            outputs.append(output)
            if output.finished:
                del self._live[request_id]
        return outputs

    def _unwritable(self, live: LiveRequest, error: Exception, now: float) -> RequestOutput:
        """The tokens of a request could not be made text: it ends with the error, alone."""
        del self._live[live.request.id]
        for seq in live.seqs:
            if seq.status is not Status.FINISHED:
                self.scheduler.stop(seq, FinishReason.ERROR, now)
                self._ended(seq, FinishReason.ERROR, now)
            else:
                self.runner.forget(seq)
        return live.output(error=f"the answer could not be written: {type(error).__name__}: {error}")

    def _apart(self, plan: StepPlan, error: Exception) -> tuple[StepResult, list[RequestOutput]]:
        """The runner could not run the step: run its requests one by one, so that only whoever is to blame ends with
        the error."""
        groups: dict[str, list[int]] = {}
        for i, work in enumerate(plan.work):
            groups.setdefault(work.seq.request.id, []).append(i)
        tokens: list[tuple[int, ...]] = [()] * len(plan.work)
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        outputs: list[RequestOutput] = []
        for indices in groups.values():
            part = replace(plan, work=tuple(plan.work[i] for i in indices))
            try:
                if len(groups) == 1:
                    raise error
                result = self.runner.run(part)
            except Exception as own:
                outputs += self._failed(part, own)
                continue
            for i, drawn in zip(indices, result.tokens, strict=True):
                tokens[i] = drawn
            logprobs |= result.logprobs
            prompt_logprobs |= result.prompt_logprobs
        return StepResult(tuple(tokens), logprobs, prompt_logprobs), outputs

    def _failed(self, plan: StepPlan, error: Exception) -> list[RequestOutput]:
        """The requests of `plan` end with the error."""
        now = self.clock.now()
        for seq in self.scheduler.fail(plan, now):
            self._ended(seq, FinishReason.ERROR, now)
        failed = [self._live.pop(r) for r in dict.fromkeys(work.seq.request.id for work in plan.work)]
        for live in failed:
            live.close(now)
        if isinstance(error, RequestError):
            return [live.output(error=str(error), code=error.code) for live in failed]
        return [live.output(error=f"the step failed: {error}") for live in failed]

    def _ended(self, seq: Sequence, reason: FinishReason, now: float) -> None:
        self.runner.forget(seq)
        for watcher in self._watchers:
            watcher.on_finish(seq, reason, now)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and give its memory back at once; returns what it had. None: unknown or already ended."""
        live = self._live.pop(request_id, None)
        if live is None:
            return None
        now = self.clock.now()
        for seq in self.scheduler.abort(request_id, now):
            self._ended(seq, FinishReason.ABORT, now)
        live.close(now)
        return live.output()

    def explain(self, request_id: str) -> Wait | None:
        """Why a request does not run; None if it runs or is unknown."""
        return self.scheduler.explain(request_id, self.clock.now())

    def ledger(self) -> Ledger:
        """Where every slot of the KV pool is."""
        return self.scheduler.ledger()

    def drain(self) -> list[RequestOutput]:
        """Step until nothing is left; returns the finished requests in the order in which they ended."""
        done: list[RequestOutput] = []
        while self.busy:
            done += (output for output in self.step() if output.finished)
        return done
