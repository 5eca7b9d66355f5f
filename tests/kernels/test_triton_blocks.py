"""Rearranged weights against gguf's own dequantisation, on random bytes with sane scales."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from quantized_weights import random_rows

from sparsekv_cli.kernels.weights import packed


@pytest.mark.parametrize("name", packed.PACKABLE)
@pytest.mark.parametrize(("n_rows", "n_columns"), [(1, 256), (5, 768), (33, 1536)])
def test_no_bit_is_lost(name, n_rows, n_columns, monkeypatch):
    monkeypatch.setattr(packed, "ROWS_AT_ONCE", 4096)  # so that rows come in several parts
    rows = random_rows(name, n_rows, n_columns)
    expected = gguf_dequantize(rows.reshape(-1), GGMLQuantizationType[name])
    matrix = packed.repack(name, torch.from_numpy(rows), n_columns)
    found = packed.dequantize_ref(matrix).numpy()
    np.testing.assert_array_equal(found, expected.reshape(n_rows, n_columns))
    assert all(plane.is_contiguous() for plane in matrix.planes)
    larger = {"Q4_K": 4 / 144, "Q5_K": 4 / 176}.get(name, 0)
    assert matrix.nbytes == round(rows.nbytes * (1 + larger))


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "F16"])
def test_widths_that_are_no_multiple_of_a_super_block(name):
    rows = random_rows(name, 3, 96)
    expected = gguf_dequantize(rows.reshape(-1), GGMLQuantizationType[name]).reshape(3, 96)
    found = packed.dequantize_ref(packed.repack(name, torch.from_numpy(rows), 96))
    np.testing.assert_array_equal(found.numpy(), expected)


def test_what_cannot_be_packed_is_refused():
    rows = torch.from_numpy(random_rows("Q4_0", 2, 64))
    with pytest.raises(ValueError, match="format IQ2_S"):
        packed.repack("IQ2_S", rows, 64)
    with pytest.raises(ValueError, match="rows of 36 bytes: expected 96 elements of Q4_0"):
        packed.repack("Q4_0", rows, 96)
    with pytest.raises(ValueError, match="data is"):
        packed.repack("Q4_0", rows.int(), 64)


def test_neighbours_of_one_format_become_one_matrix():
    names, rows = ("Q4_K", "Q4_K", "Q6_K", "F16", "F16", "Q4_K"), (3, 5, 2, 1, 4, 2)
    parts = [
        packed.repack(name, torch.from_numpy(random_rows(name, n, 512, i)), 512)
        for i, (name, n) in enumerate(zip(names, rows, strict=True))
    ]
    merged = packed.merge_alike(parts)
    assert [(m.name, m.n_rows) for m in merged] == [
        ("Q4_K", 8), ("Q6_K", 2), ("F16", 5), ("Q4_K", 2)
    ]  # fmt: skip
    expected, found = (
        torch.cat([packed.dequantize_ref(m) for m in each]) for each in (parts, merged)
    )
    assert torch.equal(found, expected)
    assert sum(m.nbytes for m in merged) == sum(m.nbytes for m in parts)
