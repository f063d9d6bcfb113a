"""The page's files: small, complete, without a foreign address, and sent with headers that keep it so."""

from __future__ import annotations

import re
from importlib import resources

import pytest
from fastapi.testclient import TestClient

from octavo.report.page import asset
from octavo.server.page import page_files
from tests.server.fake_explain_api import Fake, create_app

FILES = page_files()
SCRIPTS = sorted(name for name in FILES if name.endswith(".js"))
SVG = "http://www.w3.org/2000/svg"  # the name of a namespace, which nobody fetches


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(create_app(Fake()))


def text(name: str) -> str:
    return FILES[name].body.decode("utf-8")


def test_all_files_together_are_less_than_150_kilobytes() -> None:
    assert sum(len(file.body) for file in FILES.values()) < 150_000


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_file_names_an_address_elsewhere(name: str) -> None:
    assert re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text(name).replace(SVG, "")) == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_what_it_is_for_and_sets_text_as_text_only(name: str) -> None:
    assert re.match(r"/\* \S.{20,}\*/", text(name).splitlines()[0])
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text(name))
    assert len(text(name).splitlines()) < 400


def test_the_markup_has_no_inline_scripts_styles_or_handlers() -> None:
    markup = text("index.html")
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", markup) == []


def test_every_file_that_the_page_asks_for_is_there(client: TestClient) -> None:
    asked = set(re.findall(r"/page/([\w.-]+)", text("index.html")))
    asked |= {name for script in SCRIPTS for name in re.findall(r'from "\./([\w.-]+)"', text(script))}
    assert asked == set(FILES) - {"index.html"}
    for name in asked:
        assert client.get(f"/page/{name}").status_code == 200


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page/main.js", "text/javascript; charset=utf-8"),
        ("/page/style.css", "text/css; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
    ],
)
def test_a_file_is_sent_with_its_type_and_a_policy_that_allows_this_server_only(client, path: str, kind: str) -> None:
    answer = client.get(path)
    assert answer.headers["content-type"] == kind
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert client.head(path).headers["etag"] == answer.headers["etag"]


def test_a_browser_that_has_the_file_gets_no_second_copy(client: TestClient) -> None:
    tag = client.get("/page/main.js").headers["etag"]
    again = client.get("/page/main.js", headers={"If-None-Match": f'"other", W/{tag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert client.get("/page/main.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/page/nothing.js", "/page/..%2Fpage.py", "/page/%2e%2e/page.py", "/page/"])
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_the_files_are_part_of_the_package() -> None:
    assert set(FILES) == {entry.name for entry in resources.files("octavo.server").joinpath("page").iterdir()}


def colours(css: str, at: str) -> dict[str, str]:
    """The variables of the first block after `at`."""
    return dict(re.findall(r"--([\w-]+): ([^;]+);", css[css.index(at) :].split("}")[0]))


def test_lines_causes_and_requests_have_the_colours_of_the_reports() -> None:
    reports = asset("style.css")
    light, dark = colours(reports, ":root {"), colours(reports, "prefers-color-scheme: dark")
    here = colours(text("style.css"), ":root {")
    for name in ("live", "cached", "slack", "fragmented", "held", "quarantined", "free", "running"):
        assert here[name] == f"light-dark({light[name]}, {dark[name]})"
    for name in [f"r{i}" for i in range(9)] + [name for name in light if name.startswith("w-")]:
        assert here[name] == f"light-dark({light[name]}, {dark[name]})"


def luminance(colour: str) -> float:
    digits = colour.removeprefix("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("side", [0, 1], ids=["light", "dark"])
def test_text_has_a_contrast_of_at_least_four_and_a_half(side: int) -> None:
    pairs = {
        name: re.findall(r"#\w+", value)
        for name, value in colours(text("style.css"), ":root {").items()
        if value.startswith("light-dark")
    }
    for ground in ("paper", "panel", "plot"):
        for ink in ("ink", "soft", "accent", "good"):
            assert contrast(pairs[ink][side], pairs[ground][side]) >= 4.5, (ink, ground)
    assert contrast(pairs["control"][side], pairs["paper"][side]) >= 3  # borders of controls
