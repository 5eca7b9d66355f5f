"""Addresses of conversations, answers that go on over a reload, and what waits in a chat."""

from __future__ import annotations

import time
from typing import Any

import pytest
from scripted_page import CUT, GATE
from waiting import wait_for

pytestmark = pytest.mark.slow

# Holds the database: what is written waits.
SLOW_DISK = """
    indexedDB.open('sparsekv-cli', 1).onsuccess = ({ target }) => {
      const chats = target.result.transaction('chats', 'readwrite').objectStore('chats');
      const hold = () => { if (window.isHeld) chats.get('none').onsuccess = hold; };
      window.isHeld = true;
      hold();
    };
"""


def test_reload_comes_back_to_the_chat(site: Any) -> None:
    site.send("One", "First")
    site.press("New chat")
    site.send("Two", "Second")
    address = site.browser.current_url
    assert "/#/c/" in address
    site.browser.refresh()
    wait_for(lambda: site.texts(".text") == ["Second"])
    site.press("One")
    wait_for(lambda: site.texts(".text") == ["First"] and site.browser.current_url != address)
    site.browser.back()
    wait_for(lambda: site.texts(".text") == ["Second"] and site.browser.current_url == address)
    site.browser.back()
    wait_for(lambda: site.texts(".text") == ["First"])
    site.browser.forward()
    wait_for(lambda: site.texts(".text") == ["Second"])
    site.js(SLOW_DISK)
    wait_for(lambda: site.js("return window.isHeld"))
    site.press("Delete")
    site.press("Delete", "#confirm")
    wait_for(lambda: site.texts(".message") == [])
    site.browser.get(address)
    said = "return document.getElementById('status').textContent"
    wait_for(lambda: "no such conversation" in site.js(said))
    site.js("window.isHeld = false")
    time.sleep(0.5)
    assert "no such conversation" in site.js(said)
    assert site.browser.current_url == site.server.url + "/"


@pytest.mark.parametrize(
    "start",
    [
        (("comment", "kernels of lfps are compiled: 1 of 9"), GATE),
        (("progress", (10, 90)), GATE),
        (("think", "Hm. "), GATE, ("think", "So."), GATE),
        ("Half ", GATE),
    ],
    ids=["compile", "prefill", "thinking", "decode"],
)
def test_an_answer_goes_on_over_a_reload(site: Any, start: Any) -> None:
    site.server.answers.append((*start, "and the rest", ("rows", [[50]])))
    site.type("One")
    wait_for(lambda: site.server.writes == 1)
    for _ in range(2):
        site.browser.refresh()
        shown = [start[0]] if isinstance(start[0], str) else []
        wait_for(lambda shown=shown: site.texts(".text") == [t.strip() for t in shown] or [""])
        wait_for(site.all("#stop")[0].is_displayed)
    for item in start:
        if item == GATE:
            site.server.go()
    site.wait_whole()
    words = "Half and the rest" if shown else "and the rest"
    assert site.texts(".text") == [words] and site.texts(".note") == [""]
    assert len(site.server.asked) == 1 and site.texts("#accepted") == ["–"]
    site.send("Two", "Second")
    assert site.server.asked[-1]["messages"][1]["content"] == words


def test_stop_after_a_reload(site: Any) -> None:
    site.begin("One", "Half", GATE, " more")
    site.browser.refresh()
    wait_for(lambda: site.texts(".text") == ["Half"])
    site.press("Stop")
    site.wait_whole()
    wait_for(lambda: site.server.writes == 0)
    assert site.texts(".note") == ["Stopped."]
    site.browser.refresh()
    wait_for(lambda: site.texts(".note") == ["Stopped."])
    assert site.all("#send")[0].is_displayed()


def test_an_answer_of_a_chat_that_is_not_shown_goes_on(site: Any) -> None:
    site.begin("One", "Half", GATE, " more")
    site.press("New chat")
    site.browser.refresh()
    site.wait("#method option")
    site.server.go()
    time.sleep(0.5)
    site.server.forgets = True
    site.press("One")
    wait_for(lambda: site.texts(".text") == ["Half more"])


