"""The folder of the prefix cache: its permissions, its files, and removals when it is full.

Prompts are private: the folder has mode 0700 and its files 0600. A fault of the disk is a remark
and never stops a run. Files of other programs in the folder are neither read nor removed.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.prefix.blocks import (
    BLOCK,
    BLOCK_NAME,
    SUFFIX,
    TEMPORARY,
    BlockHeader,
    DamagedError,
    block_hash,
    is_own,
    read_header,
)
from sparsekv_cli.system.files import is_private, open_regular, user_cache

HOUR = 3600  # seconds
MOST_BEHIND = 4096  # tokens of a kept prompt that are compared with another's
MOST_BY_DEFAULT = 16 << 30  # bytes of a folder without a limit of the user's


def default_prefix_folder() -> Path | None:
    """Returns the folder of the user's prompts; None: there is no home folder."""
    return user_cache("prefixes")


def default_limit(path: Path) -> int:
    """Returns a tenth of the bytes that are free or taken by the folder, at most 16 GiB."""
    kept = 0
    with contextlib.suppress(OSError), os.scandir(path) as found:
        kept = sum(each.stat().st_size for each in found if BLOCK_NAME.fullmatch(each.name))
    place = next(each for each in (path, *path.absolute().parents) if each.exists())
    return min(MOST_BY_DEFAULT, (shutil.disk_usage(place).free + kept) // 10)


def limit_of(path: Path, gib: float | None) -> int:
    """Returns the bytes of a limit in GiB. None: ``default_limit``."""
    return default_limit(path) if gib is None else int(gib * 2**30)


def check_folder(path: Path) -> None:
    """Raises SparseKVError for a folder that holds files, none of which is the prefix cache's."""
    try:
        found = sorted(path.iterdir())
    except OSError:
        return  # an error is reported at the first use
    if found and not any(map(is_own, found)):
        raise SparseKVError(
            f"--cache-dir {path}: holds files that are not the prefix cache's, such as "
            f"{found[0].name}; name an empty folder, or a new one"
        )


class KeptFile(NamedTuple):
    """A file of the folder: when it was used last (seconds), and its bytes."""

    path: Path
    used: float
    size: int


class PrefixFolder:
    """Files by name in one folder, which is made when the first prompt is kept.

    limit: bytes of all files. warn: called with a line for each problem.
    """

    def __init__(self, path: Path, limit: int, warn: Callable[[str], None]) -> None:
        self.path, self.limit, self.warn = path, limit, warn

    def is_usable(self) -> bool:
        """Returns whether the folder exists, is the user's, and only the user may write to it."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        if is_private(status):
            return True
        self.warn(
            f"prompts in {self.path} are not used: the folder belongs to another user or others "
            "may write to it; remove it, or chmod go-w it"
        )
        return False

    def make(self) -> bool:
        """Makes the folder if there is none. Returns whether it did. Raises OSError."""
        try:
            self.path.mkdir(mode=0o700, parents=True)
        except FileExistsError:  # another process may just have made it
            if not self.path.is_dir():
                raise
            return False
        return True

    def children(self) -> dict[str, list[str]]:
        """Returns the names of all blocks, by the parent that they begin with."""
        found: dict[str, list[str]] = {}
        with contextlib.suppress(OSError):
            for name in os.listdir(self.path):
                if name.endswith(SUFFIX) and BLOCK_NAME.fullmatch(name):
                    found.setdefault(name.partition("-")[0], []).append(name)
        return found

    def read_header(self, name: str) -> BlockHeader:
        """Returns the header of a file. Raises OSError and DamagedError."""
        with open_regular(self.path / name) as file:
            header = read_header(file)
        if header.name != name:
            raise DamagedError("it has another block's name")
        if len(header.tokens) > BLOCK:
            raise DamagedError(f"it has {len(header.tokens)} tokens; a block has at most {BLOCK}")
        return header

    def header(self, name: str) -> BlockHeader | None:
        """Returns the header of a file; None if there is no file. A damaged one is removed."""
        try:
            return self.read_header(name)
        except DamagedError as error:
            self.remove_damaged(name, error)
        except OSError:
            pass
        return None

    def tokens_behind(
        self, n: int, headers: Sequence[BlockHeader], parents: Iterable[str],
        children: Mapping[str, Sequence[str]],
    ) -> list[int]:  # fmt: skip
        """Returns tokens of a kept prompt from position n on, MOST_BEHIND or a few more.

        headers: of the blocks with its first n tokens. parents: the possible parents of the next
        block, if the blocks hold n tokens exactly. children: of the folder.
        """
        goes_on = bool(headers) and n < headers[-1].first + len(headers[-1].tokens)
        names = [name for parent in parents for name in children.get(parent, ())]
        header = headers[-1] if goes_on else next(filter(None, map(self.header, names)), None)
        tokens: list[int] = []
        while header is not None and len(tokens) < MOST_BEHIND:
            tokens += header.tokens[max(0, n - header.first) :]
            names = [*children.get(block_hash(header.parent, header.tokens), ())]
            header = next(filter(None, map(self.header, names)), None)
        return tokens

    def remove_damaged(self, name: str, error: Exception) -> None:
        """Reports a file's fault, and removes it if it is the program's."""
        what = (isinstance(error, OSError) and error.strerror) or error
        done = "removed" if is_own(self.path / name) else "left as it is"
        self.warn(f"{self.path / name}: {what}; it is {done}, and its tokens are computed again")
        self.remove([name])

    def remove(self, names: Iterable[str]) -> None:
        """Removes files; those that are not the program's are left."""
        for name in names:
            with contextlib.suppress(OSError):
                if is_own(self.path / name):
                    (self.path / name).unlink()

    def touch(self, names: Iterable[str]) -> None:
        """Marks blocks of one prompt as used, the first ones last: more prompts use them."""
        for name in reversed(list(names)):
            with contextlib.suppress(OSError):
                os.utime(self.path / name)

    def entries(self) -> list[KeptFile]:
        """Returns all files of the program, the most recently used first.

        A file with a future time comes last: the clock went back, and its last use is unknown.
        """
        entries, soon = [], time.time() + HOUR
        with contextlib.suppress(OSError):
            for path in filter(is_own, self.path.iterdir()):
                with contextlib.suppress(OSError):
                    status = path.stat()
                    used = status.st_mtime if status.st_mtime < soon else 0.0
                    entries.append(KeptFile(path, used, status.st_size))
        return sorted(entries, key=lambda entry: entry.used, reverse=True)

    def trim(self) -> None:
        """Removes files of killed processes, and beyond the limit the least recently used ones."""
        self.remove_leftovers()
        total = 0
        for path, _, size in self.entries():
            total += size
            if total > self.limit:
                self.remove([path.name])

    def remove_leftovers(self) -> None:
        """Removes files of killed processes. A living one may need a day for a prompt."""
        for path, used, _ in self.entries():
            if path.suffix == TEMPORARY and used < time.time() - 24 * HOUR:
                self.remove([path.name])

    def clear(self) -> tuple[int, int, int]:
        """Removes all files. Returns their number and bytes, and how many are left of them."""
        entries = self.entries()
        self.remove(entry.path.name for entry in entries)
        gone = [entry for entry in entries if not entry.path.exists()]
        return len(gone), sum(entry.size for entry in gone), len(entries) - len(gone)
