"""How a model attends to a text: what sparse attention can rely on, by layer and head.

Measured in a dense prefill, chunk by chunk, from Q and K as the layers' caches get them. Only a few
queries of each chunk are looked at. There is then never a matrix of all rows by all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsekv_cli.cache.kinds import CACHES, share_rows
from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.cache.spec import N_SINKS, AttnInput, LayerSpec
from sparsekv_cli.cpu.jit.floats import as_f32
from sparsekv_cli.errors import SparseKVError

if TYPE_CHECKING:
    from sparsekv_cli.model import Model
    from sparsekv_cli.models.forward import OnProgress

SHARES = (0.01, 0.02, 0.05, 0.10)  # of the rows, whose mass is measured
SHARE = 0.05  # of the rows, by which rules of choice are compared
N_QUERIES = 32  # the last of a chunk that are looked at
N_PAST = 24  # of these, the first ones, from which the attention of the others is guessed
PAGE = 8  # rows of a page
N_RECENT = 32  # last rows that past attention takes always
LEAST_ROWS = 512  # ahead of the first query that is looked at
KEPT_VARIANCE = 0.9
LEAST_TOKENS = 1024  # of a text that says something of long contexts
SUITS, FINDS = 0.9, 0.85  # mass of the best rows, and the share of it that a rule finds
RULES = ("sinks", "recent", "vertical", "slash", "past", "pages")


@dataclass(frozen=True)
class AttentionMeasures:
    """Arrays by layer and head, of the full layers in ``layers``.

    mass (L, H, shares): of the best rows. sinks, recent: on the first rows, and on the last SHARE.
    vertical, slash (L, H): on the SHARE of the rows, or of distances, that N_PAST queries before
    attended to most. past (L, H): on the best SHARE of rows among twice as many of both, first and
    last rows. pages (L, H): on pages that bounds of their keys choose. cosine (L, H): of a query
    and the next one. rank (L, G): directions that hold KEPT_VARIANCE of the keys' variance, before
    rotation. spectrum (L, d): the mean of the heads' shares of the variance, the largest first.
    """

    n_tokens: int
    n_queries: int
    layers: Sequence[int]
    mass: np.ndarray
    sinks: np.ndarray
    recent: np.ndarray
    vertical: np.ndarray
    slash: np.ndarray
    past: np.ndarray
    pages: np.ndarray
    cosine: np.ndarray
    rank: np.ndarray
    spectrum: np.ndarray


@dataclass(frozen=True)
class Suitability:
    """Whether a model suits sparse attention, and which method finds most of the best rows' mass.

    found: by method, the share of that mass which its rule of choice finds.
    """

    suits: bool
    method: str
    found: dict[str, float]
    sentence: str


def judge(measures: AttentionMeasures) -> Suitability:
    """Judges the methods by the means over layers and heads."""
    best = float(measures.mass[..., SHARES.index(SHARE)].mean())
    reached = {
        "lfps": measures.past,
        "quest": measures.pages,
        "streaming": np.minimum(measures.sinks + measures.recent, 1),
    }
    found = {name: min(1.0, float(mass.mean()) / best) for name, mass in reached.items()}
    method = max(found, key=lambda name: found[name])
    if found[method] < FINDS:
        method = "topk"
    suits = best >= SUITS
    rank, d = float(measures.rank.mean()), measures.spectrum.shape[1]
    say = "suits" if suits else "hardly suits"
    rules = (
        f"past attention finds {found['lfps']:.0%} of that (lfps), pages by their bounds "
        f"{found['quest']:.0%} (quest), first and last rows {found['streaming']:.0%} (streaming)"
    )
    advice = f"try {method}"
    if method == "topk":
        advice = "no rule finds enough without scoring all rows: try topk, fasa or sals"
    return Suitability(
        suits,
        method,
        found,
        f"this model {say} sparse attention: {SHARE:.0%} of the rows hold {best:.0%} of the "
        f"attention; {rules}; {rank:.0f} of {d} directions hold {KEPT_VARIANCE:.0%} of the keys' "
        f"variance (sals); {advice}",
    )


class WatchedCache(DenseCache):
    """A dense layer that measures the last queries of each chunk that lies far enough back."""

    queries_read = None  # type: ignore[assignment]  # all

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.sums = {name: np.zeros(spec.n_head) for name in (*RULES, "cosine")}
        self.mass = np.zeros((spec.n_head, len(SHARES)))
        self.n_chunks = 0
        d = spec.head_dim
        self._n_keys = 0
        self._key_sum = np.zeros((spec.n_head_kv, d))
        self._key_products = np.zeros((spec.n_head_kv, d, d))

    def extend(self, x: AttnInput) -> Any:
        rows = super().extend(x)
        keys = as_f32(x.k_nope)
        self._n_keys += keys.shape[1]
        self._key_sum += keys.sum(1, dtype=np.float64)
        self._key_products += keys.swapaxes(1, 2) @ keys
        if x.q.shape[1] >= N_QUERIES and self.store.n - N_QUERIES >= LEAST_ROWS:
            self._watch(as_f32(x.q[:, -N_QUERIES:]))
        return rows

    def _watch(self, q: np.ndarray) -> None:
        """q f32 (H, N_QUERIES, d), of the last rows."""
        spec, n = self.spec, self.store.n
        keys = self.store.k[:, :n, : spec.head_dim]
        length = np.linalg.norm(q, axis=-1)
        products = (q[:, 1:] * q[:, :-1]).sum(-1) / np.maximum(length[:, 1:] * length[:, :-1], 1e-9)
        self.sums["cosine"] += products.mean(-1)
        for head in range(spec.n_head):
            rows = keys[head // spec.group].astype(np.float32)
            weights = softmax(q[head] @ rows.T * spec.scale, spec, head)
            for name, share in rate_rules(weights).items():
                self.sums[name][head] += share
            self.sums["pages"][head] += rate_pages(weights, q[head], rows)
            self.mass[head] += best_mass(weights)
        self.n_chunks += 1

    def spectrum(self) -> np.ndarray:
        """(G, d): shares of the keys' variance along its directions, the largest first."""
        mean = self._key_sum / self._n_keys
        covariance = self._key_products / self._n_keys - mean[:, :, None] * mean[:, None]
        values = np.maximum(np.linalg.eigvalsh(covariance)[:, ::-1], 0)
        return values / np.maximum(values.sum(-1, keepdims=True), 1e-30)


