"""lm-eval, unchanged, against `octavo serve`: a loglikelihood task and a generating one, compared with offline.

Needs an interpreter with `lm-eval[api]` (see README.md). Token ids are sent as prompts; lm-eval finds the server's
tokenizer by itself. Compared: every loglikelihood with `LLM`'s prompt_logprobs, every answer with `LLM.generate`.

    python benchmarks/clients/run_lm_eval.py --python /path/to/venv/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from octavo.llm import LLM  # noqa: E402
from octavo.types import SamplingParams  # noqa: E402
from server_process import octavo_serve, running, work_folder  # noqa: E402

TASKS = ("octavo_choices", "octavo_sentences")
SETTINGS = {"kv_memory": "256MiB"}
TOLERANCE = 0.02  # of a token's logprob: a batch of other requests changes the order of sums


def evaluate(python: Path, url: str, model: str, folder: Path, batch: int, concurrent: int) -> None:
    """Run lm-eval; its samples go to `folder`."""
    arguments = {
        "model": model,
        "base_url": f"{url}/v1/completions",
        "num_concurrent": concurrent,
        "tokenized_requests": True,
        "max_retries": 1,
    }
    command = [python, "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", ",".join(TASKS)]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--include_path", HERE / "tasks", "--batch_size", batch, "--log_samples", "--output_path", folder]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    environment.pop("PYTHONPATH", None)
    subprocess.run(list(map(str, command)), cwd=HERE / "tasks", env=environment, check=True)


def samples(folder: Path, task: str) -> Iterable[dict[str, Any]]:
    """What lm-eval logged of a task, in its latest run."""
    file = max(folder.rglob(f"samples_{task}_*.jsonl"), key=lambda path: path.stat().st_mtime)
    return [json.loads(line) for line in file.read_text().splitlines()]


def compare_choices(llm: LLM, logged: Iterable[dict[str, Any]]) -> list[str]:
    """Loglikelihoods: what differs, in sentences."""
    tokenizer = llm.built.loaded.tokenizer
    assert tokenizer is not None
    wrong, worst, count = [], 0.0, 0
    for sample in logged:
        for call, response in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context, continuation = call["arg_0"], call["arg_1"]
            whole = tokenizer.encode(context + continuation)
            start = len(tokenizer.encode(context))
            output = llm.generate(
                [whole], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1), use_tqdm=False
            )
            given = output[0].prompt_logprobs
            assert given is not None
            expected = sum(entry.logprob for entry in given[start:] if entry is not None)
            found = float(response[0][0])
            count, worst = count + 1, max(worst, abs(found - expected) / (len(whole) - start))
            if abs(found - expected) > TOLERANCE * (len(whole) - start):
                wrong.append(f"{context!r} + {continuation!r}: {found} over HTTP, {expected} offline")
    print(f"{count} loglikelihoods; the furthest from offline: {worst:.6f} a token")
    return wrong


def compare_sentences(llm: LLM, logged: Iterable[dict[str, Any]]) -> list[str]:
    """Answers: what differs, in sentences."""
    wrong = []
    for sample in logged:
        (call,) = sample["arguments"].values()
        context, options = call["arg_0"], call["arg_1"]
        params = SamplingParams(max_tokens=options["max_gen_toks"], temperature=0, stop=options["until"])
        expected = llm.generate([context], params, use_tqdm=False)[0].outputs[0].text
        found = sample["resps"][0][0]
        print(f"    {context!r} -> {found!r}")
        if found != expected:
            wrong.append(f"{context!r}: {found!r} over HTTP, {expected!r} offline")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="interpreter that has lm-eval[api]")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batch", type=int, default=8, help="prompts in one HTTP request")
    parser.add_argument("--concurrent", type=int, default=2, help="HTTP requests at once")
    parser.add_argument("--folder", type=Path, help="for logs and samples; default: a new one in /tmp")
    given = parser.parse_args()
    folder = work_folder(given.folder)
    with running(octavo_serve(given.model, SETTINGS, folder), folder) as server:
        evaluate(given.python, server.url, given.model, folder, given.batch, given.concurrent)
        bad = [line for line in server.access_log() if line["status"] != 200 and "tokenizer_info" not in line["path"]]
    llm = LLM(given.model, kv_memory=256 << 20)
    wrong = [f"the server answered {line['status']} to {line['method']} {line['path']}" for line in bad]
    wrong += compare_choices(llm, samples(folder, TASKS[0]))
    wrong += compare_sentences(llm, samples(folder, TASKS[1]))
    for sentence in wrong:
        print(f"FAIL  {sentence}")
    print(f"{len(wrong)} differences")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
