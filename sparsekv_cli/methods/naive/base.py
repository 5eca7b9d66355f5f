"""The base class of the naive forms: the rows of a layer, softmax, and the two parts of a step.

Letters: H query heads, G kv heads, n rows (tokens), d head size, d_v value size.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsekv_cli.cache.spec import AttnInput, LayerSpec

FORCED, NEVER = np.inf, -np.inf  # scores of rows that a step always, or never, attends to


@dataclass
class Choice:
    """The rows to which a query head, a kv head or the whole layer attends in a step."""

    rows: np.ndarray  # positions, ascending
    scores: np.ndarray  # f64 (n,), the scores by which the rows were chosen
    # the least relative distance of a compared value from its threshold
    margin: float = np.inf


class Naive:
    """One layer of one sequence. A method implements ``is_dense_at`` and ``select``, or more.

    A step is ``choose`` and then ``attend``. A test can change the choices in between.
    """

    method: Any

    def __init__(self, method: Any, spec: LayerSpec) -> None:
        self.method, self.spec = method, spec
        self.n_head, self.n_kv, self.group = spec.n_head, spec.n_head_kv, spec.group
        self.scale, self.softcap = float(spec.scale), float(spec.softcap)
        self.sinks = spec.sinks if len(spec.sinks) else np.full(spec.n_head, -np.inf)  # (H,)
        self.k = np.empty((spec.n_head_kv, 0, spec.head_dim))  # (G, n, d), rotated
        self.v = np.empty((spec.n_head_kv, 0, spec.value_dim))  # (G, n, d_v)
        self.q = np.empty((spec.n_head, spec.head_dim))  # (H, d), of the current step

    @property
    def n(self) -> int:
        return self.k.shape[1]

    def is_dense_at(self, n: int) -> bool:
        """Returns whether a step of n rows attends to all of them."""
        raise NotImplementedError

    def select(self) -> list[Choice]:
        """Returns the choices of a sparse step: one a query head, one a kv head, or one for all."""
        raise NotImplementedError

    def append(self, x: AttnInput) -> None:
        """Adds the T rows of x, rounded to f16."""
        self.k = np.concatenate([self.k, half(x.k[..., : self.spec.head_dim])], axis=1)
        self.v = np.concatenate([self.v, half(x.v[..., : self.spec.value_dim])], axis=1)

    def prefill(self, x: AttnInput) -> np.ndarray:
        """Adds T rows. Returns their causal attention f64 (H, T, d_v) to the rows that are kept."""
        n_past, q = self.n, x.q[..., : self.spec.head_dim].astype(np.float64)
        self.append(x)
        k, v = self.view()
        out = np.empty((self.n_head, q.shape[1], v.shape[2]))
        for t in range(q.shape[1]):
            for h in range(self.n_head):
                kept = self.kept(h // self.group)
                rows = kept[kept <= n_past + t]
                weights = self.weights(h, self.scores(h, q[:, t], k, rows))
                self.receive(h, rows, weights, q.shape[1] - t)
                out[h, t] = weights @ v[h // self.group, rows]
        self.finish_prefill(q)
        return out

    def choose(self, x: AttnInput) -> list[Choice]:
        """Adds the row of a step. Returns the choices of rows; in a dense step, all rows."""
        self.append(x)
        self.q = x.q[:, 0, : self.spec.head_dim].astype(np.float64)
        if self.is_dense_at(self.n):
            return [Choice(np.arange(self.n), np.full(self.n, FORCED))]
        return self.select()

    def attend(self, choices: list[Choice]) -> np.ndarray:
        """Returns the attention f64 (H, d_v) to the chosen rows. Then calls ``finish_step``."""
        k, v = self.view()
        out = np.empty((self.n_head, v.shape[2]))
        for h in range(self.n_head):
            rows = choices[h * len(choices) // self.n_head].rows
            weights = self.weights(h, self.scores(h, self.q, k, rows))
            self.receive(h, rows, weights, 1)
            out[h] = weights @ v[h // self.group, rows]
        self.finish_step(choices)
        return out

    def decode(self, x: AttnInput) -> tuple[np.ndarray, list[Choice]]:
        """Runs a step. Returns its attention f64 (H, d_v) and its choices."""
        choices = self.choose(x)
        return self.attend(choices), choices

    def truncate(self, n: int) -> None:
        """Removes all rows but the first n, a length to which the method's cache can go back."""
        self.k, self.v = self.k[:, :n], self.v[:, :n]

    # Parts that some methods change.

    def view(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns K (G, n, d) and V (G, n, d_v) as attention reads them."""
        return self.k, self.v

    def kept(self, g: int) -> np.ndarray:
        """Returns the positions of the rows that kv head g still has."""
        return np.arange(self.n)

    def receive(self, h: int, rows: np.ndarray, weights: np.ndarray, n_left: int) -> None:
        """Takes note of the attention that query head h pays: ``weights`` to ``rows``.

        n_left: the number of input rows from the query's own row to the last.
        """

    def finish_prefill(self, q: np.ndarray) -> None:
        """Called after a prefill. q (H, T, d): its queries."""

    def finish_step(self, choices: list[Choice]) -> None:
        """Called after the attention of a step. choices: the rows that it attended to."""

    # Formulas.

    def scores(self, h: int, q: np.ndarray, k: np.ndarray, rows: Any = slice(None)) -> np.ndarray:
        """Returns the scaled, capped scores (rows,) of query head h. q (H, d), k (G, n, d)."""
        return self.capped(k[h // self.group, rows] @ q[h] * self.scale)

    def capped(self, scores: np.ndarray) -> np.ndarray:
        return self.softcap * np.tanh(scores / self.softcap) if self.softcap else scores

    def weights(self, h: int, scores: np.ndarray) -> np.ndarray:
        """Returns the softmax of query head h's scores (rows,). The head's sink adds to its sum."""
        peak = max(scores.max(), self.sinks[h])
        weights = np.exp(scores - peak)
        return weights / (weights.sum() + np.exp(self.sinks[h] - peak))


def half(x: np.ndarray) -> np.ndarray:
    """Returns x rounded to f16."""
    return x.astype(np.float16).astype(np.float64)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def best(scores: np.ndarray, forced: np.ndarray, count: int) -> Choice:
    """Returns a choice of the rows ``forced`` and of the ``count`` best others by scores (n,)."""
    scores = scores.copy()
    scores[forced] = FORCED
    order = np.argsort(-scores, kind="stable")
    return Choice(np.sort(order[: len(forced) + count]), scores)


def rotate(x: np.ndarray, positions: np.ndarray, theta: np.ndarray, scale: float) -> np.ndarray:
    """Returns x (..., n, d) turned by RoPE to positions (n,). Pairs are (i, i + n_rot/2)."""
    c = len(theta)
    turn = scale * np.exp(1j * np.multiply.outer(positions, theta))  # (n, n_rot/2)
    pairs = (x[..., :c] + 1j * x[..., c : 2 * c]) * turn
    return np.concatenate([pairs.real, pairs.imag, x[..., 2 * c :]], axis=-1)
