"""`octavo run MODEL "prompt"`: stream an answer and say what it cost."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Annotated

import typer

from octavo.commands import options


def run(
    model: options.Model,
    prompt: Annotated[str | None, typer.Argument(help="Without a prompt: a chat on the terminal.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the text as it is, without the chat template.")] = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    weights: options.Weights = "auto",
    implementation: options.Implementation = "auto",
    kv_dtype: options.KVDtype = "auto",
    kv_strategy: options.KVStrategy = "paged",
    kv_memory: options.KVMemory = None,
    block_size: options.BlockSize = 16,
    max_model_len: options.MaxModelLen = None,
    speculative_tokens: options.SpeculativeTokens = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say what was loaded and where the time went.")] = False,
) -> None:
    """Answer PROMPT, streaming the text; then print TTFT, ITL and the KV memory used."""
    from octavo.llm import LLM
    from octavo.types import SamplingParams

    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
    llm = LLM(
        model,
        dtype=dtype,
        device=device,
        weights=weights,
        implementation=implementation,
        kv_dtype=kv_dtype,
        kv_strategy=kv_strategy,
        kv_memory=kv_memory,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=8,
        speculative_tokens=speculative_tokens,
    )
    if verbose:
        _say_loading(llm.built)
    chat = llm.built.loaded.has_chat_template and not raw
    if prompt is not None:
        _answer(llm, llm.chat_prompt([{"role": "user", "content": prompt}]) if chat else prompt, params)
        return
    _converse(llm, params, chat)


def _say_loading(built) -> None:  # type: ignore[no-untyped-def]
    from octavo.comparing import describe
    from octavo.models.phases import process_age

    age = process_age()
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in built.load_seconds.items())
    total = "" if age is None else f"; ready {age:.2f} s after the start of the process"
    print(f"{describe(built.loaded)}\n{phases}{total}", file=sys.stderr)


def _converse(llm, params, chat: bool) -> None:  # type: ignore[no-untyped-def]
    from octavo.types import RequestError

    messages: list[dict[str, str]] = []
    print("Type a message; an empty line ends the chat.", file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        if not line.strip():
            return
        messages.append({"role": "user", "content": line})
        try:
            text = _answer(llm, llm.chat_prompt(messages) if chat else line, params)
        except RequestError as error:
            messages.pop()
            print(f"octavo run: {error}", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": text})


def _answer(llm, prompt, params) -> str:  # type: ignore[no-untyped-def]
    from octavo.errors import OctavoError

    last = None
    peak = 0
    for output in llm.stream(prompt, params):
        print(output.outputs[0].delta, end="", flush=True)
        ledger = llm.engine.ledger()
        peak = max(peak, ledger.live + ledger.slack + ledger.reserved)
        last = output
    print()
    assert last is not None
    if last.error:
        raise OctavoError(last.error)
    _report(llm, last, peak)
    return str(last.outputs[0].text)


def _report(llm, output, peak_slots: int) -> None:  # type: ignore[no-untyped-def]
    metrics, built = output.metrics, llm.built
    times = metrics.token_times
    if not times:
        return
    ttft = times[0] - metrics.arrival
    gaps = [b - a for a, b in pairwise(times)]
    itl = f"{1000 * sum(gaps) / len(gaps):.1f} ms" if gaps else "-"
    slot_bytes = built.layout.page_bytes / built.config.block_size
    kv = llm.engine.scheduler.kv
    used = peak_slots * slot_bytes * kv.pages_per_block
    drafts = f", {metrics.accepted_tokens} of {metrics.drafted_tokens} drafts right" if metrics.drafted_tokens else ""
    print(
        f"\n{len(output.prompt_token_ids)} prompt tokens ({metrics.cached_tokens} from the prefix cache), "
        f"{len(times)} generated{drafts}, finish: {output.outputs[0].finish_reason.value} | "
        f"TTFT {1000 * ttft:.0f} ms, ITL {itl} | KV {used / 2**20:.1f} of {built.kv_bytes / 2**20:.0f} MiB "
        f"({built.config.kv_strategy})",
        file=sys.stderr,
    )
