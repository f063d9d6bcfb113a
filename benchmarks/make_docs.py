"""Puts the figures of a `make run` into README.md, README.zh-CN.md and docs/kv-cache.md, and the plot into docs/.

    make run && .venv/bin/python benchmarks/make_docs.py out/compare.json

Everything between the markers `<!-- run:begin -->` and `<!-- run:end -->` is replaced by the table that `make run`
printed. The plot needs Chromium (see docs/screenshot.py); without it the old one stays.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from octavo.report.comparison import Comparison
from octavo.report.table import render

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "README.zh-CN.md", "docs/kv-cache.md")


def printed(comparison: Comparison) -> str:
    """The terminal table as text, 120 columns."""
    out = io.StringIO()
    Console(file=out, width=120, color_system=None).print(render(comparison))
    lines = (line.rstrip() for line in out.getvalue().splitlines())
    return "\n".join(lines).strip()


def fill(page: Path, text: str) -> None:
    """Replace what stands between the markers of `page`."""
    old = page.read_text(encoding="utf-8")
    new, count = re.subn(
        r"(<!-- run:begin -->\n).*?(<!-- run:end -->)", lambda m: m[1] + text + m[2], old, flags=re.DOTALL
    )
    if count != 1:
        raise SystemExit(f"{page} has {count} pairs of run markers; it needs one.")
    page.write_text(new, encoding="utf-8")


def plot(report: Path) -> None:
    """The ledger section of the report as docs/ledger.png."""
    folder = report.parent / "shots"
    command = [sys.executable, ROOT / "docs/screenshot.py", report, folder, "--section", "ledger", "--height", "1080"]
    subprocess.run(list(map(str, command)), check=True)
    shutil.copy(folder / f"{report.stem}-ledger.png", ROOT / "docs/ledger.png")


def main() -> None:
    source = Path(sys.argv[1])
    comparison = Comparison.from_json(json.loads(source.read_text(encoding="utf-8")))
    text = f"```text\n{printed(comparison)}\n```\n\n`{comparison.command}`, on {comparison.machine}.\n"
    for page in PAGES:
        fill(ROOT / page, text)
    if shutil.which("chromium"):
        plot(source.with_suffix(".html"))


if __name__ == "__main__":
    main()
