"""The folders that the program uses: their paths, and whether it can read and write them."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.sources.folder import models_folder
from sparsekv_cli.models.sources.hub import cache_folder
from sparsekv_cli.system.files import is_private, user_cache

#: Name -> its path; None where there is no home folder.
FOLDERS: dict[str, Callable[[], Path | None]] = {
    "models": models_folder,
    "hub": cache_folder,
    "prefixes": lambda: user_cache("prefixes"),
    "kernels": lambda: user_cache("kernels"),
    "calibration": lambda: user_cache("calibration"),
    "speeds": lambda: user_cache("speeds"),
}
#: Files in these are used only if nobody else can write to them.
PRIVATE = ("prefixes", "kernels")


def folders(problems: list[str]) -> list[dict[str, Any]]:
    """Returns a description of each folder in FOLDERS. Faults are added to ``problems``."""
    found = []
    for name, locate in FOLDERS.items():
        try:
            path = locate()
        except (RuntimeError, SparseKVError):  # where there is no home folder
            path = None
        folder = describe(name, path)
        found.append(folder)
        if folder["problem"]:
            problems.append(f"folder {name}: {folder['problem']}")
    return found


def describe(name: str, path: Path | None) -> dict[str, Any]:
    """Returns the description of a folder. path: None: there is no home folder.

    ``files`` and ``bytes`` count the regular files directly in it. ``writable``: whether files can
    be made there, or, for a missing folder, whether it can be made.
    """
    folder: dict[str, Any] = {"name": name, "path": None, "exists": False, "writable": False}
    folder |= {"files": None, "bytes": None, "problem": None}
    if path is None:
        return folder | {"problem": "there is no home folder"}
    folder["path"] = str(path)
    try:
        status = os.stat(path)
    except FileNotFoundError:
        folder["writable"] = _can_be_made(path)
        return folder | {"problem": None if folder["writable"] else "it cannot be made"}
    except OSError as error:
        return folder | {"problem": f"it cannot be read: {error.strerror}"}
    folder["exists"] = True
    if not stat.S_ISDIR(status.st_mode):
        return folder | {"problem": "it is no folder"}
    folder["writable"] = os.access(path, os.W_OK | os.X_OK)
    try:
        folder["files"], folder["bytes"] = _counted(path)
    except OSError as error:
        return folder | {"problem": f"it cannot be read: {error.strerror}"}
    if name in PRIVATE and not is_private(status):
        folder["problem"] = "it is not used: it belongs to another user or others may write to it"
    elif not folder["writable"]:
        folder["problem"] = "it cannot be written"
    return folder


def _can_be_made(path: Path) -> bool:
    """Returns whether the nearest existing parent is a folder in which the user may write."""
    for parent in path.absolute().parents:
        try:
            status = os.stat(parent)
        except FileNotFoundError:
            continue
        except OSError:
            return False
        return stat.S_ISDIR(status.st_mode) and os.access(parent, os.W_OK | os.X_OK)
    return False


def _counted(path: Path) -> tuple[int, int]:
    """Returns the number and the bytes of the regular files directly in a folder."""
    sizes = []
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                if entry.is_file():
                    sizes.append(entry.stat().st_size)
            except OSError:
                continue  # the file has just been removed, or is a link to nothing
    return len(sizes), sum(sizes)
