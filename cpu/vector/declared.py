"""Declarations of numbers and arrays: their names, types, and shapes by other names."""

import ast
import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NewType

import numpy as np
from llvmlite import ir

from sparsekv_cli.cpu.jit.llvm import I64

Size = NewType("Size", int)  # a number of elements, which is known from the shapes of arrays
NUMBERS = (Size, int, bool, float, np.float32)
_OPERATORS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul"}  # names in IRBuilder


class Array(NamedTuple):
    """One array, contiguous. shape: numbers, or texts such as ``n_head`` and ``n // 64 + 2``.

    optional: whether the array may be missing. All its dims are then 0.
    zeros: whether scratch memory is set to 0 before it is used.
    """

    dtype: np.dtype
    shape: tuple[int | str, ...]
    optional: bool
    zeros: bool


class Words(NamedTuple):
    """An array int64 (n,) inside the record."""

    n: int


class _Element:
    """Declares arrays of one type. In a class it is a default, so the type says Any."""

    def __init__(self, dtype: type) -> None:
        self._dtype = np.dtype(dtype)

    def __call__(self, *shape: int | str, optional: bool = False, zeros: bool = False) -> Any:
        return Array(self._dtype, shape, optional, zeros)


f32, f64 = _Element(np.float32), _Element(np.float64)
i32, i64 = _Element(np.int32), _Element(np.int64)
u8, u64 = _Element(np.uint8), _Element(np.uint64)
f16 = _Element(np.uint16)  # kernels read the bits of f16


def words(count: int) -> Any:
    """Declares an int64 array inside the record."""
    return Words(count)


class Field(NamedTuple):
    """One number or array. name: with the parts that it is in, as in ``rules.softcap``.

    kind: one of NUMBERS, an Array or Words. word: its first word of 8 bytes in a record.
    """

    name: str
    kind: Any
    word: int

    @property
    def n_words(self) -> int:
        return self.kind.n if isinstance(self.kind, Words) else 1


class FieldGroup(NamedTuple):
    """The fields that one class declares.

    name: of the field that holds the class; empty for the record itself. cls: the NamedTuple that
    compiled code sees. members: a Field for each number or array, a FieldGroup for each class
    inside this one.
    """

    name: str
    cls: Any
    members: tuple[Any, ...]

    def fields(self) -> Iterator[Field]:
        for member in self.members:
            yield from (member,) if isinstance(member, Field) else member.fields()

    @property
    def n_words(self) -> int:
        return sum(field.n_words for field in self.fields())

    def digest(self) -> str:
        """Returns a short hash of all names, types, shapes and places."""
        told = repr([(self.cls.__qualname__, *field) for field in self.fields()])
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def declared(cls: Any, view: Any, name: str = "", word: int = 0) -> FieldGroup:
    """Returns what a class declares by its annotations and defaults, from ``word`` on.

    view: the NamedTuple of the same names. name: of the part, or empty for the record itself.
    Raises TypeError for an annotation that is no field.
    """
    members: list[Any] = []
    defaults = getattr(cls, "_field_defaults", vars(cls))
    for key, hint in inspect.get_annotations(cls, eval_str=True).items():
        inner, default = f"{name}.{key}" if name else key, defaults.get(key)
        if isinstance(default, Array | Words):
            members.append(Field(inner, default, word))
        elif hint in NUMBERS:
            members.append(Field(inner, hint, word))
        elif hasattr(hint, "_fields") and not name:
            members.append(declared(hint, hint, inner, word))
        else:
            raise TypeError(f"{cls.__name__}.{key}: {hint} with {default} declares no field")
        word += members[-1].n_words
    return FieldGroup(name, view, tuple(members))


def size_of(
    b: ir.IRBuilder, dim: int | str, word_of: Callable[[str], ir.Value], refuse: Callable[[], None]
) -> ir.Value:
    """Returns a dim's value, i64. word_of: returns the value of a name.

    A text has names, numbers, ``+ - * //``, ``min`` of two and brackets. Raises ValueError for
    anything else. refuse: emits code that leaves the function, because a divisor is 0.
    """

    def value(node: ast.expr) -> ir.Value:
        match node:
            case ast.Constant(value=int(number)):
                return I64(number)
            case ast.Name(id=name):
                return word_of(name)
            case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
                divisor = value(right)
                with b.if_then(b.icmp_unsigned("==", divisor, I64(0)), likely=False):
                    refuse()
                return b.udiv(value(left), divisor)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
                return getattr(b, _OPERATORS[type(operator)])(value(left), value(right))
            case ast.Call(func=ast.Name(id="min"), args=[one, other], keywords=[]):
                x, y = value(one), value(other)
                return b.select(b.icmp_signed("<", x, y), x, y)
        raise ValueError(f"{dim}: a size has names, numbers, + - * //, min and brackets only")

    return value(ast.parse(str(dim), mode="eval").body)


def names_in(dim: int | str) -> set[str]:
    """Returns the names of numbers in a dim."""
    nodes = [*ast.walk(ast.parse(str(dim)))]
    functions = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    return {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in functions}
