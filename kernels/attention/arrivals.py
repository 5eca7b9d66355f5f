"""How the last program of a launch to arrive takes over what its others have written.

The programs that share a list each write a part, and count that they have. The last of them goes on
with all parts. No program waits for another.
"""

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.checks import check

NONE_ARRIVED = -1  # what the counts hold between launches


@triton.jit
def arrive_last(arrived_at, n_split):
    """Counts that a program has written its split. Returns whether it is the last of n_split.

    The last program may read what all have written, but not from the cache of its multiprocessor.
    """
    tl.debug_barrier()  # the program's other warps have written, too
    is_last = tl.atomic_add(arrived_at, 1, sem="acq_rel", scope="gpu") == n_split - 2
    if is_last:
        tl.store(arrived_at, -1)
    return is_last


def none_arrived(n_batch: int, n_list: int, device: torch.device) -> torch.Tensor:
    """Returns the counts of arrivals of a launch that has not begun, int32 (B, n_list)."""
    return torch.full((n_batch, n_list), NONE_ARRIVED, dtype=torch.int32, device=device)


def check_arrived(arrived: torch.Tensor, n_batch: int, n_list: int, device: torch.device) -> None:
    """Raises ValueError unless there is a count for each list; there may be more."""
    check("arrived", arrived, torch.int32, (n_batch, None), device)
    if arrived.shape[1] < n_list:
        raise ValueError(f"arrived has {arrived.shape[1]} counts a row: expected {n_list} or more")
