"""What scripts/gpu/pack carries to a machine with a GPU, and how it is used there."""

import hashlib
import json
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CARRY = ROOT / "build" / "gpu-carry"
ENVIRONMENT = ROOT / "build" / "gpu-environment"  # of the other machine's Python, made by pack
MODEL = CARRY / "model.gguf"
ROWS = CARRY / "rows.npz"  # of gpu_rows.py
KERNELS = CARRY / "kernels.tar.xz"
MANIFEST = CARRY / "manifest.json"
# Triton's cache, where kernels are compiled and used: its files name each other by whole paths.
CACHE = Path("/tmp/sparsekv-cli-triton")
KEPT = (".cubin", ".json")  # of a compiled kernel: what is needed to launch it


def run_in(environment: Path) -> None:
    """Starts this command again with the environment's Python, unless that runs it already."""
    python = environment / "bin" / "python"
    if Path(sys.prefix).resolve() != environment.resolve() and python.exists():
        os.execv(python, [str(python), *sys.argv])


def library_hash() -> str:
    """SHA-256 of libtriton.so, on which the names of compiled kernels depend; empty without it."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin).parent / "_C" / "libtriton.so"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def manifest() -> dict[str, str]:
    """What ``pack`` has noted; empty if it has not run."""
    return json.loads(MANIFEST.read_text(encoding="utf-8")) if MANIFEST.exists() else {}


def kernels_fit() -> bool:
    """Whether the carried kernels are those that this machine's Triton looks for."""
    return KERNELS.exists() and manifest().get("libtriton.so") == library_hash()


def pack_kernels(used: Collection[str]) -> int:
    """Puts the folders ``used`` of Triton's cache into an archive; the number of kernels.

    The cache loses its other folders, so it does not grow.
    """
    for folder in CACHE.iterdir():
        if folder.name not in used:
            shutil.rmtree(folder)
    files = sorted(path for name in used for path in (CACHE / name).iterdir())
    files = [path for path in files if path.suffix in KEPT]
    with tarfile.open(KERNELS, "w:xz") as tar:
        for path in files:
            tar.add(path, path.relative_to(CACHE))
    return sum(path.suffix == ".cubin" for path in files)


def unpack_kernels() -> None:
    with tarfile.open(KERNELS) as tar:
        tar.extractall(CACHE, filter="data")


def make_site(site: Path) -> None:
    """A folder with the package as it is installed, by links, and the carried wheels."""
    package = site / "sparsekv_cli"
    package.mkdir(parents=True)
    for part in (ROOT / "sparsekv_cli").iterdir():
        (package / part.name).symlink_to(part)
    for folder in ("cpu", "kernels", "models"):
        (package / folder).symlink_to(ROOT / folder)
    for wheel in sorted(CARRY.glob("*.whl")):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(site)
