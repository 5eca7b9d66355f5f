"""Makes numba compile machine code only for functions that Python calls or that need an address.

A kernel holds copies of all functions that it calls, its callees. numba alone optimises each callee
in full and makes machine code and wrappers for it. Here a callee stays lightly optimised IR, which
kernels copy. This halves the time of a cold start. A function that is both a kernel and a callee is
compiled twice. So a kernel's code does not depend on earlier compilations.
"""

import contextlib
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from llvmlite import binding
from numba.core import ccallback, codegen, cpu, dispatcher, sigutils, typed_passes
from numba.core.compiler_lock import global_compiler_lock
from numba.core.environment import lookup_environment

ENVIRONMENT = "_ZN08NumbaEnv"  # prefix of the names of environments in a module
NAMES = "names"  # the source file of modules that define names only


class _Progress:
    """The current compilation. numba's compiler lock lets one thread at a time compile."""

    n_functions = 0  # functions in compilation: a kernel, its callee, a callee of that, ...
    n_lowered = 0  # functions, and bodies of parallel loops, whose IR is being written
    n_without_ir = 0  # kernels that are being kept without their IR
    interrupted = False


_now = _Progress()


def is_callee() -> bool:
    """Returns whether the function in compilation is a callee of a kernel in compilation."""
    return _now.n_functions > 1 or _now.n_lowered > 1


class _Callee:
    """Replaces a callee's entry point. Only kernels can call a callee."""


@contextlib.contextmanager
def _one_more(counter: str) -> Iterator[None]:
    before = getattr(_now, counter)
    setattr(_now, counter, before + 1)
    try:
        yield
    finally:
        setattr(_now, counter, before)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Delays Ctrl-C until the current function is compiled. Inside LLVM it would be lost."""
    handler = signal.getsignal(signal.SIGINT)
    if (
        threading.current_thread() is not threading.main_thread()
        or handler is not signal.default_int_handler
    ):
        yield
        return

    def note(*_: Any) -> None:
        _now.interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        _stop_if_interrupted()


def _stop_if_interrupted() -> None:
    if _now.interrupted:
        _now.interrupted = False
        raise KeyboardInterrupt


# --- libraries: LLVM modules on the way to machine code -------------------------------------------


def _finalize(self: Any) -> None:
    """Replaces numba's ``_finalize_final_module``, which makes machine code at once."""
    self._finalize_dynamic_globals()
    self._verify_declare_only_symbols()
    self._final_module._CPUCodeLibrary__library = weakref.proxy(self)
    self._is_machine_code = False
    self._finalized = True


def _optimize_lightly(self: Any) -> None:
    """Runs the first half of numba's optimisation: inlines functions, simplifies the result."""
    manager, builder = self._codegen._module_pass_manager(
        loop_vectorize=self._codegen._loopvect,
        slp_vectorize=False,
        opt=self._codegen._opt_level,
        cost="cheap",
    )
    manager.run(self._final_module, builder)
    self._is_light = True


def _make_machine_code(self: Any) -> None:
    self._ensure_finalized()
    if self._is_machine_code:
        return
    self._is_machine_code = True
    if getattr(self, "_is_light", False):
        manager, builder = self._codegen._module_pass_manager()
        manager.run(self._final_module, builder)
    self._codegen._add_module(self._final_module)
    self._finalize_specific()
    for variable in self._final_module.global_variables:
        if variable.name.startswith(ENVIRONMENT):
            environment = lookup_environment(variable.name)
            if environment is not None:
                self._codegen.set_env(variable.name, environment)


def _pointer_to_function(self: Any, name: str) -> int:
    _make_machine_code(self)
    return _numba_pointer_to_function(self, name)


def _serialize(self: Any) -> tuple[Any, ...]:
    if is_callee():
        return self.serialize_using_bitcode()
    _make_machine_code(self)
    if not _now.n_without_ir:
        return _numba_serialize(self)
    return (self.name, "object", (self._get_compiled_object(), _names_of(self._final_module)))


def without_ir() -> contextlib.AbstractContextManager[None]:
    """Keeps kernels without their IR. Then they can be called, but no function can copy them."""
    return _one_more("n_without_ir")


def _names_of(module: Any) -> bytes:
    """Returns bitcode that defines a module's names and nothing else.

    numba keeps a kernel's whole IR for functions that copy it. Only callees are copied here, and a
    program's start would spend a tenth of its time on reading that IR.
    """
    values = (*module.functions, *module.global_variables)
    names = [value.name for value in values if not value.is_declaration]
    lines = [f'source_filename = "{NAMES}"', *(f'@"{name}" = global i8 0' for name in names)]
    return binding.parse_assembly("\n".join(lines)).as_bitcode()


def _module_for_linking(self: Any) -> Any:
    """Raises RuntimeError for a kernel that was loaded without its IR."""
    module = _numba_module_for_linking(self)
    if module.source_file == NAMES:
        raise RuntimeError(f"{self.name} is called by a function that is no numba.njit function")
    return module


