"""Whether this machine may have a GPU, and the packages that using it needs.

Nothing heavy is imported here: torch takes seconds, and most machines need no answer from it.
"""

import ctypes
from importlib.util import find_spec
from pathlib import Path

from sparsekv_cli.system.installation import install_command

GPU_PACKAGES = ("torch", "triton")
GPU_FILES = ("nvidia*", "nvhost*", "dxg", "kfd")  # in /dev: NVIDIA's, its boards', WSL's, AMD's


def may_have_device() -> bool:
    """Returns whether there is a GPU's driver; without one torch, slow to import, is not asked."""
    if any(found for name in GPU_FILES for found in Path("/dev").glob(name)):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def lacking_packages() -> str:
    """Which packages a GPU needs and are not installed, with the command; empty if none."""
    missing = [package for package in GPU_PACKAGES if find_spec(package) is None]
    return f"{' and '.join(missing)} not installed: {install_command('gpu')}" if missing else ""
