"""Products of quantised matrices with a few vectors, on the GPU.

A decode step reads every weight once, so instructions a weight decide its speed. At 4.5 bits a
weight and full memory speed, an H200 has 3.4 instructions for each weight, an H100 4.8. Layout:
weights/packed.py; kernels: weights/matvec.py and weights/matmul.py.
"""

import torch

from sparsekv_cli.kernels.checks import check
from sparsekv_cli.kernels.weights import matmul, matvec
from sparsekv_cli.kernels.weights.packed import PackedMatrix

MAX_BATCH = matmul.BATCH
MAX_FUSED = 2  # vectors above which the tensor cores take less time, on an H200
MAX_INPUTS = 16384  # of these vectors together, above which they do: a program has to round them


def multiply(w: PackedMatrix, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """y f32 (B, rows) = x W^T for x (B, columns) f32, f16 or bf16, B from 1 to 16, summed in f32.

    Up to MAX_FUSED vectors have at most MAX_INPUTS numbers. Inputs are rounded to 16 bits relative
    to the largest of 32 (of 16 with Q8_0). Plain floats take them as they are. More: weights and
    inputs are rounded to 11 bits. Where an input is no finite number, no output of its vector is.
    out: f32 (B, rows), rows any stride apart.
    """
    n_batch, device = x.shape[0], w.low.device
    if not 1 <= n_batch <= MAX_BATCH:
        raise ValueError(f"x has {n_batch} rows: expected 1 to {MAX_BATCH}")
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    check("x", x, dtypes, (n_batch, w.n_columns), device, strided=True)
    if out is None:
        out = torch.empty(n_batch, w.n_rows, dtype=torch.float32, device=device)
    check("out", out, torch.float32, (n_batch, w.n_rows), device, strided=True)
    few = n_batch <= MAX_FUSED and n_batch * w.n_columns <= MAX_INPUTS
    (matvec.matvec if few else matmul.matmul)(w, x, out)
    return out
