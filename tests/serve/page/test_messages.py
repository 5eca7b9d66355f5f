"""Messages: stop, regenerate, edit and resend, copy, thinking, errors, and what a step read."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_page import CUT, GATE
from waiting import wait_for

pytestmark = pytest.mark.slow

ENTER, ESCAPE, UP = "\ue007", "\ue00c", "\ue013"
KEY = "document.dispatchEvent(new KeyboardEvent('keydown', arguments[0]))"
ASKED = {"method": "full", "sparsekv_rows": 64, "stream": True}


def contents(site: Any) -> list[str]:
    return [message["content"] for message in site.server.asked[-1]["messages"]]


def test_what_an_answer_tells(site: Any) -> None:
    rows = [[100, 100, 100], [100, 0, 100]]
    site.server.answers.append(
        (("comment", "kernels of lfps are compiled: 3 of 9"), GATE, ("comment", "prefill 3 of 9"),
         ("think", "I think *this*."), GATE, "Hello", ("rows", rows), GATE)
    )  # fmt: skip
    site.type("Hi")
    waits = ["The kernels of lfps are compiled, once: 3 of 9, 1 s…"]
    wait_for(lambda: site.texts(".waits") == waits)
    assert site.browser.find_element("id", "stop").is_displayed()
    site.server.go()
    wait_for(lambda: site.texts(".thinking summary") == ["Thinking…"])
    site.server.go()
    read = ["2 layers; the last step read 83.3% of the rows."]
    wait_for(lambda: site.texts("#rows-text") == read)
    assert site.texts(".message .actions")[1] == "", "the answer is not whole"
    site.js(KEY, {"key": "Escape", "isComposing": True, "bubbles": True})  # of a word, in Japanese
    site.server.go()
    site.wait_whole()
    assert site.server.asked[0].items() >= ASKED.items()
    about = "lfps · budget 5% · 24.0 tokens/s · 25.0% of rows read · 12 tokens"
    assert site.texts(".about") == [about]
    assert not site.all(".thinking .said")[0].is_displayed(), "thoughts are folded"
    site.all(".thinking summary")[0].click()
    assert site.texts(".thinking .said") == ["I think *this*."]
    numbers = dict(zip(site.texts("aside dt"), site.texts("aside dd"), strict=True))
    assert numbers.items() >= {
        "Speed": "24.0 tokens/s", "Prompt": "30 tokens", "From the cache": "5 tokens",
        "Rows attended": "25.0%", "Context": "42 of 1024", "From drafts": "none",
    }.items()  # fmt: skip
    said = "return document.getElementById('status').textContent"
    assert site.js(said) == "The answer is complete."


def test_stop(site: Any) -> None:
    for stop in (lambda: site.press("Stop"), lambda: site.js(KEY, {"key": "Escape"})):
        site.begin("One", "Half", GATE)
        stop()
        site.wait_whole()
        wait_for(lambda: site.server.writes == 0)
        assert site.texts(".note")[-1] == "Stopped." and site.all("#send")[0].is_displayed()
        site.press("New chat")
    site.press("One")
    site.send("Two")
    assert contents(site) == ["One", "Half", "Two"], "what was written counts"


def test_regenerate(site: Any) -> None:
    site.send("One", "First")
    site.send("Two", "Second")
    assert [b.is_displayed() for b in site.all(".again")] == [False, True]
    site.server.answers.append(("Third",))
    site.press("Regenerate")
    wait_for(lambda: site.texts(".text") == ["First", "Third"])
    assert contents(site) == ["One", "First", "Two"]
    assert site.texts(".branches span") == ["2/2"]


def test_edit_and_resend(site: Any) -> None:
    site.send("One", "First")
    site.send("Two", "Second")
    site.all(".edit")[0].click()
    field = site.browser.switch_to.active_element
    assert field.get_attribute("aria-label") == "Edit the message"
    assert "The messages after it stay in a branch of their own." in site.texts(".message")[0]
    field.send_keys(" and a half" + ESCAPE)
    assert site.texts(".user .said") == ["One", "Two"]
    site.all(".edit")[0].click()
    site.server.answers.append(("Third",))
    site.browser.switch_to.active_element.send_keys(" and a half" + ENTER)
    wait_for(lambda: site.texts(".text") == ["Third"])
    assert contents(site) == ["One and a half"]
    site.browser.find_element("id", "prompt").send_keys(UP)
    assert site.browser.switch_to.active_element.get_attribute("value") == "One and a half"


def test_copy(site: Any) -> None:
    site.browser.execute_cdp_cmd(
        "Browser.grantPermissions",
        {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]},
    )
    code = "a = '<b>'\n"
    site.send("**Mine**", f"*Text*\n\n```python\n{code}```\n")
    answer = f"*Text*\n\n```python\n{code}```\n"
    script = "navigator.clipboard.writeText = null"  # then the browser's old command copies
    for name, text, before in (
        ("message", "**Mine**", ""), ("code", code, ""), ("answer", answer, ""),
        ("message", "**Mine**", script),
    ):  # fmt: skip
        site.js(before)
        copy = site.all(f"[aria-label='Copy the {name}']")[0]
        wait_for(lambda copy=copy: copy.text == "Copy")
        copy.click()
        wait_for(lambda copy=copy: copy.text == "Copied")
        read = "navigator.clipboard.readText().then(arguments[0])"
        assert site.browser.execute_async_script(read) == text


def test_failures(site: Any) -> None:
    site.server.forgets = True
    for answer, note in (
        ((400, "top_k = -1: expected 0 or more"), "Error: top_k = -1: expected 0 or more"),
        (("Half", CUT), "Error: the connection ended before the answer was whole"),
    ):  # fmt: skip
        site.send("One", *answer)
        assert site.texts(".note")[-1] == note
    site.send("Two", "Second")
    assert contents(site) == ["One", "Half", "Two"], "what got no answer is not told again"
    site.server.answers.append((503, "the server is stopping"))
    site.press("Regenerate")
    wait_for(lambda: site.texts(".note")[-1] == "Error: the server is stopping")


def test_a_server_that_is_gone(site: Any) -> None:
    site.browser.execute_cdp_cmd("Network.enable", {})
    gone = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    site.browser.execute_cdp_cmd("Network.emulateNetworkConditions", gone)
    try:
        site.send("One")
        assert site.texts(".note") == ["Error: Failed to fetch"]
    finally:
        site.browser.execute_cdp_cmd("Network.emulateNetworkConditions", {**gone, "offline": False})
        site.browser.get_log("browser")


def test_the_log_follows_an_answer_unless_one_reads(site: Any) -> None:
    end = "const log = document.getElementById('log');"
    end += "return log.scrollHeight - log.scrollTop - log.clientHeight"
    site.server.answers.append(("line\n\n" * 60, GATE, "more\n\n" * 60, GATE, "last\n\n" * 60))
    site.type("Go")
    wait_for(lambda: site.js(end) == 0 and "line" in site.texts(".text")[0])
    site.server.go()
    wait_for(lambda: site.js(end) == 0 and "more" in site.texts(".text")[0])
    site.js("document.getElementById('log').scrollTop = 10")
    site.server.go()
    site.wait_whole()
    assert site.js("return document.getElementById('log').scrollTop") == 10
