"""Branches of a conversation, search, and files of conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

pytestmark = pytest.mark.slow


def edit(site: Any, place: int, words: str, answer: str) -> None:
    site.all(".edit")[place].click()
    site.server.answers.append((answer,))
    site.browser.switch_to.active_element.send_keys(words + "\ue007")
    wait_for(lambda: answer in site.texts(".text"))
    site.wait_whole()


def shown(site: Any) -> list[str]:
    return site.texts(".user .said, .text")


def test_nothing_is_lost_by_edit_and_regenerate(site: Any) -> None:
    site.send("One", "First")
    site.send("Two", "Second")
    site.server.answers.append(("Third",))
    site.press("Regenerate")
    wait_for(lambda: "Third" in site.texts(".text"))
    site.wait_whole()
    edit(site, 0, "!", "Fourth")
    assert shown(site) == ["One!", "Fourth"] and site.texts(".branches span") == ["2/2"]
    assert [each.is_enabled() for each in site.all(".branches button")] == [True, False]
    site.press("‹")
    assert shown(site) == ["One", "First", "Two", "Third"]
    assert site.texts(".branches span") == ["1/2", "2/2"]
    site.all("[aria-label='Previous branch']")[1].click()
    assert shown(site) == ["One", "First", "Two", "Second"]
    site.send("Three", "Fifth")
    assert [m["content"] for m in site.server.asked[-1]["messages"]][3] == "Second"
    site.browser.refresh()
    wait_for(lambda: shown(site) == ["One", "First", "Two", "Second", "Three", "Fifth"])
    site.all("[aria-label='Next branch']")[1].click()
    assert shown(site) == ["One", "First", "Two", "Third"]
    site.all("[aria-label='Next branch']")[0].click()
    assert shown(site) == ["One!", "Fourth"]
    focused = "return document.activeElement.ariaLabel"
    assert site.js(focused) == "Previous branch", "the keyboard stays at the branches"


def test_an_answer_without_a_word_is_no_branch(site: Any) -> None:
    site.send("One", 503, "busy")
    site.server.answers.append(("Second",))
    site.press("Regenerate")
    wait_for(lambda: shown(site) == ["One", "Second"])
    assert site.all(".branches") == []


def test_search(site: Any) -> None:
    site.send("Apples", "Red <b>fruit</b>")
    edit(site, 0, " and pears", "Green")
    site.press("New chat")
    site.send("Bread", "Brown")
    field = site.browser.find_element("id", "search")
    titles = lambda: site.texts("#chats .open")  # noqa: E731
    for words, found in (("FRUIT", ["Apples"]), ("pears", ["Apples"]), ("bro", ["Bread"])):
        field.clear()
        field.send_keys(words)
        wait_for(lambda found=found: titles() == found)
    assert site.texts("li .found") == ["Bread Brown"]
    field.send_keys("xyz")
    wait_for(lambda: titles() == [] and site.texts("#found") == ["Nothing is found."])
    field.send_keys("\ue003" * 6)
    wait_for(lambda: titles() == ["Bread", "Apples"] and site.texts("#found") == [""])


def give(site: Any, path: Path, text: str) -> str:
    path.write_text(text, "utf-8")
    site.js("document.getElementById('import-note').textContent = ''")
    site.browser.find_element("id", "import-input").send_keys(str(path))
    return wait_for(lambda: site.texts("#import-note")[0])


def test_conversations_go_from_one_browser_to_another(site: Any, tmp_path: Path) -> None:
    site.js("document.getElementById('system').value = 'Be short.'")
    site.send("One", "First", ("rows", [[100, 0]]), ("think", "Hm."))
    edit(site, 0, "!", "Second")
    site.press("Export all")
    file = site.browser.downloads / "conversations.json"
    # The browser first reserves the name with an empty file.
    text = wait_for(lambda: file.exists() and file.read_text("utf-8"))
    file.unlink()
    path = tmp_path / "kept.json"
    assert give(site, path, text) == "0 imported, 1 were here already."
    site.press("Delete")
    site.press("Delete", "#confirm")
    assert give(site, path, text) == "1 imported."
    site.open()
    site.press("One")
    assert shown(site) == ["One!", "Second"]
    site.press("‹")
    assert shown(site) == ["One", "First"] and site.texts("#attended") == ["25.0%"]
    assert site.texts(".thinking summary") == ["Thinking"]
    assert site.js("return document.getElementById('system').value") == "Be short."


MESSAGE = {"role": "user", "content": "x"}
CHAT = {"id": "a", "title": "x", "messages": [MESSAGE]}
DEEP: dict[str, Any] = MESSAGE
for _ in range(102):
    DEEP = {**MESSAGE, "fork": {"at": 0, "tails": [None, [DEEP]]}}
WRONG: list[tuple[Any, str]] = [
    ("{", "it is no JSON"),
    ("[" * 100_000, "it is no JSON"),
    ({"format": "other"}, "it holds no conversations"),
    ([{**CHAT, "id": "<b>"}], "conversation 1: id: expected letters"),
    ([CHAT, {**CHAT, "messages": []}], "conversation 2: messages: expected a list"),
    ([{**CHAT, "messages": [{**MESSAGE, "role": "system"}]}], "role: expected user or assistant"),
    ([{**CHAT, "messages": [{**MESSAGE, "content": 1}]}], "content: expected a text"),
    ([{**CHAT, "messages": [{**MESSAGE, "files": [{"name": "x"}]}]}], "files.text: expected"),
    ([{**CHAT, "messages": [{**MESSAGE, "fork": {"at": 2, "tails": []}}]}], "fork: expected"),
    ([{**CHAT, "messages": [DEEP]}], "at most 100 branches"),
    ([{**CHAT, "messages": [MESSAGE] * 100_001}], "at most 100000 messages"),
]


def test_wrong_files_are_refused(site: Any, tmp_path: Path) -> None:
    head = {"format": "sparsekv-cli conversations", "version": 1}
    for chats, words in WRONG:
        value = {**head, "chats": chats} if isinstance(chats, list) else chats
        text = value if isinstance(value, str) else json.dumps(value)
        told = give(site, tmp_path / "x.json", text)
        assert told.startswith("x.json: ") and words in told
    assert site.texts("#chats .open") == []


def test_what_a_file_says_is_text(site: Any, tmp_path: Path) -> None:
    bad = "<img src=x onerror=window.hit=1>"
    about = {"method": bad, "rows": [["x"]], "attended": bad, "n": bad, "speed": 1, "evil": bad}
    answer = {"role": "assistant", "content": bad, "thinking": bad, "note": bad, "state": "writing"}
    messages = [{**MESSAGE, "content": bad, "files": [{"name": bad, "text": bad}]}]
    chat = {**CHAT, "title": bad, "messages": [*messages, {**answer, "about": about}]}
    chat["settings"] = {"system": bad, "model": bad, "method": bad, "temperature": {"x": 1}}
    head = {"format": "sparsekv-cli conversations", "version": 1}
    assert give(site, tmp_path / "x.json", json.dumps({**head, "chats": [chat]})) == "1 imported."
    site.all("#chats .open")[0].click()
    assert site.texts("#chats .open") == [bad] and site.texts(".user .said") == [bad]
    assert site.texts(".note") == [bad] and site.all("#send")[0].is_displayed()
    assert site.js("return [window.hit ?? 0, document.querySelectorAll('img').length]") == [0, 0]
