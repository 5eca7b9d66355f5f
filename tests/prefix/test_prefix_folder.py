"""The folder of the prefix cache: whose files it touches, and who may make it."""

import os
import shutil
import time
from pathlib import Path

import pytest

from sparsekv_cli.cli import main
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.prefix.blocks import MAGIC
from sparsekv_cli.prefix.folder import MOST_BY_DEFAULT, PrefixFolder, check_folder, limit_of

LONG_AGO = 10**9  # seconds
OWN = f"{'a' * 32}-{'b' * 32}"
# Files of others: by their name, or by what they hold.
FOREIGN = {
    "thesis.tmp": b"Chapter 1",
    "table.rows": b"1,2,3",
    "vm.snapshot": b"a machine",
    f"{OWN}.rows": b"not the magic of a file of rows",
    f"{OWN}.snapshot": b"sparsekv is a nice name",
    ".sparsekv-abcdefgh.tmp": b"Mine.",
    f"{OWN}.rows.bak": MAGIC,
    "notes.rows": MAGIC,
}


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    for name, data in FOREIGN.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder.rows").mkdir()
    (tmp_path / f"{OWN[::-1]}.rows").symlink_to(tmp_path / "notes.rows")
    os.mkfifo(tmp_path / f"{'c' * 32}-{'d' * 32}.rows")
    for path in tmp_path.iterdir():
        os.utime(path, (LONG_AGO, LONG_AGO))
    return tmp_path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_files_of_others_are_never_touched(foreign, capfd, monkeypatch):
    monkeypatch.delenv("SPARSEKV_NO_CACHE", raising=False)

    def told(code: int, *arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            main([*arguments, "--cache-dir", str(foreign)])
        assert end.value.code == code
        return capfd.readouterr().err

    before = names(foreign)
    with pytest.raises(SparseKVError, match="holds files that are not the prefix cache's"):
        check_folder(foreign)
    for command in (("cache", "list"), ("cache", "clear"), ("run", "-p", "x"), ("chat",)):
        text = told(1, *command)
        assert text.count("\n") == 1 and "name an empty folder" in text, command
    own = [foreign / f"{'e' * 32}-{'f' * 32}.rows", foreign / ".sparsekv-12345678.tmp"]
    for path in own:
        path.write_bytes(MAGIC)
        os.utime(path, (LONG_AGO, LONG_AGO))
    check_folder(foreign)
    said: list[str] = []
    folder = PrefixFolder(foreign, 1 << 30, said.append)
    assert "'sparsekv-cli cache clear' removes it" in told(0, "cache", "list")
    assert names(foreign) == before | {path.name for path in own}  # a listing removes nothing
    folder.trim()
    assert names(foreign) == before | {own[0].name}
    PrefixFolder(foreign, 0, said.append).trim()
    assert names(foreign) == before and not said
    own[0].write_bytes(MAGIC)
    assert folder.clear() == (1, len(MAGIC), 0)
    for name in (*FOREIGN, f"{'c' * 32}-{'d' * 32}.rows"):
        assert folder.header(name) is None
    assert names(foreign) == before
    assert all((foreign / name).read_bytes() == data for name, data in FOREIGN.items())
    remove = PrefixFolder.remove

    def remove_while_another_writes(*given):
        remove(*given)
        own[1].write_bytes(MAGIC)

    own[0].write_bytes(MAGIC)
    monkeypatch.setattr(PrefixFolder, "remove", remove_while_another_writes)
    told(0, "cache", "clear")


def test_a_folder_that_is_empty_or_not_there_is_taken(tmp_path):
    check_folder(tmp_path)
    check_folder(tmp_path / "none")


def test_two_first_runs_make_the_folder(tmp_path, monkeypatch):
    """Neither finds it; the one that makes it says so, the other one goes on."""
    mkdir = Path.mkdir

    def after_another(path: Path, *arguments: int, **named: bool) -> None:
        mkdir(path, parents=True, exist_ok=True)
        mkdir(path, *arguments, **named)

    folder = PrefixFolder(tmp_path / "a" / "b", 1 << 30, print)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", after_another)
        assert not folder.make() and folder.is_usable()
    folder.path.rmdir()
    assert folder.make() and folder.path.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        PrefixFolder(tmp_path / "file", 1 << 30, print).make()


def test_the_default_limit_is_a_tenth_of_the_free_disk(tmp_path, monkeypatch):
    """What the folder holds counts as free, so that the limit does not shrink as it fills."""
    free = 1 << 30
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    assert limit_of(tmp_path / "none" / "yet", None) == free // 10
    (tmp_path / f"{OWN}.rows").write_bytes(bytes(1 << 20))
    (tmp_path / "thesis.rows").write_bytes(bytes(1 << 20))
    assert limit_of(tmp_path, None) == (free + (1 << 20)) // 10
    assert limit_of(tmp_path, 0.5) == 1 << 29
    free = 1 << 40
    assert limit_of(tmp_path, None) == MOST_BY_DEFAULT == 16 << 30


def test_files_of_the_future_go_first(tmp_path: Path) -> None:
    """A clock that went back makes no room for them. A writer has a day for a long prompt."""
    now, later = time.time(), time.time() + 30 * 86400
    block, unfinished = "{0}-{0}.rows", ".sparsekv-{0:.8}.tmp"
    for form, letter, used in (
        (block, "a", LONG_AGO), (block, "b", now), (block, "c", later),
        (unfinished, "d", later), (unfinished, "e", now - 7200),
    ):  # fmt: skip
        path = tmp_path / form.format(letter * 32)
        path.write_bytes(MAGIC)
        os.utime(path, (used, used))
    PrefixFolder(tmp_path, 3 * len(MAGIC), print).trim()
    assert {name[-6] for name in names(tmp_path)} == {"a", "b", "e"}
