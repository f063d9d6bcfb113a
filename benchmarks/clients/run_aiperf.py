"""NVIDIA's aiperf, unchanged, against `octavo serve`: streaming chats and completions, with the server's own counts.

Needs an interpreter with `aiperf` (see README.md). Checked: aiperf ends with success, no request failed, every request
streamed as many tokens as it asked for, and the server answered nothing but 200.

    python benchmarks/clients/run_aiperf.py --python /path/to/venv/bin/python
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

from server_process import ServerProcess, octavo_serve, running, work_folder  # noqa: E402

SETTINGS = {"kv_memory": "256MiB"}
ENDPOINTS = ("chat", "completions")
OUTPUT = 24  # tokens of every answer
SHOWN = ("request_throughput", "output_token_throughput", "time_to_first_token", "inter_token_latency")


def profile(python: Path, server: ServerProcess, model: str, kind: str, tokenizer: Path, folder: Path) -> Path:
    """Run aiperf; returns the folder with what it found."""
    found = folder / kind
    command = [python.parent / "aiperf", "profile", "--model", model, "--url", server.url, "--endpoint-type", kind]
    command += ["--streaming", "--tokenizer", tokenizer, "--use-server-token-count", "--request-count", 48]
    command += ["--concurrency", 8, "--isl", 64, "--isl-stddev", 16, "--osl", OUTPUT, "--osl-stddev", 0]
    command += ["--extra-inputs", "ignore_eos:true", "--ui", "simple", "--artifact-dir", found]
    # With HF_HUB_OFFLINE set, aiperf takes no folder for a tokenizer.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    subprocess.run(list(map(str, command)), env=environment, check=True, timeout=600)
    return found


def check(kind: str, found: Path) -> list[str]:
    """What is wrong with aiperf's figures, in sentences."""
    figures: dict[str, Any] = json.loads((found / "profile_export_aiperf.json").read_text())
    for name in SHOWN:
        print(f"    {kind} {name}: {figures[name]['avg']:.3f} {figures[name]['unit']}")
    wrong = []
    requests, errors = figures["request_count"]["avg"], figures.get("error_request_count", {}).get("avg", 0)
    if requests != 48 or errors:
        wrong.append(f"{kind}: {requests} of 48 requests succeeded, {errors} failed")
    length = figures["output_sequence_length"]
    if not length["min"] == length["max"] == OUTPUT:
        wrong.append(f"{kind}: answers have {length['min']} to {length['max']} tokens; {OUTPUT} were asked for")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="interpreter that has aiperf")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--folder", type=Path, help="for logs and results; default: a new one in /tmp")
    given = parser.parse_args()
    folder = work_folder(given.folder)
    tokenizer = save_tokenizer(given.model, folder)
    wrong = []
    with running(octavo_serve(given.model, SETTINGS, folder), folder) as server:
        for kind in ENDPOINTS:
            wrong += check(kind, profile(given.python, server, given.model, kind, tokenizer, folder))
        bad = [line for line in server.access_log() if line["method"] == "POST" and line["status"] != 200]
    wrong += [f"the server answered {line['status']} to {line['path']}" for line in bad]
    for sentence in wrong:
        print(f"FAIL  {sentence}")
    print(f"{len(wrong)} faults")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
