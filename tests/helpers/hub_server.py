"""A stand-in for the Hugging Face hub on this machine: what huggingface_hub asks of it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Repositories by name, each a dict of files; use it as a context manager.

    refused: repository -> (HTTP status, its X-Error-Code).  requests: method and path of each.
    starts: the first byte of each file that was sent.
    on_chunk: called before each piece of a file is sent.  sha, etag, lfs, names: what a hub that
    lies tells of the revision, of bytes, of their checksum and of names.  sent: what
    it sends instead of a file.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.refused: dict[str, tuple[int, str]] = {}
        self.gated: set[str] = set()
        self.requests: list[str] = []
        self.starts: list[int] = []
        self.on_chunk: Callable[[], None] = lambda: None
        self.be_honest()

    def be_honest(self) -> None:
        self.sha = SHA
        self.etag: Callable[[bytes], str] = lambda data: hashlib.sha256(data).hexdigest()
        self.lfs: Callable[[bytes], dict[str, object]] = lambda data: {}
        self.names: dict[str, str] = {}
        self.sent: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """The list of a repository's files, and the files."""

    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append(f"{self.command} {path}")
        if path.startswith("/api/models/"):
            self.answer_list("/".join(path.removeprefix("/api/models/").split("/")[:2]))
            return
        repository, _, rest = path.removeprefix("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        if self.refuses(repository):
            return
        if repository in self.server.gated:
            self.refuse(403, "GatedRepo")
            return
        data = self.server.repositories[repository].get(name)
        if data is None or revision not in (SHA, "main"):
            self.refuse(404, "EntryNotFound")
            return
        etag, data = self.server.etag(data), self.server.sent.get(name, data)
        start = 0
        if "Range" in self.headers:
            start = int(self.headers["Range"].removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("ETag", f'"{etag}"')
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if with_body:
            self.server.starts.append(start)
            step = 1 << 14
            for at in range(start, len(data), step):
                self.server.on_chunk()
                self.wfile.write(data[at : at + step])

    def answer_list(self, repository: str) -> None:
        if self.refuses(repository):
            return
        files = self.server.repositories[repository]
        siblings = [
            {"rfilename": self.server.names.get(name, name), "size": len(data)}
            | self.server.lfs(data)
            for name, data in files.items()
        ]
        sha = self.server.sha
        body = {"id": repository, "modelId": repository, "sha": sha, "siblings": siblings}
        self.send_json(200, body)

    def refuses(self, repository: str) -> bool:
        if repository in self.server.refused:
            self.refuse(*self.server.refused[repository])
        elif repository not in self.server.repositories:
            self.refuse(401, "RepoNotFound")  # as the hub does for who is not logged in
        else:
            return False
        return True

    def refuse(self, status: int, code: str) -> None:
        self.send_json(status, {"error": f"refused: {code}"}, code)

    def send_json(self, status: int, body: object, code: str = "") -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", f"refused: {code}")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""
