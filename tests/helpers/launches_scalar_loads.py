"""A kernel that reads single elements, and one that does not, for kernels/test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _every_other_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + 2 * at))


@triton.jit
def _all_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


def launches() -> Iterator[Callable[[], object]]:
    x = torch.empty(2048, dtype=torch.float16)
    kernels: tuple[Any, ...] = (_every_other_kernel, _all_kernel)
    for kernel in kernels:
        yield partial(kernel[(1,)], x, x, BLOCK=1024, num_warps=4)
