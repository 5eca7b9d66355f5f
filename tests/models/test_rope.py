"""Angles: the formula, Llama 3's factors, linear scaling and YaRN, and how the table grows."""

import math

import numpy as np
import pytest
from tiny_models import llama3_factors, make_model

from sparsekv_cli.models.gguf.file import open_gguf
from sparsekv_cli.models.hparams import read_hparams
from sparsekv_cli.models.rope import RopeParams, RopeTable, inverse_frequencies


def test_plain_frequencies():
    theta = inverse_frequencies(8, RopeParams(freq_base=10000.0))
    np.testing.assert_allclose(theta, [1, 0.1, 0.01, 0.001], rtol=1e-12)


def test_linear_scaling_and_factors_divide():
    plain = inverse_frequencies(64, RopeParams())
    np.testing.assert_allclose(inverse_frequencies(64, RopeParams(factor=4.0)), plain / 4)
    factors = llama3_factors(64, 10000.0)
    np.testing.assert_allclose(inverse_frequencies(64, RopeParams(), factors), plain / factors)
    none = RopeParams(scaling="none", factor=4.0)
    np.testing.assert_array_equal(inverse_frequencies(64, none), plain)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    yarn = RopeParams(scaling="yarn", factor=4.0, n_ctx_original=2048, ext_factor=1.0)
    plain = inverse_frequencies(64, RopeParams())
    ratio = inverse_frequencies(64, yarn) / plain
    turns = 2048 * plain / (2 * math.pi)  # of a pair within the original context
    np.testing.assert_allclose(ratio[turns > 33 * 1.4], 1.0)
    np.testing.assert_allclose(ratio[turns < 1 / 1.4], 0.25)
    assert (np.diff(ratio) <= 1e-12).all() and ((ratio > 0.26) & (ratio < 0.99)).any()


def test_yarn_magnitude():
    yarn = RopeParams(scaling="yarn", factor=4.0, n_ctx_original=2048, ext_factor=1.0)
    assert yarn.magnitude == pytest.approx(1 + 0.1 * math.log(4))
    assert RopeParams(factor=4.0).magnitude == 1.0


@pytest.fixture
def table(tmp_path):
    path = make_model(tmp_path / "model.gguf", rope_scaling=("yarn", 4.0, 32))
    file = open_gguf(path)
    hparams = read_hparams(file)
    file.close()
    return RopeTable(hparams.n_rot, hparams.rope)


def test_table_holds_every_position(table):
    yarn = RopeParams(scaling="yarn", factor=4.0, n_ctx_original=32, ext_factor=1.0)
    theta = inverse_frequencies(64, yarn)
    for n in (1, 512, 513, 5000):
        table.reserve(n)
        assert len(table.cos) == len(table.sin) >= n
    angles = np.outer(np.arange(5000), theta)
    magnitude = 1 + 0.1 * math.log(4)
    np.testing.assert_allclose(table.cos[:5000], magnitude * np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(table.sin[:5000], magnitude * np.sin(angles), atol=1e-6)
    assert table.cos.dtype == np.float32 and table.cos.flags.c_contiguous


def test_table_grows_in_steps(table):
    table.reserve(1)
    seen = {id(table.cos)}
    arrays = [table.cos]
    for position in range(4000):
        table.reserve(position + 1)
        if id(table.cos) not in seen:
            seen.add(id(table.cos))
            arrays.append(table.cos)  # keeps the id taken
    assert len(seen) < 15
