"""Keeps the compiled kernels of this package on disk, where numba finds them.

The name of a kernel's file is a hash of everything that its machine code depends on. It covers the
source files that the module imports (sources.py), the signature and the CPU. It also covers the
versions of Python, numba and LLVM. numba's own cache covers one source file only and does not check
a file's content. It writes next to the sources if it finds no other place.
"""

import contextlib
import hashlib
import pickle
import sys
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite import binding
from numba.core import caching
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from sparsekv_cli.cpu.jit.compiling.callees import is_callee, is_installed, without_ir
from sparsekv_cli.cpu.jit.compiling.sources import Sources
from sparsekv_cli.cpu.jit.compiling.store import KernelStore, default_folder

PACKAGE = "sparsekv_cli.cpu"
VERSIONS = (sys.implementation.cache_tag, numba.__version__, llvmlite.__version__)
STORE = KernelStore(default_folder())
SOURCES = Sources(PACKAGE, Path(__file__).parents[2])


def _kind() -> str:
    return "callee" if is_callee() else "kernel"


_numba_index_key = caching.FunctionCache._index_key


def _index_key(self: Any, sig: Any, codegen: Any) -> tuple[Any, ...]:
    """Keeps functions of other packages apart, as ``callees`` makes them.

    Only processes that install this package find them: numba alone would run callees.
    """
    return (*_numba_index_key(self, sig, codegen), PACKAGE, _kind())


# ``install`` (cpu/jit/install.py) sets these attributes of numba's classes.
REPLACEMENTS: tuple[tuple[Any, str, Any], ...] = (
    (caching.FunctionCache, "_index_key", _index_key),
)


class KernelCache(caching._Cache):
    """The compiled signatures of one function, for its numba dispatcher."""

    def __init__(self, py_func: Any, store: KernelStore, sources: Sources) -> None:
        self._function = py_func
        self._store = store
        self._sources = sources

    @property
    def cache_path(self) -> str:
        return str(self._store.folder)

    def flush(self) -> None:
        """Does nothing. numba calls it before it recompiles a function and replaces the file."""

    enable = disable = flush  # that numba's class has, too; nobody calls them

    @cached_property
    def _function_key(self) -> tuple[Any, ...]:
        """Returns the common key of all signatures of the function."""
        function = self._function
        cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
        bodies = [
            hashlib.sha256(data).hexdigest() for data in (function.__code__.co_code, dumps(cells))
        ]
        named = (function.__globals__.get(name) for name in function.__code__.co_names)
        declared = [each.digest() for each in named if hasattr(each, "declaration")]
        place = (function.__module__, function.__qualname__, function.__code__.co_firstlineno)
        return (VERSIONS, place, self._sources.digest(function.__module__), *bodies, *declared)

    def name(self, signature: Any, codegen: Any) -> str:
        """Returns the name of the file of one signature."""
        key = repr((self._function_key, str(signature), _kind(), codegen.magic_tuple()))
        function = f"{self._function.__module__}.{self._function.__qualname__}"
        readable = function.removeprefix(PACKAGE + ".").replace("<", "").replace(">", "")
        return f"{readable}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Returns the compiled signature, ready to run; None if it must be compiled.

        numba's own caches prepare its compiler first (``refresh``). Machine code needs only the
        functions of memory. numba prepares the rest when it compiles a function.
        """
        if not is_installed():
            raise RuntimeError("call sparsekv_cli.cpu.jit.install.install() before a kernel")
        rtsys.initialize(target_context)
        name = self.name(sig, target_context.codegen())
        payload = self._store.read(name)
        if payload is None:
            return None
        return CompileResult._rebuild(target_context, *pickle.loads(payload))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keeps a compiled signature, unless its code holds addresses of this process."""
        if data.library.has_dynamic_globals:
            return
        with without_ir():
            payload = data._reduce()
        self._store.write(self.name(sig, data.codegen), dumps(payload))

    def lock(self, sig: Any, target_context: Any) -> contextlib.AbstractContextManager[None]:
        """Lets one process at a time compile a signature that is not on disk."""
        name = self.name(sig, target_context.codegen())
        if self._store.has(name):
            return contextlib.nullcontext()
        return self._store.lock(name, self._function.__name__)


@cache
def _version() -> str:
    """Returns a hash of everything that any kernel depends on."""
    cpu = (binding.get_process_triple(), binding.get_host_cpu_name())
    key = repr((VERSIONS, SOURCES.digest_of_all(), cpu))
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def is_marked(name: str) -> bool:
    """Returns whether ``mark(name)`` was called with the present sources, versions and CPU."""
    return STORE.has(f"{name}-{_version()}")


def mark(name: str) -> None:
    """Notes on disk that the kernels of ``name`` are compiled."""
    STORE.write(f"{name}-{_version()}", b"")
