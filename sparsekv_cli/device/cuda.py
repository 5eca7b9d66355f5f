"""The device that torch and Triton offer, and reports of the kernels that Triton compiles."""

import os
from collections.abc import Callable
from typing import Any

import torch
import triton

from sparsekv_cli.errors import SparseKVError

LEAST_CAPABILITY = (8, 0)  # for which kernels are compiled in tests


def find_cuda(name: str) -> torch.device | None:
    """Returns the device of ``auto`` or ``cuda``. None, for auto only: the CPU's decoder.

    With TRITON_INTERPRET=1, cuda is the CPU with interpreted kernels, which is slow and only for
    tests.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if torch.cuda.is_available() and not interpreted:
        return torch.device("cuda")
    if name == "auto":
        return None
    if interpreted:
        return torch.device("cpu")
    raise SparseKVError(
        "--device cuda: torch finds no CUDA device; use --device cpu, or install a torch for CUDA"
    )


def problem_of(device: torch.device) -> str:
    """Returns why a GPU cannot be used; an empty text if it can."""
    if device.type != "cuda":
        return ""
    try:
        found = torch.cuda.get_device_capability(device)
    except RuntimeError as error:  # another process may use it exclusively
        return f"it cannot be started ({str(error).partition(chr(10))[0]})"
    needed = ".".join(map(str, LEAST_CAPABILITY))
    if found < LEAST_CAPABILITY:
        return f"it has compute capability {found[0]}.{found[1]}, and at least {needed} is needed"
    return ""


def describe_devices() -> tuple[str | None, list[dict[str, Any]]]:
    """Returns the CUDA version of torch (None: a build for the CPU), and the devices."""
    if not torch.cuda.is_available():
        return torch.version.cuda, []
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return torch.version.cuda, [
        {
            "name": each.name,
            "memory_bytes": each.total_memory,
            "capability": f"{each.major}.{each.minor}",
        }
        for each in devices
    ]


def report_compiling(report: Callable[[str, int, int], None]) -> None:
    """Calls ``report`` with the name of each kernel that Triton compiles from now on.

    It reports 0 of 0 done, because the number of kernels is unknown. Triton has one such listener;
    a model that is opened later replaces it.
    """

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            report(src.name, 0, 0)

    triton.knobs.compilation.listener = listen
