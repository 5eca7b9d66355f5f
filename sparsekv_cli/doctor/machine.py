"""The environment of the program: Python, packages, CPU, memory, GPU and environment variables."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sparsekv_cli.evaluation.roofline import cpu_name
from sparsekv_cli.system.control_groups import cpu_quota
from sparsekv_cli.system.gpu import lacking_packages, may_have_device
from sparsekv_cli.system.memory import available_memory, container_limit, physical_memory
from sparsekv_cli.system.work import usable_cores, usable_cpus

#: The packages that the program requires, by their names at PyPI.
REQUIRED = (
    *("click", "gguf", "jinja2", "llvmlite", "numba", "numpy", "packaging", "prompt-toolkit"),
    *("pydantic", "rich", "sentencepiece", "threadpoolctl", "tokenizers"),
)
#: The packages of the extras that users install.
OPTIONAL = (
    *("cryptography", "huggingface-hub", "llguidance", "matplotlib", "prometheus-client", "pypdf"),
    *("ray", "starlette", "torch", "triton", "uvicorn"),
)
#: The features, by LLVM's names, that the kernels in cpu/ ask the CPU for.
FEATURES = (
    *("avx2", "avx512f", "avx512bw", "avx512vbmi", "avx512vnni", "avx512bf16", "avxvnni"),
    *("amx-bf16", "sse4a", "dotprod", "i8mm"),
)
#: The environment variables that change what the program does. No secret is among them.
VARIABLES = (
    *("SPARSEKV_MODEL", "SPARSEKV_MODELS", "SPARSEKV_NO_CACHE", "XDG_CACHE_HOME", "XDG_DATA_HOME"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET"),
    *("NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER", "NUMBA_DISABLE_JIT", "NUMBA_CPU_NAME"),
    *("NUMBA_CPU_FEATURES", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX"),
)
DRIVER = Path("/proc/driver/nvidia/version")


def python(problems: list[str]) -> dict[str, Any]:
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
    }


def packages(problems: list[str]) -> dict[str, str | None]:
    """Returns package -> version; None: it is not installed. No package is imported.

    Missing packages that the program requires are added to ``problems``.
    """
    found = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    problems += [f"packages: {name} is not installed" for name in REQUIRED if not found[name]]
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu(problems: list[str]) -> dict[str, Any]:
    """Returns the CPU's name and numbers of CPUs. ``usable``: those that this process may use.

    ``container_quota``: CPUs that a container allows; None: no limit.
    """
    return {
        "name": cpu_name(),
        "architecture": platform.machine(),
        "count": os.cpu_count(),
        "usable": usable_cpus(),
        "container_quota": cpu_quota(),
        "threads": usable_cores(),
    }


def cpu_features(problems: list[str]) -> dict[str, bool]:
    from sparsekv_cli.cpu.jit.features import cpu_features as find

    return {name: find().get(name, False) for name in FEATURES}


def memory(problems: list[str]) -> dict[str, int | None]:
    """Returns bytes of memory; None: unknown, for the container: no limit."""
    return {
        "physical_bytes": physical_memory(),
        "available_bytes": available_memory(),
        "container_limit_bytes": container_limit(),
    }


def gpu(problems: list[str]) -> dict[str, Any]:
    """Returns the GPU's driver and devices. Without a driver torch is not imported."""
    has_driver = may_have_device()
    found: dict[str, Any] = {
        "driver": has_driver,
        "driver_version": _driver_version(),
        "cuda_of_torch": None,
        "devices": [],
    }
    if not has_driver:
        return found
    lacks = lacking_packages()
    if lacks:
        problems.append(f"gpu: there is a driver, but {lacks}")
        return found
    try:
        from sparsekv_cli.device.cuda import describe_devices

        found["cuda_of_torch"], found["devices"] = describe_devices()
    except Exception as error:  # a torch that does not fit the driver fails in many ways
        problems.append(f"gpu: torch or triton fails: {type(error).__name__}: {error}")
        return found
    if not found["devices"]:
        problems.append("gpu: there is a driver, but torch finds no CUDA device")
    return found


def _driver_version() -> str | None:
    """Returns the first line of NVIDIA's version file on Linux; None without the file."""
    try:
        return DRIVER.read_text(errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return None


def environment(problems: list[str]) -> dict[str, str]:
    """Returns the variables of VARIABLES that are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}
