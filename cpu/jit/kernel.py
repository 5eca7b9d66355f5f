"""The decorator of kernels. It is numba's ``njit`` with this package's cache on disk.

A declared kernel compiles at its first call. ``install`` (install.py) must have run by then.
"""

from collections.abc import Callable
from typing import Any

import numba
from numba.core import ccallback, sigutils

from sparsekv_cli.cpu.jit import features
from sparsekv_cli.cpu.jit.compiling import kernel_cache

if features.architecture() == "aarch64":
    # numba reads its setting at the first declaration. LLVM's list lacks some features.
    numba.config.CPU_FEATURES = features.flattened()


def _kept(function: Callable[..., Any]) -> kernel_cache.KernelCache:
    return kernel_cache.KernelCache(function, kernel_cache.STORE, kernel_cache.SOURCES)


def njit(*, cache: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator with numba's options.

    cache: whether KernelCache keeps the machine code on disk.
    """

    def declared(function: Callable[..., Any]) -> Any:
        kernel = numba.njit(**options)(function)
        if cache:
            kernel._cache = _kept(function)
        return kernel

    return declared


def callback(function: Callable[..., Any], signature: Any) -> Any:
    """Returns numba's ``cfunc`` of ``function``, compiled or loaded by KernelCache."""
    entry = ccallback.CFunc(function, sigutils.normalize_signature(signature), {}, {})
    entry._cache = _kept(function)
    entry.compile()
    return entry
