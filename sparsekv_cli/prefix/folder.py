"""The folder of the prefix cache: who may read it, what lies in it, what goes when it is full.

Prompts are private: the folder has mode 0700 and its files 0600. A fault of the disk is a line and
never stops a run.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from sparsekv_cli.prefix.blocks import (
    SNAPSHOT,
    SUFFIX,
    TEMPORARY,
    BlockHeader,
    DamagedError,
    read_header,
)

WRITABLE_BY_OTHERS = 0o022
HOUR = 3600  # seconds after which a file that is being written has been left behind


def default_prefix_folder() -> Path | None:
    """Where the user's prompts are kept; None where there is no home folder."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base) / "sparsekv-cli" / "prefixes"


class KeptFile(NamedTuple):
    """A file of the folder: when it was used last (seconds), and its bytes."""

    path: Path
    used: float
    size: int


class PrefixFolder:
    """Files by name in one folder, which is made when something is first kept.

    limit: bytes of all files. warn: told of what is wrong, a line each.
    """

    def __init__(self, path: Path, limit: int, warn: Callable[[str], None]) -> None:
        self.path, self.limit, self.warn = path, limit, warn

    def is_usable(self) -> bool:
        """Whether the folder exists, belongs to the user, and nobody else may write to it."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        if not hasattr(os, "geteuid"):
            return True
        if status.st_uid == os.geteuid() and not status.st_mode & WRITABLE_BY_OTHERS:
            return True
        self.warn(
            f"prompts in {self.path} are not used: the folder belongs to another user or others "
            "may write to it; remove it, or chmod go-w it"
        )
        return False

    def make(self) -> bool:
        """Makes the folder if there is none; whether it was made. OSError if it cannot be."""
        if self.path.is_dir():
            return False
        self.path.mkdir(mode=0o700, parents=True)
        return True

    def children(self) -> dict[str, list[str]]:
        """The names of all blocks, by the parent that they begin with."""
        found: dict[str, list[str]] = {}
        with contextlib.suppress(OSError):
            for name in os.listdir(self.path):
                if name.endswith(SUFFIX):
                    found.setdefault(name.partition("-")[0], []).append(name)
        return found

    def header(self, name: str) -> BlockHeader | None:
        """What a file says of itself; None if it is not there. A damaged one is removed."""
        try:
            with open(self.path / name, "rb", buffering=0) as file:
                header = read_header(file)
            if header.name != name:
                raise DamagedError("it has another block's name")
        except DamagedError as error:
            self.remove_damaged(name, error)
            return None
        except OSError:
            return None
        return header

    def remove_damaged(self, name: str, error: Exception) -> None:
        what = (isinstance(error, OSError) and error.strerror) or error
        self.warn(f"{self.path / name}: {what}; it is removed, and its tokens are computed again")
        self.remove([name])

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                (self.path / name).unlink()

    def touch(self, names: Iterable[str]) -> None:
        """Marks blocks of one prompt as used; the first ones last, for they serve more prompts."""
        for name in reversed(list(names)):
            with contextlib.suppress(OSError):
                os.utime(self.path / name)

    def entries(self) -> list[KeptFile]:
        """All files, the ones that were used last first; those left behind are removed."""
        entries = []
        with contextlib.suppress(OSError):
            for path in self.path.iterdir():
                with contextlib.suppress(OSError):
                    status = path.stat()
                    if path.suffix == TEMPORARY and status.st_mtime < time.time() - HOUR:
                        path.unlink()
                    elif path.suffix in (SUFFIX, SNAPSHOT, TEMPORARY):
                        entries.append(KeptFile(path, status.st_mtime, status.st_size))
        return sorted(entries, key=lambda entry: entry.used, reverse=True)

    def trim(self) -> None:
        """Removes the files that were not used for the longest time, down to the limit."""
        total = 0
        for path, _, size in self.entries():
            total += size
            if total > self.limit:
                self.remove([path.name])

    def clear(self) -> tuple[int, int]:
        """Removes all files; how many, and their bytes."""
        entries = self.entries()
        self.remove(entry.path.name for entry in entries)
        left = {entry.path for entry in self.entries()}
        gone = [entry for entry in entries if entry.path not in left]
        return len(gone), sum(entry.size for entry in gone)
