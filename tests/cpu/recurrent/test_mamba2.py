"""Mamba-2: groups of rows and single rows against the reference, across chunks."""

import numpy as np
import pytest

from sparsekv_cli.cpu.jit.floats import as_f32, as_type_of
from sparsekv_cli.cpu.recurrent.mamba2 import mamba2, mamba2_ref

EPS = 1e-6
BF16 = np.empty(0, np.uint16)


def inputs(n_rows, n_group, n_head, d_k, d_v, length, has_norm, seed=0):
    """raw, the weights of ``mamba2``, rows and states; decays from nearly none to nearly all."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    n_out = n_head * d_v
    n = n_out + 2 * n_group * d_k
    heads = np.stack([normal(n_head), -np.exp(2 * normal(n_head)), normal(n_head)])
    norm = 1 + 0.1 * normal(n_out * has_norm)
    weights = normal(length, n), 0.3 * normal(n), heads, norm
    return (
        normal(n_rows, n_out + n + n_head),
        weights,
        normal(length - 1, n),
        normal(n_head, d_k, d_v),
    )


def laid_out(states: np.ndarray) -> np.ndarray:
    """states (H, d_k, d_v) as the kernel has them."""
    n_head, d_k, d_v = states.shape
    padded = np.zeros((n_head, d_k, -(-d_v // 16) * 16), np.float32)
    padded[:, :, :d_v] = states
    return np.ascontiguousarray(padded.reshape(n_head, d_k, -1, 16).transpose(0, 2, 1, 3))


@pytest.mark.parametrize(
    ("n_rows", "sizes"),
    [
        (1, (1, 4, 128, 64, 4)),
        (63, (1, 3, 80, 24, 4)),
        (150, (2, 6, 24, 80, 3)),
        (131, (2, 2, 256, 16, 4)),
    ],
)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_kernel_is_the_reference_across_chunks(n_rows, sizes, dtype, has_norm):
    raw, weights, rows, states = inputs(n_rows, *sizes, has_norm)
    if dtype == "bf16":
        raw = as_type_of(BF16, raw)
    wide = [as_f32(x).astype(np.float64) for x in (raw, *weights)]
    expected, last_rows, last = mamba2_ref(
        *wide, EPS, rows.astype(np.float64), states.astype(np.float64)
    )
    found = laid_out(states)
    out = np.empty(expected.shape, raw.dtype)
    for start in range(0, n_rows, 100):
        part = slice(start, min(n_rows, start + 100))
        mamba2(raw[part], *weights, np.float32(EPS), rows, found, out[part], 2)
    limit = 1e-2 if dtype == "bf16" else 1e-4
    np.testing.assert_allclose(as_f32(out), expected, rtol=limit, atol=limit)
    np.testing.assert_allclose(rows, last_rows, rtol=1e-6)
    np.testing.assert_allclose(found, laid_out(last), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("n_rows", [7, 8, 9, 64, 73])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_rows_in_groups_are_rows_one_by_one(n_rows, n_threads):
    raw, weights, rows, states = inputs(n_rows, 2, 4, 32, 40, 4, True, seed=n_rows)
    results = []
    for step in (n_rows, 1):
        own_rows, own = rows.copy(), laid_out(states)
        out = np.empty((n_rows, 4 * 40), np.float32)
        for start in range(0, n_rows, step):
            part = slice(start, start + step)
            mamba2(raw[part], *weights, np.float32(EPS), own_rows, own, out[part], n_threads)
        results.append((out, own_rows, own))
    for grouped, single in zip(*results, strict=True):
        np.testing.assert_allclose(grouped, single, rtol=1e-4, atol=1e-5)
