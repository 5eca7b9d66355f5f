"""Kernels' vector code as a CPU of ARM would get it: ``python arm_assembly.py dotprod,i8mm``.

A process of its own: modules ask for the CPU's features when they are imported. Prints a JSON
object: the x86 intrinsics in the code, and the instructions of inner loops by case. A second
argument is a file for the code itself.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llvmlite import binding, ir
from numba import types

from sparsekv_cli.cpu.jit import features

FEATURES = {"neon": True, **{name: name in sys.argv[1] for name in ("dotprod", "i8mm")}}
features.cpu_features = lambda: FEATURES

from sparsekv_cli.cpu.attention import byte_scores, softmax_bf16, tile  # noqa: E402
from sparsekv_cli.cpu.attention.rows import F16, Q8_0  # noqa: E402
from sparsekv_cli.cpu.jit import bf16, pool  # noqa: E402
from sparsekv_cli.cpu.jit.value import I32, I64, Value, store, write  # noqa: E402
from sparsekv_cli.cpu.layer import matmul_int8, tiles_int8  # noqa: E402
from sparsekv_cli.cpu.weights import dot, integer, interleaved  # noqa: E402
from sparsekv_cli.cpu.weights.formats import FORMATS  # noqa: E402

features.architecture = lambda: "aarch64"  # what is compiled while modules are imported runs here
TRIPLE = "aarch64-unknown-linux-gnu"
literal = types.literal


class _Context:
    """Stands for numba's, of which the vector code needs nothing more."""

    def get_dummy_value(self) -> None:
        return None


def module_of(emit: Callable[[ir.IRBuilder, Sequence[ir.Value]], object], n: int) -> ir.Module:
    """A module with a function of ``n`` i64."""
    module = ir.Module()
    module.triple = TRIPLE
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * n), "kernel")
    builder = ir.IRBuilder(function.append_basic_block())
    emit(builder, function.args)
    builder.ret_void()
    return module


def intrinsic(function: Any, *literals: Any, n: int) -> ir.Module:
    """A module of one of numba's intrinsics, with types or integers and then ``n`` i64."""
    signature, codegen = function._defn(None, *literals, *[types.int64] * n)
    context = _Context()
    total = len(literals) + n
    return module_of(lambda b, args: codegen(context, b, signature, args), total)


def inner_loops(assembly: str) -> list[str]:
    """The instructions, each once, of loops that hold no other loop."""
    lines = [line.split("//")[0].strip() for line in assembly.splitlines()]
    places = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    loops = []
    for i, line in enumerate(lines):
        jump = re.match(r"(?:b|b\.\w+|cbn?z|tbn?z)\s(?:.*,)?\s*(\.\w+)$", line)
        if jump and places.get(jump[1], i) < i:
            loops.append((places[jump[1]], i))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    words = {lines[i].split()[0] for a, b in inner for i in range(a + 1, b) if lines[i]}
    return sorted(word for word in words if not word.endswith(":"))


def compiled(module: ir.Module) -> str:
    target = binding.Target.from_triple(TRIPLE)
    machine = target.create_target_machine(cpu="generic", features=features.flattened(), opt=3)
    parsed = binding.parse_assembly(str(module))
    parsed.data_layout = str(machine.target_data)
    parsed.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed)


def scores(
    start: Value, query: Value, first: Value, second: Value, n_words: Value, out: Value
) -> None:
    """One query over two tiles of rows in bytes."""
    starts, row = [start.to(I32)], Value(I64(0))
    sums = byte_scores.emit_products(starts, query, row, 4, [first, second], n_words)
    for i, total in enumerate(sums[0]):
        store(total, out, 64 * i)


def half_scores(query: Value, query_row: Value, tile: Value, n_words: Value, out: Value) -> None:
    """Two queries over a tile of rows in half bytes."""
    sums = byte_scores.emit_half_products(2, query, query_row, tile, n_words, 128)
    for i, total in enumerate(part for of_query in sums for part in of_query):
        store(total, out, 64 * i)


def cases() -> dict[str, ir.Module]:
    """Modules by name; the formats' names are first words."""
    found = {}
    for name, format_ in FORMATS.items():
        code = literal(format_.code)
        found[f"{name} floats"] = intrinsic(dot._row_dots, code, literal(0), literal(1), n=6)
        found[f"{name} to f32"] = intrinsic(dot._row_dequantize, code, literal(0), n=3)
        found[f"{name} to bf16"] = intrinsic(dot._row_dequantize, code, literal(1), n=3)
        if format_.decode is None:
            continue
        for planes in (1, 2):
            shape = code, literal(planes), literal(1)
            found[f"{name} {planes}"] = intrinsic(dot._row_dots, *shape, n=6)
            if interleaved.can_repack(format_.code, interleaved.GROUP):
                group = intrinsic(interleaved._group_dots, *shape, n=6)
                found[f"{name} {planes} repacked"] = group
        if tiles_int8.is_available() and matmul_int8.can_multiply(format_.code):
            found[f"{name} panel"] = intrinsic(matmul_int8._decode_row, code, n=5)
            traits = map(literal, matmul_int8._format_traits(format_.code))
            found[f"{name} tile"] = intrinsic(tiles_int8._multiply_tile, *traits, n=7)
    for planes in (1, 2):
        found[f"rounding {planes}"] = intrinsic(integer.quantize_activations, literal(planes), n=3)
    for name, kind in (("f16", F16), ("q8_0", Q8_0)):
        found[f"scores {name}"] = intrinsic(tile._any_scores, literal(kind), n=10)
        found[f"values {name}"] = intrinsic(tile._any_values, literal(kind), n=10)
    found["byte scores"] = module_of(lambda b, args: write(b, scores, *args), 6)
    found["half byte scores"] = module_of(lambda b, args: write(b, half_scores, *args), 5)
    found["pause"] = intrinsic(pool._pause, n=0)
    assert not bf16.is_available() and not bf16.HAS_TILES and softmax_bf16  # which ask the same
    return found


COMPILED = ("Q4_K 1", "Q4_K 1 repacked", "Q8_0 1", "Q4_K tile", "scores f16", "values f16",
            "byte scores", "half byte scores")  # fmt: skip

if __name__ == "__main__":
    gc.disable()  # modules are many objects that stay
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    modules = cases()
    if len(sys.argv) > 2:
        texts = {each: str(module) for each, module in modules.items()}
        Path(sys.argv[2]).write_text(json.dumps(texts), encoding="utf-8")
    foreign = {
        each: [name for name in module.globals if name.startswith("llvm.x86")]
        for each, module in modules.items()
    }
    loops = {each: inner_loops(compiled(modules[each])) for each in COMPILED if each in modules}
    json.dump(
        {
            "cases": sorted(modules),
            "x86": {each: names for each, names in foreign.items() if names},
            "loops": loops,
        },
        sys.stdout,
    )
    sys.stdout.flush()
    os._exit(0)  # nobody has to free them
