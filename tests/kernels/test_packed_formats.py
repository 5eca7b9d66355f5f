"""The GPU's table of packed formats against the records of the CPU's."""

import pytest

from sparsekv_cli.cpu.weights.formats import FORMATS
from sparsekv_cli.kernels.weights.packed import FLOATS, PACKINGS


@pytest.mark.parametrize("name", PACKINGS)
def test_a_packed_format_is_the_files(name):
    packing, format_ = PACKINGS[name], FORMATS[name]
    assert (packing.n_elements, packing.n_bytes) == (format_.n_elements, format_.n_bytes)
    assert packing.zero == format_.zero
    assert 2 ** (packing.low_bits + packing.high_bits) - 1 == format_.largest


def test_plain_floats_are_the_formats_that_are_not_decoded():
    assert set(FLOATS) == {name for name, format_ in FORMATS.items() if format_.decode is None}
