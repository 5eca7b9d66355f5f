"""The internals of numba that the kernels' compilation replaces or calls are the known ones.

``python tests/cpu/jit/test_numba.py`` writes the known ones anew. docs/kernels.md says when to.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import numba
from numba.core import caching, ccallback, codegen, compiler, dispatcher, environment
from numba.np.ufunc import parallel

from sparsekv_cli.cpu.jit.install import REPLACEMENTS

KNOWN = Path(__file__).parents[2] / "data" / "numba.json"
# What the replacements call, and what hands a parallel loop to numba_parallel_for.
CALLED: tuple[tuple[Any, str], ...] = (
    (codegen.JITCodeLibrary, "_ensure_finalized"),
    (codegen.JITCodeLibrary, "_finalize_dynamic_globals"),
    (codegen.JITCodeLibrary, "_verify_declare_only_symbols"),
    (codegen.JITCodeLibrary, "_finalize_specific"),
    (codegen.JITCodeLibrary, "finalize"),
    (codegen.JITCodeLibrary, "_get_compiled_object"),
    (codegen.JITCodeLibrary, "_unserialize"),
    (codegen.JITCodeLibrary, "serialize_using_bitcode"),
    (codegen.JITCPUCodegen, "_module_pass_manager"),
    (codegen.JITCPUCodegen, "_add_module"),
    (codegen.JITCPUCodegen, "magic_tuple"),
    (compiler.CompileResult, "_reduce"),
    (compiler.CompileResult, "_rebuild"),
    (dispatcher.Dispatcher, "enable_caching"),
    (dispatcher._DispatcherBase, "_compile_for_args"),
    (ccallback.CFunc, "__init__"),
    (caching, "_Cache"),
    (environment, "lookup_environment"),
    (parallel, "build_gufunc_wrapper"),
    (parallel, "build_gufunc_kernel"),
    (parallel, "_launch_threads"),
)


def text_of(owner: Any, name: str) -> str:
    """The text of a function in numba's files, whatever the owner has in its place by now."""
    for kind in (owner,) if inspect.ismodule(owner) else owner.__mro__:
        module = kind.__name__ if inspect.ismodule(kind) else kind.__module__
        if not module.startswith("numba."):
            continue
        text = inspect.getsource(sys.modules[module])
        body: Any = ast.parse(text).body
        if kind is not sys.modules[module]:
            body = next(each.body for each in body if getattr(each, "name", "") == kind.__name__)
        for each in body:
            if getattr(each, "name", "") == name:
                return str(ast.get_source_segment(text, each))
    raise LookupError(f"numba {numba.__version__} has no {owner.__name__}.{name}")


def found() -> dict[str, str]:
    """A hash of each text, by name."""
    names = [(owner, name) for owner, name, _ in REPLACEMENTS] + list(CALLED)
    return {
        f"{owner.__name__}.{name}": hashlib.sha256(text_of(owner, name).encode()).hexdigest()[:16]
        for owner, name in names
    }


def test_numba_is_the_one_that_is_replaced():
    known = json.loads(KNOWN.read_text("utf-8"))
    here = found()
    assert here.keys() == known["internals"].keys()
    changed = [name for name, digest in here.items() if digest != known["internals"][name]]
    told = f"numba {numba.__version__} is not {known['version']}: {', '.join(changed)} changed"
    assert not changed, f"{told}; docs/kernels.md says how to move on"


if __name__ == "__main__":
    KNOWN.write_text(
        json.dumps({"version": numba.__version__, "internals": found()}, indent=1) + "\n", "utf-8"
    )
