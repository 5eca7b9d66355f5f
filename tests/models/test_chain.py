"""Layers in one compiled call (layer/chain.py): the same bits and counts as one layer a call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_models import make_model

from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.config import SessionConfig
from sparsekv_cli.cpu.layer import chain
from sparsekv_cli.methods import build_method, lfps
from sparsekv_cli.methods.quest import Quest
from sparsekv_cli.session import Session, load_session

N_PROMPT, N_STEPS = 60, 560  # a session makes room for 512 rows beyond its prompt
GEOMETRIES = [(4, 2, 64), (8, 1, 80), (3, 3, 128)]  # query heads, kv heads, head size
METHODS = {
    "full": ("full", {}),
    "full q8_0": ("full", {"cache_type_k": "q8_0"}),
    "lfps": ("lfps", {"budget": "12"}),
    "lfps pages": ("lfps", {"budget": "12", "dense_rows": "200"}),
    "lfps fast": ("lfps", {"budget": "12", "preset": "fast"}),
    "lfps paper": ("lfps", {"budget": "5%", "preset": "paper"}),  # all rows at first
    "lfps q8_0": ("lfps", {"budget": "12", "cache_type_v": "q8_0", "epsilon": "0.1"}),
    "quest": ("quest", {"budget": "32", "dense_layers": "1,3"}),
    "quest q8_0": ("quest", {"budget": "32", "cache_type_k": "q8_0"}),
}


class Opaque:
    """A cache as a wrapper shows it: with ``decode``, and not a LayerCache."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


@pytest.fixture(scope="module", params=GEOMETRIES, ids=str)
def model(request, tmp_path_factory):
    n_head, n_kv, head_dim = request.param
    path = tmp_path_factory.mktemp("chain") / "model.gguf"
    make_model(
        path, wtype="Q8_0", n_layer=4, n_head=n_head, n_head_kv=n_kv, head_dim=head_dim
    )  # fmt: skip
    return path


def opened(path, name: str) -> Session:
    method, options = METHODS[name]
    session = load_session(path, build_method(method, options), SessionConfig(threads=2))
    tokens = np.random.default_rng(3).integers(0, 512, N_PROMPT).tolist()
    session.prefill(tokens)
    return session


def decoded(session: Session, n: int, seed: int) -> np.ndarray:
    tokens = np.random.default_rng(seed).integers(0, 512, n).tolist()
    return np.stack([session.decode(token) for token in tokens])


def separated(session: Session) -> Session:
    session.caches = [Opaque(cache) for cache in session.caches]  # type: ignore[misc]
    return session


@pytest.mark.parametrize("name", METHODS)
def test_a_chain_changes_nothing(model, name, monkeypatch):
    """Long enough for stores and tables to grow; then after a rewind."""
    lengths = []
    run_layers = chain.run_layers
    monkeypatch.setattr(lfps, "PAGES", Quest(page=8, budget=Budget(tokens=64)))

    def counted(layers, steps, first, last, n_threads):
        lengths.append(last - first)
        run_layers(layers, steps, first, last, n_threads)

    chained, single = opened(model, name), separated(opened(model, name))
    expected = decoded(single, N_STEPS, 1)
    monkeypatch.setattr(chain, "run_layers", counted)
    found = decoded(chained, N_STEPS, 1)
    np.testing.assert_array_equal(found, expected)
    assert chained.ledger.as_dict() == single.ledger.as_dict()
    assert max(lengths) == 4 and len(lengths) >= N_STEPS - 20
    for session in (chained, single):
        session.rewind(100)
    np.testing.assert_array_equal(decoded(chained, 30, 2), decoded(single, 30, 2))


def test_a_traced_layer_leaves_the_chain(model):
    """It shows which rows it attended to, and the others go on without it."""
    chained, single = opened(model, "lfps"), separated(opened(model, "lfps"))
    traced = chained.caches[2]
    traced.traced = True
    np.testing.assert_array_equal(decoded(chained, 20, 1), decoded(single, 20, 1))
    rows, counts = traced.attended
    assert rows.shape[0] == chained.hparams.n_head[2] and counts.min() > 4
    assert chained.caches[3].attended is None
    assert chained.ledger.as_dict() == single.ledger.as_dict()
