"""Views of declared records and scratch memory in compiled code; see fields.py."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.imputils import lower_constant
from numba.extending import intrinsic, models, register_model, typeof_impl
from numba.np import arrayobj
from numba.np.numpy_support import from_dtype

from sparsekv_cli.cpu.jit.llvm import I64
from sparsekv_cli.cpu.jit.pointers import LINE
from sparsekv_cli.cpu.vector.declared import Array, Field, FieldGroup, Size, Words, size_of
from sparsekv_cli.cpu.vector.fields import WORD, Declaration, KernelFields, Scratch

_DOUBLE = ir.DoubleType()


class DeclarationType(types.Opaque):
    """The type of a declaring class in compiled code. Its name has a hash of the declaration.

    So a function's signature, under which it is kept on disk, changes with the declaration.
    """

    def __init__(self, cls: Declaration) -> None:
        self.cls = cls
        super().__init__(f"{cls.__module__}.{cls.__qualname__} {cls.digest()}")


register_model(DeclarationType)(models.OpaqueModel)


@typeof_impl.register(Declaration)
def _typeof_declaration(cls: Declaration, context: Any) -> DeclarationType:
    return DeclarationType(cls)


@lower_constant(DeclarationType)
def _no_value(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.get_dummy_value()


def _dims_of(array: Array) -> tuple[int | str, ...]:
    """Returns the declared dims that a view has: those that are not 1, or the last one."""
    return tuple(dim for dim in array.shape if dim != 1) or array.shape[-1:]


def _type_of(member: Any) -> Any:
    """Returns the numba type of a field, or of a part."""
    if isinstance(member, FieldGroup):
        return types.BaseTuple.from_types([_type_of(each) for each in member.members], member.cls)
    if isinstance(member.kind, Array):
        return types.Array(from_dtype(member.kind.dtype), len(_dims_of(member.kind)), "C")
    if isinstance(member.kind, Words):
        return types.Array(types.int64, 1, "C")
    return {
        Size: types.int64, int: types.int64, bool: types.boolean, float: types.float64,
        np.float32: types.float32,
    }[member.kind]  # fmt: skip


class _Record:
    """Emits code that reads at an address: the record of ``kind``, or that of its sizes."""

    def __init__(self, context: Any, b: ir.IRBuilder, kind: Any, at: ir.Value) -> None:
        self.context, self.b, self.kind, self.at = context, b, kind, at
        self.places = {field.name: field.word for field in kind.of.declaration.fields()}

    def place(self, word: int) -> ir.Value:
        return self.b.add(self.at, I64(WORD * word))

    def word(self, word: int, type_: ir.Type = I64) -> ir.Value:
        return self.b.load(self.b.inttoptr(self.place(word), type_.as_pointer()))

    def dims(self, field: Field) -> list[ir.Value]:
        """The dims that a view has.

        The code raises ZeroDivisionError if a size divides by a number that is 0.
        """
        word_of = lambda name: self.word(self.places[name])  # noqa: E731

        def refuse() -> None:
            told = f"{self.kind.__name__}.{field.name}: a divisor is 0: {field.kind.shape}"
            self.context.call_conv.return_user_exc(self.b, ZeroDivisionError, (told,))

        return [size_of(self.b, dim, word_of, refuse) for dim in _dims_of(field.kind)]

    def array(self, member: Field, data: ir.Value, dims: list[ir.Value]) -> ir.Value:
        """An array at the address ``data``."""
        context, b, type_ = self.context, self.b, _type_of(member)
        array = arrayobj.make_array(type_)(context, b)
        item = I64(type_.dtype.bitwidth // 8)
        strides = [item]
        for dim in dims[:0:-1]:
            strides.insert(0, b.mul(strides[0], dim))
        arrayobj.populate_array(
            array, data=b.inttoptr(data, array.data.type), shape=dims, strides=strides,
            itemsize=item, meminfo=None,
        )  # fmt: skip
        return array._getvalue()

    def value(self, member: Any) -> ir.Value:
        b = self.b
        if isinstance(member, FieldGroup):
            values = [self.value(each) for each in member.members]
            return self.context.make_tuple(b, _type_of(member), values)
        kind, word = member.kind, member.word
        if isinstance(kind, Words):
            return self.array(member, self.place(word), [I64(kind.n)])
        if isinstance(kind, Array):
            data, dims = self.word(word), self.dims(member)
            if kind.optional:
                is_there = b.icmp_unsigned("!=", data, I64(0))
                dims = [b.select(is_there, dim, I64(0)) for dim in dims]
            return self.array(member, data, dims)
        if kind is bool:
            return b.icmp_unsigned("!=", self.word(word), I64(0))
        if kind in (float, np.float32):
            number = self.word(word, _DOUBLE)
            return number if kind is float else b.fptrunc(number, ir.FloatType())
        return self.word(word)

    def places_of(
        self, part: FieldGroup, at: ir.Value, only_zeros: bool = False
    ) -> Iterator[tuple[Field, ir.Value, list[ir.Value], ir.Value]]:
        """The arrays of scratch memory at ``at``: fields, addresses, dims, and the addresses after
        them.
        """
        b = self.b
        for field in part.fields():
            if only_zeros and not field.kind.zeros:
                return
            dims = self.dims(field)
            n_bytes = I64(field.kind.dtype.itemsize)
            for dim in dims:
                n_bytes = b.mul(n_bytes, dim)
            after = b.add(at, b.and_(b.add(n_bytes, I64(LINE - 1)), I64(-LINE)))
            yield field, at, dims, after
            at = after


def _is(kind: Any, base: type) -> bool:
    return isinstance(kind, DeclarationType) and issubclass(kind.cls, base)


@intrinsic
def view(typingctx, kind, at):
    """Returns the view of the record of ``kind``, a class of KernelFields, at an address."""
    if not _is(kind, KernelFields):
        return None
    part = kind.cls.declaration

    def codegen(context, b, signature, args):
        return _Record(context, b, kind.cls, args[1]).value(part)

    return _type_of(part)(kind, types.int64), codegen


@intrinsic
def scratch(typingctx, kind, at, memory):
    """Returns the view of scratch memory at an address. at: of the record that gives its sizes."""
    if not _is(kind, Scratch):
        return None
    part = kind.cls.declaration

    def codegen(context, b, signature, args):
        record = _Record(context, b, kind.cls, args[1])
        arrays = {
            f: record.array(f, at, dims) for f, at, dims, _ in record.places_of(part, args[2])
        }

        def value(member: Any) -> ir.Value:
            if isinstance(member, Field):
                return arrays[member]
            values = [value(each) for each in member.members]
            return context.make_tuple(b, _type_of(member), values)

        return value(part)

    return _type_of(part)(kind, types.int64, types.int64), codegen


def _room(typingctx: Any, kind: Any, only_zeros: bool) -> Any:
    if not _is(kind, Scratch):
        return None
    part = kind.cls.declaration

    def codegen(context, b, signature, args):
        record = _Record(context, b, kind.cls, args[1])
        return [I64(0), *(after for *_, after in record.places_of(part, I64(0), only_zeros))][-1]

    return types.int64(kind, types.int64), codegen


@intrinsic
def room(typingctx, kind, at):
    """Returns the bytes of scratch memory. at: of the record that gives its sizes."""
    return _room(typingctx, kind, False)


@intrinsic
def zeroed(typingctx, kind, at):
    """Returns the bytes at the beginning of scratch memory that must be 0 at first."""
    return _room(typingctx, kind, True)
