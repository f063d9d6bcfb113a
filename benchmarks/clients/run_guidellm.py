"""guidellm, unchanged, against `octavo serve`: streaming chats and completions.

Needs an interpreter with `guidellm` (see README.md). Checked: guidellm ends with success, no request failed or stayed
incomplete, every answer has as many tokens as were asked for, and the server answered nothing but 200.

    python benchmarks/clients/run_guidellm.py --python /path/to/venv/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tokenizer_files import save_tokenizer  # noqa: E402

from server_process import octavo_serve, running, work_folder  # noqa: E402

SETTINGS = {"kv_memory": "256MiB"}
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
REQUESTS, OUTPUT = 32, 24  # how many, and tokens of every answer
SHOWN = ("requests_per_second", "output_tokens_per_second", "time_to_first_token_ms", "inter_token_latency_ms")


def measure(python: Path, url: str, endpoint: str, tokenizer: Path, folder: Path) -> dict[str, Any]:
    """Run guidellm; returns what it found, as it writes it."""
    report = folder / f"guidellm{endpoint.replace('/', '-')}.json"
    command = [python.parent / "guidellm", "run", "--profile", "kind=concurrent,streams=8"]
    command += ["--backend", f"kind=openai_http,target={url},request_format={endpoint}"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    command += ["--output", f"kind=json,path={report}", "--disable-console-interactive"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(list(map(str, command)), env=environment, check=True, timeout=600)
    found: dict[str, Any] = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    return found


def check(endpoint: str, metrics: dict[str, Any]) -> list[str]:
    """What is wrong, in sentences."""
    for name in SHOWN:
        print(f"    {endpoint} {name}: {metrics[name]['successful']['mean']:.2f}")
    wrong, totals = [], metrics["request_totals"]
    if totals["successful"] != REQUESTS or totals["errored"] or totals["incomplete"]:
        wrong.append(f"{endpoint}: of {REQUESTS} requests: {totals}")
    length = metrics["output_token_count"]["successful"]
    if not length["min"] == length["max"] == OUTPUT:
        wrong.append(f"{endpoint}: answers have {length['min']} to {length['max']} tokens; {OUTPUT} were asked for")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="interpreter that has guidellm")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--folder", type=Path, help="for logs and results; default: a new one in /tmp")
    given = parser.parse_args()
    folder = work_folder(given.folder)
    tokenizer = save_tokenizer(given.model, folder)
    wrong = []
    with running(octavo_serve(given.model, SETTINGS, folder), folder) as server:
        for endpoint in ENDPOINTS:
            wrong += check(endpoint, measure(given.python, server.url, endpoint, tokenizer, folder))
        bad = [line for line in server.access_log() if line["status"] != 200]
    wrong += [f"the server answered {line['status']} to {line['path']}" for line in bad]
    for sentence in wrong:
        print(f"FAIL  {sentence}")
    print(f"{len(wrong)} faults")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
