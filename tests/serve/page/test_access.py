"""The page by keyboard, for a screen reader and on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from scripted_page import GATE
from waiting import wait_for

pytestmark = pytest.mark.slow

TAB, ESCAPE = "\ue004", "\ue00c"
UNNAMED = """
    const named = (e) => e.textContent.trim() || e.labels?.length || e.ariaLabel
        || e.getAttribute('aria-labelledby');
    const kinds = 'input, select, textarea, button, nav, main > form, aside, dialog, canvas, pre,'
        + '[role]:not(:empty)';
    return [...document.querySelectorAll(kinds)].filter(e => !named(e)).map(e => e.outerHTML)
"""


def test_everything_has_a_name(site: Any) -> None:
    site.send("One", "```python\na = 1\n```", ("think", "Hm."))
    site.press("Rename")
    assert site.js(UNNAMED) == []
    ids = "return [...document.querySelectorAll('[id]')].map(e => e.id)"
    found = site.js(ids)
    assert len(found) == len(set(found))
    assert site.js("return document.documentElement.lang") == "en"


def test_the_log_is_not_read_out_token_by_token(site: Any) -> None:
    log = site.browser.find_element("id", "log")
    assert log.get_attribute("role") == "log" and log.get_attribute("aria-live") == "off"
    site.server.answers.append(("Half", GATE, " done"))
    site.type("One")
    said = "return document.getElementById('status').textContent"
    wait_for(lambda: site.js(said) == "The answer is being written.")
    assert log.get_attribute("aria-busy") == "true"
    site.server.go()
    wait_for(lambda: site.js(said) == "The answer is complete.")


def focused(site: Any) -> str:
    return site.js("const e = document.activeElement; return e.id || e.ariaLabel || e.textContent")


def test_by_keyboard(site: Any) -> None:
    site.server.method = "lfps"
    site.open()
    assert focused(site) == "prompt"
    site.send("One")
    assert focused(site) == "prompt", "the focus stays while an answer is written"
    order = set()
    for _ in range(34):
        site.browser.switch_to.active_element.send_keys(TAB)
        order.add(focused(site))
    assert {"attach", "method", "budget", "send", "open-settings", "new", "One", "Rename"} <= order
    assert {"search", "import", "export-all"} <= order
    assert {"log", "Edit", "Copy the message", "Regenerate", "Copy the answer"} <= order
    site.browser.find_element("id", "open-settings").send_keys(" ")
    assert site.browser.find_element("id", "settings").is_displayed()
    site.browser.switch_to.active_element.send_keys(ESCAPE)
    assert focused(site) == "open-settings"
    site.js("document.dispatchEvent(new KeyboardEvent('keydown', { altKey: true, code: 'KeyN' }))")
    assert site.texts(".message") == [] and focused(site) == "prompt"


@pytest.fixture
def phone(site: Any) -> Iterator[Any]:
    screen = {"width": 390, "height": 780, "deviceScaleFactor": 2, "mobile": True}
    site.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    site.browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    site.open()
    yield site
    site.browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
    site.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_phone(phone: Any) -> None:
    prompt = phone.browser.find_element("id", "prompt")
    assert phone.browser.switch_to.active_element != prompt, "no keyboard over the page at first"
    words = "word " * 200 + "\n\n| " + "wide | " * 30 + "\n" + "|-" * 30 + "|"
    phone.send("One", words, ("rows", [[1]]))
    assert not phone.browser.find_element("id", "rows").is_displayed(), "the picture is folded"
    assert phone.texts("#picture-summary") == ["1.0% in the last step"]
    wide = "return [document.documentElement.scrollWidth, innerWidth]"
    assert phone.js(wide) == [390, 390]
    log, send, attach = (phone.all(name)[0].rect for name in ("#log", "#send", "#attach"))
    assert log["height"] > 400 and send["y"] == attach["y"]
    for button in phone.all("header button, .controls button, .message .actions button"):
        assert not button.is_displayed() or button.rect["height"] >= 40
    phone.all("#picture summary")[0].click()
    assert phone.browser.find_element("id", "rows").is_displayed()
    assert not phone.browser.find_element("id", "chats").is_displayed()


def test_the_list_of_a_phone(phone: Any) -> None:
    chats = phone.browser.find_element("id", "chats")
    phone.send("One")
    for close in ("Close", "elsewhere", "Escape", "One"):
        phone.press("Chats")
        assert chats.is_displayed() and focused(phone) == "close-chats"
        if close == "elsewhere":  # the button under the shade is not pressed
            phone.js("document.getElementById('new').click()")
            assert phone.texts(".user .said") == ["One"]
        elif close == "Escape":
            phone.browser.switch_to.active_element.send_keys(ESCAPE)
        else:
            phone.press(close)
        wait_for(lambda: not chats.is_displayed())
        assert focused(phone) == "open-chats"
