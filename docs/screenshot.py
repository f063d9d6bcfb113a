"""Pictures of a report page: `python docs/screenshot.py report.html out/ [--section ID] [--dark] [--no-script]`.

A replay's page as the docs show it, a picture of each section: `... replay.html docs/img --section each --fit`.

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
REPLAY = ("budget", "timeline", "requests", "rates", "changes")  # more that a replay's page has
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


def height_of(page: Path, folder: Path, *, width: int, flags: list[str]) -> int:
    """Height in pixels of what the page shows; the page itself says it on the console."""
    says = "console.log('HEIGHT ' + Math.ceil(document.body.getBoundingClientRect().height))"
    copy = folder / "measured.html"
    copy.write_text(page.read_text(encoding="utf-8") + f"<script>{says}</script>", encoding="utf-8")
    said = picture(copy, folder / "measured.png", width=width, height=800, flags=flags)
    found = re.search(r"HEIGHT (\d+)", "\n".join(said))
    return int(found.group(1)) if found else sys.exit(f"The page did not say how high it is: {said}")


def sections_of(page: Path, wanted: str | None) -> list[str | None]:
    """The sections to make pictures of; None: the whole page at once."""
    if wanted != "each":
        return [wanted]
    return re.findall(r'<section id="(\w+)"', page.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path, help="folder for the picture")
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--height", type=int, default=5200)
    parser.add_argument("--section", choices=(*SECTIONS, *REPLAY, "each"), help="show only this one, or each by itself")
    parser.add_argument("--fit", action="store_true", help="as high as what is shown, whatever --height says")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--no-script", action="store_true", help="as without JavaScript")
    parser.add_argument("--print", action="store_true", dest="paper", help="a PDF as the printer gets it")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for section in sections_of(args.page, args.section):
        shoot(args, section)


def shoot(args: argparse.Namespace, section: str | None) -> None:
    """One picture."""
    flags = ["--blink-settings=preferredColorScheme=0"] if args.dark else []
    marks = [section] if section else []
    marks += (["dark"] if args.dark else []) + (["plain"] if args.no_script else [])
    name = "-".join([args.page.stem, *marks]) + (".pdf" if args.paper else ".png")
    target = (args.out / name).resolve()
    with tempfile.TemporaryDirectory() as folder:
        page = variant(args.page, Path(folder), section, not args.no_script)
        height = height_of(page, Path(folder), width=args.width, flags=flags) if args.fit else args.height
        said = picture(page, target, width=args.width, height=height, flags=flags)
    print(target)
    print("\n".join(said) or "no console messages")


if __name__ == "__main__":
    main()
