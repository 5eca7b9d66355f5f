"""torch where it is needed, and its tensors as the kernels see them.

To import torch takes as long as all else of a start and a short answer, and 180 MB. Host code asks
``load_torch`` for it where it computes with it: in most sessions nowhere. device/ imports it as
usual. Arrays of bf16, which numpy does not have, are of uint16: the upper halves of f32.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

_n_threads = 0  # that torch is to have; 0: as it likes


def limit_torch(n_threads: int) -> None:
    """From now on torch computes with ``n_threads`` threads, whenever it is imported."""
    global _n_threads
    _n_threads = n_threads
    if "torch" in sys.modules:
        load_torch()


def load_torch() -> Any:
    """The module torch, which keeps no gradients in the thread that asks."""
    import torch

    if _n_threads:
        if torch.get_num_threads() != _n_threads:
            torch.set_num_threads(_n_threads)
        torch.set_grad_enabled(False)
    return torch


def bits(tensor: Any) -> np.ndarray:
    """The memory of a bf16 tensor as an array."""
    return tensor.view(load_torch().int16).numpy().view(np.uint16)


def as_tensor(x: Any) -> Any:
    """An array, or a tensor already, as a tensor; the same memory."""
    torch = load_torch()
    if isinstance(x, np.ndarray) and x.dtype == np.uint16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.as_tensor(x)


def as_f32(x: Any) -> np.ndarray:
    """An f32 or bf16 array, or a CPU tensor of any type, as an f32 array; may share its memory."""
    if not isinstance(x, np.ndarray):
        return x.float().numpy()
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x


def seen(x: Any) -> np.ndarray:
    """Rows as kernels take them: an array itself, the memory of a bf16 tensor, others as f32."""
    if isinstance(x, np.ndarray):
        return x
    return bits(x) if x.dtype == load_torch().bfloat16 else as_f32(x)
