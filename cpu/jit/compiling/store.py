"""A folder of compiled kernels on disk. Each file has a checksum and belongs to the user.

The data of the files are unpickled and run. So the folder and its files must belong to the user,
and nobody else may write to them. A file is used only if its checksum is right. A fault of the disk
never stops a run. The kernel is then compiled again, and kept in memory only.
"""

import contextlib
import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from sparsekv_cli.system.files import DAY, is_private, replace_file, user_cache

MAGIC = b"sparsekv kernel 1\n"
HEADER_BYTES = len(MAGIC) + hashlib.sha256().digest_size
SUFFIX, LOCK, TEMPORARY = ".kernel", ".lock", ".tmp"
UNUSED_DAYS = 30  # a file that is not used for so long is removed
MOST_BYTES = 1 << 30  # of all files; the files with the oldest last use are removed first


def default_folder() -> Path | None:
    """Returns the folder of the user's kernels, or None if there is no home folder."""
    return user_cache("kernels")


class Busy(Exception):
    """Another process has the lock, and this one does not wait."""


class KernelStore:
    """Keeps bytes by name in one folder. The folder is made on first use.

    is_patient: whether ``lock`` waits for other processes. Otherwise it raises Busy.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.is_patient = True
        self._is_open = False
        self._may_read = self._may_write = False
        self._is_clean = False
        self._said: set[str] = set()

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            print(text, file=sys.stderr, flush=True)

    def _open(self) -> None:
        """Makes the folder if it is missing, and decides whether it may be used."""
        if self._is_open:
            return
        self._is_open = True
        if self.folder is None:
            self._say("kernels are not kept: there is no home folder and no XDG_CACHE_HOME")
            return
        try:
            if not self.folder.exists():
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = os.stat(self.folder)
        except OSError as error:
            self._do_not_write(error)
            return
        if is_private(status):
            self._may_read = self._may_write = True
        else:
            self._say(
                f"kernels in {self.folder} are not used: the folder belongs to another user or "
                "others may write to it; remove it, or chmod go-w it"
            )

    def _do_not_write(self, error: OSError) -> None:
        self._may_write = False
        reason = error.strerror or type(error).__name__
        self._say(f"kernels compiled now are not kept: {self.folder}: {reason}")

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / (name + SUFFIX)

    def may_write(self) -> bool:
        """Returns whether files can be kept. A later write may still fail."""
        self._open()
        if self._may_write and self.folder is not None and not os.access(self.folder, os.W_OK):
            self._may_write = False
        return self._may_write

    def has(self, name: str) -> bool:
        """Returns whether there is a file of that name. The file may be damaged."""
        self._open()
        return self._may_read and self._path(name).exists()

    def read(self, name: str) -> bytes | None:
        """Returns the data of ``name``, None if there are none. Removes a damaged file."""
        self._open()
        if not self._may_read:
            return None
        path = self._path(name)
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                data = file.read() if is_private(status) else b""
        except OSError:
            return None
        payload = data[HEADER_BYTES:]
        if data[:HEADER_BYTES] != MAGIC + hashlib.sha256(payload).digest():
            self.remove(name)
            return None
        if time.time() - status.st_mtime > DAY:  # the time of the last use, to the day
            with contextlib.suppress(OSError):
                os.utime(path)
        return payload

    def write(self, name: str, payload: bytes) -> None:
        """Keeps bytes under ``name``. On the first error it says why, and writes no more files."""
        self._open()
        if not self._may_write:
            return
        header = MAGIC + hashlib.sha256(payload).digest()
        try:
            replace_file(self._path(name), header + payload)
        except OSError as error:
            self._do_not_write(error)
        if not self._is_clean:  # once a process, and only if it compiles
            self._is_clean = True
            self._clean_up()

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    @contextlib.contextmanager
    def lock(self, name: str, what: str) -> Iterator[None]:
        """Keeps other processes from compiling ``name`` meanwhile, if the folder can be locked.

        what: the kernel's name in the line that says that this process waits.
        """
        self._open()
        handle = None
        if self._may_write:
            assert self.folder is not None
            with contextlib.suppress(OSError):
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                handle = os.open(self.folder / (name + LOCK), flags, 0o600)
        try:
            if handle is not None:
                self._wait_for(handle, what)
            yield
        finally:
            if handle is not None:
                os.close(handle)  # releases the lock

    def _wait_for(self, handle: int, what: str) -> None:
        with contextlib.suppress(OSError):  # a file system without locks: both processes compile
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not self.is_patient:
                    raise Busy from None
                self._say(f"waiting for another process that compiles {what}")
                fcntl.flock(handle, fcntl.LOCK_EX)

    def _clean_up(self) -> None:
        """Removes files that were not used for UNUSED_DAYS, and the oldest above MOST_BYTES."""
        assert self.folder is not None
        files = []
        with contextlib.suppress(OSError):  # the folder may have gone
            for path in self.folder.iterdir():
                if path.suffix in (SUFFIX, LOCK, TEMPORARY):
                    with contextlib.suppress(OSError):
                        status = path.stat()
                        files.append((status.st_mtime, status.st_size, path))
        total, oldest_kept = 0, time.time() - UNUSED_DAYS * DAY
        for used, size, path in sorted(files, reverse=True):
            total += size
            if used < oldest_kept or total > MOST_BYTES:
                with contextlib.suppress(OSError):
                    path.unlink()
