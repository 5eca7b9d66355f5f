"""Which device torch and Triton offer; nothing else of device/ is imported for it."""

from __future__ import annotations

import os

import torch

from sparsekv_cli.errors import SparseKVError


def find_cuda(name: str) -> torch.device | None:
    """The device that ``auto`` or ``cuda`` stands for. None, for auto only: the CPU's decoder.

    With TRITON_INTERPRET=1, cuda is the CPU with interpreted kernels, which is slow and there to
    look for errors.
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
