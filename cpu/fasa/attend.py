"""FASA's focused attention: exact attention over a head's chosen rows, with K in two parts."""

import numpy as np

from sparsekv_cli.cpu.attention.softmax import exponentiate
from sparsekv_cli.cpu.attention.tile import PAD, tile_scores, tile_values
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import keep


@njit(cache=True, nogil=True)
def attend_split_rows(q_rest, rest, v, rows, scores, scale, softcap, sink, out):
    """Computes exact attention of one head over listed rows; scores: the dominant part of q . k.

    q_rest f32 (d_rest padded,), rest u16 (n, d_rest padded), v u16 (n, d_v), rows int32 (k,),
    scores f32 (k,), out f32 (d_v,). softcap: 0 for none; sink: a score without a value, or -inf.
    """
    count = rows.shape[0]
    dots = np.empty(count + PAD, np.float32)
    tile_scores(
        1, 1, q_rest.ctypes.data, rest.ctypes.data, rest.strides[0], rows.ctypes.data, count,
        q_rest.shape[0], dots.ctypes.data, 0,
    )  # fmt: skip
    for j in range(count):
        dots[j] = scale * (dots[j] + scores[j])
    peak, mass = exponentiate(dots, count, softcap, sink)
    mass += np.exp(sink - peak)
    out[:] = 0
    tile_values(
        1, 1, dots.ctypes.data, 0, v.ctypes.data, v.strides[0], rows.ctypes.data, count,
        out.shape[0], out.ctypes.data,
    )  # fmt: skip
    keep(dots)
    for c in range(out.shape[0]):
        out[c] /= mass
