"""`LLM`: the engine as a Python object, shaped as users of vLLM know it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.build import BuiltEngine, build_engine
from octavo.config import EngineConfig, parse_bytes
from octavo.outputs import RequestOutput
from octavo.types import RequestError, SamplingParams

Prompt = str | Seq[int]
Messages = Seq[Mapping[str, str]]


class LLM:
    """A model ready to generate.

    >>> llm = LLM("demo", kv_strategy="paged", kv_memory="256MiB")
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))

    Keyword arguments are the fields of `EngineConfig`; `kv_memory` also takes '256MiB'.
    """

    def __init__(self, model: str, *, kv_memory: int | str | None = None, **settings: Any) -> None:
        if isinstance(kv_memory, str):
            kv_memory = parse_bytes(kv_memory, "kv_memory")
        self.built: BuiltEngine = build_engine(EngineConfig(model=model, kv_memory=kv_memory, **settings))
        self.engine = self.built.engine

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts (text or token ids), batched; outputs in the order of the prompts.

        Raises RequestError, running nothing, if one of them can never run.
        """
        items = _as_list(prompts)
        params = _params_for(items, sampling_params)
        ids: list[str] = []
        try:
            for prompt, own in zip(items, params, strict=True):
                ids.append(self.engine.submit(prompt, own))
        except RequestError:
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        done: dict[str, RequestOutput] = {}
        with _progress(use_tqdm) as progress:
            task = progress.add_task("generating", total=len(ids))
            while len(done) < len(ids):
                for output in self.engine.step():
                    if output.finished:
                        done[output.request_id] = output
                        progress.advance(task)
        return [done[request_id] for request_id in ids]

    def chat(
        self,
        messages: Messages | Seq[Messages],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role": …, "content": …}."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Seq[Any] = messages if several else [messages]
        prompts = [self.chat_prompt(conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Messages) -> list[int]:
        """Token ids of a conversation through the model's chat template."""
        tokenizer = self.built.loaded.tokenizer
        if not messages:
            raise RequestError("messages is empty; give at least one message.", field="messages")
        if tokenizer is None:
            raise RequestError("the model has no tokenizer; give the prompt as token ids.", field="messages")
        return tokenizer.encode_chat(messages)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield the request after every step that brought it something; closing the iterator aborts it."""
        request_id = self.engine.submit(prompt, sampling_params or SamplingParams())
        try:
            while self.engine.busy:
                for output in self.engine.step():
                    if output.request_id == request_id:
                        yield output
                        if output.finished:
                            return
        finally:
            self.engine.abort(request_id)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request; what it had so far. None if it is unknown or has ended."""
        return self.engine.abort(request_id)


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_for(items: list[Prompt], given: SamplingParams | Seq[SamplingParams] | None) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * len(items)
    if len(given) != len(items):
        raise RequestError(
            f"sampling_params has {len(given)} entries for {len(items)} prompts; give one for all or one for each.",
            field="sampling_params",
        )
    return list(given)


def _progress(show: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, disable=not show, transient=True)
