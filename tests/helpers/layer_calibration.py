"""A calibration of one layer for all methods that need one."""

import numpy as np
from layer_rows import Geometry, LowRankStream

from sparsekv_cli.calibration import fasa, sals
from sparsekv_cli.calibration.allocation import budgets_of_levels, even_budgets
from sparsekv_cli.cpu.faedkv.frequencies import N_CHUNKS


def calibration_of(geometry: Geometry, layer: int = 2) -> dict[str, np.ndarray]:
    """This layer's arrays: random ranks of chunks, bases of keys like LowRankStream's."""
    g, rng = geometry, np.random.default_rng(0)
    n_chunk = (g.n_rot or g.d) // 2
    rank = np.stack([rng.permutation(n_chunk) for _ in range(g.n_head_kv)]).astype(np.uint8)
    frequencies = {name: of_layers[layer] for name, of_layers in of_frequencies().items()}
    even = {"tip_budget": even_budgets(fasa.SHARES), "rank_budget": even_budgets(sals.SHARES)}
    return {"dom_var": rank, "dom_ca": rank, **even, **frequencies, **bases(geometry)}


def of_frequencies(n_layer: int = 4) -> dict[str, np.ndarray]:
    """As faedkv's calibration makes it: layer 2 wants to be whole most, then 0, 1, 3."""
    kld = np.outer([3.0, 2.0, 4.0, 1.0][:n_layer], [1.0, 0.99, 0.95, 0.8, 0.0])
    return {
        "imp_kld": np.stack([importance(i) for i in range(n_layer)]),
        "imp_ppl": np.stack([importance(10 + i) for i in range(n_layer)]),
        "layer_kld": kld.astype(np.float32),
        "layer_budget": budgets_of_levels(kld),
    }


def importance(seed: int) -> np.ndarray:
    """The mean's chunk first, the others anyhow."""
    order = np.random.default_rng(seed).permutation(N_CHUNKS)
    return np.where(np.arange(N_CHUNKS) == 0, 99, order).astype(np.float32)


def bases(geometry: Geometry) -> dict[str, np.ndarray]:
    """sals' bases, weighted by random pairs."""
    stream, c = LowRankStream(geometry), geometry.n_rot // 2
    keys = np.stack([stream._row()[1] for _ in range(400)]).reshape(400, -1)
    covariance = keys.T @ keys / 400
    weights = np.random.default_rng(0).uniform(0.5, 2, (geometry.n_head_kv, geometry.d))
    weights[:, c : 2 * c] = weights[:, :c]
    weights = weights.reshape(-1)
    arrays = {"weights": weights.astype(np.float32)}
    for basis, w in (("diag", weights), ("pca", np.ones_like(weights))):
        vectors = np.linalg.eigh(w[:, None] * covariance * w)[1][:, ::-1]
        arrays[f"vectors_{basis}"] = vectors.astype(np.float32)
    return arrays
