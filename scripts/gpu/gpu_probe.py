"""Prints what the machine has: versions, the hash of Triton's library, GPU, processor, memory."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_carry import kernels_fit, library_hash

NAMES = (
    "torch", "triton", "numba", "llvmlite", "numpy", "gguf", "tokenizers", "sentencepiece", "rich",
    "click", "jinja2", "prompt_toolkit", "wcwidth", "threadpoolctl", "pytest", "pytest-xdist",
)  # fmt: skip


def version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def main() -> None:
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} CPU cores, {platform.platform()}")
    print(", ".join(f"{name} {version_of(name)}" for name in NAMES))
    fits = "those carried fit" if kernels_fit() else "none are carried that fit"
    print(f"libtriton.so {library_hash()}: compiled kernels: {fits}")
    for command in (["nvidia-smi", "-L"], ["lscpu"], ["free", "-g"]):
        try:
            text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        except OSError as error:
            text = str(error)
        lines = [x for x in text.splitlines() if not x.startswith(("Vulnerab", "NUMA"))]
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
