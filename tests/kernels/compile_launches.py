"""Compiles every launch of tests/kernels/launches_NAME.py for GPUs that need not be there.

Run as a program: NAME... The launchers are called as they are, on CPU tensors; what a launch would
do is replaced by Triton's own warm-up, told by a driver that a GPU of each capability is present,
so that types, alignment and options are specialised as in a real launch. One JSON line a kernel and
capability: module (its NAME), kernel, capability, registers a thread, bytes of stack and local
memory, shared bytes; for a module that fails, a line with its error.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

CAPABILITIES = (80, 90)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class AbsentGpu:
    """As much of Triton's driver as a warm-up asks for; the device's number is its capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


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


def compile_all(names: list[str]) -> None:
    launch_now = triton.runtime.JITFunction.run
    seen = set()
    name = ""

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        for capability in CAPABILITIES:
            driver.set_active(AbsentGpu(capability))  # type: ignore[arg-type]
            kernel = launch_now(self, *args, grid=grid, warmup=True, **kwargs)
            key = name, self.fn.__name__, capability, kernel.hash
            if key in seen:
                continue
            seen.add(key)
            used = resources(kernel.asm["cubin"])
            line = {
                "module": name,
                "kernel": self.fn.__name__,
                "capability": capability,
                "registers": used["REG"],
                "stack": used["STACK"],
                "local": used["LOCAL"],
                "shared": kernel.metadata.shared,
                "warps": kernel.metadata.num_warps,
                "constants": {
                    k: v for k, v in kwargs.items() if isinstance(v, int | bool) and k.isupper()
                },
            }
            print(json.dumps(line), flush=True)

    triton.runtime.JITFunction.run = warm_up
    for name in names:
        try:
            for launch in importlib.import_module(f"launches_{name}").launches():
                launch()
        except Exception:
            print(json.dumps({"module": name, "error": traceback.format_exc()}), flush=True)


if __name__ == "__main__":
    compile_all(sys.argv[1:])