def _set_environment(self: Any, name: str, environment: Any) -> None:
    """Skips callees. ``_make_machine_code`` sets their environments in each kernel."""
    if self._engine.is_symbol_defined(name):
        _numba_set_environment(self, name, environment)


# --- functions ------------------------------------------------------------------------------------


def _run_lowering(self: Any, state: Any) -> bool:
    _stop_if_interrupted()
    with _one_more("n_lowered"):
        if is_callee():
            state.flags = state.flags.copy()
            state.flags.no_cpython_wrapper = state.flags.no_cfunc_wrapper = True
        return _numba_run_lowering(self, state)


def _get_executable(self: Any, library: Any, fndesc: Any, env: Any) -> Any:
    if is_callee():
        return _Callee()
    return _numba_get_executable(self, library, fndesc, env)


def _add_overload(self: Any, result: Any) -> None:
    if isinstance(result.entry_point, _Callee):
        self.overloads[tuple(result.signature.args)] = result
    else:
        _numba_add_overload(self, result)


def _kernels(self: Any) -> dict[Any, Any]:
    """Returns a dispatcher's kernels by signature; its ``overloads`` may hold callees instead."""
    return self.__dict__.setdefault("_kernels_by_signature", {})


@global_compiler_lock
def _compile(self: Any, signature: Any) -> Any:
    arguments = tuple(sigutils.normalize_signature(signature)[0])
    kernels = _kernels(self)
    if _now.n_functions:
        if self.overloads.get(arguments) is kernels.get(arguments, self):
            del self.overloads[arguments]
        with _one_more("n_functions"):
            return _numba_compile(self, signature)
    if arguments in kernels:
        return kernels[arguments].entry_point
    callee = self.overloads.pop(arguments, None)
    try:
        with (
            _interruptible(),
            _one_more("n_functions"),
            _alone(self._cache, signature, self.targetctx),
        ):
            entry_point = _numba_compile(self, signature)
        kernels[arguments] = self.overloads[arguments]
        return entry_point
    finally:
        if callee is not None:
            self.overloads[arguments] = callee


def _alone(cache: Any, signature: Any, context: Any) -> contextlib.AbstractContextManager[None]:
    """Locks a kernel while it is compiled. Other processes wait, then load it from disk."""
    lock = getattr(cache, "lock", None)
    return contextlib.nullcontext() if lock is None else lock(signature, context)


def compiled(function: Any, signature: tuple[Any, ...]) -> Any:
    """Returns numba's compile result of the dispatcher ``function``, for calls by address.

    The dispatcher keeps the machine code alive.
    """
    function.compile(signature)
    return _kernels(function)[signature]


def _compile_callback(self: Any) -> None:
    """Compiles a numba.cfunc, which has no dispatcher. Its functions become callees."""
    alone = _alone(self._cache, self._sig, self._targetdescr.target_context)
    with global_compiler_lock, _interruptible(), alone, _one_more("n_functions"):
        _numba_compile_callback(self)


_numba_pointer_to_function = codegen.JITCodeLibrary.get_pointer_to_function
_numba_serialize = codegen.JITCodeLibrary.serialize_using_object_code
_numba_module_for_linking = codegen.JITCodeLibrary._get_module_for_linking
_numba_set_environment = codegen.JITCPUCodegen.set_env
_numba_run_lowering = typed_passes.BaseNativeLowering.run_pass
_numba_get_executable = cpu.CPUContext.get_executable
_numba_add_overload = dispatcher.Dispatcher.add_overload
_numba_compile = dispatcher.Dispatcher.compile
_numba_compile_callback = ccallback.CFunc.compile


# ``install`` (cpu/jit/install.py) sets these attributes of numba's classes.
REPLACEMENTS: tuple[tuple[Any, str, Any], ...] = (
    (codegen.JITCodeLibrary, "_finalize_final_module", _finalize),
    (codegen.JITCodeLibrary, "_optimize_final_module", _optimize_lightly),
    (codegen.JITCodeLibrary, "get_pointer_to_function", _pointer_to_function),
    (codegen.JITCodeLibrary, "serialize_using_object_code", _serialize),
    (codegen.JITCodeLibrary, "_get_module_for_linking", _module_for_linking),
    (codegen.JITCPUCodegen, "set_env", _set_environment),
    (typed_passes.BaseNativeLowering, "run_pass", _run_lowering),
    (cpu.CPUContext, "get_executable", _get_executable),
    (dispatcher.Dispatcher, "add_overload", _add_overload),
    (dispatcher.Dispatcher, "compile", _compile),
    (ccallback.CFunc, "compile", _compile_callback),
)


def is_installed() -> bool:
    """Returns whether numba compiles as this module says."""
    return dispatcher.Dispatcher.compile is _compile
