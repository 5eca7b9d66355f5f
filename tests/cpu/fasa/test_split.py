"""K in two parts against numpy: where every dim goes, that nothing else is touched, and back."""

import numpy as np
import pytest

from sparsekv_cli.cpu.fasa.split import BLOCK, join_keys, split_keys, split_keys_ref

NAN = 0x7E00  # f16


@pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 64, 65, 257, 1100, 2048])
@pytest.mark.parametrize(
    ("n_kv", "d", "n_dom"), [(2, 64, 16), (3, 64, 64), (1, 80, 20), (1, 128, 2)]
)
def test_split_and_join(n_kv, d, n_dom, n):
    rng = np.random.default_rng(n)
    room, width, n_rest = n + 40, -(-d // 16) * 16, -(-(d - n_dom) // 16) * 16
    dims = np.stack([rng.permutation(d) for _ in range(n_kv)]).astype(np.int32)
    k = np.zeros((n_kv, room, width), np.uint16)
    k[..., :d] = rng.integers(0, 1 << 16, (n_kv, room, d))  # any bits, NaN as well
    dom = np.full((n_kv, -(-room // BLOCK), n_dom, BLOCK), NAN, np.uint16)
    rest = np.full((n_kv, room, n_rest), NAN, np.uint16)
    split_keys(k, n, dims, dom, rest)

    expected_dom, expected_rest = split_keys_ref(k[:, :n, :d], dims, n_dom)
    tokens, expected = (x.swapaxes(2, 3).reshape(n_kv, -1, n_dom) for x in (dom, expected_dom))
    np.testing.assert_array_equal(tokens[:, :n], expected[:, :n])
    np.testing.assert_array_equal(rest[:, :n, : d - n_dom], expected_rest)
    assert not rest[:, :n, d - n_dom :].any()
    assert (tokens[:, n:] == NAN).all() and (rest[:, n:] == NAN).all()

    joined = np.zeros_like(k)
    join_keys(dom, rest, n, dims, joined)
    np.testing.assert_array_equal(joined[:, :n], k[:, :n])
    assert not joined[:, n:].any()


def test_reference_takes_the_dims_one_by_one():
    k = np.arange(2 * 20 * 6).reshape(2, 20, 6)
    dims = np.array([[5, 0, 1, 2, 3, 4], [2, 3, 5, 4, 1, 0]], np.int32)
    dom, rest = split_keys_ref(k, dims, 2)
    assert dom.shape == (2, 2, 2, 16) and rest.shape == (2, 20, 4)
    for j in range(20):
        for g in range(2):
            assert dom[g, j // 16, :, j % 16].tolist() == [k[g, j, c] for c in dims[g, :2]]
            assert rest[g, j].tolist() == [k[g, j, c] for c in dims[g, 2:]]
