"""Prints what the machine has: versions, the hash of Triton's library, GPU, processor, memory."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

NAMES = (
    "torch", "triton", "numba", "llvmlite", "numpy", "gguf", "tokenizers", "sentencepiece", "rich",
    "click", "jinja2", "prompt_toolkit", "wcwidth", "threadpoolctl", "pytest", "pytest-xdist",
)  # fmt: skip


def library_hash() -> str:
    """SHA-256 of libtriton.so, on which the names of compiled kernels depend."""
    import triton

    path = Path(triton.__file__).parent / "_C" / "libtriton.so"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def main() -> None:
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} CPU cores, {platform.platform()}")
    print(", ".join(f"{name} {version_of(name)}" for name in NAMES))
    print(f"libtriton.so {library_hash()}")
    for command in (["nvidia-smi", "-L"], ["lscpu"], ["free", "-g"]):
        try:
            text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        except OSError as error:
            text = str(error)
        lines = [x for x in text.splitlines() if not x.startswith(("Vulnerab", "NUMA"))]
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
