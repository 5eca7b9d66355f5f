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
    size = "const c = document.getElementById('rows'); return [c.width, c.height]"
    assert site.js(size) == [2, 1]
    site.send("And then?")
    assert [m["content"] for m in site.server.asked[-1]["messages"]][1:] == ["# One", "And then?"]
    assert titles(site) == ["First question", "Second question"], "the newest is the first"
    assert site.browser.title == "First question · sparsekv-cli"


def test_rename(site: Any) -> None:
    site.js("document.getElementById('prompt').value = '😀'.repeat(49)")
    site.send("")
    assert titles(site) == ["😀" * 48 + "…"]
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


def test_a_conversation_is_kept_while_one_uses_the_list(site: Any) -> None:
    keeps = "document.getElementById('seed').dispatchEvent(new Event('change'));"
    site.send("One")
    site.js("document.querySelector('#chats .actions button').focus();" + keeps)
    assert site.browser.switch_to.active_element.text == "Rename"
    site.press("Rename")
    for keys in ("My ", "rows\ue007"):
        site.browser.switch_to.active_element.send_keys(keys)
        site.js(keeps)
    assert titles(site) == ["My rows"]


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
    site.begin("Two", "Words", GATE)
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
    # The browser first reserves the name with an empty file.
    text = wait_for(lambda: path.exists() and path.read_text("utf-8"))
    assert text == (
        "# Compare `a/b` & c?\n\n## System\n\nBe short.\n\n## You\n\nCompare `a/b` & c?\n\n"
        "## Answer (lfps)\n\n| a |\n|---|\n| **b** |\n"
    )


def test_another_chat_while_an_answer_is_written(site: Any) -> None:
    site.begin("One", "Slow ", GATE, "answer")
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
        site.begin("Three", "Half", GATE, " whole")
        site.browser.switch_to.window(second)
        wait_for(lambda: site.texts(".user .said")[-1] == "Three")
        site.send("Four", "Fourth")
        site.browser.switch_to.window(first)
        site.server.go()
        wait_for(lambda: site.texts(".text")[-1] == "Half whole")
        site.browser.switch_to.window(second)
        wait_for(lambda: titles(site) == ["One", "One"] and site.texts(".text")[-1] == "Fourth")
        site.js("document.querySelector('#chats .open:not([aria-current])').click()")
        site.press("Delete")
        site.press("Delete", "#confirm")
        wait_for(lambda: titles(site) == ["One"])
        site.browser.switch_to.window(first)
        wait_for(lambda: titles(site) == ["One"] and site.texts(".message") == [])
    finally:
        site.browser.switch_to.window(second)
        site.browser.close()
        site.browser.switch_to.window(first)


def test_a_form_and_a_name_while_another_tab_answers(site: Any) -> None:
    """What is being edited stays, and the newer name."""
    site.send("One", "First")
    first = site.browser.current_window_handle
    site.browser.switch_to.new_window("tab")
    second = site.browser.current_window_handle
    try:
        site.open()
        site.press("One")
        site.all(".edit")[0].click()
        site.browser.switch_to.active_element.send_keys(" more")
        site.browser.switch_to.window(first)
        site.begin("Two", "Half", GATE, " whole")
        site.browser.switch_to.window(second)
        wait_for(lambda: "Two" in site.texts(".user .said"))
        field = site.browser.switch_to.active_element
        assert field.get_attribute("value") == "One more"
        field.send_keys(" words")
        assert site.js("return document.querySelector('.edit-form textarea').value") == (
            "One more words"
        )
        site.press("Rename")
        site.browser.switch_to.active_element.send_keys("New name\ue007")
        site.browser.switch_to.window(first)
        wait_for(lambda: titles(site) == ["New name"])
        site.server.go()
        wait_for(lambda: site.texts(".text")[-1] == "Half whole")
        site.wait_whole()
        site.open()
        assert titles(site) == ["New name"]
    finally:
        site.browser.switch_to.window(second)
        site.browser.close()
        site.browser.switch_to.window(first)


def test_a_tab_that_is_closed_keeps_what_was_written(site: Any) -> None:
    site.begin("One", "Half", GATE, " of", GATE)
    time.sleep(2.1)  # it is kept every two seconds
    site.server.go()
    wait_for(lambda: site.texts(".text") == ["Half of"])
    site.server.forgets = True
    site.open()
    site.press("One")
    assert site.texts(".text") == ["Half of"]
    assert site.texts(".note") == ["This answer was interrupted."]


REFUSES = "const no = () => { throw Error('not allowed') }; indexedDB.open = no;"
REFUSES += "Object.defineProperty(window, 'localStorage', { get: no }); BroadcastChannel = no;"
FULL = """
    const { put } = IDBObjectStore.prototype;
    IDBObjectStore.prototype.put = function (chat) {
      const asked = put.call(this, chat);
      asked.addEventListener('success', () => this.transaction.abort());
      return asked;
    };
    Object.defineProperty(IDBTransaction.prototype, 'error', { get: () => Error('full') });
"""


@pytest.mark.parametrize("source", [REFUSES, FULL], ids=["refuses", "full"])
def test_a_browser_that_keeps_nothing(site: Any, source: str) -> None:
    add = "Page.addScriptToEvaluateOnNewDocument"
    added = site.browser.execute_cdp_cmd(add, {"source": source})
    try:
        site.open()
        site.send("One")
        assert "are lost when this page is closed" in site.wait("#chats-note.error").text
        assert titles(site) == ["One"]
        site.press("Settings")
        site.all("#theme option")[2].click()
        assert site.js("return document.documentElement.dataset.theme") == "dark"
    finally:
        site.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
