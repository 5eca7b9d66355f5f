"""Finds the source files of a kernel: its module's file and all files that the module imports.

A module gets other kernels, constants and code generators by import statements only. So a compiled
kernel is up to date if the text of these files is unchanged. An edit of one file makes only the
kernels that import it out of date.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

_IMPORT = re.compile(
    r"^\s*from\s+([\w.]+)\s+import\s+(\([^)]*\)|[^\n]*)|^\s*import\s+([^\n]+)", re.M
)
_NAME = re.compile(r"[\w.]+")


class Sources:
    """The modules of one package and their texts, which are read once.

    If a file is edited before its kernels' key is made, this process may have imported either text.
    """

    def __init__(self, package: str, root: Path) -> None:
        """root: the package's folder."""
        self._texts: dict[str, bytes] = {}
        self._files: dict[str, tuple[Path, object]] = {}  # with the time and size of its text
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            name = ".".join((package, *parts))
            self._files[name] = path, _state(path)
            self._texts[name] = path.read_bytes()
        self._imports: dict[str, list[str]] = {}
        self._digests: dict[str, str] = {}

    def digest(self, module: str) -> str:
        """Returns a hash of the text of ``module`` and of the package's modules that it imports.

        If one of them was edited, it is a random number, so that no other process has it.
        """
        if module not in self._digests:
            found = self.closure(module)
            is_edited = any(_state(path) != of for path, of in map(self._files.__getitem__, found))
            self._digests[module] = secrets.token_hex(32) if is_edited else self._hash(found)
        return self._digests[module]

    def digest_of_all(self) -> str:
        """Returns a hash of the text of all modules."""
        return self._hash(self._texts)

    def _hash(self, modules: Iterable[str]) -> str:
        result = hashlib.sha256()
        for name in sorted(modules):
            text = self._texts[name]
            result.update(f"{name} {len(text)}\n".encode() + text)
        return result.hexdigest()

    def closure(self, module: str) -> set[str]:
        """Returns ``module`` and all modules of the package that it imports, also indirectly."""
        found: set[str] = set()
        missing = [module]
        while missing:
            name = missing.pop()
            if name not in found:
                found.add(name)
                missing.extend(self._imported(name))
        return found

    def _imported(self, module: str) -> list[str]:
        if module not in self._imports:
            names = set()
            for source, imported, plain in _IMPORT.findall(self._texts[module].decode()):
                if source:  # a name may be a module itself
                    names.add(source)
                    names.update(f"{source}.{name}" for name in _NAME.findall(imported))
                else:
                    names.update(_NAME.findall(plain))
            self._imports[module] = [name for name in names if name in self._texts]
        return self._imports[module]


def _state(path: Path) -> object:
    """Returns a file's time and size; None if it has gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
