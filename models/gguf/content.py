"""Identifies a model by a hash of all its bytes. The hash is computed once and stored.

Reading a large model takes seconds, so a thread does it. A file in the user's cache has the hashes.
Its keys are device, inode, size and both times of change of a file.
"""

import contextlib
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.part import GGUFPart
from sparsekv_cli.system.files import is_private, open_regular, replace_file, user_cache

DIGITS = 32
SMALL = 16 << 20  # bytes; a smaller model is read at once, and its hash is not stored
BUFFER = 1 << 20  # bytes
MOST_REMEMBERED = 256  # files whose hashes are stored
# Seconds that must have passed since a file's last change before its hash is stored. Until then the
# file may change again without a new time in the file system's clock.
SETTLED = 2.0


class ModelContent:
    """The hash of a model's bytes. It is valid while no file of the model changes. Thread-safe."""

    def __init__(self, parts: Sequence[GGUFPart]) -> None:
        self._parts = tuple(parts)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._digest: str | None = None
        self._failure = ""

    def __eq__(self, other: object) -> bool:
        """Whether both are of the same unchanged files."""
        return isinstance(other, ModelContent) and self._marks == other._marks

    def __hash__(self) -> int:
        return hash(self._marks)

    @property
    def _marks(self) -> tuple[str, ...]:
        return tuple(part.mark for part in self._parts)

    def known(self) -> str | None:
        """Returns the hash, 32 hex digits; None while it is not known.

        The first call starts the reading. It also returns None if a file cannot be read or has
        changed since it was opened.
        """
        if not all(part.is_unchanged() for part in self._parts):
            return None
        with self._lock:
            if self._digest is None and self._thread is None and not self._failure:
                self._begin()
        return self._digest

    def wait(self) -> str:
        """Returns the hash, after waiting for it.

        Raises SparseKVError for an unreadable or changed file.
        """
        found = self.known()
        if found is None and self._thread is not None:
            self._thread.join()
            found = self.known()
        if found is None:
            path = self._parts[0].path
            why = self._failure or "was changed while in use; start again"
            raise SparseKVError(f"{path}: {why}")
        return found

    def _begin(self) -> None:
        """Computes a small model's hash at once, or finds a stored hash, or starts a thread."""
        if sum(part.size for part in self._parts) <= SMALL:
            self._read(is_small=True)
            return
        remembered = _remembered()
        found = [remembered.get(part.mark, "") for part in self._parts]
        if all(found):
            self._digest = _joined(found)
            return
        self._thread = threading.Thread(target=self._read, name="model hash", daemon=True)
        self._thread.start()

    def _read(self, is_small: bool = False) -> None:
        now = time.time()
        try:
            found = [_hash_of(part) for part in self._parts]
        except (OSError, ValueError) as error:  # ValueError: the model was closed meanwhile
            self._failure = f"cannot be read: {getattr(error, 'strerror', None) or error}"
            return
        if all(part.is_unchanged() for part in self._parts):
            if not is_small and all(part.changed < now - SETTLED for part in self._parts):
                marks = [part.mark for part in self._parts]
                _remember(dict(zip(marks, found, strict=True)))
            self._digest = _joined(found)


def _hash_of(part: GGUFPart) -> str:
    """Returns the SHA-256 of a file, 64 hex digits. Raises OSError and ValueError."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(BUFFER))
    with part.reopened() as file:
        while n := file.readinto(buffer):
            digest.update(buffer[:n])
    return digest.hexdigest()


def _joined(digests: Sequence[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:DIGITS]


def _remembered() -> dict[str, str]:
    """Returns the stored hashes, mark of a file -> hash, the oldest first.

    They are empty if the cache is damaged or not private to the user.
    """
    path = user_cache("hashes.json")
    if path is None:
        return {}
    try:
        with open_regular(path) as file:
            found = json.loads(file.read() if is_private(os.fstat(file.fileno())) else b"{}")
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {mark: digest for mark, digest in found.items() if _is_digest(digest)}


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value))


def _remember(found: Mapping[str, str]) -> None:
    """Adds hashes to the user's cache. If that fails, the files are read again next time."""
    path = user_cache("hashes.json")
    if path is None or not found:
        return
    hashes = {**_remembered(), **found}
    kept = dict(list(hashes.items())[-MOST_REMEMBERED:])
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, json.dumps(kept, indent=0).encode())
