"""What a session computes with: the CPU's decoder, or a GPU's (device/), and their caches."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sparsekv_cli import warmup
from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.config import SessionConfig
from sparsekv_cli.cpu.jit.floats import load_torch
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods.base import Method
from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.weights import Weights
from sparsekv_cli.warmup import Report

if TYPE_CHECKING:
    from sparsekv_cli.models.decoder import Decoder


class Engine(Protocol):
    """One model on one machine."""

    decoder: Any  # of models/decoder.py, or one with its methods
    note: str  # what the user should know of how it runs
    shares_prefill: bool  # whether one can fill caches of several methods (evaluation/prefill.py)
    first_steps: int  # of a sequence's decode steps, those that take longer than later ones

    def layer(self, method: Method, spec: LayerSpec) -> LayerCache:
        """The cache of one layer."""

    def decodes_on_host(self, method: Method) -> bool:
        """Whether a step with ``method`` runs kernels of cpu/."""


class HostEngine:
    """The CPU alone."""

    def __init__(self, decoder: Decoder) -> None:
        from sparsekv_cli.cpu import ops

        self.decoder = decoder
        self.note = ""
        self.shares_prefill = True
        self.first_steps = 1
        self._ops = ops

    def layer(self, method: Method, spec: LayerSpec) -> LayerCache:
        return method.layer(spec, self._ops)

    def decodes_on_host(self, method: Method) -> bool:
        return True


GPU_FILES = ("nvidia*", "nvhost*", "dxg", "kfd")  # in /dev: NVIDIA's, its boards', WSL's, AMD's


def may_have_device() -> bool:
    """Whether there is a GPU's driver, without which there is no need to ask torch for a GPU."""
    if any(found for name in GPU_FILES for found in Path("/dev").glob(name)):
        return True
    try:
        ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return False
    return True


def find_device(name: str) -> Any:
    """The GPU that ``auto``, ``cpu`` or ``cuda`` stands for, a torch.device; None: the CPU.

    SparseKVError for cuda where there is none. With TRITON_INTERPRET=1, cuda is the CPU with
    interpreted kernels, which is slow and there to look for errors.
    """
    if name == "cpu" or (name == "auto" and not may_have_device()):
        return None
    torch = load_torch()
    has_triton = find_spec("triton") is not None
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if has_triton and torch.cuda.is_available() and not interpreted:
        return torch.device("cuda")
    if name == "auto":
        return None
    if has_triton and interpreted:
        return torch.device("cpu")
    if torch.cuda.is_available():
        raise SparseKVError(
            "--device cuda needs the package triton: pip install 'sparsekv-cli[gpu]'"
        )
    raise SparseKVError(
        "--device cuda: torch finds no CUDA device; use --device cpu, or install a torch for CUDA"
    )


def open_engine(
    hparams: HParams,
    architecture: Architecture,
    weights: Weights,
    method: Method,
    config: SessionConfig,
    n_threads: int,
    n_ctx: int,
    on_compile: Report | None,
) -> Engine:
    """The engine that ``config.device`` names; SparseKVError where there is none or no room."""
    device = find_device(config.device)
    if device is not None:
        from sparsekv_cli.device.engine import open_device_engine

        return open_device_engine(
            device, hparams, architecture, weights, method, config, n_threads, n_ctx, on_compile
        )
    from sparsekv_cli.models.decoder import Decoder, cpu_prefill_dtype

    dtype = config.prefill_dtype
    if dtype == "auto":
        dtype = cpu_prefill_dtype()
    warmup.compile_weight_kernels(weights, dtype, on_compile)
    return HostEngine(
        Decoder(
            hparams,
            architecture,
            weights,
            n_threads=n_threads,
            prefill_dtype=dtype,
            chunk=config.chunk,
            repack=config.repack,
        )
    )
