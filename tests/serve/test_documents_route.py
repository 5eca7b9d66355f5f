"""POST /documents: texts of PDF and Word files, and bytes that lie."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import httpx
import pytest
from sample_documents import pdf_of, word_of
from waiting import wait_for

from sparsekv_cli.errors import BusyError, SparseKVError
from sparsekv_cli.serve.app import Access
from sparsekv_cli.serve.wire import documents

PATH = "/documents"
KIND = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def client(serve: Callable[..., Any]) -> Iterator[httpx.Client]:
    url = serve(access=Access(api_key="sesame"), body_bytes=1 << 17).url
    headers = {"authorization": "Bearer sesame", **KIND}
    with httpx.Client(base_url=url, timeout=240, headers=headers) as client:
        yield client


def refused(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]["message"]
    assert "\n" not in message
    return message


def word_file(body: bytes, n: int) -> bytes:
    """A Word file whose text is ``body``, n times."""
    out = BytesIO(word_of("x"))
    with ZipFile(out) as made, ZipFile(target := BytesIO(), "w", ZIP_DEFLATED) as changed:
        for name in made.namelist():
            data = made.read(name)
            if name == "word/document.xml":
                at = data.index(b"<w:body>") + 8
                data = data[:at] + body * n + data[at:]
            changed.writestr(name, data)
    return target.getvalue()


def test_texts(client: httpx.Client) -> None:
    both = [pdf_of("one", "two"), word_of("Größe")]
    with ThreadPoolExecutor() as pool:
        ask = lambda data: client.post(PATH, params={"name": "a & b.pdf"}, content=data)  # noqa: E731
        answers = [each.json() for each in pool.map(ask, both)]
    texts = ["one\n\ntwo", "Größe\nleft | right\nafter it"]
    assert answers == [{"name": "a & b.pdf", "text": text} for text in texts]


def test_names(client: httpx.Client) -> None:
    name = "<img src=x>\n\0\u202e\x1b[31m b.pdf"
    said = refused(client.post(PATH, params={"name": name}, content=pdf_of("")))
    assert said.startswith("<img src=x> [31m b.pdf: the PDF has no text")
    assert client.post(PATH, content=pdf_of("a")).json() == {"name": "document", "text": "a"}
    long = client.post(PATH, params={"name": "x" * 256}, content=pdf_of("a"))
    assert refused(long) == "name has more than 255 characters"
    assert refused(client.post(PATH, params={"nme": "x"}, content=b"")) == "nme: no such field"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "x is no PDF or Word file"),
        (b"\x89PNG\r\n", "x is no PDF or Word file"),
        (pdf_of("a")[:200], "x: the PDF cannot be read"),
        (b"PK\3\4" + bytes(100), "x: the archive is damaged"),
        (word_file(b"", 0)[:-30], "x: the archive is damaged"),
        (b"\xd0\xcf\x11\xe0" + bytes(100), "x: this is an old Office file, or has a password"),
    ],
)
def test_bytes_that_lie(client: httpx.Client, data: bytes, words: str) -> None:
    assert refused(client.post(PATH, params={"name": "x"}, content=data)).startswith(words)


def test_who_may_ask(client: httpx.Client) -> None:
    data = pdf_of("a")
    refused(client.post(PATH, content=data, headers={"authorization": ""}), 401)
    refused(client.post(PATH, content=data, headers={"host": "evil.example"}), 421)
    refused(client.post(PATH, content=data, headers={"content-type": "text/plain"}), 415)
    refused(client.post(PATH, content=bytes(1 << 18)), 413)
    assert PATH in refused(client.get("/other"), 404)
    assert PATH in client.get("/openapi.json").json()["paths"]


def test_more_text_than_a_request_takes(client: httpx.Client) -> None:
    data = word_file(b"<w:p><w:r><w:t>text</w:t></w:r></w:p>", 1 << 15)
    said = refused(client.post(PATH, content=data))
    assert said.startswith("document has 163863 bytes of text, more than 131072")


def test_bombs(client: httpx.Client) -> None:
    """A Word file of 80 KB would take some GiB to read, and sizes that lie end the reading."""
    bomb = word_file(b"<w:p/>" * 1000, 7000)
    said = refused(client.post(PATH, content=bomb))
    assert said.startswith("document: the Word file has 7000057 marks in a part, more than 4000000")
    at = bomb.rindex(b"word/document.xml") - 46 + 24  # the size in the archive's directory
    for size, words in ((300 << 20, "unpacks to 300 MiB, more than 256"), (9, "cannot be read")):
        lie = bomb[:at] + size.to_bytes(4, "little") + bomb[at + 4 :]
        assert f"document: the Word file {words}" in refused(client.post(PATH, content=lie))


def asleep(started: list[subprocess.Popen[bytes]], n: int = 9) -> Callable[..., Any]:
    """Popen whose first n processes only sleep."""
    popen = subprocess.Popen

    def start(command: Any, **options: Any) -> Any:
        started.append(popen(["sleep", "60"] if len(started) < n else command, **options))
        return started[-1]

    return start


def test_two_are_there_at_once_and_no_third(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose client has gone ends at once, and the next one is read."""
    started: list[subprocess.Popen[bytes]] = []

    async def ask() -> None:
        reader = documents.Documents(1000)
        first, second = (asyncio.create_task(reader.read(pdf_of("a"), "x")) for _ in range(2))
        await asyncio.sleep(0.1)
        with pytest.raises(BusyError):
            await reader.read(pdf_of("a"), "x")
        assert len(started) == 1 and started[0].returncode is None
        first.cancel()
        assert await second == "a"
        assert started[0].wait(5) == -9

    monkeypatch.setattr(subprocess, "Popen", asleep(started, 1))
    asyncio.run(ask())


def test_a_client_that_goes_ends_the_reading(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(subprocess, "Popen", asleep(started))
    data = pdf_of("a")
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sesame\r\n"
    head += f"Content-Type: application/octet-stream\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port)) as link:
        link.sendall(head.encode() + data)
        wait_for(lambda: started)
    assert started[0].wait(10) == -9


def test_an_end_of_the_server_ends_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    async def ask() -> None:
        reader = documents.Documents(1000)
        asked = [asyncio.create_task(reader.read(pdf_of("a"), "x")) for _ in range(2)]
        await asyncio.sleep(0.1)
        reader.end()
        for each in asked:
            with pytest.raises(BusyError, match="the server ends"):
                await each
        assert [each.returncode for each in started] == [-9]

    monkeypatch.setattr(subprocess, "Popen", asleep(started))
    asyncio.run(ask())


def test_what_takes_too_long_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "WAIT_S", 0.01)
    with pytest.raises(SparseKVError, match="takes more than 30 s or 1 GiB"):
        asyncio.run(documents.Documents(9).read(pdf_of("a"), "x"))
