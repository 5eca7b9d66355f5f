"""Which model a file holds: by every byte, for as long as nothing is written to it."""

import json
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
from tiny_models import make_model

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf import content
from sparsekv_cli.models.gguf.file import open_gguf


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that counts as large, and as one that was written long ago."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(content, "SMALL", 0)
    monkeypatch.setattr(content, "SETTLED", -60.0)
    return make_model(tmp_path / "model.gguf", n_layer=1, n_embd=64, n_ff=64)


def hash_of(path: Path) -> str:
    with open_gguf(path) as file:
        return file.content.wait()


def read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(part: object) -> str:
        raise AssertionError("it is remembered")

    monkeypatch.setattr(content, "_hash_of", fail)


def test_every_byte_counts(model, tmp_path):
    hashed, data = hash_of(model), model.read_bytes()
    assert re.fullmatch("[0-9a-f]{32}", hashed)
    other, size = tmp_path / "other.gguf", len(data)
    shutil.copy(model, other)
    assert hash_of(other) == hashed
    with open_gguf(model) as file:
        start = file.parts[0].data_offset
    for at in (start, start + 300, (start + size) // 2, size - 300, size - 1):
        other.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert hash_of(other) != hashed, at


def test_a_hash_is_remembered_until_the_file_changes(model, tmp_path, monkeypatch):
    hashed = hash_of(model)
    memory = tmp_path / "cache" / "sparsekv-cli" / "hashes.json"
    assert memory.stat().st_mode & 0o777 == 0o600 and len(json.loads(memory.read_bytes())) == 1
    with monkeypatch.context() as patched:
        read_nothing(patched)
        with open_gguf(model) as file:
            assert file.content.known() == hashed  # at once, without a thread
    times = model.stat().st_atime_ns, model.stat().st_mtime_ns
    with open(model, "r+b") as changed:
        changed.seek(-400, os.SEEK_END)
        changed.write(b"another")
    os.utime(model, ns=times)  # the time of the last change of its status tells
    assert hash_of(model) != hashed
    monkeypatch.setattr(content, "MOST_REMEMBERED", 1)
    hash_of(shutil.copy(model, tmp_path / "third.gguf"))
    assert len(json.loads(memory.read_bytes())) == 1


@pytest.mark.parametrize("what", ["text", "nested", "types", "pipe", "writable", "none"])
def test_a_memory_that_is_damaged_is_not_believed(what, model, tmp_path):
    hashed = hash_of(model)
    memory = tmp_path / "cache" / "sparsekv-cli" / "hashes.json"
    (mark,) = json.loads(memory.read_bytes())
    memory.unlink()
    if what == "pipe":
        os.mkfifo(memory)
    elif what == "none":
        memory.mkdir()
    else:
        texts = {"text": "{", "nested": "[" * 100_000, "types": json.dumps({mark: [1]})}
        memory.write_text(texts.get(what, json.dumps({mark: "0" * 64})))
        memory.chmod(0o666 if what == "writable" else 0o600)
    assert hash_of(model) == hashed


def test_it_is_not_known_until_all_is_read(model, monkeypatch):
    hashed, may_end, read = hash_of(model), threading.Event(), content._hash_of
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent / "empty"))

    def slowly(part: object) -> str:
        may_end.wait()
        return read(part)

    monkeypatch.setattr(content, "_hash_of", slowly)
    with open_gguf(model) as file:
        assert file.content.known() is None is file.content.known()
        may_end.set()
        assert file.content.wait() == file.content.known() == hashed


def test_a_file_that_changes_while_it_is_in_use_is_unknown(model, tmp_path):
    for is_read in (False, True):
        with open_gguf(model) as file:
            if is_read:
                file.content.wait()
            with open(model, "r+b") as changed:
                changed.seek(-400, os.SEEK_END)
                changed.write(b"another")
            os.utime(model)
            assert file.content.known() is None
            with pytest.raises(SparseKVError, match="was changed while in use"):
                file.content.wait()
    with open_gguf(model) as file:  # its path is another file's, which is of no interest
        hashed = file.content.wait()
        other = make_model(tmp_path / "other.gguf", n_layer=1, n_embd=64, n_ff=64, seed=3)
        held = os.open(model, os.O_RDONLY)
        os.replace(other, model)
        assert file.content.known() in (None, hashed)  # its number of links has changed
        os.close(held)
    with open_gguf(model) as file:
        file.close()
        assert file.content.known() is None
