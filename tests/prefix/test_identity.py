"""Which rows may serve which request: on disk, in memory, and where the method changes."""

from dataclasses import replace

import numpy as np
import pytest
from kept_prompts import keep, keeping, n_cached
from tiny_sequences import SHAPE, decoded, tokens

from sparsekv_cli.models.gguf.file import open_gguf
from sparsekv_cli.models.hparams import read_hparams
from sparsekv_cli.models.identity import DENSE, identity_in

SPARSE = (8192, 512, 2)
FIRST, SECOND = tokens(700), tokens(700) + tokens(600, 1)


def test_the_identity_of_a_file_is_that_of_its_decoder(sequence_of, tiny_model):
    sequence = sequence_of("full")
    with open_gguf(tiny_model(**SHAPE)) as file:
        found = identity_in(file, read_hparams(file))
        assert found.digest() == sequence.model.calibrations.identity.digest()


def test_dense_rows_serve_a_sparse_request_and_never_the_reverse(sequence_of):
    dense = sequence_of("full").model.decoder.identity_of(("f16", "f16"))
    sparse = replace(dense, reading=SPARSE)
    other = replace(dense, reading=(4096, *SPARSE[1:]))
    assert dense.reading == DENSE and dense.serves(sparse) and dense.serves(dense)
    assert sparse.serves(sparse) and not sparse.serves(dense) and not sparse.serves(other)
    for changed in (
        {"types": ("q8_0", "f16")}, {"products": ("bf16", "1")}, {"attention": "bf16"},
        {"program": "0"}, {"model": replace(dense.model, rope=())},
    ):  # fmt: skip
        foreign = replace(dense, **changed)
        assert not foreign.serves(dense) and not foreign.serves(sparse)
        assert len({foreign.known(), dense.known(), sparse.known()}) == 3


def test_a_sparse_prompt_goes_on_from_dense_blocks_on_disk(sequence_of, tmp_path):
    """Two identities use one folder. Dense prompts do not see the sparse rows."""
    dense = sequence_of("full", ctx_size=4096)
    sparse = sequence_of("full", ctx_size=4096)
    for sequence in (dense, sparse):
        keeping(sequence, tmp_path)
    sparse.rows.identity = replace(sparse.rows.identity, reading=SPARSE)
    keep(dense, FIRST)
    assert n_cached(sparse, SECOND, keep) == 512, "a whole chunk"
    assert n_cached(sparse, SECOND) == 1024 and n_cached(dense, SECOND) == 688
    keep(sparse, tokens(600, 2))
    assert n_cached(dense, tokens(600, 2)) == 0


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q8_0")])
def test_a_change_of_the_types_reads_the_rows_again(types, sequence_of):
    sequence, other = sequence_of("full"), sequence_of("quest", budget="64", types=types)
    sequence.prefill(FIRST)
    sequence.timings.reset()
    sequence.change_method(sequence.model.attention_of(other.method))
    is_kept = types == ("f16", "f16")
    assert (len(sequence.tokens) == len(FIRST)) == is_kept
    assert sequence.serves(other.method)
    if is_kept:
        other.prefill(FIRST)
        assert np.abs(decoded(sequence, [5]) - decoded(other, [5])).max() < 0.1
