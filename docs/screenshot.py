"""Pictures of a report page: `python docs/screenshot.py report.html out/ [--section ID] [--dark] [--no-script]`.

Needs Chromium (`apt-get install -y chromium`); nothing is fetched. Writes a PNG (with --print a PDF) into the folder
and prints what the page's scripts had to say.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SECTIONS = ("verdict", "summary", "ledger", "running", "map", "waterfall", "facts")
QUIET = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=4000",
    "--enable-logging=stderr",
)


def browser() -> str:
    """Path of an installed Chromium. Raises SystemExit with what to do if there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    raise SystemExit("No Chromium found: apt-get install -y chromium")


def picture(page: Path, out: Path, *, width: int, height: int, flags: list[str]) -> list[str]:
    """Write one PNG or PDF, by the suffix of `out`; returns the page's console messages."""
    what = f"--print-to-pdf={out}" if out.suffix == ".pdf" else f"--screenshot={out}"
    with tempfile.TemporaryDirectory() as profile:
        command = [browser(), *QUIET, *flags, f"--user-data-dir={profile}", f"--window-size={width},{height}", what]
        done = subprocess.run([*command, page.resolve().as_uri()], capture_output=True, text=True, timeout=120)
    if not out.exists():
        sys.exit(f"Chromium wrote no picture:\n{done.stderr[-2000:]}")
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def variant(page: Path, folder: Path, section: str | None, scripts: bool) -> Path:
    """A copy of the page that shows one section only, or has no scripts: what a browser without them shows."""
    text = page.read_text(encoding="utf-8")
    if section:
        hide = f"header, main > section:not(#{section}) {{display: none !important}} section {{margin: 0}}"
        text = text.replace("</head>", f"<style>{hide}</style></head>", 1)
    if not scripts:
        text = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    copy = folder / page.name
    copy.write_text(text, encoding="utf-8")
    return copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path, help="folder for the picture")
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--height", type=int, default=5200)
    parser.add_argument("--section", choices=SECTIONS, help="show only this one")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--no-script", action="store_true", help="as without JavaScript")
    parser.add_argument("--print", action="store_true", dest="paper", help="a PDF as the printer gets it")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    flags = ["--blink-settings=preferredColorScheme=0"] if args.dark else []
    marks = [args.section] if args.section else []
    marks += (["dark"] if args.dark else []) + (["plain"] if args.no_script else [])
    name = "-".join([args.page.stem, *marks]) + (".pdf" if args.paper else ".png")
    target = (args.out / name).resolve()
    with tempfile.TemporaryDirectory() as folder:
        page = variant(args.page, Path(folder), args.section, not args.no_script)
        said = picture(page, target, width=args.width, height=args.height, flags=flags)
    print(target)
    print("\n".join(said) or "no console messages")


if __name__ == "__main__":
    main()
