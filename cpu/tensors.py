"""torch where it is needed, and its tensors as the kernels see them.

To import torch takes as long as all else of a start and a short answer. Host code asks
``load_torch`` for it where it computes with it, which a session of method ``full`` never does if
its prefill is in integers. device/ imports it as usual.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

_wanted_threads: list[int] = []  # what torch is to be told once it is there


def limit_torch(n_threads: int) -> None:
    """From now on torch computes with ``n_threads`` threads, whenever it is imported."""
    _wanted_threads[:] = [n_threads]
    if "torch" in sys.modules:
        load_torch()


def load_torch() -> Any:
    """The module torch, which keeps no gradients."""
    import torch

    if _wanted_threads:
        torch.set_num_threads(_wanted_threads.pop())
        torch.set_grad_enabled(False)
    return torch


def bits(tensor: Any) -> np.ndarray:
    """The memory of a bf16 tensor as uint16, which is how numba sees bf16."""
    return tensor.view(load_torch().int16).numpy().view(np.uint16)


def as_f32(x: Any) -> np.ndarray:
    """An f32 array, or a CPU tensor of any type, as an f32 array; may share its memory."""
    return x if isinstance(x, np.ndarray) else x.float().numpy()


def seen(x: Any) -> np.ndarray:
    """Rows as the kernels take them: an array itself; a CPU tensor's memory, bf16 as its bits."""
    if isinstance(x, np.ndarray):
        return x
    return bits(x) if x.dtype == load_torch().bfloat16 else x.numpy()
