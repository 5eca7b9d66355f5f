"""Native signal handlers that write one line and end the process. They do not wait for the GIL.

They serve signals that Python cannot handle. SIGBUS is raised inside compiled code. An alarm may
come while a C call holds the GIL.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from functools import cache

from llvmlite import binding, ir

STDERR = 2
EXIT_CODE = 1
STATE_BYTES = 1024  # larger than any system's struct sigaction


@contextlib.contextmanager
def install(signal_number: int, message: bytes) -> Iterator[None]:
    """While the block runs, the signal writes ``message`` as a line to stderr and exits with 1.

    Nothing is flushed or cleaned up, so stdout may end within a line. After the block the signal
    has its former handler, also if that is not Python's. Raises ValueError for a number that is no
    signal.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.sigaction.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)
    saved = ctypes.create_string_buffer(STATE_BYTES)
    if libc.sigaction(signal_number, None, saved) != 0:
        raise ValueError(f"signal_number {signal_number}: {os.strerror(ctypes.get_errno())}")
    libc.signal(signal_number, _handler(message)[1])
    try:
        yield
    finally:
        libc.sigaction(signal_number, saved, None)


@cache
def _handler(message: bytes) -> tuple[object, int]:
    """Returns the object that keeps the compiled handler alive, and the handler's address."""
    number, size, text = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()
    module = ir.Module("last_words")
    module.triple = binding.get_process_triple()
    line = bytearray(message + b"\n")
    words = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), len(line)), "words")
    words.global_constant = True
    words.initializer = ir.Constant(words.value_type, line)
    write = ir.Function(module, ir.FunctionType(size, [number, text, size]), "write")
    leave = ir.Function(module, ir.FunctionType(ir.VoidType(), [number]), "_exit")
    handler = ir.Function(module, ir.FunctionType(ir.VoidType(), [number]), "last_words")
    builder = ir.IRBuilder(handler.append_basic_block())
    builder.call(write, [number(STDERR), builder.bitcast(words, text), size(len(line))])
    builder.call(leave, [number(EXIT_CODE)])
    builder.ret_void()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_triple(module.triple).create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), machine)
    engine.finalize_object()
    return engine, engine.get_function_address("last_words")
