"""torch where it is needed, and its tensors as the kernels see them.

To import torch takes as long as all else of a start and a short answer. Host code asks
``load_torch`` for it where it computes with it: in most sessions only a prefill that multiplies in
bf16 or f32. device/ imports it as usual.
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
    """The memory of a bf16 tensor as uint16, which is how numba sees bf16."""
    return tensor.view(load_torch().int16).numpy().view(np.uint16)


def as_f32(x: Any) -> np.ndarray:
    """An f32 array, or a CPU tensor of any type, as an f32 array; may share its memory."""
    return x if isinstance(x, np.ndarray) else x.float().numpy()


def seen(x: Any) -> np.ndarray:
    """Rows as kernels take them: an array itself, the bits of a bf16 tensor, others as f32."""
    if not isinstance(x, np.ndarray) and x.dtype == load_torch().bfloat16:
        return bits(x)
    return as_f32(x)
