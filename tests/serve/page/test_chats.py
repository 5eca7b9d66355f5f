"""Conversations are kept in the browser: listed, renamed, deleted and exported."""

from __future__ import annotations

import time
from typing import Any

import pytest
from scripted_page import GATE
from waiting import wait_for

pytestmark = pytest.mark.slow


def titles(site: Any) -> list[str]:
    return site.texts("#chats .open")


def test_they_outlast_the_page(site: Any) -> None:
    site.send("First question\ue008\ue007\ue008with a line", "# One", ("rows", [[100, 0]]))
    site.press("New chat")
    assert site.texts(".message") == []
    site.send("Second question", "Two", ("think", "Hm."))
    assert titles(site) == ["Second question", "First question"]
    site.open()
    assert titles(site) == ["Second question", "First question"] and site.texts(".message") == []
    site.press("First question")
    assert site.texts(".user .said") == ["First question\nwith a line"]
    assert site.texts(".text h3") == ["One"] and "25.0% of rows read" in site.texts(".about")[0]
    assert site.js("const c = document.getElementById('rows'); return [c.width, c.height]") == [
        2,
        1,
    ]
    site.send("And then?")
    assert [m["content"] for m in site.server.asked[-1]["messages"]][1:] == ["# One", "And then?"]
    assert titles(site) == ["First question", "Second question"], "the newest is the first"
    assert site.browser.title == "First question · sparsekv-cli"


def test_rename(site: Any) -> None:
    site.send("A question")
    site.press("Rename")
    field = site.browser.switch_to.active_element
    assert field.get_attribute("aria-label") == "Name of the conversation"
    field.send_keys("Rows\ue007")
    assert titles(site) == ["Rows"]
    site.press("Rename")
    site.browser.switch_to.active_element.send_keys("Other\ue00c")
    assert titles(site) == ["Rows"], "Escape keeps the name"
    site.open()
    assert titles(site) == ["Rows"]


def test_delete(site: Any) -> None:
    for text in ("One", "Two"):
        site.press("New chat")
        site.send(text)
    site.press("Delete")
    assert "“Two”" in site.wait("#confirm-text").text
    site.press("Cancel", "#confirm")
    assert titles(site) == ["Two", "One"]
    site.press("Delete")
    site.press("Delete", "#confirm")
    wait_for(lambda: titles(site) == ["One"])
    assert site.texts(".message") == []
    site.open()
    assert titles(site) == ["One"]


def test_delete_while_an_answer_is_written(site: Any) -> None:
    site.server.answers.append(("Words", GATE))
    site.type("Two")
    wait_for(lambda: site.texts(".text") == ["Words"])
    site.press("Delete")
    site.press("Delete", "#confirm")
    wait_for(lambda: titles(site) == [])
    site.send("Three")
    site.open()
    assert titles(site) == ["Three"]


def test_export(site: Any) -> None:
    site.js("document.getElementById('system').value = 'Be short.'")
    site.send("Compare `a/b` & c?", "| a |\n|---|\n| **b** |")
    site.press("Export")
    path = (site.browser.downloads / "Compare-a-b-c").with_suffix(".md")
    wait_for(path.exists)
    assert path.read_text("utf-8") == (
        "# Compare `a/b` & c?\n\n## System\n\nBe short.\n\n## You\n\nCompare `a/b` & c?\n\n"
        "## Answer (lfps)\n\n| a |\n|---|\n| **b** |\n"
    )


def test_another_chat_while_an_answer_is_written(site: Any) -> None:
    site.server.answers.append(("Slow ", GATE, "answer"))
    site.type("One")
    wait_for(lambda: site.texts(".text") == ["Slow"])
    site.press("New chat")
    site.send("Two", "Fast")
    assert site.texts(".text") == ["Fast"]
    site.press("One")
    assert site.texts(".text") == ["Slow"]
    site.server.go()
    wait_for(lambda: site.texts(".text") == ["Slow answer"])
    site.wait_whole()
    site.open()
    site.press("One")
    assert site.texts(".text") == ["Slow answer"]


def test_two_tabs(site: Any) -> None:
    site.send("One", "First")
    first = site.browser.current_window_handle
    site.browser.switch_to.new_window("tab")
    second = site.browser.current_window_handle
    try:
        site.open()
        site.press("One")
        site.send("Two", "Second")
        site.browser.switch_to.window(first)
        wait_for(lambda: site.texts(".text") == ["First", "Second"])
        site.browser.switch_to.window(second)
        site.press("Delete")
        site.press("Delete", "#confirm")
        wait_for(lambda: titles(site) == [])
        site.browser.switch_to.window(first)
        wait_for(lambda: titles(site) == [] and site.texts(".message") == [])
    finally:
        site.browser.switch_to.window(second)
        site.browser.close()
        site.browser.switch_to.window(first)


def test_a_tab_that_is_closed_keeps_what_was_written(site: Any) -> None:
    site.server.answers.append(("Half", GATE, " of", GATE))
    site.type("One")
    wait_for(lambda: site.texts(".text") == ["Half"])
    time.sleep(2.1)  # it is kept every two seconds
    site.server.go()
    wait_for(lambda: site.texts(".text") == ["Half of"])
    site.open()
    site.press("One")
    assert site.texts(".text") == ["Half of"]
    assert site.texts(".note") == ["This answer was interrupted."]


def test_a_browser_that_keeps_nothing(site: Any) -> None:
    added = site.browser.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument",
        {
            "source": "const no = () => { throw new Error('not allowed') }; indexedDB.open = no;"
            "Object.defineProperty(window, 'localStorage', { get: no }); BroadcastChannel = no;"
        },
    )
    try:
        site.open()
        assert "are lost when this page is closed" in site.wait("#chats-note.error").text
        site.send("One")
        assert titles(site) == ["One"]
        site.press("Settings")
        site.all("#theme option")[2].click()
        assert site.js("return document.documentElement.dataset.theme") == "dark"
    finally:
        site.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
