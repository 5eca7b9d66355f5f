"""How many bytes rows take, and what is refused where there is no memory for them."""

from itertools import product

import numpy as np
import pytest
from opened import open_sequence
from tiny_models import make_model

from sparsekv_cli import machine
from sparsekv_cli.cache import row_sizes, store
from sparsekv_cli.cache.row_sizes import CACHE_TYPES, fitting_context, token_bytes
from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import METHODS, build_method, method_class
from sparsekv_cli.settings.config import SessionConfig


@pytest.mark.parametrize(("k", "v"), list(product(CACHE_TYPES, repeat=2)))
def test_token_bytes_are_those_of_a_store(k, v):
    spec = LayerSpec(0, 2, 6, 3, 40, 80, 1, cache_type_k=k, cache_type_v=v)
    rows = KVStore(spec)
    rows.reserve(7)
    assert 7 * token_bytes([spec], k, v) == rows.nbytes
    assert token_bytes([spec, spec], k, v) == 2 * token_bytes([spec], k, v)
    assert fitting_context(600 * rows.nbytes // 7, rows.nbytes // 7) == 512


def test_methods_that_are_sparse_later_hold_all_rows():
    held = {name for name in METHODS if method_class(name).holds_all_rows}
    assert held >= {name for name in METHODS if method_class(name).work_of_a_head} | {"full"}
    assert not held & {"h2o", "snapkv", "sals", "faedkv"}


def test_what_does_not_fit_is_refused(tmp_path, monkeypatch):
    path = make_model(tmp_path / "model.gguf", n_ctx=4000)
    n_bytes = 0

    def available(n: int) -> None:
        for module in (row_sizes, machine):
            monkeypatch.setattr(module, "available_memory", lambda: n)

    def load(method: str, n_ctx: int = 0):
        config = SessionConfig(ctx_size=n_ctx, threads=1, prefill_dtype="f32")
        return open_sequence(path, build_method(method, {}), config)

    sequence = load("full")
    n_bytes = token_bytes(sequence.model.hparams.layers, "f16", "f16")
    ids = [3 + i % 200 for i in range(600)]
    available(1000 * n_bytes)
    with pytest.raises(SparseKVError, match=r"^K and V of 2000 tokens take .* most 768 tokens"):
        load("full", 2000)
    load("snapkv", 2000).model.gguf.close()
    load("full", 1000).model.gguf.close()
    with pytest.raises(SparseKVError, match=r"^K and V of 1112 tokens .* shorten the prompt"):
        sequence.prefill(ids)
    assert not sequence.tokens and not sequence.caches[0].store.nbytes
    available(1112 * n_bytes)
    logits = sequence.prefill(ids).copy()
    available(0)
    monkeypatch.setattr(store, "LARGE", 1)
    for _ in range(512):
        sequence.decode(5)
    with pytest.raises(SparseKVError, match="K and V of 1507 tokens in a layer take"):
        sequence.decode(5)
    assert len(sequence.tokens) == 1112
    available(1 << 40)
    sequence.decode(5)
    sequence.rewind(600)
    assert sequence.checkpoint is not None
    np.testing.assert_array_equal(sequence.checkpoint.logits, logits)
    sequence.model.gguf.close()


@pytest.mark.parametrize("name", ["quest", "lfps", "freekv"])
def test_a_prompt_needs_memory_for_the_index_too(name, sequence_of, monkeypatch):
    """The rows of all layers would fit."""
    sequence, ids = sequence_of(name, budget="64", ctx_size=2000), [3 + i % 200 for i in range(600)]
    n_bytes = 1112 * token_bytes(sequence.model.hparams.layers, "f16", "f16")
    monkeypatch.setattr(row_sizes, "available_memory", lambda: n_bytes)
    with pytest.raises(SparseKVError, match=r"^K and V of 1112 tokens and their index take"):
        sequence.prefill(ids)
    assert not sequence.tokens
    monkeypatch.setattr(row_sizes, "available_memory", lambda: 2 * n_bytes)
    sequence.prefill(ids)
