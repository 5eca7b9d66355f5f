"""Files that go with a message: texts and documents are taken, others are refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_documents import pdf_of, word_of
from waiting import wait_for

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
    wait_for(lambda: site.texts("#files li") == ["a.txt×"])
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


def test_documents_are_read_by_the_server(site: Any) -> None:
    """Their names and texts never become markup."""
    bad = "<img src=x onerror=window.hit=1>"
    site.js(DROP, [[f"{bad}\n\u202e.pdf", list(pdf_of("one"))], ["b.docx", list(word_of(bad))]])
    wait_for(lambda: site.texts("#files li") == [f"{bad} .pdf×", "b.docx×"])
    site.send("Read them.")
    assert site.server.asked[0]["messages"][0]["content"] == (
        f"{bad} .pdf:\n```\none\n```\n\n"
        f"b.docx:\n```\n{bad}\nleft | right\nafter it\n```\n\nRead them."
    )
    assert site.texts(".file summary") == [f"{bad} .pdf", "b.docx"]
    assert site.js("return [window.hit ?? 0, document.querySelectorAll('img').length]") == [0, 0]


def test_a_message_waits_for_its_documents(site: Any) -> None:
    error = site.browser.find_element("id", "file-error")
    site.server.gated = {"slow.pdf"}
    drop(site, bad_txt=b"\xff", slow_pdf=pdf_of("slow"), good_txt=b"good")
    wait_for(lambda: site.texts("#files li")[:1] == ["slow.pdf is being read…×"])
    site.type("Read it.")
    wait_for(lambda: "slow.pdf is being read: send the message when it is there." in error.text)
    assert error.text.startswith("bad.txt: it is no UTF-8 text") and site.server.asked == []
    site.server.go()
    wait_for(lambda: site.texts("#files li") == ["slow.pdf×", "good.txt×"])
    words = "bad.txt: it is no UTF-8 text, PDF or Word file: only these are taken."
    wait_for(lambda: error.text == words)
    site.send("")
    assert site.server.asked[0]["messages"][0]["content"].endswith("good\n```\n\nRead it.")


def test_a_document_that_is_removed_is_read_no_more(site: Any) -> None:
    site.server.gated, site.server.n_open, site.server.left = {"slow.pdf"}, 0, 0
    drop(site, slow_pdf=pdf_of("slow"), good_txt=b"good")
    wait_for(lambda: site.texts("#files li")[:1] == ["slow.pdf is being read…×"])
    site.all("#files button")[0].click()
    wait_for(lambda: site.server.left and site.texts("#files li") == ["good.txt×"])
    site.server.go()
    assert site.browser.find_element("id", "file-error").text == ""


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"%PDF-1.7\nx", "x.y: the PDF cannot be read"),
        (pdf_of(""), "x.y: the PDF has no text: if it is a scan"),
        (b"PK\3\4x", "x.y: the archive is damaged"),
        (b"\xd0\xcf\x11\xe0", "x.y: this is an old Office file, or has a password"),
        (b"\xff\xfe\x00", "x.y: it is no UTF-8 text, PDF or Word file: only these are taken."),
        (b"a\0b", "x.y: it is no UTF-8 text"),
        (b"\x89PNG\r\n", "x.y: it is no UTF-8 text"),
    ],
)
def test_others_are_refused(site: Any, data: bytes, words: str) -> None:
    drop(site, x_y=data, good_txt=b"good")
    wait_for(lambda: words in site.browser.find_element("id", "file-error").text)
    assert site.texts("#files li") == ["good.txt×"]


def test_a_large_file_is_refused(site: Any) -> None:
    site.js(
        "const t = new DataTransfer(); t.items.add(new File(['x'.repeat(2 ** 21 + 1)], 'log'));"
        "t.items.add(new File(['`a'.repeat(2 ** 20)], 'sql'));"
        "document.body.dispatchEvent(new DragEvent('drop', { dataTransfer: t, bubbles: true }))"
    )
    words = "log: it has 2097153 bytes: at most 2097152 are taken."
    wait_for(lambda: site.browser.find_element("id", "file-error").text == words)
    site.send("Read it.")
    assert site.server.asked[0]["messages"][0]["content"].endswith("`a\n```\n\nRead it.")
