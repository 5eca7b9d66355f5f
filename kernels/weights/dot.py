"""Products of quantised matrices with a few vectors, on the GPU.

A decode step reads every weight once, so its speed depends on the instructions a weight. At 4.5
bits a weight and full memory speed, an H200 has 3.4 instructions for each weight, an H100 4.8. The
layout is in weights/packed.py, the kernels are in weights/matvec.py and weights/matmul.py.
"""

import torch

from sparsekv_cli.kernels.checks import check
from sparsekv_cli.kernels.weights import matmul, matvec
from sparsekv_cli.kernels.weights.packed import FLOATS, PACKINGS, PackedMatrix

MAX_BATCH = matmul.BATCH
MAX_FUSED = 2  # most vectors for matvec; for more, tensor cores take less time on an H200
# Whether a word's two fields become neighbours in a product of tensor cores. A program then has
# fewer instructions, 14% with Q4_K. No GPU has compared it: scripts/gpu/first does.
JOINED = False
MAX_INPUTS = 16384  # most numbers of these vectors, because each program rounds all of them


def multiply(
    w: PackedMatrix,
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    joined: bool = JOINED,
) -> torch.Tensor:
    """Returns x W^T, f32 (B, rows), for x (B, columns) f32, f16 or bf16, B from 1 to 16.

    Up to MAX_FUSED vectors and MAX_INPUTS numbers, inputs are rounded to 16 bits relative to the
    largest of 32 (of 16 with Q8_0). For plain floats they are not rounded. For more vectors,
    weights and inputs are rounded to 11 bits. Sums are f32. If an input is not finite, all outputs
    of its vector are NaN. out: f32 (B, rows), any strides of rows. joined: see ``JOINED``. With few
    vectors, and of plain floats, both ways are one.
    """
    out = _checked(x, w.n_columns, w.n_rows, w.low.device, out)
    if _are_few(x):
        matvec.matvec(w, x, out)
    else:
        matmul.matmul(w, x, out, joined)
    return out


def can_pair(w: PackedMatrix, w_2: PackedMatrix) -> bool:
    """Returns whether ``multiply_pair`` takes two matrices: both packed alike but for the scales.

    Formats of 4 bits and more have one layout of their low bits. Q8_0 has another.
    """
    if w.name in FLOATS or w_2.name in FLOATS or w.n_columns != w_2.n_columns:
        return False
    return PACKINGS[w.name].low_bits == PACKINGS[w_2.name].low_bits


def multiply_pair(
    w: PackedMatrix,
    w_2: PackedMatrix,
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    joined: bool = JOINED,
) -> torch.Tensor:
    """Returns ``multiply`` of both matrices side by side, f32 (B, all rows), in one launch.

    With one or two vectors the sums have the bits of ``multiply``.
    """
    if not can_pair(w, w_2):
        raise ValueError(f"{w.name} and {w_2.name} do not go together: expected two of 4 bits")
    out = _checked(x, w.n_columns, w.n_rows + w_2.n_rows, w.low.device, out)
    if _are_few(x):
        matvec.matvec_pair(w, w_2, x, out)
    else:
        matmul.matmul_pair(w, w_2, x, out, joined)
    return out


def _are_few(x: torch.Tensor) -> bool:
    """Returns whether x is for matvec."""
    return len(x) <= MAX_FUSED and x.numel() <= MAX_INPUTS


def _checked(
    x: torch.Tensor, n_columns: int, n_rows: int, device: torch.device, out: torch.Tensor | None
) -> torch.Tensor:
    """Returns where a product is written. Raises ValueError unless the arguments fit."""
    n_batch = x.shape[0]
    if not 1 <= n_batch <= MAX_BATCH:
        raise ValueError(f"x has {n_batch} rows: expected 1 to {MAX_BATCH}")
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    check("x", x, dtypes, (n_batch, n_columns), device, strided=True)
    if out is None:
        out = torch.empty(n_batch, n_rows, dtype=torch.float32, device=device)
    check("out", out, torch.float32, (n_batch, n_rows), device, strided=True)
    return out


def multiply_chosen(
    w: PackedMatrix, x: torch.Tensor, choice: matvec.PairChoice, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the products of pairs, a vector and one of several matrices: f32 (pairs, rows).

    x (vectors, columns) f32, f16 or bf16. Inputs are rounded as ``multiply`` does it for one
    vector. out: f32 (pairs, rows), any strides of rows.
    """
    n_vector, n_pair, device = len(x), len(choice.chosen), w.low.device
    if w.n_rows % choice.n_matrix or n_vector * choice.n_choice != n_pair:
        raise ValueError(
            f"{n_pair} pairs of {n_vector} vectors, {choice.n_choice} each; {choice.n_matrix} "
            f"matrices in {w.n_rows} rows"
        )
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    check("x", x, dtypes, (n_vector, w.n_columns), device, strided=True)
    check("chosen", choice.chosen, torch.int32, (n_pair,), device)
    n_rows = w.n_rows // choice.n_matrix
    if out is None:
        out = torch.empty(n_pair, n_rows, dtype=torch.float32, device=device)
    check("out", out, torch.float32, (n_pair, n_rows), device, strided=True)
    matvec.matvec(w, x, out, choice)
    return out
