"""Timestamps of the GPU's own clock, taken in a stream. A captured graph can take them, too."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from sparsekv_cli.kernels.checks import check

STARTED, TOTAL, N_TIMES = (tl.constexpr(i) for i in range(3))  # columns of ``times``, ns


@triton.jit
def _take_time_kernel(times_ptr, STOP: tl.constexpr):
    now = globaltimer()
    if STOP:
        total = tl.load(times_ptr + TOTAL) + now - tl.load(times_ptr + STARTED)
        tl.store(times_ptr + TOTAL, total)
    else:
        tl.store(times_ptr + STARTED, now)


def take_time(times: torch.Tensor, *, stop: bool) -> None:
    """Writes the time at this point of the current stream; stop: adds the time since to the total.

    times int64 (N_TIMES,), nanoseconds. Triton's interpreter has no such clock.
    """
    check("times", times, torch.int64, (N_TIMES.value,), times.device)
    _take_time_kernel[(1,)](times, STOP=stop, num_warps=1)
