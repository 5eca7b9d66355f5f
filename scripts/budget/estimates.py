"""Estimates of the weight of single rows, by what lfps, fasa and sals know of them, in numpy."""

import numpy as np
from budget.choices import LEAST, MOST, Step, rows_until, softmax

from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.naive.base import rotate

FASA, SALS = build_method("fasa", {}), build_method("sals", {})
DECAY = 0.95  # of lfps' tables, a step


class LayerEstimates:
    """Estimates of a layer: from calibrations, and from the steps that it has seen."""

    def __init__(self, fasa_spec: LayerSpec, sals_spec: LayerSpec) -> None:
        """Each spec has the layer's calibration of its method."""
        self._fasa_spec, self._sals_spec = fasa_spec, sals_spec
        self._tables: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by kv head: ver, dist

    def latents(self, keys: np.ndarray) -> np.ndarray:
        """Returns the scored columns of sals' latents (n, r*). keys: of all kv heads (G, n, d)."""
        spec, positions = self._sals_spec, np.arange(keys.shape[1])
        straight = rotate(keys, -positions, spec.theta, 1 / spec.rope_scale)
        u, w = self._basis()
        return straight.swapaxes(0, 1).reshape(len(positions), -1) @ (w[:, None] * u)

    def logs(self, g: int, step: Step, latents: np.ndarray) -> dict[str, np.ndarray]:
        """Returns estimates of the log of a row's weight, f64 (group, n). g: the kv head."""
        found = {"fasa": self._by_chunks(g, step), "sals": self._by_latents(g, step, latents)}
        if g in self._tables:
            found["lfps"] = self._by_tables(g, len(step.k))
        return found

    def _by_chunks(self, g: int, step: Step) -> np.ndarray:
        """By the dims of fasa's dominant chunks."""
        order, n_dims = FASA.dominant_dims(self._fasa_spec)
        dims = order[g, :n_dims]
        return step.q[:, dims] @ step.k[:, dims].T

    def _basis(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns U of the scored columns (G d, r*), and the weights w (G d,)."""
        _, n_scored = SALS.ranks(self._sals_spec)
        u, w = (each.astype(np.float64) for each in SALS.basis_of(self._sals_spec))
        return u[:, :n_scored], w

    def _by_latents(self, g: int, step: Step, latents: np.ndarray) -> np.ndarray:
        """By keys that the latents reconstruct."""
        spec, (n, d), (u, w) = self._sals_spec, step.k.shape, self._basis()
        decode = (u / w[:, None])[g * d : (g + 1) * d]
        keys = rotate(latents @ decode.T, np.arange(n), spec.theta, spec.rope_scale)
        return step.q @ keys.T

    def _by_tables(self, g: int, n: int) -> np.ndarray:
        """By the sum of both tables, which know all steps before."""
        ver, dist = self._tables[g]
        known = np.zeros((len(ver), n))
        known[:, : ver.shape[1]] = ver
        far = dist[:, :n][:, ::-1]  # the row at distance 0 is the last one
        known[:, n - far.shape[1] :] += far
        return np.log(np.maximum(known, 1e-30))

    def see(self, g: int, step: Step) -> None:
        """Adds a step's weights to the tables of kv head g."""
        weights = step.weights
        tables = []
        none = np.zeros((len(weights), 0))
        before = self._tables.get(g, (none, none))
        for new, old in zip((weights, weights[:, ::-1]), before, strict=True):
            table = new.copy()
            table[:, : old.shape[1]] += DECAY * old
            tables.append(table)
        self._tables[g] = tables[0], tables[1]


def rows_by_estimate(
    step: Step, forced: np.ndarray, share: float, logs: np.ndarray
) -> tuple[np.ndarray, float]:
    """Returns the rows that a share needs, best first, and the estimate of their mass.

    ``forced`` rows come first. logs f64 (group, n): of all rows' weights.
    """
    shares = softmax(logs).mean(0)
    rest = np.setdiff1d(np.arange(len(shares)), forced)
    order = np.r_[forced, rest[np.argsort(-shares[rest], kind="stable")]]
    reached = np.cumsum(shares[order])
    n = min(MOST, len(order), max(LEAST, len(forced), rows_until(share, reached)))
    return order[:n], float(reached[n - 1])
