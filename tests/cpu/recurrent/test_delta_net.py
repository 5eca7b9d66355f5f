"""The gated delta net: groups of rows and single rows against the reference, across chunks."""

import numpy as np
import pytest

from sparsekv_cli.cpu.jit.floats import as_f32, as_type_of
from sparsekv_cli.cpu.recurrent import delta_net as kernels

EPS = 1e-6
BF16 = np.empty(0, np.uint16)


def inputs(n_rows, n_k, n_v, d_k, d_v, length, seed=0):
    """raw, the weights of ``delta_net``, rows and states; decays from nearly none to nearly all."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    n = 2 * n_k * d_k + n_v * d_v
    raw = normal(n_rows, n + n_v * d_v), normal(n_rows, 2 * n_v)
    weights = normal(length, n), normal(n_v), -np.exp(2 * normal(n_v)), 1 + 0.1 * normal(d_v)
    return raw, weights, normal(length - 1, n), 0.1 * normal(n_v, d_k, d_v)


def laid_out(states: np.ndarray) -> np.ndarray:
    """states (n_v, d_k, d_v) as the kernel has them."""
    n_v, d_k, d_v = states.shape
    padded = np.zeros((n_v, d_k, -(-d_v // 16) * 16), np.float32)
    padded[:, :, :d_v] = states
    return np.ascontiguousarray(padded.reshape(n_v, d_k, -1, 16).transpose(0, 2, 1, 3))


@pytest.mark.parametrize(
    ("n_rows", "sizes"),
    [
        (1, (2, 4, 128, 128, 4)),
        (63, (1, 3, 80, 24, 4)),
        (150, (2, 2, 24, 80, 3)),
        (131, (2, 4, 16, 16, 4)),
    ],
)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_kernel_is_the_reference_across_chunks(n_rows, sizes, dtype, grouped):
    raw, weights, rows, states = inputs(n_rows, *sizes)
    if dtype == "bf16":
        raw = tuple(as_type_of(BF16, x) for x in raw)
    wide = [as_f32(x).astype(np.float64) for x in (*raw, *weights)]
    expected, last_rows, last = kernels.delta_net_ref(
        *wide, EPS, grouped, rows.astype(np.float64), states.astype(np.float64)
    )
    found = laid_out(states)
    out = np.empty(expected.shape, raw[0].dtype)
    for start in range(0, n_rows, 100):
        part = slice(start, min(n_rows, start + 100))
        pieces = [x[part] for x in raw]
        kernels.delta_net(*pieces, *weights, np.float32(EPS), grouped, rows, found, out[part], 2)
    limit = 2e-2 if dtype == "bf16" else 2e-4
    np.testing.assert_allclose(as_f32(out), expected, rtol=limit, atol=limit)
    np.testing.assert_allclose(rows, last_rows, rtol=1e-6)
    np.testing.assert_allclose(found, laid_out(last), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("n_rows", [7, 8, 9, 64, 73])
def test_rows_in_groups_are_rows_one_by_one(n_rows):
    raw, weights, rows, states = inputs(n_rows, 2, 4, 32, 48, 4, seed=n_rows)
    results = []
    for step in (n_rows, 1):
        own_rows, own = rows.copy(), laid_out(states)
        out = np.empty((n_rows, 4 * 48), np.float32)
        for start in range(0, n_rows, step):
            part = slice(start, start + step)
            pieces = [x[part] for x in raw]
            kernels.delta_net(
                *pieces, *weights, np.float32(EPS), False, own_rows, own, out[part], 1
            )
        results.append((out, own_rows, own))
    for grouped, single in zip(*results, strict=True):
        np.testing.assert_allclose(grouped, single, rtol=1e-4, atol=1e-5)
