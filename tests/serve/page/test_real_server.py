"""The page with a model: the files that a server gives, and a chat by keyboard."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from waiting import wait_for

from sparsekv_cli.serve import page

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FILES = [path for path in page.FOLDER.rglob("*.*") if path.suffix[1:] in TYPES]
OWN = [path for path in FILES if path.parent.name != "vendor"]


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Any:
    return serve(ctx_size=1024, tokens=32)


def test_files(server: Any) -> None:
    """They have their types, a policy, and a tag that spares a browser the second transfer."""
    files = [path for path in page.FOLDER.rglob("*.*") if path.suffix[1:] in (*TYPES, "txt")]
    with httpx.Client(base_url=server.url) as client:
        for path in files:
            address = f"/static/{path.relative_to(page.FOLDER).as_posix()}"
            got = client.get(address)
            assert got.content == path.read_bytes()
            kind = TYPES.get(path.suffix[1:], "text/plain")
            kind += "; charset=utf-8" * kind.startswith("text/")
            assert got.headers["content-type"] == kind
            assert got.headers["x-content-type-options"] == "nosniff"
            assert got.headers["cache-control"] == "no-cache"
            tag = {"if-none-match": got.headers["etag"]}
            again = client.get(address, headers=tag)
            assert again.status_code == 304 and again.content == b""
            assert client.get(address, headers={"if-none-match": '"other"'}).status_code == 200
            assert client.head(address).headers["etag"] == got.headers["etag"]
        front = client.get("/")
        assert front.content == (page.FOLDER / "index.html").read_bytes()
        policy = front.headers["content-security-policy"]
        assert "unsafe" not in policy and "default-src 'none'; script-src 'self'" in policy
        for name in ("../app.py", "%2e%2e/app.py", "__init__.py", "", "vendor", "/etc/passwd"):
            assert client.get(f"/static/{name}").status_code == 404, name
        assert client.post("/static/app.js").status_code == 405


def test_the_page_asks_nobody_else() -> None:
    """Its own files name no other place, and none of them makes markup of a text."""
    assert len(OWN) > 10
    for path in OWN:
        text = path.read_text("utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        text = text.replace('NS = "http://www.w3.org/1998/Math/MathML"', "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacent|eval\(|style=", text)
        assert "http" not in re.sub(r'"https?:"', "", text), path.name
    front = (page.FOLDER / "index.html").read_text("utf-8")
    assert re.findall(r"<script(.*?)>", front) == [' type="module" src="/static/app.js"']
    assert not re.search(r"<style|\son\w+=", front)


def test_code_of_the_page_is_in_short_files() -> None:
    lines = {path.name: path.read_text("utf-8").split("\n") for path in OWN}
    assert {name for name, each in lines.items() if len(each) > 400} == set()
    assert [(name, line) for name, each in lines.items() for line in each if len(line) > 100] == []


def test_licences() -> None:
    text = (page.FOLDER / "vendor" / "licences.txt").read_text("utf-8")
    for name in ("markdown-it", "highlight.js", "linkify-it", "mdurl", "uc.micro", "entities"):
        assert f"== {name}" in text
    for path in (page.FOLDER / "vendor").glob("*.js"):
        version = re.search(r"(markdown-it|Highlight\.js) v?([\d.]+)", path.read_text("utf-8"))
        assert version and f"{version[1].lower()} {version[2]}" in text


@pytest.mark.slow
def test_a_chat_by_keyboard(server: Any, chromium: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    chromium.get(server.url)
    by_id = {
        name: chromium.find_element("id", name)
        for name in ("method", "budget", "prompt", "log", "rows-text", "attended", "context")
    }
    wait_for(lambda: len(by_id["method"].find_elements("tag name", "option")) == 11)
    wait_for(lambda: by_id["method"].get_attribute("value") == "full")
    by_id["method"].send_keys("topk")
    by_id["budget"].send_keys("16")
    by_id["prompt"].send_keys("many words " * 20, Keys.ENTER)
    wait_for(lambda: by_id["context"].text.endswith("of 1024"))
    assert by_id["log"].text.startswith("You\nmany words")
    assert float(by_id["attended"].text.rstrip("%")) < 60  # two of four layers are dense
    about = chromium.find_element("css selector", ".about").text
    assert about.startswith("topk · budget 16") and "% of rows read · 32 tokens" in about
    assert "4 layers; the last step read" in by_id["rows-text"].text
    note = chromium.find_element("css selector", ".note").text
    assert note == "The answer ends at the limit of tokens."
    size = "const c = document.getElementById('rows'); return [c.width, c.height]"
    assert chromium.execute_script(size) == [64, 4]
    chromium.execute_script("document.getElementById('temperature').value = '-1'")
    by_id["prompt"].send_keys("more", Keys.ENTER)
    notes = lambda: chromium.find_elements("css selector", ".note.error")  # noqa: E731
    assert wait_for(notes)[0].text == "Error: temperature = -1: expected 0.0 or more"
    problems = [e["message"] for e in chromium.get_log("browser") if e["level"] == "SEVERE"]
    assert [text for text in problems if "status of 400" not in text] == []
