"""The bandwidth probe really reads everything."""

import numpy as np
import pytest

from sparsekv_cli.cpu.bandwidth import sum_parts, sum_parts_ref


@pytest.mark.parametrize("n", [1, 63, 1000, 4097])
@pytest.mark.parametrize("n_parts", [1, 2, 3])
def test_sums_of_all_parts(n, n_parts):
    data = np.random.RandomState(n).random_sample(n).astype(np.float32)
    expected = sum_parts_ref(data, n_parts)
    assert expected.shape == (n_parts,)
    np.testing.assert_allclose(sum_parts(data, n_parts), expected, rtol=1e-5)
    assert expected.sum() == pytest.approx(data.sum(dtype=np.float64), rel=1e-5)