def softmax(scores: np.ndarray, spec: LayerSpec, head: int) -> np.ndarray:
    """Causal weights of scores f32 (Q, n), whose queries are those of the last rows."""
    if spec.softcap:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    n_query, n = scores.shape
    scores[np.arange(n) > np.arange(n - n_query, n)[:, None]] = -np.inf
    most = scores.max(-1, keepdims=True)
    if len(spec.sinks):
        most = np.maximum(most, spec.sinks[head])
    weights = np.exp(scores - most)
    rest = np.exp(spec.sinks[head] - most) if len(spec.sinks) else 0
    return weights / (weights.sum(-1, keepdims=True) + rest)


def best_mass(weights: np.ndarray) -> np.ndarray:
    """(shares,): the mean of the queries' mass on SHARES of the rows, the best ones."""
    n = weights.shape[1]
    counts = [max(1, round(share * n)) for share in SHARES]
    best = -np.partition(-weights, [count - 1 for count in counts], axis=-1)
    return np.array([best[:, :count].sum(-1).mean() for count in counts])


def rate_rules(weights: np.ndarray) -> dict[str, float]:
    """The mass that rules of choice find, by name; weights (Q, n) of the last rows' queries.

    Each takes SHARE of the rows, from which queries N_PAST on are counted.
    """
    n_query, n = weights.shape
    count = max(1, round(SHARE * n))
    later, n_later = weights[N_PAST:], n_query - N_PAST
    # Column j of these rows is the distance n - 1 - j of each row's own query.
    by_distance = np.stack([np.roll(row, n_query - 1 - i) for i, row in enumerate(weights)])
    past = weights[:N_PAST].sum(0), by_distance[:N_PAST].sum(0)
    vertical, slash = (np.argsort(-sums)[: 2 * count] for sums in past)
    recent, found = [], []
    for i, row in enumerate(later):
        end = n - n_later + i + 1
        recent.append(row[max(0, end - count) : end].sum())
        candidates = np.zeros(n, np.bool_)
        candidates[vertical] = candidates[:N_SINKS] = True
        candidates[np.maximum(0, slash - (n - end))] = True
        candidates[max(0, end - N_RECENT) : end] = True
        chosen = row[candidates]
        found.append(-np.partition(-chosen, min(count, len(chosen)) - 1)[:count].sum())
    return {
        "sinks": float(later[:, :N_SINKS].sum(-1).mean()),
        "recent": float(np.mean(recent)),
        "vertical": float(later[:, vertical[:count]].sum(-1).mean()),
        "slash": float(by_distance[N_PAST:, slash[:count]].sum(-1).mean()),
        "past": float(np.mean(found)),
    }


