"""Arguments of kernels, declared once: a record in memory, and its view in compiled code.

A kernel gets the address of a record, because an array as an argument costs half a microsecond.
The record has a word of 8 bytes for each number and for the address of each array:

    class State(KernelFields):
        n_head: Size                                  # known from the arrays
        n: int
        softcap: float
        weights: np.ndarray = f32("n_head", 4)
        sinks: np.ndarray = f32("n_head", optional=True)
        rules: Rules                                  # a NamedTuple, declared alike

    state = State(weights=np.zeros((3, 4), np.float32), softcap=0.0, rules=rules)
    state.set(n=7)

    @njit
    def kernel(at):  # is called with state.at
        this = view(State, at)
        this.weights[2, 3] = this.n

The first words of this record: n_head = 3, n = 7, softcap, the address of weights, 0 for sinks. A
view leaves out dims that are declared as 1, unless all are.
``Scratch`` declares memory that a kernel needs only while it runs. A view has no reference counts,
for which threads would wait.
"""

import inspect
from array import array
from collections import namedtuple
from collections.abc import Iterable
from ctypes import addressof, c_char
from typing import Any, cast

import numpy as np

from sparsekv_cli.cpu.jit.pointers import address, on_lines
from sparsekv_cli.cpu.vector.declared import (
    Array,
    Field,
    FieldGroup,
    Size,
    Words,
    declared,
    names_in,
)

WORD = 8  # bytes
_ALIKE: dict[Any, Any] = {}  # records of arrays of the same shapes share what fits
_MOST_ALIKE = 256  # entries; a server meets ever new shapes
_from_buffer = c_char.from_buffer
HALVES = (np.dtype(np.float16), np.dtype(np.uint16))  # kernels read f16 as u16


class Declaration(type):
    """The type of classes that declare fields. Compiled code may name such a class.

    View: the NamedTuple that compiled code sees. declaration: the fields. of: the record whose
    numbers give the sizes: the class itself, or that of a Scratch.
    """

    View: Any
    declaration: FieldGroup
    of: Any
    _whole: dict[str, Any]  # the words of whole numbers, and of arrays inside the record
    _whole_parts: dict[str, slice]  # the words of parts that have only whole numbers
    _sizes: dict[str, int]  # the words of sizes
    _members: dict[str, tuple[tuple[Field, ...], FieldGroup | None]]  # fields; None: of no part
    _of_arrays: list[Field]

    def __new__(mcs, name: str, bases: Any, space: Any, of: Any = None) -> Any:
        return super().__new__(mcs, name, bases, {"__slots__": ()} | space)

    def __init__(cls, name: str, bases: Any, space: Any, of: Any = None) -> None:
        super().__init__(name, bases, space)
        names = list(inspect.get_annotations(cls)) if bases else []
        cls.View = namedtuple(name, names, module=cls.__module__)  # type: ignore[misc]
        cls.View.__qualname__ = f"{cls.__qualname__}.View"  # where pickle finds it
        cls.declaration = declared(cls, cls.View) if bases else FieldGroup("", cls.View, ())
        cls.of = of or cls
        cls._check_dims(name)
        fields = list(cls.declaration.fields())
        cls._whole = {f.name: f.word for f in fields if f.kind in (int, bool)}
        for f in fields:
            if isinstance(f.kind, Words):
                cls._whole[f.name] = slice(f.word, f.word + f.kind.n)
        cls._whole_parts = {
            member.name: slice(member.members[0].word, member.members[0].word + member.n_words)
            for member in cls.declaration.members
            if isinstance(member, FieldGroup) and all(f.kind is int for f in member.fields())
        }
        cls._sizes = {f.name: f.word for f in fields if f.kind is Size}
        cls._of_arrays = [f for f in fields if isinstance(f.kind, Array)]
        cls._members = {
            member.name: (tuple(member.fields()), member)
            if isinstance(member, FieldGroup)
            else ((member,), None)
            for member in cls.declaration.members
        }
        for each in space.keys() & set(names):  # an instance has values instead
            delattr(cls, each)

    def _check_dims(cls, name: str) -> None:
        """TypeError: a dim is unknown, or scratch memory has a number or zeros after others."""
        kinds = (Size, int, bool) if cls.of is not cls else (Size,)
        numbers = {f.name for f in cls.of.declaration.fields() if f.kind in kinds}
        is_zero = True
        for field in cls.declaration.fields():
            told, is_array = f"{name}.{field.name}", isinstance(field.kind, Array)
            if cls.of is not cls and not is_array:
                raise TypeError(f"{told}: scratch memory has arrays only")
            for dim in field.kind.shape if is_array else ():
                names = names_in(dim)
                if names - numbers or (cls.of is cls and names and dim not in names):
                    raise TypeError(f"{told}: {dim} is no size")
            if is_array and field.kind.zeros:
                if not is_zero or cls.of is cls:
                    raise TypeError(f"{told}: zeros come first, in scratch memory")
            else:
                is_zero = False

    def digest(cls) -> str:
        """Returns a hash of the declaration. Kernels that name the class are kept under it."""
        return f"{cls.declaration.digest()} {cls.of.declaration.digest()}"


