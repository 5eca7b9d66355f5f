"""Arrays that start on a cache line, and addresses, which compiled code gets as int64.

A kernel that is called by its address is compiled once, apart from the kernels that call it.
"""

from collections.abc import Callable
from ctypes import addressof, c_char
from inspect import Parameter, Signature, signature
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import DTypeLike

from sparsekv_cli.cpu.jit.compiling import callees
from sparsekv_cli.cpu.jit.emitter import addresses_in, emitter
from sparsekv_cli.cpu.jit.value import I64

LINE = 64  # bytes, a cache line


def on_lines(shape: Any, dtype: DTypeLike, *, zeros: bool = False) -> np.ndarray:
    """Returns an array, uninitialised or of zeros, that starts on a cache line.

    numpy's own large arrays start 16 bytes after the start of a line (glibc). A row of 128 bytes is
    then on three lines instead of two. Gathering such rows from memory takes 1.5 times as long.
    """
    count, dtype = int(np.prod(shape, dtype=np.int64)), np.dtype(dtype)
    room = (np.zeros if zeros else np.empty)(count * dtype.itemsize + LINE, np.uint8)
    start = -room.ctypes.data % LINE
    return room[start : start + count * dtype.itemsize].view(dtype).reshape(shape)


def grown(old: np.ndarray, axis: int, size: int, fill: int = 0) -> np.ndarray:
    """Returns ``old`` with ``size`` entries along an axis, cut or filled with ``fill``."""
    shape = [size if i == axis else n for i, n in enumerate(old.shape)]
    new = on_lines(shape, old.dtype, zeros=fill == 0)
    if fill:
        new[...] = fill
    kept = tuple(slice(min(pair)) for pair in zip(old.shape, shape, strict=True))
    new[kept] = old[kept]
    return new


def address(array: np.ndarray) -> int:
    """Returns the address of an array's first element; the caller keeps the array alive.

    numpy's own attributes for it take ten times as long (3 to 5 us, numpy 2.4).
    """
    writable: Any = array
    try:
        return addressof(c_char.from_buffer(writable))
    except (TypeError, ValueError):  # read-only, empty, or not contiguous
        return int(array.__array_interface__["data"][0])


def function_address(dispatcher, signature: tuple) -> int:
    """Returns the address of a numba function compiled for ``signature``.

    The dispatcher keeps the machine code alive. signature: first the types of the literals, then
    int64 only. The function must return nothing.
    """
    result = callees.compiled(dispatcher, signature)
    return result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name)


def caller(function: Callable[..., Any], n_literals: int = 0) -> Any:
    """Returns an intrinsic that calls a ``function_address`` of functions like ``function``.

    Its arguments are the address, and those of ``function`` after the first n_literals. An array
    gives its address, as with an ``emitter``.
    """
    names = ("address", *list(signature(function).parameters)[n_literals:])

    def codegen(context, builder, signature, args):
        type_ = ir.FunctionType(ir.VoidType(), [I64] * (n_literals + len(args) - 1))
        place, *others = addresses_in(context, builder, signature.args, args)
        place = builder.inttoptr(place, type_.as_pointer())
        builder.call(place, [I64(0)] * n_literals + others)  # a literal has an argument
        return context.get_dummy_value()

    def call(typingctx, *given):
        kinds = [kind if isinstance(kind, types.Array) else types.int64 for kind in given]
        return types.void(*kinds), codegen

    parameters = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in ("typingctx", *names)]
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(call)


@emitter(returns=types.CPointer(types.int64))
def integer_pointer(at):
    """Turns an int64 address into a pointer for ``carray``."""
    return at.pointer(I64)
