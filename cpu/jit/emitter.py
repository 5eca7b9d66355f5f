"""Functions that write LLVM IR, for calls from compiled code. Their arguments are declared once.

    @emitter(factor=types.float32, n_rows=range(1, 5))
    def scale_rows(x, n_rows, count, factor):
        ...

Compiled code calls ``scale_rows(x, n_rows, count, factor)`` with an address, two int64 and an f32.
For an int64 it may pass an array. The function then gets the address of its first element, and the
array lives until the end of the call.
The function runs four times at compile time, with n_rows = 1, 2, 3 and 4. The code takes one of the
four branches.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sparsekv_cli.cpu.jit.value import I64, write

# Kinds of arguments that shape the code: a literal by its value, any other by its numba type.
LITERAL, TYPE = object(), object()


def _each(b: ir.IRBuilder, number: ir.Value, values: Collection[int]) -> Iterator[int]:
    """Emits a switch on ``number``. The caller writes the branch of each yielded value."""
    done = b.append_basic_block("done")
    switch = b.switch(number, done)
    for each in values:
        block = b.append_basic_block()
        switch.add_case(I64(each), block)
        b.position_at_end(block)
        yield each
        b.branch(done)
    b.position_at_end(done)


def _write(
    function: Callable[..., Any], kinds: list[Any], b: ir.IRBuilder, values: list[Any]
) -> Any:
    """Calls ``function`` for each combination of the numbers that branches choose between."""
    for i, kind in enumerate(kinds):
        if isinstance(kind, tuple | range) and isinstance(values[i], ir.Value):
            for number in _each(b, values[i], kind):
                _write(function, kinds, b, [*values[:i], number, *values[i + 1 :]])
            return None
    return write(b, function, *values)


def addresses_in(context: Any, b: ir.IRBuilder, kinds: Iterable[Any], args: Any) -> list[Any]:
    """Returns arguments of a call in IR, with the address of its first element for each array."""
    return [
        b.ptrtoint(context.make_array(kind)(context, b, value).data, I64)
        if isinstance(kind, types.Array)
        else value
        for kind, value in zip(kinds, args, strict=True)
    ]


def emitter(
    function: Callable[..., Any] | None = None, *, returns: Any = types.void, **kinds: Any
) -> Any:
    """Returns an intrinsic of numba. A call of it becomes the IR that ``function`` writes.

    function(...) gets the arguments of the call, each as a ``Value`` (jit/value.py). kinds: of the
    arguments that are no int64, and of those that shape the code:

        a numba type    a ``Value`` of this type
        LITERAL         a literal; ``function`` gets its value
        TYPE            any type; ``function`` gets the numba type
        numbers         an int64 that is one of them; ``function`` writes a branch for each, and
                        returns nothing

    The result of ``function`` has the type ``returns``.
    """
    if function is None:
        return partial(emitter, returns=returns, **kinds)
    parameters = list(signature(function).parameters.values())
    names = [parameter.name for parameter in parameters]
    declared = [kinds.get(name, types.int64) for name in names]

    @wraps(function)
    def typed(typingctx: Any, *given: Any) -> Any:
        known = []
        for kind, type_ in zip(declared, given, strict=True):
            if kind is LITERAL and not isinstance(type_, types.Literal):
                return None
            is_array = kind == types.int64 and isinstance(type_, types.Array)
            is_known = isinstance(kind, types.Type) and not is_array
            is_taken = kind in (LITERAL, TYPE) or is_array
            known.append(kind if is_known else type_ if is_taken else types.int64)

        def codegen(context: Any, b: Any, kinds: Any, args: Any) -> Any:
            values = addresses_in(context, b, known, args)
            for i, (kind, type_) in enumerate(zip(declared, known, strict=True)):
                if kind in (LITERAL, TYPE):
                    values[i] = type_.literal_value if kind is LITERAL else type_
            result = _write(function, declared, b, values)
            if isinstance(returns, types.BaseTuple):
                return context.make_tuple(b, returns, result)
            return context.get_dummy_value() if returns is types.void else result

        return returns(*known), codegen

    first = Parameter("typingctx", Parameter.POSITIONAL_OR_KEYWORD)  # numba takes it away
    typed.__signature__ = Signature([first, *parameters])  # type: ignore[attr-defined]
    return intrinsic(typed)
