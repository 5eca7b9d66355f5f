"""Multicore CPU kernels (numba, LLVM vector IR), each with a numpy reference beside it.

Importing this package points numba's on-disk cache at a folder of the user's cache directory that
is named after the text of all kernel files. numba keys its own cache on the file that defines a
function only, so an edit of a file that the function merely calls would otherwise go unnoticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
from pathlib import Path


def _kernel_cache_folder() -> Path:
    """Folder for this version of the kernels; those of other versions beside it are removed."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsekv-cli"
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(here.rglob("*.py")):
        digest.update(path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes())
    folder = base / f"numba-{digest.hexdigest()[:16]}"
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(base.glob("numba-*"), key=lambda path: path.stat().st_mtime)[:-3]:
            shutil.rmtree(old, ignore_errors=True)
    return folder


if "NUMBA_CACHE_DIR" not in os.environ:
    with contextlib.suppress(
        OSError, RuntimeError
    ):  # no writable home: numba chooses a place itself
        os.environ["NUMBA_CACHE_DIR"] = str(_kernel_cache_folder())
os.environ.setdefault("NUMBA_THREADING_LAYER_PRIORITY", "omp tbb workqueue")
# How long an idle worker of libgomp spins before it sleeps: some tens of microseconds bridge the
# calls of a decode step. libgomp's own default, milliseconds, makes torch's and numba's pools wait
# for each other in prefill, and costs a scheduler slice at every barrier when the machine is busy.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
if "numba" in sys.modules:  # which has read these already
    sys.modules["numba"].config.reload_config()