def rate_pages(weights: np.ndarray, q: np.ndarray, keys: np.ndarray) -> float:
    """Returns the mass on SHARE of the rows in pages by Quest's bounds, with the first and the last
    one.

    weights (Q, n) of the queries q (Q, d); keys (n, d).
    """
    n_pages = len(keys) // PAGE
    pages = keys[: n_pages * PAGE].reshape(n_pages, PAGE, -1)
    bounds = np.maximum(q, 0) @ pages.max(1).T + np.minimum(q, 0) @ pages.min(1).T
    bounds[:, [0, -1]] = np.inf
    count = 2 + max(1, round(SHARE * n_pages))
    best = np.argpartition(-bounds, count - 1, axis=-1)[:, :count]
    mass = weights[:, : n_pages * PAGE].reshape(len(q), n_pages, PAGE).sum(-1)
    rest = weights[:, n_pages * PAGE :].sum(-1)
    return float((np.take_along_axis(mass, best, -1).sum(-1) + rest).mean())


def measure_attention(
    model: Model, ids: Sequence[int], progress: OnProgress | None = None
) -> AttentionMeasures:
    """Measures the model's full layers in a dense prefill of ``ids``.

    Raises SparseKVError for a text that is too short, or a model without full layers.
    """
    if len(ids) < LEAST_TOKENS:
        raise SparseKVError(
            f"the text has {len(ids)} tokens, too few to see how a model attends: at least "
            f"{LEAST_TOKENS} are needed"
        )
    from sparsekv_cli.cpu.jit.threads import blas_threads

    specs = model.decoder.layer_specs()
    caches = [CACHES.get(spec.kind, WatchedCache)(spec) for spec in specs]
    for cache in caches:
        cache.reserve(len(ids))
    share_rows(caches)
    with blas_threads(model.n_threads):
        model.decoder.forward(ids, 0, caches, progress=progress)
    watched = [cache for cache in caches if isinstance(cache, WatchedCache)]
    if not watched:
        raise SparseKVError("the model has no layer that attends to all rows")
    spectra = [cache.spectrum() for cache in watched]
    rank = [(each.cumsum(-1) < KEPT_VARIANCE).sum(-1) + 1 for each in spectra]
    n_chunks = watched[0].n_chunks

    def by_head(name: str) -> np.ndarray:
        return np.stack([cache.sums[name] / n_chunks for cache in watched])

    return AttentionMeasures(
        n_tokens=len(ids),
        n_queries=n_chunks * N_QUERIES,
        layers=[cache.spec.layer for cache in watched],
        mass=np.stack([cache.mass / n_chunks for cache in watched]),
        **{name: by_head(name) for name in (*RULES, "cosine")},
        rank=np.stack(rank),
        spectrum=np.stack([each.mean(0) for each in spectra]),
    )
