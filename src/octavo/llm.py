"""`LLM`: the engine as a Python object, shaped as users of vLLM know it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from numbers import Integral
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.build import BuiltEngine, build_engine
from octavo.config import EngineConfig, parse_bytes
from octavo.errors import OctavoError
from octavo.outputs import RequestOutput
from octavo.types import RequestError, SamplingParams

Prompt = str | Seq[int]
Messages = Seq[Mapping[str, str]]


class LLM:
    """A model ready to generate.

    >>> llm = LLM("demo", kv_strategy="paged", kv_memory="256MiB")
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))

    Keyword arguments are the fields of `EngineConfig`; `kv_memory` also takes '256MiB'. `decision_log` names a file
    for every input and decision. `engine` is the step-by-step API; whoever calls `engine.step()` gets its outputs.
    """

    def __init__(
        self,
        model: str,
        *,
        kv_memory: int | str | None = None,
        decision_log: str | Path | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(kv_memory, str):
            kv_memory = parse_bytes(kv_memory, "kv_memory")
        log = None if decision_log is None else Path(decision_log)
        self.built: BuiltEngine = build_engine(EngineConfig(model=model, kv_memory=kv_memory, **settings), log=log)
        self.engine = self.built.engine
        self._inbox: dict[str, deque[RequestOutput]] = {}  # outputs that a generate or stream has not looked at yet

    def _submit(self, prompt: Prompt, params: SamplingParams) -> str:
        request_id = self.engine.submit(prompt, params)
        self._inbox[request_id] = deque()
        return request_id

    def _next(self, request_id: str) -> RequestOutput:
        """The next output of a request; others that come meanwhile wait for whoever asks for them."""
        inbox = self._inbox[request_id]
        while not inbox:
            for output in self.engine.step():
                if output.request_id in self._inbox:
                    self._inbox[output.request_id].append(output)
        return inbox.popleft()

    def _drop(self, request_id: str) -> None:
        self._inbox.pop(request_id, None)
        self.engine.abort(request_id)

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts (text or token ids), batched; outputs in the order of the prompts.

        Raises RequestError, running nothing, if one of them can never run, and OctavoError if all of them failed; where
        only some did, their outputs have `error`.
        """
        items = _as_list(prompts)
        params = _params_for(items, sampling_params)
        ids: list[str] = []
        outputs: list[RequestOutput] = []
        try:
            for prompt, own in zip(items, params, strict=True):
                ids.append(self._submit(prompt, own))
            with _progress(use_tqdm) as progress:
                for request_id in progress.track(ids, description="generating"):
                    while not (output := self._next(request_id)).finished:
                        pass
                    outputs.append(output)
        finally:  # whatever happens, nothing of this call stays behind
            for request_id in ids:
                self._drop(request_id)
        if outputs and all(output.error for output in outputs):
            raise OctavoError(f"no prompt was completed: {outputs[0].error}")
        return outputs

    def chat(
        self,
        messages: Messages | Seq[Messages],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role": …, "content": …}."""
        if not isinstance(messages, (list, tuple)):
            raise RequestError(
                'messages is no list; give a list of {"role": …, "content": …} or several such lists.', field="messages"
            )
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
        request_id = self._submit(prompt, sampling_params or SamplingParams())
        try:
            while True:
                output = self._next(request_id)
                yield output
                if output.finished:
                    return
        finally:
            self._drop(request_id)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request; what it had so far. None if it is unknown or has ended."""
        return self.engine.abort(request_id)


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt or several: a text is one, and so is a list of token ids."""
    if isinstance(prompts, (str, Mapping)) or (len(prompts) and isinstance(prompts[0], Integral)):
        prompts = [prompts]  # type: ignore[list-item]
    return [_plain(prompt) for prompt in prompts]


def _plain(prompt: Any) -> Prompt:
    """vLLM's prompt dicts as what is in them."""
    if isinstance(prompt, Mapping):
        for name in ("prompt_token_ids", "prompt"):
            if name in prompt:
                return prompt[name]  # type: ignore[no-any-return]
        raise RequestError("prompt is a dict without prompt_token_ids or prompt; give one of them.", field="prompt")
    return prompt  # type: ignore[no-any-return]


def _params_for(items: list[Prompt], given: SamplingParams | Seq[SamplingParams] | None) -> list[SamplingParams]:
    params = [given or SamplingParams()] * len(items) if not isinstance(given, (list, tuple)) else list(given)
    if len(params) != len(items):
        raise RequestError(
            f"sampling_params has {len(params)} entries for {len(items)} prompts; give one for all or one for each.",
            field="sampling_params",
        )
    for own in params:
        if not isinstance(own, SamplingParams):
            raise RequestError(f"sampling_params holds {own!r}; it takes SamplingParams.", field="sampling_params")
    return params  # type: ignore[return-value]


def _progress(show: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, disable=not show, transient=True)
