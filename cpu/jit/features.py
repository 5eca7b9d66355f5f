"""The CPU's features, by LLVM's names. Nothing here imports numba."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

from llvmlite import binding

# getauxval of Linux reports an ARM CPU's byte products: (entry, bit).
ARM_PRODUCTS = {"dotprod": (16, 20), "i8mm": (26, 13)}


def architecture() -> str:
    """Returns ``x86_64``, ``aarch64`` or another name."""
    return binding.get_default_triple().split("-")[0].replace("arm64", "aarch64")


@cache
def cpu_features() -> dict[str, bool]:
    """Returns LLVM's features, and on ARM also sdot (dotprod) and usdot (i8mm).

    LLVM does not detect these two. On Apple's CPUs they follow from the CPU's name.
    """
    found = dict(binding.get_host_cpu_features())  # takes some milliseconds
    if architecture() != "aarch64":
        return found
    if sys.platform == "linux":
        getauxval = ctypes.CDLL(None).getauxval
        getauxval.restype = ctypes.c_ulong
        for name, (entry, bit) in ARM_PRODUCTS.items():
            found[name] = bool(getauxval(ctypes.c_ulong(entry)) >> bit & 1)
    elif binding.get_host_cpu_name().startswith("apple-m"):
        found |= {"dotprod": True, "i8mm": binding.get_host_cpu_name() != "apple-m1"}
    return found


def flattened() -> str:
    """Returns the features in LLVM's notation: ``+name`` or ``-name``, separated by commas."""
    return ",".join(f"{'+' if has else '-'}{name}" for name, has in cpu_features().items())
