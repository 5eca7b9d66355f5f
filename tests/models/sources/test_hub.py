"""Models of the hub, from a stand-in on this machine: chosen, downloaded once, refused."""

import builtins
import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import SHA, HubServer

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.sources.hub import cached_models
from sparsekv_cli.models.sources.locate import resolve_model

BYTES = b"GGUF" * 10000
FILES = {
    "README.md": b"x",
    "mmproj-F16.gguf": b"x",
    "tiny-Q4_K_M.gguf": BYTES,
    "tiny-Q8_0.gguf": 2 * BYTES,
    "BF16/tiny-BF16-00001-of-00002.gguf": 3 * BYTES,
    "BF16/tiny-BF16-00002-of-00002.gguf": 4 * BYTES,
}
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with HubServer() as server:
        server.repositories["me/Tiny-GGUF"] = FILES
        yield server


@pytest.fixture
def hub(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The stand-in, an empty cache and an empty working directory."""
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("SPARSEKV_MODELS", str(tmp_path / "models"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    server.requests.clear()
    server.be_honest()
    return server


def failure(name: str) -> str:
    said: list[str] = []
    with pytest.raises(SparseKVError) as caught:
        resolve_model(name, said.append)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(name.partition(":")[0])
    return message


def test_a_model_is_downloaded_once(hub, monkeypatch):
    said: list[str] = []
    path = resolve_model("me/Tiny-GGUF", said.append)
    assert path.name == "tiny-Q4_K_M.gguf" and path.read_bytes() == BYTES
    assert said == [
        f"downloading tiny-Q4_K_M.gguf of me/Tiny-GGUF: 0.0 MB, to {os.environ['HF_HUB_CACHE']}"
    ]
    asked = len(hub.requests)
    for name in ("me/Tiny-GGUF", "me/Tiny-GGUF:q4_k_m"):
        assert resolve_model(name, said.append) == path
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    assert resolve_model("me/Tiny-GGUF", said.append) == path
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model("me/Tiny-GGUF", said.append) == path
    assert len(hub.requests) == asked and len(said) == 1


def test_all_parts_of_a_split_model_are_downloaded(hub):
    said: list[str] = []
    path = resolve_model("me/Tiny-GGUF:BF16", said.append)
    assert path.name == "tiny-BF16-00001-of-00002.gguf" and path.parent.name == "BF16"
    second = path.with_name("tiny-BF16-00002-of-00002.gguf")
    assert second.read_bytes() == 4 * BYTES
    assert ["part 1 of 2" in said[0], "part 2 of 2" in said[1]] == [True, True]
    second.unlink()  # the part of a model is no model
    assert not cached_models()
    assert resolve_model("me/Tiny-GGUF:BF16", said.append) == path and second.exists()


def test_another_quant_without_a_network(hub, monkeypatch):
    path = resolve_model("me/Tiny-GGUF:Q8_0")
    said: list[str] = []
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    assert resolve_model("me/Tiny-GGUF", said.append) == path
    assert said[0].startswith(f"warning: cannot reach {NOWHERE}: ") and path.name in said[0]
    message = failure("me/Tiny-GGUF:Q2_K")
    assert f"cannot reach {NOWHERE}: " in message and message.endswith("is there a network?")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model("me/Tiny-GGUF") == path
    message = failure("me/Tiny-GGUF:Q2_K")
    assert "HF_HUB_OFFLINE forbids to download it: unset that, or give a file" in message


def test_files_and_the_models_folder_come_first(hub, tmp_path):
    Path("me").mkdir()
    message = failure("me/Tiny-GGUF")
    assert "no such file in me; if a repository of the hub is meant, name the quanti" in message
    assert resolve_model("me/Tiny-GGUF:Q8_0").read_bytes() == 2 * BYTES
    Path("me/Tiny-GGUF").write_bytes(b"GGUF")
    hub.requests.clear()
    assert resolve_model("me/Tiny-GGUF") == Path("me/Tiny-GGUF")
    assert resolve_model("you/Tiny.gguf") == Path("you/Tiny.gguf")
    assert not hub.requests


def test_what_a_repository_lacks(hub):
    message = failure("me/Tiny-GGUF:Q2_K")
    assert message == "me/Tiny-GGUF: has no Q2_K; there are BF16, Q4_K_M, Q8_0"
    hub.repositories["me/plain"] = {"model.safetensors": b"x", "config.json": b"{}"}
    assert "me/plain: holds no GGUF model among its 2 files" in failure("me/plain")


@pytest.mark.parametrize(
    ("name", "refusal", "words"),
    [
        ("me/unknown", None, "no such repository at URL, or a private one: check the name; if"),
        ("me/private", (401, ""), "URL answers with HTTP status 401: log in (`hf auth login` or a"),
        ("me/broken", (500, ""), "URL answers with HTTP status 500: try again later"),
        ("me/a--b", None, "is no name of a repository: "),
    ],
)
def test_refusals(hub, name, refusal, words):
    if refusal:
        hub.refused[name] = refusal
    assert words.replace("URL", hub.url) in failure(name)


def test_terms_to_be_accepted(hub, monkeypatch):
    monkeypatch.setattr(hub, "gated", {"me/Tiny-GGUF"})
    words = f"wants terms to be accepted first: do that at {hub.url}/me/Tiny-GGUF, then log in"
    assert words in failure("me/Tiny-GGUF")


def test_without_the_extra(hub, monkeypatch):
    cached = resolve_model("me/Tiny-GGUF:Q8_0")
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "[hub]'" in failure("me/Tiny-GGUF")
    assert resolve_model("me/Tiny-GGUF:Q8_0") == cached


def test_a_cache_that_cannot_be_written(hub, tmp_path):
    """The disk's failures are the system's words, which name the file."""
    (tmp_path / "hub").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        resolve_model("me/Tiny-GGUF")


def test_what_is_in_the_cache(hub):
    for quant in ("Q8_0", "BF16"):
        resolve_model(f"me/Tiny-GGUF:{quant}")
    names = {model.name: model.path for model in cached_models()}
    assert list(names) == ["me/Tiny-GGUF:BF16", "me/Tiny-GGUF:Q8_0"]
    for name, path in names.items():
        assert resolve_model(name) == path and SHA in path.parts


def test_without_a_home_folder_no_models_are_in_the_cache(monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", "~nobody-has-this-name/hub")
    assert cached_models() == []
    with pytest.raises(SparseKVError, match="no home folder: set HF_HOME"):
        resolve_model("owner/repo:Q8_0", print)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"XDG_CACHE_HOME": "/c"},
        {"XDG_CACHE_HOME": "/c", "HF_HOME": "~/x"},
        {"HF_HOME": "/x", "HUGGINGFACE_HUB_CACHE": "/y"},
        {"HF_HOME": "/x", "HF_HUB_CACHE": "~/y"},
    ],
)
def test_the_cache_is_where_the_library_has_it(variables):
    names = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    program = (
        "from huggingface_hub import constants; from sparsekv_cli.models.sources import hub; "
        "print(constants.HF_HUB_CACHE); print(hub.cache_folder())"
    )
    command = [sys.executable, "-c", program]
    told = subprocess.check_output(command, env={**kept, **variables}, text=True, timeout=240)
    theirs, ours = told.splitlines()
    assert ours == theirs


def test_ctrl_c_while_downloading(hub, monkeypatch):
    """Exit code 130; what is there already is not taken for the model, and the next run has it."""
    arguments = [sys.executable, "-m", "sparsekv_cli", "inspect", "-m", "me/Tiny-GGUF:Q8_0"]
    started, stopped = threading.Event(), threading.Event()
    n_chunks = 0

    def wait() -> None:
        nonlocal n_chunks
        n_chunks += 1
        if n_chunks == 3:
            started.set()
            stopped.wait(30)

    monkeypatch.setattr(hub, "on_chunk", wait)
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert started.wait(30)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        stopped.set()
    assert process.returncode == 130 and out == b""
    assert err.decode().splitlines()[0].startswith("downloading tiny-Q8_0.gguf of me/Tiny-GGUF")
    assert err.count(b"\n") == 1
    assert not cached_models()
    monkeypatch.setattr(hub, "on_chunk", lambda: None)
    assert resolve_model("me/Tiny-GGUF:Q8_0").read_bytes() == 2 * BYTES


@pytest.mark.parametrize("is_good", [True, False])
def test_a_download_goes_on(hub, is_good):
    """After what came; bytes that are not the hub's are thrown away, and told."""
    digest = hashlib.sha256(2 * BYTES).hexdigest()
    partial = Path(os.environ["HF_HUB_CACHE"]) / f"models--me--Tiny-GGUF/blobs/{digest}.part"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(BYTES if is_good else b"x" * len(BYTES))
    hub.starts.clear()
    if not is_good:
        assert "is damaged: download it again" in failure("me/Tiny-GGUF:Q8_0")
        assert not partial.exists() and not cached_models()
    assert resolve_model("me/Tiny-GGUF:Q8_0").read_bytes() == 2 * BYTES
    assert hub.starts == [len(BYTES), 0][: 1 if is_good else 2] and not partial.exists()
    partial.write_bytes(b"too long" * len(BYTES))
    partial.with_suffix("").unlink()
    assert resolve_model("me/Tiny-GGUF:Q8_0").read_bytes() == 2 * BYTES


def in_cache() -> list[Path]:
    return [path for path in Path(os.environ["HF_HUB_CACHE"]).rglob("*") if not path.is_dir()]


def listing(data: bytes) -> dict[str, object]:
    digest = hashlib.sha256(data).hexdigest()
    return {"lfs": {"size": len(data), "sha256": digest, "pointerSize": 130}}


@pytest.mark.parametrize(
    "revision", ["../../../../diary", SHA.upper(), SHA[1:], f"{SHA}\n", "", "main", "/etc"]
)
def test_a_revision_of_another_form_is_refused(hub, revision, tmp_path):
    hub.sha = revision
    assert "expected 40 hexadecimal digits" in failure("me/Tiny-GGUF")
    assert not in_cache() and sorted(path.name for path in tmp_path.iterdir()) == ["work"]


@pytest.mark.parametrize(
    "name",
    [
        "../../../../diary-Q4_K_M.gguf",
        "/etc/diary-Q4_K_M.gguf",
        "a/../diary-Q4_K_M.gguf",
        "a//b-Q4_K_M.gguf",
        "..\\diary-Q4_K_M.gguf",
        "C:diary-Q4_K_M.gguf",
        "-Q4_K_M.gguf",
        "a\x1b]2;title\x07-Q4_K_M.gguf",
        "a\x00-Q4_K_M.gguf",
        "a\u202e-Q4_K_M.gguf",
        "a" * 300 + "-Q4_K_M.gguf",
    ],
)
def test_a_file_name_of_another_form_is_refused(hub, name, tmp_path):
    hub.names = {"tiny-Q4_K_M.gguf": name}
    message = failure("me/Tiny-GGUF")
    assert "is no plain name" in message and message.isprintable()
    assert not in_cache() and sorted(path.name for path in tmp_path.iterdir()) == ["work"]


@pytest.mark.parametrize("etag", ["../../../../diary", "a/b", "..", "", "a b", "-x"])
def test_an_etag_of_another_form_is_refused(hub, etag, tmp_path):
    """Unless the list has the checksum: it then is the name of the bytes."""
    hub.etag = lambda data: etag
    assert "the hub names tiny-Q4_K_M.gguf by the tag" in failure("me/Tiny-GGUF")
    assert not in_cache() and sorted(path.name for path in tmp_path.iterdir()) == ["work"]
    hub.lfs = listing
    path = resolve_model("me/Tiny-GGUF")
    assert path.resolve().name == hashlib.sha256(BYTES).hexdigest()


def git_listing(data: bytes) -> dict[str, object]:
    return {"blobId": hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()}


@pytest.mark.parametrize("lfs", [listing, git_listing])
@pytest.mark.parametrize("sent", [BYTES[:-1] + b"X", BYTES + b"X", BYTES[:-1], b""])
@pytest.mark.parametrize("etag", ["mtime-and-size", hashlib.sha256(BYTES[:-1] + b"X").hexdigest()])
def test_other_bytes_than_the_list_says_leave_nothing(hub, lfs, sent, etag):
    """Whatever the ETag is: another SHA-256 of the bytes that come, too."""
    hub.lfs, hub.sent, hub.etag = lfs, {"tiny-Q4_K_M.gguf": sent}, lambda data: etag
    assert "is damaged: download it again" in failure("me/Tiny-GGUF")
    assert not in_cache()
    hub.sent = {}
    assert resolve_model("me/Tiny-GGUF").read_bytes() == BYTES


def test_bytes_without_any_checksum_are_told(hub):
    hub.etag = lambda data: "mtime-and-size"
    said: list[str] = []
    assert resolve_model("me/Tiny-GGUF", said.append).read_bytes() == BYTES
    assert "tells no checksum of tiny-Q4_K_M.gguf: it is not checked" in said[1]


@pytest.mark.parametrize("place", ["blobs", f"snapshots/{SHA}"])
def test_a_link_out_of_the_cache_is_not_followed(hub, place, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    link = Path(os.environ["HF_HUB_CACHE"]) / "models--me--Tiny-GGUF" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    with pytest.raises(SparseKVError, match="is a link out of"):
        resolve_model("me/Tiny-GGUF")
    assert not [*outside.iterdir()]


def test_a_partial_file_that_is_a_link_is_not_followed(hub, tmp_path):
    diary, folder = tmp_path / "diary", Path(os.environ["HF_HUB_CACHE"]) / "models--me--Tiny-GGUF"
    diary.write_bytes(b"dear diary")
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / f"{hashlib.sha256(BYTES).hexdigest()}.part").symlink_to(diary)
    with pytest.raises(OSError):
        resolve_model("me/Tiny-GGUF")
    assert diary.read_bytes() == b"dear diary"


def test_no_message_has_a_password(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret\u00e9word")
    for name in ("me/Tiny-GGUF", "me/unknown"):
        for place in (NOWHERE, hub.url):
            monkeypatch.setenv("HF_ENDPOINT", place.replace("://", "://me:p%40ss@"))
            said: list[str] = []
            with pytest.raises(SparseKVError) as caught:
                resolve_model(name, said.append)
            assert "p%40ss" not in str(caught.value) and "secret" not in str(caught.value)
