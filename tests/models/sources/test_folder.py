"""The models folder: files by name."""

from pathlib import Path

import pytest

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.sources.folder import find_by_name, models_by_name, models_folder
from sparsekv_cli.models.sources.locate import resolve_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A models folder; the working directory is an empty one."""
    path = tmp_path / "models"
    path.mkdir()
    monkeypatch.setenv("SPARSEKV_MODELS", str(path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in ("Tiny-Q8_0.gguf", "big-00002-of-00002.gguf", "big-00001-of-00002.gguf", "x.txt"):
        (path / name).write_bytes(b"GGUF")
    return path


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.delenv("SPARSEKV_MODELS", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert models_folder() == tmp_path / "sparsekv-cli" / "models"
    assert models_by_name() == {} and find_by_name("tiny") is None
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_folder() == tmp_path / ".local" / "share" / "sparsekv-cli" / "models"
    monkeypatch.setenv("SPARSEKV_MODELS", "~/m")
    assert models_folder() == tmp_path / "m"


def test_names(folder):
    assert models_by_name() == {
        "Tiny-Q8_0": folder / "Tiny-Q8_0.gguf",
        "big": folder / "big-00001-of-00002.gguf",
    }
    for name in ("Tiny-Q8_0", "tiny-q8_0", "TINY-Q8_0.gguf"):
        assert resolve_model(name) == folder / "Tiny-Q8_0.gguf"
    for name in ("Big", "big-00002-of-00002.gguf"):
        assert resolve_model(name) == folder / "big-00001-of-00002.gguf"


def test_a_path_that_exists_comes_first(folder):
    Path("Big").write_bytes(b"GGUF")
    assert resolve_model("Big") == Path("Big")
    assert resolve_model("big") == folder / "big-00001-of-00002.gguf"


def test_case_decides_between_two(folder):
    (folder / "tiny-q8_0.gguf").write_bytes(b"GGUF")
    assert resolve_model("tiny-q8_0") == folder / "tiny-q8_0.gguf"
    with pytest.raises(SparseKVError, match=r"Tiny-Q8_0 and tiny-q8_0 are both in .*models; name"):
        resolve_model("TINY-q8_0")


def test_names_that_are_not_there(folder):
    with pytest.raises(SparseKVError, match=r"name \(smollm2, Tiny-Q8_0, big\) \(did you mean Tin"):
        resolve_model("tiny-Q4_0")
    assert resolve_model("other.gguf") == Path("other.gguf")
    for number in range(20):
        (folder / f"m{number}.gguf").write_bytes(b"GGUF")
    with pytest.raises(SparseKVError, match=r"m11, m12 and 15 more\)"):
        resolve_model("nothing-like-them")


def test_a_folder_that_is_a_file(folder, monkeypatch):
    monkeypatch.setenv("SPARSEKV_MODELS", str(folder / "x.txt"))
    with pytest.raises(SparseKVError, match=r"x\.txt: models cannot be listed: Not a directory"):
        resolve_model("tiny")
