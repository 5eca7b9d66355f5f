"""Short convolutions: against the reference, in one and in parts, in f32 and bf16."""

import numpy as np
import pytest

from sparsekv_cli.cpu.jit.floats import as_f32, as_type_of
from sparsekv_cli.cpu.recurrent.convolution import gated_convolution, gated_convolution_ref

BF16 = np.empty(0, np.uint16)


@pytest.mark.parametrize("length", [2, 3, 4])
@pytest.mark.parametrize(("n_rows", "n", "n_threads"), [(1, 80, 1), (63, 37, 2), (130, 64, 3)])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_kernel_is_the_reference_across_chunks(length, n_rows, n, n_threads, dtype):
    rng = np.random.default_rng(n_rows)
    raw = rng.standard_normal((n_rows, 3 * n)).astype(np.float32)
    if dtype == "bf16":
        raw = as_type_of(BF16, raw)
    weight, state = (
        rng.standard_normal((size, n)).astype(np.float32) for size in (length, length - 1)
    )
    expected, last = gated_convolution_ref(as_f32(raw), weight, state)
    out = np.empty((n_rows, n), raw.dtype)
    for start in range(0, n_rows, 50):
        part = slice(start, min(n_rows, start + 50))
        gated_convolution(raw[part], weight, state, out[part], n_threads)
    np.testing.assert_allclose(
        as_f32(out), expected, rtol=1e-2 if dtype == "bf16" else 1e-5, atol=1e-5
    )
    np.testing.assert_allclose(state, last, rtol=1e-6)
