"""Numbers and vectors of LLVM IR with Python's operators, which write instructions.

    keys = load(VF, at)                                  # sixteen f32
    store(keys.fma(cosine, 0.5) * 2.0, at, 64)           # f32 at at + 64

An operator turns a Python number into a constant of the other operand's type. It turns a sequence
into a vector constant.
The instructions go to the place where ``write`` builds a function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

LANES = 16
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
VF = ir.VectorType(F32, LANES)
VI = ir.VectorType(I32, LANES)
_BITS = {F16: 16, F32: 32, F64: 64}
_now = threading.local()


def builder() -> ir.IRBuilder:
    """Returns the builder of the function that is written now."""
    return _now.builder


def raw(value: Any) -> Any:
    return value.ir if isinstance(value, Value) else value


def write(b: ir.IRBuilder, function: Callable[..., Any], *given: Any) -> Any:
    """Returns function(*given), which writes by ``b``. IR values are wrapped and unwrapped."""
    before, _now.builder = getattr(_now, "builder", None), b
    try:
        result = function(*(Value(x) if isinstance(x, ir.Value) else x for x in given))
    finally:
        _now.builder = before
    return [raw(x) for x in result] if type(result) in (list, tuple) else raw(result)


def vec(element: ir.Type, count: int = LANES) -> ir.VectorType:
    return ir.VectorType(element, count)


def _element(type_: ir.Type) -> ir.Type:
    return type_.element if isinstance(type_, ir.VectorType) else type_


def _constant(type_: ir.Type, value: Any) -> ir.Constant:
    if isinstance(type_, ir.VectorType):
        lanes = [value] * type_.count if isinstance(value, int | float) else list(value)
        return ir.Constant(type_, [_number(type_.element, lane) for lane in lanes])
    return ir.Constant(type_, _number(type_, value))


def _number(type_: ir.Type, value: Any) -> int | float:
    return int(value) if isinstance(type_, ir.IntType) else float(value)


def const(type_: ir.Type, value: Any, count: int = LANES) -> Value:
    """Returns a constant: ``value`` in every lane of a vector, or the lanes of a sequence.

    type_: of the vector, or of its elements; then it has ``count`` lanes.
    """
    return Value(_constant(type_ if isinstance(type_, ir.VectorType) else vec(type_, count), value))


def _operator(of_integers: str, of_floats: str = "", swapped: bool = False) -> Any:
    def apply(self: Value, other: Any) -> Value:
        pair = self.ir, self.like(other).ir
        name = of_floats if self.is_float else of_integers
        return Value(getattr(builder(), name)(*(pair[::-1] if swapped else pair)))

    return apply


def _comparison(sign: str) -> Any:
    def apply(self: Value, other: Any) -> Value:
        b = builder()
        of_floats = b.fcmp_unordered if sign == "!=" else b.fcmp_ordered  # a NaN is not itself
        compare = of_floats if self.is_float else b.icmp_signed
        return Value(compare(sign, self.ir, self.like(other).ir))

    return apply


class Value:
    """A number or vector in IR. Integers are signed, except where a name says otherwise."""

    __slots__ = ("ir",)
    __hash__ = object.__hash__

    def __init__(self, value: ir.Value) -> None:
        self.ir = value

    @property
    def type(self) -> ir.Type:
        return self.ir.type

    @property
    def count(self) -> int:
        """Lanes of a vector."""
        return self.ir.type.count

    @property
    def is_float(self) -> bool:
        return not isinstance(_element(self.type), ir.IntType)

    def like(self, other: Any) -> Value:
        """Returns ``other`` as a value; a Python number becomes a constant of this type."""
        if isinstance(other, Value):
            return other
        return Value(other if isinstance(other, ir.Value) else _constant(self.type, other))

    __add__, __radd__ = _operator("add", "fadd"), _operator("add", "fadd", True)
    __sub__, __rsub__ = _operator("sub", "fsub"), _operator("sub", "fsub", True)
    __mul__, __rmul__ = _operator("mul", "fmul"), _operator("mul", "fmul", True)
    __truediv__, __rtruediv__ = _operator("", "fdiv"), _operator("", "fdiv", True)
    __floordiv__, __mod__ = _operator("sdiv"), _operator("srem")
    __and__, __or__, __xor__ = _operator("and_"), _operator("or_"), _operator("xor")
    __ror__ = _operator("or_", swapped=True)
    __lshift__, __rlshift__ = _operator("shl"), _operator("shl", swapped=True)
    __rshift__ = _operator("lshr")  # zeros come in
    signed_shift = _operator("ashr")
    unsigned_div, unsigned_mod = _operator("udiv"), _operator("urem")
    __lt__, __le__, __gt__, __ge__ = (_comparison(sign) for sign in ("<", "<=", ">", ">="))
    __eq__, __ne__ = _comparison("=="), _comparison("!=")

    def __neg__(self) -> Value:
        return Value(builder().fneg(self.ir) if self.is_float else builder().neg(self.ir))

    def below(self, other: Any) -> Value:
        """Returns self < other for unsigned integers."""
        return Value(builder().icmp_unsigned("<", self.ir, self.like(other).ir))

    def to(self, type_: ir.Type) -> Value:
        """Converts numbers to another type, rounded to nearest or toward zero."""
        return self._to(type_, ("sext", "sitofp", "fptosi"))

    def unsigned_to(self, type_: ir.Type) -> Value:
        """Converts unsigned integers to another type."""
        return self._to(type_, ("zext", "uitofp", "fptoui"))

    def _to(self, type_: ir.Type, names: tuple[str, str, str]) -> Value:
        widen, to_float, to_integer = names
        old, new = _element(self.type), _element(type_)
        if isinstance(old, ir.IntType):
            is_wider = isinstance(new, ir.IntType) and new.width > old.width
            narrow = "trunc" if isinstance(new, ir.IntType) else to_float
            name = widen if is_wider else narrow
        elif isinstance(new, ir.IntType):
            name = to_integer
        else:
            name = "fpext" if _BITS.get(new, 16) > _BITS.get(old, 16) else "fptrunc"
        return Value(getattr(builder(), name)(self.ir, type_))

    def bitcast(self, type_: ir.Type) -> Value:
        return Value(builder().bitcast(self.ir, type_))

    def fma(self, factor: Any, summand: Any) -> Value:
        """Returns self * factor + summand, rounded once."""
        return self.call("fma", factor, summand)

    def maxnum(self, other: Any) -> Value:
        """Returns the larger float. If one is NaN, it is the other."""
        return self.call("maxnum", other)

    def minnum(self, other: Any) -> Value:
        """Returns the smaller float. If one is NaN, it is the other."""
        return self.call("minnum", other)

    def call(self, name: str, *others: Any) -> Value:
        """Calls llvm.NAME for this type, for example llvm.rint.v16f32 on sixteen f32."""
        element = _element(self.type)
        lanes = f"v{self.count}" if isinstance(self.type, ir.VectorType) else ""
        kind = f"i{element.width}" if isinstance(element, ir.IntType) else f"f{_BITS[element]}"
        given = (self.like(other) for other in others)
        return call_named(f"llvm.{name}.{lanes}{kind}", self.type, self, *given)

    def splat(self, count: int = LANES) -> Value:
        """Returns a vector with this number in every lane."""
        type_, b = vec(self.type, count), builder()
        one = b.insert_element(ir.Constant(type_, ir.Undefined), self.ir, I32(0))
        zeros = ir.Constant(vec(I32, count), [0] * count)
        return Value(b.shuffle_vector(one, ir.Constant(type_, ir.Undefined), zeros))

    def shuffle(self, lanes: Sequence[int], other: Value | None = None) -> Value:
        """Returns the listed lanes. A number from ``count`` on is a lane of ``other``."""
        picked = ir.Constant(vec(I32, len(lanes)), list(lanes))
        second = self if other is None else other
        return Value(builder().shuffle_vector(self.ir, second.ir, picked))

    def lane(self, i: int) -> Value:
        return Value(builder().extract_element(self.ir, I32(i)))

    def pointer(self, type_: ir.Type | None = None) -> ir.Value:
        """Returns this address as LLVM's pointer to ``type_``; None: to anything."""
        kind = ir.PointerType() if type_ is None else type_.as_pointer()
        return builder().inttoptr(self.ir, kind)


