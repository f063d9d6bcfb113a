"""The page in a real Chromium, against sample data: what it says, what can be done with it, and that it stays here."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import uvicorn

from tests.server.fake_explain_api import HOSTILE, WAITS, Fake, create_app

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
expect = api.expect

LAPTOP = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}
Open = Callable[..., Any]


def chromium() -> str | None:
    """Path of a Chromium, by OCTAVO_CHROMIUM or by name."""
    names = ("/usr/bin/chromium", "chromium", "chromium-browser", "google-chrome")
    return os.environ.get("OCTAVO_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="module")
def fake() -> Fake:
    return Fake()


@pytest.fixture(scope="module")
def url(fake: Fake) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(create_app(fake), port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium()
    if path is None:
        pytest.skip("no Chromium found: set OCTAVO_CHROMIUM to its path, or apt-get install -y chromium")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any, url: str, fake: Fake) -> Iterator[Open]:
    """Opens the page with a scene; afterwards fails if a script complained or asked another server."""
    fake.scene, fake.key, fake.failing, fake.chat_template = "load", None, None, True
    fake.token_pause, fake.slowness = 0.01, 0.0
    fake.asked.clear()
    fake.aborted = 0
    said: list[str] = []
    asked: list[str] = []
    contexts: list[Any] = []

    def opened(scene: str = "load", *, answers: bool = True, size: dict[str, int] = LAPTOP, **options: Any) -> Any:
        fake.scene = scene
        context = browser.new_context(viewport=size, reduced_motion="reduce", **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(8000)
        page.on("console", lambda message: message.type == "error" and said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        if answers:
            page.wait_for_selector("body.told")
        return page

    yield opened
    for context in contexts:
        context.close()
    # Chromium itself writes a line for each answer that is an error; those are asked for by the tests.
    assert [line for line in said if "Failed to load resource" not in line] == []
    assert [one for one in asked if not one.startswith(url + "/")] == []


def pixels(page: Any) -> int:
    """Number of different colours on the block map."""
    script = """canvas => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(data.buffer)).size;
    }"""
    return page.locator("#blocks-canvas").evaluate(script)


# -- what it says -----------------------------------------------------------------------------------------------------


def test_the_verdict_says_who_waits_for_what_and_what_would_help(open_page: Open) -> None:
    page = open_page("reserve")
    said = page.get_by_role("region", name="The answer now")
    expect(said).to_contain_text("9 requests wait while 4 run: 1 for memory (full) and 8 behind another request.")
    expect(said).to_contain_text("4 requests hold all 1,408 blocks")
    expect(said).to_contain_text(re.compile(r"reserve-max keeps \d+ MiB reserved and empty; paged"))
    page.get_by_role("link", name="Try it on the recent traffic").click()
    expect(page.get_by_label("Strategy")).to_have_value("paged")


def test_an_idle_server_is_no_failure(open_page: Open) -> None:
    page = open_page("empty")
    expect(page.locator("#verdict")).to_contain_text("Nothing runs and nobody waits: 100 % of the KV pool")
    expect(page.locator("#requests")).to_contain_text("No request is in the engine.")
    expect(page.locator("#figure-ttft")).to_have_text("–")


def test_figures_have_units(open_page: Open) -> None:
    page = open_page()
    for name, shape in {"running": r"^24$", "tokens": r"^\d+$", "ttft": r"^\d+ ms$", "itl": r"^\d+ ms$"}.items():
        expect(page.locator(f"#figure-{name}")).to_have_text(re.compile(shape))
    expect(page.locator("#device-size")).to_have_text(re.compile(r"^\d\.\d\d GiB$"))


def test_the_ledgers_lines_sum_to_the_device_and_are_explained(open_page: Open, fake: Fake) -> None:
    page = open_page()
    rows = page.locator("#lines-body tr")
    expect(rows).to_have_count(len(fake.lines()))
    widths = page.locator("#device-bar i").evaluate_all("parts => parts.map(part => parseFloat(part.style.width))")
    assert sum(widths) == pytest.approx(100)
    page.locator("#pool-bar").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("cached prefixes")
    expect(page.locator("#tip")).to_contain_text("kept for reuse")
    expect(page.locator("#memory-told")).to_contain_text("cached prefixes")


def test_weights_can_be_unfolded_in_the_plot_over_time(open_page: Open) -> None:
    page = open_page()
    plot = page.locator("#memory-plot svg")
    expect(plot.locator("path.live")).to_have_count(1)
    expect(plot.locator("path.weights")).to_have_count(0)
    page.get_by_role("button", name="Only the KV pool").click()
    expect(plot.locator("path.weights")).to_have_count(1)
    expect(page.get_by_role("button", name="Only the KV pool")).to_have_attribute("aria-pressed", "false")


def test_every_kind_of_wait_is_told_in_words_with_its_numbers(open_page: Open) -> None:
    page = open_page()
    wanted = {
        "needs-a-slot": ["All sequence slots are taken", "needs 1 slot, 0 available, 1 short", "at most 3.20 s more"],
        "too-big-now": [
            "Memory is full",
            "55 short",
            "Held by: chat-03 (57 blocks)",
            "and 1 more",
            "Unblocks: running",
        ],
        "one-piece": ["Memory is fragmented", "largest run 41, free 80, need 64 blocks"],
        "held-back": ["Memory is held back", "needs 30 blocks, 12 available, 18 short"],
        "follower": ["Behind another request: held-back", "Unblocks: the request before it is admitted"],
        "over-quota": ["Its tenant’s quota is used up", "needs 210 blocks, 200 available, 10 short"],
        "stalled": ["No step runs", "no step for 12 s"],
        "taken-back": ["Memory is full", "29 short"],
        "soon": ["Starts with the next step"],
    }
    for label, words in wanted.items():
        row = page.get_by_role("row").filter(has=page.get_by_role("button", name=label, exact=True).first).first
        for part in words:
            expect(row).to_contain_text(part)
    expect(page.locator("#requests-body")).to_contain_text("The step’s token budget is used up")
    preempted = page.locator('tr[data-state="preempted"]')
    expect(preempted).to_contain_text("waiting, preempted")
    expect(preempted).to_contain_text("preempted once")
    assert {label for label, *_ in WAITS} == {*wanted, HOSTILE}


def test_text_of_clients_is_shown_as_text(open_page: Open) -> None:
    page = open_page()
    expect(page.get_by_role("button", name=HOSTILE)).to_be_visible()
    assert page.locator("main img").count() == 0
    assert page.title() == "Octavo"


def test_of_very_many_requests_some_are_shown_and_the_rest_is_counted(open_page: Open) -> None:
    page = open_page("crowd")
    expect(page.locator("#requests-body tr")).to_have_count(24)
    expect(page.locator("#requests-more")).to_have_text("1,500 more requests are not shown; /kv/requests has them all.")
    page.get_by_role("button", name="Show 176 more").click()
    expect(page.locator("#requests-body tr")).to_have_count(200)
    page.get_by_role("radio", name="Running 24").check()
    expect(page.locator("#requests-body tr")).to_have_count(24)
    expect(page.locator("#requests-body")).not_to_contain_text("waiting")


# -- what can be done with it -----------------------------------------------------------------------------------------


def test_the_block_map_is_painted_and_says_whose_a_block_is(open_page: Open) -> None:
    page = open_page()
    canvas = page.locator("#blocks-canvas")
    expect(page.locator("#blocks-text")).to_contain_text("1,408 blocks of 16 tokens:")
    assert pixels(page) > 9
    canvas.hover(position={"x": 4, "y": 4})
    expect(page.locator("#tip")).to_contain_text("Block 0")
    expect(page.locator("#tip")).to_contain_text("live: holds token states of chat-00")
    canvas.focus()
    page.keyboard.press("End")
    expect(page.locator("#blocks-told")).to_contain_text("Block 1,407. free")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    expect(page.locator("tr.chosen")).to_contain_text("chat-00")


def test_a_tap_on_the_map_says_whose_block_it_is(open_page: Open) -> None:
    page = open_page(size=PHONE, has_touch=True, is_mobile=True)
    page.locator("#blocks-canvas").tap(position={"x": 3, "y": 3})
    expect(page.locator("#tip")).to_contain_text("chat-00")


def test_the_keyboard_leads_through_the_list_into_a_request_and_back(open_page: Open) -> None:
    page = open_page()
    page.locator("#filter input").first.focus()
    page.keyboard.press("Tab")
    first = page.get_by_role("button", name="needs-a-slot")
    expect(first).to_be_focused()
    page.keyboard.press("ArrowDown")
    second = page.get_by_role("button", name="too-big-now")
    expect(second).to_be_focused()
    page.wait_for_timeout(1500)  # a round of news does not take the focus
    expect(second).to_be_focused()
    page.keyboard.press("Enter")
    detail = page.get_by_role("region", name="too-big-now")
    expect(detail).to_contain_text("Submitted")
    expect(detail).to_contain_text("slots: needs 1, 0 available")
    expect(page.locator("#detail-title")).to_be_focused()
    expect(second).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).to_be_hidden()
    expect(second).to_be_focused()


def test_a_request_in_full_says_why_its_prompt_missed_and_marks_its_blocks(open_page: Open) -> None:
    page = open_page()
    page.get_by_role("radio", name="Running 24").check()
    before = page.locator("#blocks-canvas").screenshot()
    page.get_by_role("button", name="chat-01").click()
    detail = page.get_by_role("region", name="chat-01")
    expect(detail).to_contain_text("The first differing token is at position 16")
    expect(detail).to_contain_text("Admitted")
    expect(detail).to_contain_text(re.compile(r"Block table\d+–\d+, 1900"))
    page.mouse.move(2, 2)
    assert page.locator("#blocks-canvas").screenshot() != before
    page.get_by_role("button", name="Close").click()
    expect(detail).to_be_hidden()


def test_a_holder_leads_to_the_request_that_holds(open_page: Open) -> None:
    page = open_page()
    page.locator("#requests-body").get_by_role("button", name="chat-07").first.click()
    expect(page.locator("#detail-title")).to_have_text("chat-07")


def test_the_prompt_box_streams_and_says_how_fast(open_page: Open, fake: Fake) -> None:
    page = open_page()
    page.get_by_label("Max tokens").fill("12")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#prompt-status")).to_have_text("Done (length): 12 tokens.")
    expect(page.locator("#prompt-output")).to_contain_text("Light scatters on small molecules, blue <b>most</b>.")
    expect(page.locator("#prompt-figures")).to_contain_text(re.compile(r"TTFT\d.*Tokens/s\d.*Requestreq-101"))
    asked = fake.asked[-1]
    assert (asked["model"], asked["max_tokens"], asked["temperature"], asked["stream"]) == ("demo-1b", 12, 0.7, True)
    assert asked["messages"] == [{"role": "user", "content": "Why is the sky blue?"}]
    page.locator("#prompt-figures").get_by_role("button", name="req-101").click()
    expect(page.locator("#detail-title")).to_have_text("chat-00")


def test_stop_ends_the_request_at_the_server(open_page: Open, fake: Fake) -> None:
    fake_aborted = fake.aborted
    page = open_page()
    fake.token_pause = 0.1
    page.get_by_label("Max tokens").fill("5000")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#prompt-output")).to_contain_text("Light scatters")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#prompt-status")).to_have_text(re.compile(r"^Stopped after \d+ tokens\.$"))
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    deadline = time.monotonic() + 10
    while fake.aborted == fake_aborted and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    assert fake.aborted == fake_aborted + 1


def test_a_model_without_a_chat_template_gets_the_prompt_as_it_is(open_page: Open, fake: Fake) -> None:
    page = open_page()
    fake.chat_template = False
    page.get_by_label("Max tokens").fill("3")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#prompt-status")).to_contain_text("The model has no chat template")
    assert fake.asked[-1]["prompt"] == "Why is the sky blue?"


def test_what_if_shows_now_and_changed_side_by_side(open_page: Open, fake: Fake) -> None:
    page = open_page()
    page.get_by_role("button", name="Replay").click()
    expect(page.locator("#whatif-status")).to_have_text("Change at least one setting.")
    page.get_by_label("Strategy").select_option("growing")
    page.get_by_label("KV memory, MiB").fill("2048")
    page.get_by_label("Max sequences").fill("64")
    page.get_by_role("button", name="Replay").click()
    expect(page.locator("#whatif-sentence")).to_contain_text("29.7 requests run at once instead of 18.4")
    expect(page.locator("#whatif-fidelity")).to_contain_text("within 6 %")
    table = page.get_by_role("table", name="Now and changed")
    expect(table.get_by_role("row").filter(has_text="Strategy")).to_contain_text("pagedgrowing")
    expect(table.get_by_role("row").filter(has_text="at once, mean")).to_contain_text("18.429.7+61 %, better")
    expect(table.get_by_role("row").filter(has_text="ITL")).to_contain_text("worse")
    expect(table.get_by_role("row").filter(has_text="Waited, memory: full")).to_contain_text("better")
    assert fake.asked == [{"strategy": "growing", "kv_bytes": 2048 * 1024**2, "max_num_seqs": 64}]


# -- when something is in the way -------------------------------------------------------------------------------------


def test_a_server_with_keys_is_asked_again_with_the_readers_key(open_page: Open, fake: Fake) -> None:
    fake.key = "secret-1"
    page = open_page(answers=False)
    field = page.get_by_label("Key", exact=True)
    expect(field).to_be_focused()
    field.fill("wrong")
    page.get_by_role("button", name="Use this key").click()
    expect(page.get_by_role("alert")).to_have_text("The API key is missing or wrong.")
    field.fill("secret-1")
    page.keyboard.press("Enter")
    page.wait_for_selector("body.told")
    expect(field).to_be_hidden()
    page.reload()
    page.wait_for_selector("body.told")  # remembered in this tab
    assert page.evaluate("localStorage.length") == 0


def test_a_server_that_does_not_answer_is_told_and_found_again(open_page: Open) -> None:
    page = open_page()
    page.context.set_offline(True)
    banner = page.locator("#banner")
    expect(banner).to_contain_text("The server does not answer")
    expect(banner).to_contain_text("What you see is from")
    expect(page.locator("#connection")).to_contain_text("no answer")
    page.context.set_offline(False)
    expect(banner).to_be_hidden()


def test_a_busy_server_is_told_and_asked_less_often(open_page: Open, fake: Fake) -> None:
    page = open_page()
    fake.failing = 503
    expect(page.locator("#banner")).to_contain_text("The server is busy: The queue is full.")
    expect(page.locator("#banner")).to_contain_text(re.compile(r"Asked again every [24] s"))


def test_a_slow_server_is_asked_less_often_and_the_page_says_so(open_page: Open, fake: Fake) -> None:
    page = open_page(size=PHONE)
    fake.slowness = 0.8
    expect(page.locator("#connection")).to_contain_text(re.compile("busy, asked every [3-5] s"))
    expect(page.locator("#banner")).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


def test_a_hidden_page_asks_nothing(open_page: Open, fake: Fake) -> None:
    page = open_page()
    page.evaluate("""() => {
        Object.defineProperty(document, "hidden", { value: true, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }""")
    page.wait_for_timeout(300)  # what was under way
    before = fake.tick
    page.wait_for_timeout(1300)
    assert fake.tick == before
    page.evaluate("() => { delete document.hidden; document.dispatchEvent(new Event('visibilitychange')); }")
    page.wait_for_function("() => true")
    deadline = time.monotonic() + 5
    while fake.tick == before and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    assert fake.tick > before


# -- how it looks and reads -------------------------------------------------------------------------------------------


def test_light_and_dark_follow_the_system_and_the_button(open_page: Open) -> None:
    def ground() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    page = open_page(color_scheme="dark")
    assert ground() == "rgb(20, 23, 27)"
    page.get_by_role("button", name="Switch to light colours").click()
    assert ground() == "rgb(255, 255, 255)"
    page.reload()
    assert ground() == "rgb(255, 255, 255)"
    page.get_by_role("button", name="Switch to dark colours").click()
    assert ground() == "rgb(20, 23, 27)"


@pytest.mark.parametrize("scene", ["load", "reserve"])
def test_a_phone_needs_no_sideways_scrolling(open_page: Open, scene: str) -> None:
    page = open_page(scene, size=PHONE)
    page.locator("#requests-body button.open").first.click()
    expect(page.locator("#detail")).to_contain_text("Submitted")
    page.get_by_label("Strategy").select_option("paged")
    page.get_by_role("button", name="Replay").click()
    expect(page.locator("#whatif-sentence")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


def test_headings_and_landmarks_give_the_page_its_outline(open_page: Open) -> None:
    page = open_page()
    levels = page.locator("h1, h2, h3").evaluate_all(
        "all => all.filter(one => !one.closest('[hidden]')).map(one => Number(one.tagName[1]))"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for role in ("banner", "main", "navigation", "contentinfo"):
        assert page.get_by_role(role).count() == 1
    targets = page.get_by_role("navigation").get_by_role("link").evaluate_all("all => all.map(one => one.hash)")
    for target in targets:
        expect(page.locator(f"section{target}")).to_be_visible()


def test_every_control_and_picture_has_a_name_of_its_own(open_page: Open) -> None:
    page = open_page()
    tree = page.locator("body").aria_snapshot()
    unnamed = re.findall(
        r"- (?:button|link|textbox|spinbutton|combobox|radio|img|region|table)(?:\s*\[.*\])?:?$", tree, re.M
    )
    assert unnamed == []
    assert page.locator("[tabindex]").evaluate_all("all => all.filter(one => one.tabIndex > 0).length") == 0
    for plot in page.locator('[role="img"]').all():
        assert len(plot.get_attribute("aria-label") or "") >= 9
    ids = page.locator("[id]").evaluate_all("all => all.map(one => one.id)")
    assert len(ids) == len(set(ids))
    refs = page.locator("[aria-labelledby], [aria-describedby]").evaluate_all(
        "all => all.map(one => one.getAttribute('aria-labelledby') ?? one.getAttribute('aria-describedby'))"
    )
    assert set(refs) <= set(ids)


def test_the_list_is_a_table_to_assistive_technology_on_a_phone_too(open_page: Open) -> None:
    page = open_page(size=PHONE)
    table = page.get_by_role("table", name="Requests, and why each one waits")
    assert table.get_by_role("columnheader").count() == 6
    row = table.get_by_role("row").nth(1)
    assert row.get_by_role("rowheader").count() == 1
    assert row.get_by_role("cell").count() == 5


def test_the_verdict_is_announced_when_it_changes_and_not_each_second(open_page: Open, fake: Fake) -> None:
    page = open_page()
    live = page.locator('#verdict [aria-live="polite"]')
    expect(live).to_contain_text("10 requests wait")
    live.evaluate(
        "node => { window.said = 0; new MutationObserver(() => window.said++).observe(node, {childList: true}) }"
    )
    step = page.locator("#step").text_content()
    expect(page.locator("#step")).not_to_have_text(step)
    page.wait_for_timeout(1200)
    assert page.evaluate("window.said") == 0
    assert page.locator("#verdict-text[aria-live]").count() == 0


def test_the_focus_can_be_seen(open_page: Open) -> None:
    page = open_page()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the answer")).to_be_in_viewport()
    for _ in range(4):
        page.keyboard.press("Tab")
        style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style == "solid"
