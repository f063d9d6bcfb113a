"""Measure engines one after the other, in interleaved rounds, and append one JSON line a result.

    python run.py --plan smollm2 --rounds 3 --out FILE [--peers octavo,openvino] [--concurrency 64] [--kv-mib 256,1024]

Every measurement is a process of its own, so that loading is measured too. Before it the machine must be idle (--wait),
and a probe before and after it says how fast the machine is; the CPU share of all other processes is written down.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import set_up
from limits import Shape, limits
from roster import HERE, PEERS, PLANS, Peer, Place, Plan

CORES = os.cpu_count() or 1
# Unpinned, both spinning threads now and then land on one core, and a region takes a time slice, not a microsecond.
PIN = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "OMP_NUM_THREADS": str(CORES)}
IDLE_SHARE = 0.04  # of the machine's CPU time, below which it counts as idle


@dataclass(frozen=True, slots=True)
class Session:
    """What stays the same over all rounds."""

    place: Place
    plan: Plan
    plan_name: str
    out: Path
    wait: float
    timeout: float
    extra: list[str]  # further driver arguments


def busy_seconds() -> float:
    """CPU seconds of all processes since boot, the host's steal included."""
    times = [int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU seconds of this process and of all its ended descendants that were waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def wait_until_idle(limit: float) -> bool:
    """One foreign busy thread halves every engine that waits at a barrier, so wait; False: it never became idle."""
    end = time.monotonic() + limit
    while True:
        before = busy_seconds()
        time.sleep(2)
        if (busy_seconds() - before) / (2 * CORES) < IDLE_SHARE:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(3)


def environment(session: Session, peer: Peer | None) -> dict[str, str]:
    """A peer's caches live in the peers' folder. `peer` None: the probe's environment."""
    env = dict(os.environ, TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    env["VLLM_CACHE_ROOT"] = str(session.place.peers / "cache" / "vllm")
    if peer is None or peer.pinned:
        env |= PIN
    return env | (peer.env if peer else {})


def take_probe(session: Session) -> dict[str, float]:
    command = [session.place.octavo_python, str(HERE / "probe.py"), str(session.place.peers / "bin" / "libprobe.so")]
    env = environment(session, None)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the probe failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def run_driver(session: Session, peer: Peer, arguments: list[str]) -> str | None:
    """Run one driver in a session of its own, so that a time-out ends its worker processes too. Returns what failed."""
    command = peer.command(session.place) + arguments
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command, env=environment(session, peer), stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(session.timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"not finished after {session.timeout:.0f} s"
        if code == 0:
            return None
        log.seek(0)
        return f"ended with {code}: {log.read()[-2000:]}"


def driver_arguments(session: Session, peer: Peer, kv_mib: int, rows_file: Path) -> list[str]:
    """The same for every driver, but a slow peer is spared the concurrencies above its `most`."""
    numbers = [number for number in session.plan.concurrency.split(",") if int(number) <= peer.most]
    arguments = ["--workload", str(session.place.peers / "models" / "workload64.json"), "--out", str(rows_file)]
    arguments += ["--mode", session.plan.mode, "--concurrency", ",".join(numbers or [str(peer.most)])]
    arguments += ["--kv-mib", str(kv_mib), "--stamps", str(session.out.with_suffix(".stamps.jsonl"))]
    return arguments + session.extra


def measure_peer(session: Session, peer: Peer, kv_mib: int, round_number: int) -> None:
    """One process of one peer between two probes; its lines go to the result file with all that was noted around."""
    quiet = wait_until_idle(session.wait)
    before = take_probe(session)
    with tempfile.TemporaryDirectory() as scratch:
        rows_file = Path(scratch) / "rows.jsonl"
        arguments = driver_arguments(session, peer, kv_mib, rows_file)
        start, busy, own = time.monotonic(), busy_seconds(), own_seconds()
        failure = run_driver(session, peer, arguments)
        others = (busy_seconds() - busy) - (own_seconds() - own)
        foreign = others / ((time.monotonic() - start) * CORES)
        rows = [json.loads(line) for line in rows_file.read_text().splitlines()] if rows_file.exists() else []
    after = take_probe(session)
    notes: dict[str, Any] = dict(
        peer=peer.name,
        model=session.place.model,
        weights=peer.weights,
        kv=peer.kv,
        kv_mib=kv_mib,
        plan=session.plan_name,
        round=round_number,
        time=time.strftime("%Y-%m-%dT%H:%M:%S"),
        quiet=quiet,
        foreign=round(max(0.0, foreign), 4),
        before=before,
        after=after,
    )
    report(session, rows, notes, failure)


def report(session: Session, rows: list[dict[str, Any]], notes: dict[str, Any], failure: str | None) -> None:
    """Write results and failures to the file and a line of each to the screen."""
    shape = Shape.read(session.place.checkpoint)
    probes = (notes["before"], notes["after"])
    read, gemm = (sum(probe[name] for probe in probes) / 2 for name in ("read_gb_s", "gemm_gflop_s"))
    with session.out.open("a") as file:
        for row in rows:
            bounds = {name: round(value, 2) for name, value in limits(notes | row, shape, read, gemm).items()}
            row = {name: value for name, value in row.items() if name != "asks"}
            file.write(json.dumps(dict(kind="result") | notes | row | bounds) + "\n")
            speed = row.get("out_tok_s") or row.get("decode_tok_s")
            print(f"  {row['mode']:6} {row['concurrency']:3}  {speed} tok/s, limit {bounds}", flush=True)
        if failure:
            file.write(json.dumps(dict(kind="failure", why=failure) | notes) + "\n")
            print(f"  FAILED: {failure}", flush=True)
    print(f"  read {read:.1f} GB/s, GEMM {gemm:.0f} GFLOP/s, foreign CPU {notes['foreign']:.1%}", flush=True)


def machine() -> dict[str, Any]:
    """Written once at the start of a run: what it ran on and which Octavo it was."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    return dict(kind="machine", cpu=cpu.partition(": ")[2], cores=CORES, commit=git.stdout.strip())


def parse() -> tuple[Session, int, list[Peer]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=sorted(PLANS), required=True)
    parser.add_argument("--peers", help=f"comma list out of {', '.join(PEERS)}; default: the plan's")
    parser.add_argument("--model", help="instead of the plan's")
    parser.add_argument("--mode", choices=["single", "batch", "all"])
    parser.add_argument("--concurrency", help="comma list")
    parser.add_argument("--kv-mib", help="comma list; each budget is a run of its own")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dir", type=Path, default=set_up.default_folder(), help="where set_up.py put the peers")
    parser.add_argument("--octavo-python", default=sys.executable, help="an interpreter with torch and transformers")
    parser.add_argument("--wait", type=float, default=400, help="seconds to wait for an idle machine before each run")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one run")
    parser.add_argument("--extra", default="", help='further arguments for every driver, such as "--limit 4 --clip 8"')
    args = parser.parse_args()
    plan = PLANS[args.plan]
    given = dict(model=args.model, peers=args.peers, mode=args.mode, concurrency=args.concurrency)
    plan = replace(plan, **{name: value for name, value in given.items() if value})
    if args.kv_mib:
        plan = replace(plan, kv_mib=tuple(int(part) for part in args.kv_mib.split(",")))
    names = plan.peers.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        parser.error(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    place = Place(args.dir.resolve(), plan.model, args.octavo_python)
    extra = args.extra.split()
    session = Session(place, plan, args.plan, args.out.resolve(), args.wait, args.timeout, extra)
    return session, args.rounds, [PEERS[name] for name in names]


def main() -> None:
    session, rounds, peers = parse()
    session.out.parent.mkdir(parents=True, exist_ok=True)
    (session.place.peers / "results").mkdir(parents=True, exist_ok=True)
    with session.out.open("a") as file:
        file.write(json.dumps(machine()) + "\n")
    for round_number in range(rounds):
        for kv_mib in session.plan.kv_mib:
            for peer in peers:
                print(f"round {round_number + 1} of {rounds}: {peer.name}, {kv_mib} MiB for KV", flush=True)
                measure_peer(session, peer, kv_mib, round_number)


if __name__ == "__main__":
    main()