def select(condition: Value, x: Any, y: Any) -> Value:
    """Returns x where ``condition`` is true, else y. One of the two may be a Python number."""
    known = x if isinstance(x, Value) else y
    return Value(builder().select(condition.ir, known.like(x).ir, known.like(y).ir))


def call_named(name: str, result: ir.Type, *given: Any) -> Value:
    """Returns a call of the LLVM intrinsic ``name``, declared in the module on first use."""
    b, arguments = builder(), [raw(x) for x in given]
    function = b.module.globals.get(name)
    if function is None:
        type_ = ir.FunctionType(result, [x.type for x in arguments])
        function = ir.Function(b.module, type_, name)
    return Value(b.call(function, arguments))


def offset(address: Value, n_bytes: Any) -> Value:
    """Returns address + n_bytes, without an instruction for 0."""
    return address if isinstance(n_bytes, int) and n_bytes == 0 else address + n_bytes


def load(type_: ir.Type, address: Value, n_bytes: Any = 0) -> Value:
    """Returns an unaligned load of ``type_`` at ``address + n_bytes``."""
    return Value(builder().load(offset(address, n_bytes).pointer(type_), align=1))


def store(value: Value, address: Value, n_bytes: Any = 0) -> None:
    builder().store(value.ir, offset(address, n_bytes).pointer(value.type), align=1)
