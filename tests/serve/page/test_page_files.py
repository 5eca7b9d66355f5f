"""Files that go with a message: texts are taken, others are refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripted_page import wait_for

pytestmark = pytest.mark.slow

DROP = """
    const t = new DataTransfer();
    for (const [name, bytes] of arguments[0]) t.items.add(new File([new Uint8Array(bytes)], name));
    for (const kind of ['dragover', 'drop'])
      document.body.dispatchEvent(
        new DragEvent(kind, { dataTransfer: t, cancelable: true, bubbles: true }));
"""


def drop(site: Any, **files: bytes) -> None:
    site.js(DROP, [[name.replace("_", "."), list(data)] for name, data in files.items()])


def test_dropped_texts_are_told_to_the_model(site: Any) -> None:
    drop(site, notes_txt=b"Use ```` here.\n\n", main_py="π = 3\n".encode())
    wait_for(lambda: site.texts("#files li") == ["notes.txt×", "main.py×"])
    site.send("Read them.")
    assert site.server.asked[0]["messages"][0]["content"] == (
        "notes.txt:\n`````\nUse ```` here.\n`````\n\nmain.py:\n```\nπ = 3\n```\n\nRead them."
    )
    assert site.texts("#files li") == [] and site.texts(".file summary") == ["notes.txt", "main.py"]
    site.all(".file summary")[1].click()
    assert site.texts(".file pre")[1] == "π = 3"
    site.all(".edit")[0].click()
    site.server.answers.append(("Again",))
    site.browser.switch_to.active_element.send_keys(" Now.\ue007")
    wait_for(lambda: len(site.server.asked) == 2)
    assert site.server.asked[1]["messages"][0]["content"].endswith("```\n\nRead them. Now.")


def test_a_chosen_file_alone(site: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    site.browser.find_element("id", "attach-input").send_keys(str(tmp_path / "a.txt"))
    wait_for(lambda: site.texts("#files li"))
    remove = site.all("#files button")[0]
    assert remove.get_attribute("aria-label") == "Remove a.txt"
    remove.click()
    assert site.texts("#files li") == []
    site.type("")
    assert site.server.asked == [], "there is nothing to send"
    site.browser.find_element("id", "attach-input").send_keys(str(tmp_path / "a.txt"))
    wait_for(lambda: site.texts("#files li"))
    site.send("")
    assert site.server.asked[0]["messages"][0]["content"] == "a.txt:\n```\nwords\n```\n\n"
    assert site.texts("#chats .open") == ["a.txt"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"%PDF-1.7\nx", "x.y is a PDF, and only text and code are taken: make a text of it first"),
        (b"\xff\xfe\x00", "x.y is no UTF-8 text: only text and code are taken."),
        (b"a\0b", "x.y is no UTF-8 text"),
        (b"\x89PNG\r\n", "x.y is no UTF-8 text"),
    ],
)
def test_others_are_refused(site: Any, data: bytes, words: str) -> None:
    drop(site, x_y=data, good_txt=b"good")
    wait_for(lambda: words in site.browser.find_element("id", "file-error").text)
    assert site.texts("#files li") == ["good.txt×"]


def test_a_large_file_is_refused(site: Any) -> None:
    site.js(
        "const t = new DataTransfer(); t.items.add(new File(['x'.repeat(2 ** 21 + 1)], 'log'));"
        "document.body.dispatchEvent(new DragEvent('drop', { dataTransfer: t, bubbles: true }))"
    )
    words = "log has 2097153 bytes: at most 2097152 are taken."
    wait_for(lambda: site.browser.find_element("id", "file-error").text == words)
