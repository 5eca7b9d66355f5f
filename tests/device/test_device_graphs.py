"""A graph is replayed while the key of ``plan`` is the same: no tensor may have moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import side_by_side
import torch
from side_by_side import GEOMETRIES, SideBySide

from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.calibration import fasa, sals
from sparsekv_cli.calibration.allocation import even_budgets
from sparsekv_cli.device.cache import DeviceCache
from sparsekv_cli.methods.fasa import FASA
from sparsekv_cli.methods.freekv import FreeKV
from sparsekv_cli.methods.quest import Quest
from sparsekv_cli.methods.sals import SALS
from sparsekv_cli.methods.streaming import Streaming
from sparsekv_cli.methods.topk import TopK

BUDGET = {"budget": Budget(tokens=40)}
METHODS = {
    "topk": TopK(**BUDGET),
    "streaming": Streaming(**BUDGET),
    "quest": Quest(**BUDGET, page=8),
    "fasa": FASA(**BUDGET),
    "fasa-m": FASA(**BUDGET, variant="m"),
    "sals": SALS(sinks=4, window=20, budget=Budget(tokens=24)),
    "freekv": FreeKV(budget=Budget(tokens=64), page=8, sinks=8, window=16),
}


def tensors(x: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a cache that its steps read, by where they are found."""
    if isinstance(x, torch.Tensor):
        yield path, x
    elif isinstance(x, tuple | list):
        for i, part in enumerate(x):
            yield from tensors(part, f"{path}[{i}]")
    elif type(x).__module__.startswith("sparsekv_cli.device"):
        for name, part in vars(x).items():
            if name != "_start":  # kept for a rewind
                yield from tensors(part, f"{path}.{name}")


@pytest.mark.parametrize("name", METHODS)
def test_nothing_moves_under_one_key(name, device, monkeypatch):
    """Through dense and sparse steps, growth, a prompt, and the same rewind twice."""
    geometry = GEOMETRIES[0]
    rng, size = np.random.default_rng(5), geometry.n_head_kv * geometry.d
    rank = np.stack([rng.permutation(32) for _ in range(geometry.n_head_kv)]).astype(np.uint8)
    vectors = np.linalg.qr(rng.standard_normal((size, size)))[0].astype(np.float32)
    calibration = {
        "dom_var": rank, "dom_ca": rank, "tip_budget": even_budgets(fasa.SHARES),
        "vectors_diag": vectors, "vectors_pca": vectors,
        "rank_budget": even_budgets(sals.SHARES), "weights": np.ones(size, np.float32),
    }  # fmt: skip
    pair = SideBySide(geometry, METHODS[name], calibration, device)
    places, kept = {}, []
    prepare = side_by_side.prepare

    def watched(cache: DeviceCache, n: int, n_max: int) -> Any:
        key = prepare(cache, n, n_max)
        found = dict(tensors(cache.store if n < 40 else cache))  # dense steps read no more
        kept.extend(found.values())  # so that no later tensor gets their memory
        now = {path: x.data_ptr() for path, x in found.items()}
        assert places.setdefault(key, now) == now
        return key

    monkeypatch.setattr(side_by_side, "prepare", watched)
    pair.prefill(30)
    for n_steps, n_prompt in ((2, 90), (1, 88)):  # to 124 rows both times
        for _ in range(n_steps):
            pair.decode()
        pair.prefill(n_prompt)
        end = pair.host.n
        for _ in range(2):
            pair.decode()
        back = end if name == "sals" else 32  # to the end of a prompt it always goes back
        for each in (pair.host, pair.device):
            assert each.truncate(back) == back
        pair.decode()
    assert len(places) < 12
