"""The layers' own inputs: the kernel of a prefilled chunk against its reference.

Decode steps are compared with prefills in tests/models/test_architectures.py.
"""

import numpy as np
import pytest

from sparsekv_cli.cpu.jit.floats import as_f32, as_type_of
from sparsekv_cli.cpu.layer.activation import GELU, SILU
from sparsekv_cli.cpu.layer.layer_input import gate_inputs, gate_inputs_ref


@pytest.mark.parametrize("activation", [GELU, SILU])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize(("n_rows", "n"), [(1, 16), (63, 40), (3, 256)])
def test_gated_inputs(n_rows, n, dtype, activation):
    rng, like = np.random.default_rng(n), np.empty(0, dtype)
    projected, embedded, gate = rng.standard_normal((3, n_rows, n)).astype(np.float32)
    norm = rng.standard_normal(n).astype(np.float32)
    projected, gate = (as_type_of(like, x) for x in (projected, gate))
    out = np.empty((n_rows, n), dtype)
    eps = np.float32(0.3)
    gate_inputs(projected, norm, eps, embedded, gate, activation, out, 2)
    expected = gate_inputs_ref(as_f32(projected), norm, eps, embedded, as_f32(gate), activation)
    tolerance = 2e-5 if dtype == np.float32 else 1 / 256
    np.testing.assert_allclose(as_f32(out), expected, rtol=tolerance, atol=1e-5)
