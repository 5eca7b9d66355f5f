"""The Hadamard rotation against its matrix."""

import numpy as np
import pytest

from sparsekv_cli.cpu.layer.hadamard import block_of, rotate_rows, rotate_rows_ref


@pytest.mark.parametrize(
    ("d", "block"), [(16, 16), (40, 8), (64, 64), (80, 16), (96, 32), (128, 128), (256, 256)]
)
def test_kernel_is_its_reference_and_its_own_inverse(d, block):
    assert block_of(d) == block
    x = np.random.default_rng(0).standard_normal((7, d + 8)).astype(np.float32)
    turned = x.copy()
    rotate_rows(turned, d, block_of(d), 2)
    np.testing.assert_allclose(turned[:, :d], rotate_rows_ref(x[:, :d]), atol=1e-5)
    np.testing.assert_array_equal(turned[:, d:], x[:, d:])
    assert np.abs(turned[:, :d] - x[:, :d]).max() > 1
    rotate_rows(turned, d, block_of(d), 1)
    np.testing.assert_allclose(turned, x, atol=1e-5)


def test_products_stay_and_one_large_element_is_spread():
    q, k = np.random.default_rng(1).standard_normal((2, 5, 64)).astype(np.float32)
    k[:, 3] = 40
    turned = [x.copy() for x in (q, k)]
    for x in turned:
        rotate_rows(x, 64, 64, 1)
    np.testing.assert_allclose((turned[0] * turned[1]).sum(-1), (q * k).sum(-1), rtol=1e-4)
    assert np.abs(turned[1]).max() < 10
