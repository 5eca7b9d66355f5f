"""Compiles the launches of tests/kernels/launches.py for GPUs that need not be there.

Run as a program: [--first] NAME... With --first only the first launch of each kernel is compiled,
for sm_90. The launchers are called as they are, on CPU tensors; what a launch would
do is replaced by Triton's own warm-up, told by a driver that a GPU of each capability is present,
so that types, alignment and options are specialised as in a real launch. One JSON line a kernel and
capability: module (its NAME), kernel, capability, registers a thread, bytes of stack and local
memory, shared bytes, and what kernel_ptx.py reads; for a module that fails, a line with its error.

All launches are compiled for sm_80. sm_90 takes about as many registers (from 40 on at most a
quarter more), and its own instructions where matrices are multiplied. So it gets the first launch
of each kernel, the first one that multiplies, and those that take more than MANY registers.
"""

import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import launches
import triton
from gpu_compile import AbsentGpu
from kernel_ptx import read_ptx
from triton.runtime.driver import driver

CAPABILITIES = (80, 90)
MANY = 160  # registers of 255
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED, LOCAL, ... of the one kernel in a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = text.split("Function ")[1].split(":", 1)[1].split()
    pairs = (field.split(":") for field in fields)
    return {name: int(value) for name, value in pairs if name.isupper()}


def compile_all(
    names: Sequence[str], capabilities: Sequence[int] = CAPABILITIES, *, first_only: bool = False
) -> Iterator[dict[str, Any]]:
    """The lines of modules; all launches for the first capability, some for the others.

    first_only: of a kernel's launches only the first.
    """
    launch_now = triton.runtime.JITFunction.run
    done: set[Any] = set()
    lines: list[dict[str, Any]] = []
    name = ""

    def compiled(capability: int, jitted: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        """The line of a launch; empty if the same was compiled before."""
        driver.set_active(AbsentGpu(capability))  # type: ignore[arg-type]
        kernel = launch_now(jitted, *args, warmup=True, **kwargs)
        if (name, capability, kernel.hash) in done:
            return {}
        done.add((name, capability, kernel.hash))
        used = resources(kernel.asm["cubin"])
        constants = {k: v for k, v in kwargs.items() if isinstance(v, int | bool) and k.isupper()}
        lines.append({
            "module": name, "kernel": jitted.fn.__name__, "capability": capability,
            "registers": used["REG"], "stack": used["STACK"], "local": used["LOCAL"],
            "shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps,
            "constants": constants, **read_ptx(kernel.asm["ptx"]),
        })  # fmt: skip
        return lines[-1]

    def warm_up(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        if first_only and (name, self.fn.__name__) in done:
            return
        done.add((name, self.fn.__name__))
        line = compiled(capabilities[0], self, args, kwargs)
        if not line:
            return
        kind = name, line["kernel"], line["mma"] > 0
        if kind not in done or line["registers"] > MANY:
            done.add(kind)
            for capability in capabilities[1:]:
                compiled(capability, self, args, kwargs)

    triton.runtime.JITFunction.run = warm_up
    try:
        for name in names:
            try:
                for launch in getattr(launches, name)():
                    launch()
                    yield from lines
                    lines.clear()
            except Exception:
                yield {"module": name, "error": traceback.format_exc()}
    finally:
        triton.runtime.JITFunction.run = launch_now


if __name__ == "__main__":
    if sys.argv[1:2] == ["--first"]:
        found = compile_all(sys.argv[2:], CAPABILITIES[1:], first_only=True)
    else:
        found = compile_all(sys.argv[1:])
    for told in found:
        print(json.dumps(told), flush=True)
