"""The steps of latent attention in a chunk against numpy, in f32 and bf16, with odd sizes."""

import numpy as np
import pytest

from sparsekv_cli.cpu.jit.floats import as_f32
from sparsekv_cli.cpu.latent import prefill

EPS = np.float32(1e-6)
SIZES = [(1, 1, 2, 1, 1), (63, 3, 16, 24, 40), (130, 16, 64, 128, 512)]  # T, H, R, N, L


def made(rng, dtype: str, *shape: int) -> np.ndarray:
    """Normal numbers; of bf16, bits whose values have no rounding."""
    values = rng.standard_normal(shape).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else values


def empty(dtype: str, *shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint16 if dtype == "bf16" else np.float32)


def turned(pairs: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (0, 1), (2, 3) .. in half-split order, before and after the rotation."""
    a, b = pairs[..., ::2], pairs[..., 1::2]
    after = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return np.concatenate([a, b], axis=-1), after


def check(expected: np.ndarray, actual: np.ndarray) -> None:
    tolerance = 8e-3 if actual.dtype == np.uint16 else 1e-5
    np.testing.assert_allclose(as_f32(actual), expected, rtol=tolerance, atol=tolerance)


def angles(rng, n: int, n_rot: int) -> tuple[np.ndarray, np.ndarray]:
    angle = rng.uniform(-3, 3, (n, n_rot // 2))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("n", "n_head", "n_rot", "n_nope", "n_rank"), SIZES)
def test_rows_and_queries(n, n_head, n_rot, n_nope, n_rank, dtype):
    rng = np.random.default_rng(n)
    cos, sin = angles(rng, n, n_rot)
    raw, norm = made(rng, dtype, n, n_rank + n_rot), rng.standard_normal(n_rank).astype("f4")
    k, k_nope = (empty(dtype, n, n_rot + n_rank) for _ in range(2))
    prefill.split_rows(raw, norm, EPS, cos, sin, k, k_nope, 2)
    c, pairs = np.split(as_f32(raw), [n_rank], axis=1)
    c = c / np.sqrt((c**2).mean(1, keepdims=True) + EPS) * norm
    for rotated, rows in zip(turned(pairs, cos, sin), (k_nope, k), strict=True):
        check(np.concatenate([rotated, c], axis=1), rows)
    out = empty(dtype, n, n_rank)
    prefill.norm_vectors(raw, norm, EPS, out, 2)
    check(c, out)

    raw = made(rng, dtype, n, n_head * (n_nope + n_rot))
    q, q_nope = (empty(dtype, n_head, n, n_rot + n_nope) for _ in range(2))
    prefill.split_queries(raw, cos, sin, q[..., n_rot:], q, q_nope, 2)
    heads = as_f32(raw).reshape(n, n_head, -1).swapaxes(0, 1)
    np.testing.assert_array_equal(as_f32(q[..., n_rot:]), heads[..., :n_nope])
    for rotated, rows in zip(turned(heads[..., n_nope:], cos, sin), (q_nope, q), strict=True):
        check(rotated, rows[..., :n_rot])
