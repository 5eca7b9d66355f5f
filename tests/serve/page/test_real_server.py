"""The page at /, in a headless Chromium; skipped only where there is none."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparsekv_cli.serve import app

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
PAGE = Path(app.__file__).parent / "page.html"
MARKUP = "# Title\n\n**bold** `code` <img src=x onerror=alert(1)> [link](javascript:alert(1))\n\n"
MARKUP += "- one\n- two\n\n```\n<b>raw</b>\n```"


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Any:
    return serve(ctx_size=1024, tokens=32)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver

    if CHROMIUM is None or DRIVER is None:
        pytest.skip("there is no Chromium here")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,800"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    browser.set_script_timeout(30)
    yield browser
    browser.quit()


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.slow
def test_a_chat_by_keyboard(server: Any, browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.get(server.url)
    by_id = {
        name: browser.find_element("id", name)
        for name in ("method", "budget", "prompt", "log", "rows-text", "attended", "context")
    }
    wait_for(lambda: len(by_id["method"].find_elements("tag name", "option")) == 11)
    browser.execute_script("arguments[0].value = 'topk'", by_id["method"])
    by_id["budget"].send_keys("16")
    prompt = browser.switch_to.active_element
    assert browser.execute_script("return document.activeElement.id") == "budget"
    by_id["prompt"].send_keys("many words " * 20, Keys.ENTER)
    wait_for(lambda: by_id["context"].text.endswith("of 1024 tokens"))
    assert prompt and by_id["log"].text.startswith("You\nmany words")
    assert float(by_id["attended"].text.rstrip("%")) < 60  # two of four layers are dense
    assert "4 layers; the last step read" in by_id["rows-text"].text
    size = "const c = document.getElementById('rows'); return [c.width, c.height]"
    assert browser.execute_script(size) == [64, 4]
    status = browser.find_element("id", "status").get_attribute("textContent")
    assert status == "The answer is complete."
    unlabelled = browser.execute_script(
        "return [...document.querySelectorAll('input, select, textarea, button')]"
        ".filter(e => !e.textContent.trim() && !e.labels.length).map(e => e.id)"
    )
    assert unlabelled == []
    problems = [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    assert problems == []


@pytest.mark.slow
def test_markup_of_the_model_is_text(server: Any, browser: Any) -> None:
    browser.get(server.url)
    html = browser.execute_script(
        "const at = document.createElement('div'); markdown(arguments[0], at);return at.innerHTML;",
        MARKUP,
    )
    assert "<img" not in html and "<b>" not in html and "<a" not in html
    assert "<strong>bold</strong>" in html and "<code>code</code>" in html
    assert html.count("<li>") == 2 and "<h3>Title</h3>" in html


def test_the_page_asks_nobody_else() -> None:
    text = PAGE.read_text("utf-8")
    assert "http" not in text.replace("https?:", "") and "innerHTML" not in text