class Scratch(metaclass=Declaration):
    """Memory of a kernel, in arrays whose sizes follow from the numbers of a record.

        class StateScratch(Scratch, of=State):
            keys: np.ndarray = i32("n + 16")

    ``run`` (run.py) allocates it. Each array starts on a cache line.
    """


class KernelFields(metaclass=Declaration):
    """A record of numbers and arrays, which it keeps alive."""

    # Attributes in few lines of memory: a step of each layer finds them outside of the caches.
    __slots__ = (
        "_arrays",  # by name; None for one that is missing
        "_at",
        "_fitting",  # what changes no size: the shape, type and word of arrays
        "_floats",
        "_missing",
        "_record",
        "_words",
    )

    def __init__(self, **values: Any) -> None:
        """values: of some fields. Other numbers are 0."""
        cls = type(self)
        self._record = on_lines(max(1, cls.declaration.n_words), np.int64, zeros=True)
        # Writing to a memoryview checks the type of a number, and is faster than to an array.
        self._words, self._floats = (
            memoryview(cast(Any, self._record.view(kind))) for kind in (np.int64, np.float64)
        )
        self._at = address(self._record)
        self._missing = {f.name for f in cls._of_arrays if not f.kind.optional}
        self._arrays: dict[str, np.ndarray | None] = {}
        self._fitting: dict[str, tuple[tuple[int, ...], np.dtype, int]] = {}
        self.set(**values)

    def __getattr__(self, name: str) -> Any:
        """Returns a number, an array outside the record, or a part. None: the array is missing."""
        fields, part = self._members.get(name, ((), None))
        if not fields:
            raise AttributeError(f"{self._told(name)}: there is no such field")
        values = [self._value(field) for field in fields]
        return values[0] if part is None else part.cls(*values)

    def _value(self, field: Field) -> Any:
        if isinstance(field.kind, Array):
            return self._arrays.get(field.name)
        if isinstance(field.kind, Words):
            return self._record[self._whole[field.name]].copy()
        is_float = field.kind in (float, np.float32)
        value = (self._floats if is_float else self._words)[field.word]
        return bool(value) if field.kind is bool else value

    @property
    def at(self) -> int:
        """The record's address, for kernels. ValueError: an array is missing."""
        if self._missing:
            raise ValueError(f"{self._told(', '.join(sorted(self._missing)))}: not given")
        return self._at

    def set(self, **values: Any) -> None:
        """Sets numbers, takes arrays, and does both with parts.

        None: an optional array is missing. Sizes follow from the shapes of arrays. ValueError: the
        type, the shape or the order in memory of an array is wrong.
        """
        whole, parts, words = self._whole, self._whole_parts, self._words
        others: dict[str, np.ndarray] = {}
        for name, value in values.items():
            if name in whole:
                words[whole[name]] = value
            elif name in parts:
                words[parts[name]] = array(words.format, value)
            elif not self._put(name, value):
                for field, given in self._fields_of(name, value):
                    if not isinstance(field.kind, Array):
                        self._set(field, given)
                    elif given is None:
                        self._leave_out(field)
                    elif not self._put(field.name, given):
                        others[field.name] = given
        if others:
            self._use_others(others)

    def _set(self, field: Field, value: Any) -> None:
        if field.kind in (int, bool):
            self._words[field.word] = value
        elif field.kind in (float, np.float32):
            self._floats[field.word] = value
        else:
            raise TypeError(f"{self._told(field.name)}: follows from arrays")

    def _leave_out(self, field: Field) -> None:
        if not field.kind.optional:
            raise ValueError(f"{self._told(field.name)}: not optional")
        self._arrays[field.name], self._words[field.word] = None, 0

    def _put(self, name: str, array: Any) -> bool:
        """Takes one array of a known shape. Returns False if it is not, or if it is no array."""
        fitting = self._fitting.get(name)
        if fitting is None or array is None:
            return False
        if array.dtype is not fitting[1] or array.shape != fitting[0]:
            return False
        try:  # ``_from_buffer`` raises TypeError if the array is not contiguous
            self._words[fitting[2]] = addressof(_from_buffer(array))
        except (TypeError, ValueError):
            return False
        self._arrays[name] = array
        return True

    def _use_others(self, others: dict[str, np.ndarray]) -> None:
        """Takes arrays of new shapes, if they and those that are held fit each other."""
        held, sizes = self._arrays | others, dict.fromkeys(self._sizes, -1)
        for field in self._of_arrays:
            array = held.get(field.name)
            if array is not None:
                self._check(field, array, sizes)
        # After an interrupt nothing fits, so that the next call writes all words again.
        fitting, self._fitting, self._arrays = dict(self._fitting), {}, held
        for name, word in self._sizes.items():
            self._words[word] = max(0, sizes[name])
        for field in self._of_arrays:
            shape = tuple(sizes.get(dim, dim) for dim in field.kind.shape)
            array = held.get(field.name)
            if array is not None:
                self._words[field.word] = address(array)
                self._missing.discard(field.name)
                fitting[field.name] = shape, array.dtype, field.word
            elif -1 in shape:
                fitting.pop(field.name, None)
        if len(_ALIKE) >= _MOST_ALIKE:
            _ALIKE.clear()
        self._fitting = _ALIKE.setdefault(tuple(fitting.items()), fitting)

    def _check(self, field: Field, array: np.ndarray, sizes: dict[str, int]) -> None:
        """Adds an array's sizes to those that are known."""
        kind, told = field.kind, f"{self._told(field.name)}: {array.dtype} {array.shape}"
        is_right = array.dtype == kind.dtype or (kind.dtype in HALVES and array.dtype in HALVES)
        if not is_right or not array.flags.c_contiguous or array.ndim != len(kind.shape):
            raise ValueError(f"{told}, must be contiguous {kind.dtype} {kind.shape}")
        for dim, length in zip(kind.shape, array.shape, strict=True):
            known = dim if isinstance(dim, int) else sizes[dim]
            if known not in (-1, length):
                raise ValueError(f"{told}, must be {kind.shape}, where {dim} is {known}")
            if not isinstance(dim, int):
                sizes[dim] = length

    def _fields_of(self, name: str, value: Any) -> Iterable[tuple[Field, Any]]:
        """The fields of a member, and their values: those of a NamedTuple, or None."""
        if name not in self._members:
            raise TypeError(f"{self._told(name)}: there is no such field")
        fields, part = self._members[name]
        if part is None:
            return ((fields[0], value),)
        return zip(fields, (None,) * len(fields) if value is None else value, strict=True)

    def _told(self, name: str) -> str:
        return f"{type(self).__name__}.{name}"
