"""Pictures of a running server's page: `python benchmarks/server_screenshots.py --url http://127.0.0.1:8000`.

Writes docs/img/server-light.png, server-dark.png (a laptop's window) and server-phone.png; with --section NAME also
server-NAME.png, that part of the page alone, and with --full the whole page instead of the window. Start the server and
its load first; the page is given --watch seconds to fill its plots.

Needs playwright (`pip install playwright`) and an installed Chromium (`apt-get install -y chromium`), found by
OCTAVO_CHROMIUM or by name; nothing is fetched.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

#: name -> (width, height, scale, colours)
PICTURES = {
    "light": (1280, 900, 1, "light"),
    "dark": (1280, 900, 1, "dark"),
    "phone": (390, 844, 2, "light"),
}
NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str:
    """Path of an installed Chromium. Raises SystemExit with what to do if there is none."""
    found = os.environ.get("OCTAVO_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    return found or exit("No Chromium found: set OCTAVO_CHROMIUM to its path, or apt-get install -y chromium")


def open_page(browser: Browser, args: argparse.Namespace, picture: str) -> Page:
    """The page as a reader with this picture's window sees it, once it shows the server's answers."""
    width, height, scale, colours = PICTURES[picture]
    page = browser.new_page(
        viewport={"width": width, "height": height},
        device_scale_factor=scale,
        color_scheme=colours,  # type: ignore[arg-type]
        reduced_motion="reduce",
    )
    page.on("console", lambda message: print(f"  the page says: {message.text}"))
    page.goto(args.url)
    if args.key:
        page.get_by_label("Key", exact=True).fill(args.key)
        page.get_by_role("button", name="Use this key").click()
    page.wait_for_selector("body.told")
    page.wait_for_timeout(args.watch * 1000)
    return page


def take(browser: Browser, args: argparse.Namespace, picture: str) -> None:
    page = open_page(browser, args, picture)
    target = args.out / f"server-{picture}.png"
    page.screenshot(path=target, full_page=args.full)
    print(target)
    if picture == "light":
        for section in args.section:
            part = page.locator(f"#{section}")
            part.scroll_into_view_if_needed()
            page.wait_for_timeout(1500)  # what was off the screen is asked for now
            part.screenshot(path=args.out / f"server-{section}.png")
            print(args.out / f"server-{section}.png")
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    parser.add_argument("--key", help="API key, if the server asks for one")
    parser.add_argument("--watch", type=float, default=3.0, help="seconds before the picture")
    parser.add_argument("--section", action="append", default=[], help="also this part, by its id; may be repeated")
    parser.add_argument("--full", action="store_true", help="the whole page")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for picture in PICTURES:
            take(browser, args, picture)
        browser.close()


if __name__ == "__main__":
    main()
