"""Whether this machine may have a GPU, and which packages are missing to use it.

Nothing slow is imported here: torch takes seconds, and most machines do not need it.
"""

import ctypes
from importlib.util import find_spec
from pathlib import Path

from sparsekv_cli.system.installation import install_command

GPU_PACKAGES = ("torch", "triton")
# files in /dev of NVIDIA's drivers, its boards, WSL and AMD
GPU_FILES = ("nvidia*", "nvhost*", "dxg", "kfd")  # in /dev: NVIDIA's, its boards', WSL's, AMD's


def may_have_device() -> bool:
    """Returns whether a GPU's driver is there. If not, torch need not be imported."""
    if any(found for name in GPU_FILES for found in Path("/dev").glob(name)):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def lacking_packages() -> str:
    """Returns which packages for a GPU are missing and how to install them; "" if none is."""
    missing = [package for package in GPU_PACKAGES if find_spec(package) is None]
    return f"{' and '.join(missing)} not installed: {install_command('gpu')}" if missing else ""
