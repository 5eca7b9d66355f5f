"""Opens, writes and replaces files. Every error names its file.

Only regular files are read. Every file that the program writes is a WrittenFile, so that tests can
make each of its writes fail.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

from sparsekv_cli.errors import SparseKVError

WRITABLE_BY_OTHERS = 0o022
DAY = 86400  # seconds


def user_cache(name: str) -> Path | None:
    """Returns the path ``name`` in the user's cache folder; None without a home folder."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base) / "sparsekv-cli" / name


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Returns a regular file, or a link to one, open for reading.

    Raises OSError for anything else: opening a pipe might never return.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
    return FileIO(descriptor, "rb")


class WrittenFile(FileIO):
    """A file that is open for writing: from its start, or with O_APPEND at its end."""


NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
APPENDED = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def open_written(path: str | os.PathLike[str], flags: int = NEW, mode: int = 0o600) -> WrittenFile:
    """Opens a file for writing. flags, mode: as for os.open. Raises OSError."""
    return WrittenFile(os.open(path, flags | os.O_CLOEXEC, mode), "wb")


def is_private(status: os.stat_result) -> bool:
    """Returns whether a file or folder is the user's and nobody else may write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & WRITABLE_BY_OTHERS


def replace_file(path: Path, data: bytes) -> None:
    """Replaces the file ``path`` by ``data`` as a whole, or not at all. Raises OSError.

    Only the user may read the new file.
    """
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[BufferedWriter]:
    """Yields a new file, which replaces ``path`` when the block ends. Raises OSError.

    If the block fails, ``path`` stays as it is. If ``path`` is a link, the file that it points to
    is replaced. Anything but a regular file is refused. mode: as for os.open.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
    _remove_leftovers(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        raw: Any = open_written(temporary, NEW, mode)
        with BufferedWriter(raw) as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _remove_leftovers(path: Path) -> None:
    """Removes temporary files for ``path`` to which nothing was written for a day."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.tmp")
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for found in filter(lambda each: name.fullmatch(each.name), entries):
            if found.is_file(follow_symlinks=False) and time.time() - found.stat().st_mtime > DAY:
                os.unlink(found.path)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns an OSError in the block into a SparseKVError that names the file."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SparseKVError(f"{os.fspath(path)}: {error.strerror or error}") from error


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lets only one process at a time run the block for a folder. Other processes wait.

    If the system cannot lock folders, no process waits. Raises OSError if the folder is missing.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # closing the file frees the lock


class AppendedFile:
    """A file to which text is appended. When ``write`` returns, the text is in the file.

    If only a part of a text could be written, the part is removed. Every error names the file.
    is_alone: whether another process with is_alone for this file is refused.
    """

    def __init__(
        self, path: str | os.PathLike[str], mode: int = 0o666, *, is_alone: bool = False
    ) -> None:
        self._path = path
        with naming(path):
            self._file = open_written(path, APPENDED, mode)
        if is_alone:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                raise SparseKVError(
                    f"{os.fspath(path)}: another process writes to it: name another file"
                ) from None
            except OSError:  # a pipe, or a file system without locks
                pass

    def write(self, text: str) -> None:
        data = memoryview(text.encode())
        n_written = 0
        with naming(self._path):
            try:
                while n_written < len(data):
                    n_written += self._file.write(data[n_written:])
            except OSError:
                if n_written:
                    with contextlib.suppress(OSError):
                        self._file.truncate(os.fstat(self._file.fileno()).st_size - n_written)
                raise

    def __enter__(self) -> AppendedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