def test_a_connection_that_breaks(site: Any) -> None:
    site.send("One", "Half", CUT, " more")
    assert site.texts(".text") == ["Half more"] and site.texts(".note") == [""]
    gone = "dispatchEvent(new PageTransitionEvent('pagehide', { persisted: true }))"
    back = "dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true }))"
    site.begin("Two", "Half", GATE, " of it")
    site.js(gone)
    time.sleep(0.2)
    site.js(back)
    wait_for(lambda: site.texts(".text")[-1] == "Half")
    site.server.go()
    wait_for(lambda: site.texts(".text")[-1] == "Half of it")


def test_another_tab_stops_an_answer(site: Any) -> None:
    first = site.browser.current_window_handle
    site.begin("One", "Half", GATE, " more")
    address = site.browser.current_url
    site.browser.switch_to.new_window("tab")
    second = site.browser.current_window_handle
    try:
        site.browser.get(address)
        wait_for(lambda: site.texts(".text") == ["Half"])
        site.press("Stop")
        site.browser.switch_to.window(first)
        wait_for(lambda: site.texts(".note") == ["Stopped."])
    finally:
        site.browser.switch_to.window(second)
        site.browser.close()
        site.browser.switch_to.window(first)


def test_what_an_answer_waits_for(site: Any) -> None:
    """The time goes on where nothing comes, and a prefill has an estimate."""
    steps = [("progress", (1000, 9000)), GATE, ("progress", (2000, 9000)), GATE]
    site.server.answers.append((GATE, *steps, "Done"))
    site.type("One")
    wait_for(lambda: site.texts(".waits") == ["Waiting for the server, 1 s…"])
    site.server.go()
    wait_for(lambda: site.texts(".waits") == ["Reading the prompt: 1000 of 9000 tokens, 2 s…"])
    site.server.go()
    wait_for(lambda: "2000 of 9000 tokens" in site.texts(".waits")[0])
    assert ", about " in site.texts(".waits")[0] and " s left…" in site.texts(".waits")[0]
    site.server.go()
    site.wait_whole()
    assert site.texts(".waits") == [""] and site.texts("#prompt-tokens") == ["30 tokens"]


FILE = """
    const t = new DataTransfer(); t.items.add(new File(['words'], arguments[0]));
    document.dispatchEvent(new DragEvent('drop', { dataTransfer: t, cancelable: true }));
"""


def test_files_and_words_stay_in_their_chat(site: Any) -> None:
    prompt = site.browser.find_element("id", "prompt")
    site.send("One")
    site.js(FILE, "a.txt")
    wait_for(lambda: site.texts("#files li") == ["a.txt×"])
    prompt.send_keys("of a")
    site.press("New chat")
    assert site.texts("#files li") == [] and prompt.get_attribute("value") == ""
    site.js(FILE, "b.txt")
    wait_for(lambda: site.texts("#files li") == ["b.txt×"])
    prompt.send_keys("of b")
    site.press("One")
    assert site.texts("#files li") == ["a.txt×"] and prompt.get_attribute("value") == "of a"
    site.press("New chat")
    assert site.texts("#files li") == ["b.txt×"] and prompt.get_attribute("value") == "of b"
    site.send("")
    assert site.server.asked[-1]["messages"][0]["content"].startswith("b.txt:")
    site.press("One")
    site.send("")
    assert site.server.asked[-1]["messages"][-1]["content"] == "a.txt:\n```\nwords\n```\n\nof a"


PASTE = """
    const t = new DataTransfer(); t.setData('text/plain', 'word '.repeat(arguments[0] / 5));
    const field = document.getElementById(arguments[1]);
    const how = { clipboardData: t, cancelable: true, bubbles: true };
    return field.dispatchEvent(new ClipboardEvent('paste', how));
"""


def test_a_long_text_that_is_pasted_becomes_a_file(site: Any) -> None:
    assert site.js(PASTE, 50_000, "prompt"), "the browser pastes it"
    assert not site.js(PASTE, 100_000, "prompt")
    wait_for(lambda: site.texts("#files li") == ["pasted text.txt×"])
    began = time.monotonic()
    assert not site.js(PASTE, 40_000_000, "prompt")
    words = "pasted text.txt: it has 40000000 bytes: at most 2097152 are taken."
    wait_for(lambda: site.texts("#file-error") == [words])
    assert time.monotonic() - began < 10
