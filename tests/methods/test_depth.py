"""From which depth on methods are sparse (methods/depth.py), and that they are dense up to it."""

import numpy as np
import pytest
from tiny_sequences import N_HEAD, N_KV, decoded, tokens

from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.methods import METHODS, build_method
from sparsekv_cli.methods.depth import sparse_from

# Heads, kv heads, head size, layers.
SHAPES = {"135M": (9, 3, 64, 30), "1B": (32, 8, 64, 16), "8B": (32, 8, 128, 32)}
DEPTHS = {
    "streaming": (768, 1024, 1024), "quest": (1536, 2048, 2048), "lfps": (3840, 5120, 5120),
    "fasa": (6144, 8192, 8192), "freekv": (6144, 8192, 8192), "topk": (12288, 16384, 16384),
}  # fmt: skip


def specs_of(shape: str) -> list[LayerSpec]:
    n_head, n_head_kv, d, n_layer = SHAPES[shape]
    return [
        LayerSpec(layer, n_layer, n_head, n_head_kv, d, d, n_threads=1) for layer in range(n_layer)
    ]


@pytest.mark.parametrize("name", METHODS)
def test_the_depths_of_three_models(name):
    depths = tuple(sparse_from(build_method(name, {}), specs_of(shape)) for shape in SHAPES)
    assert depths == DEPTHS.get(name, (0, 0, 0))


@pytest.mark.parametrize("name", DEPTHS)
def test_a_sequence_is_dense_up_to_its_depth(name, sequence_of):
    """It has the bits of ``full`` in all steps to 100 rows, and no longer in the next one."""
    sparse = sequence_of(name, budget="12", sparse_from=100)
    full = sequence_of("full")
    assert sparse.sparse_from == 100 and full.sparse_from == 0
    for sequence in (sparse, full):
        sequence.prefill(tokens(60))
    answer = tokens(60, 1)
    ours, dense = (decoded(sequence, answer) for sequence in (sparse, full))
    np.testing.assert_array_equal(ours[:40], dense[:40])
    assert (ours[40] != dense[40]).any()


@pytest.mark.parametrize("name", METHODS)
def test_the_depth_of_a_sequence(name, sequence_of):
    """Methods that drop rows, or are dense anyway, have none."""
    sequence = sequence_of(name, budget="12", sparse_from=-1)
    work = build_method(name, {}).work_of_a_head
    assert sequence.sparse_from == work * (N_HEAD // N_KV)
    assert (work > 0) == (name in DEPTHS)
    assert sequence_of(name, budget="12").sparse_from == 0
