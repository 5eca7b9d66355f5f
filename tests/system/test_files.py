"""Files: what is read is a regular file, and what cannot be written is named."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from sidecars import entry, identity_of
from tiny_models import make_model

from sparsekv_cli.calibration.sidecar import write_entry
from sparsekv_cli.commands.compare import report as compare_report
from sparsekv_cli.commands.run.jsonl import resume
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation.perplexity.kld_file import write_kld_file
from sparsekv_cli.evaluation.perplexity.records import PerplexityRecords
from sparsekv_cli.system.files import AppendedFile, open_regular, replace_file, replacing

FULL = Path("/dev/full")


@contextmanager
def full_disk(n_bytes: int) -> Iterator[None]:
    """No file becomes longer than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def append(path: Path) -> None:
    with AppendedFile(path) as file:
        file.write("an answer\n" * 10_000)


def keep_record(path: Path) -> None:
    PerplexityRecords(path, {"model": "m" * 100_000})


def write_base(path: Path) -> None:
    with write_kld_file(path, np.zeros((4, 4096), np.int32), 512) as write:
        write(np.zeros((8, 516), np.uint16))


def write_report(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsekv_cli.evaluation.report import page

    monkeypatch.setattr(page, "page", lambda found: "x" * 100_000)
    compare_report.write_reports({}, str(path), None)


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    identity = identity_of(make_model(tmp_path / "m.gguf", n_layer=1, n_embd=64, n_ff=64))
    values = {"a": np.zeros((1, 100_000), np.float32)}
    writers: dict[str, Callable[[Path], None]] = {
        "--output of run": append,
        "--jsonl of eval": keep_record,
        "--kl-divergence-base of eval": write_base,
        "--html of compare": lambda path: write_report(path, monkeypatch),
        "--output of calibrate": lambda path: write_entry(path, "fasa", identity, entry(**values)),
    }
    for what, write in writers.items():
        path = tmp_path / what.replace(" ", "_")
        with full_disk(4096), pytest.raises(SparseKVError) as error:
            write(path)
        assert str(error.value) == f"{path}: {os.strerror(27)}", what
        left = {each.name for each in tmp_path.iterdir()}
        assert not [name for name in left if name.endswith((".tmp", ".part"))], what
        write(path)  # there is room again
    if FULL.exists():
        with pytest.raises(SparseKVError, match=r"^/dev/full: No space left on device$"):
            append(FULL)
    assert resume(tmp_path / "none") == (0, 0, 0) == resume(Path(os.devnull))


def test_a_file_is_replaced_as_a_whole_or_not(tmp_path):
    path = tmp_path / "a"
    replace_file(path, b"before")
    with full_disk(10), pytest.raises(OSError):
        replace_file(path, b"after" * 10)
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["a"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "link").symlink_to("a")
    os.mkfifo(tmp_path / "pipe")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"x"
    for path in (tmp_path / "pipe", tmp_path, Path(os.devnull)):
        with pytest.raises(OSError, match="is no regular file"):
            open_regular(path)


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path):
    old = [".a.0123abcd.tmp", ".a.0123abcd.tmp.tmp", ".a.thesis.tmp", ".ab.0123abcd.tmp", "a.tmp"]
    for name in [*old, ".a.0123abce.tmp"]:
        (tmp_path / name).write_bytes(b"x")
    for name in old:
        os.utime(tmp_path / name, (0, 0))
    replace_file(tmp_path / "a", b"new")
    assert set(os.listdir(tmp_path)) == {"a", ".a.0123abce.tmp", *old[1:]}
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "a", 0o666) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert (tmp_path / "a").read_bytes() == b"new" and len(os.listdir(tmp_path)) == len(old) + 1


def test_a_link_stays_and_only_regular_files_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    path, link = tmp_path / "there" / "a", tmp_path / "link"
    path.write_bytes(b"before")
    link.symlink_to(path)
    replace_file(link, b"after")
    assert link.is_symlink() and path.read_bytes() == b"after"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is no regular file"):
        replace_file(tmp_path / "pipe", b"after")


def test_a_text_is_appended_whole_or_not_and_by_one_process(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with AppendedFile(path, is_alone=True) as file:
        file.write("before\n")
        with full_disk(10), pytest.raises(SparseKVError):
            file.write("after\n")
        assert path.read_text() == "before\n"
        with pytest.raises(SparseKVError, match="another process writes to it"):
            AppendedFile(path, is_alone=True)
    AppendedFile(path, is_alone=True).__exit__()
