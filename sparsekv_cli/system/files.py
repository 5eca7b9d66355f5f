"""Files: read only where they are regular, written in one place, and named in every error.

Every file that the program writes is a WrittenFile. So tests put faults into each of its writes.
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
    """Returns a file or folder in the user's cache; None where there is no home folder."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base) / "sparsekv-cli" / name


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Returns a regular file, open for reading.

    Raises OSError for any other: to open a pipe might take for ever.

    A link to a regular file is one.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
    return FileIO(descriptor, "rb")


class WrittenFile(FileIO):
    """A file that is written, from its beginning on or, with O_APPEND, at its end."""


NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
APPENDED = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def open_written(path: str | os.PathLike[str], flags: int = NEW, mode: int = 0o600) -> WrittenFile:
    """Opens a file to write, with os.open's flags. The umask changes ``mode``. Raises OSError."""
    return WrittenFile(os.open(path, flags | os.O_CLOEXEC, mode), "wb")


def is_private(status: os.stat_result) -> bool:
    """Returns whether a file or folder belongs to the user and nobody else may write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & WRITABLE_BY_OTHERS


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a file as a whole, or not at all. Only the user may read it. Raises OSError."""
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[BufferedWriter]:
    """A new file that replaces ``path`` at the end of the block. Raises OSError.

    If the block fails, ``path`` stays as it is. The umask changes ``mode``. A link stays, and the
    file that it names is replaced. It refuses to replace anything but a regular file.
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
    """Removes the temporary files of ``path`` that no process has written to for a day."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.tmp")
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for found in filter(lambda each: name.fullmatch(each.name), entries):
            if found.is_file(follow_symlinks=False) and time.time() - found.stat().st_mtime > DAY:
                os.unlink(found.path)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns an OSError into a SparseKVError that names the file, which the system's may not do."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SparseKVError(f"{os.fspath(path)}: {error.strerror or error}") from error


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lets one process at a time work in a folder. The others wait.

    If the system cannot lock folders, nobody waits. Raises OSError if the folder does not exist.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # which gives the lock back


class AppendedFile:
    """Text at the end of a file. It is there when ``write`` returns. Every error names the file.

    A text that cannot be written as a whole is taken back. is_alone: another process that wants the
    file alone too is refused.
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
