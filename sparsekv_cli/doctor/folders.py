"""The folders that the program reads and writes: where they are, and whether it can use them."""

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
    """Returns a description of each folder, in the order of FOLDERS."""
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
    """Returns a folder's fields. ``files`` and ``bytes`` count its regular files.

    ``writable``: whether files can be made there; of a folder that is missing, whether it can be
    made.
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
    """Returns whether the nearest parent that exists is a folder that can be written."""
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
    """Regular files directly in a folder, and their bytes."""
    sizes = []
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                if entry.is_file():
                    sizes.append(entry.stat().st_size)
            except OSError:
                continue  # it has just been removed, or is a link to nothing
    return len(sizes), sum(sizes)
