"""A layer of FASA and its twin on the same rows, step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from chunks import attend_chunk
from fasa_twin import FASATwin, HeadChoice

from sparsekv_cli.cache.spec import AttnInput, LayerSpec
from sparsekv_cli.cache.store import padded
from sparsekv_cli.calibration.allocation import even_budgets
from sparsekv_cli.calibration.fasa import SHARES
from sparsekv_cli.methods.fasa import FASA, FASACache

N_STEPS = 300
TIE = 1e-5  # f32 scores against f64: nearer than this is a tie


@dataclass(frozen=True)
class Geometry:
    n_head: int
    n_head_kv: int
    d: int
    n_rot: int

    def __str__(self) -> str:
        return f"H{self.n_head}-G{self.n_head_kv}-d{self.d}-rot{self.n_rot}"


GEOMETRIES = [
    Geometry(4, 4, 64, 64),
    Geometry(9, 3, 64, 64),
    Geometry(8, 2, 80, 80),
    Geometry(8, 1, 128, 128),
    Geometry(6, 2, 80, 20),
]


class Layer:
    """A layer's cache, its twin, and random rows for both: drifting queries, a few heavy chunks."""

    def __init__(self, geometry: Geometry, seed: int = 0, n_threads: int = 1, **options) -> None:
        g, rng = geometry, np.random.default_rng(seed)
        self.geometry, self.rng = g, rng
        n_chunk = g.n_rot // 2
        rank = np.stack([rng.permutation(n_chunk) for _ in range(g.n_head_kv)]).astype(np.uint8)
        self.spec = LayerSpec(
            layer=2, n_layer=4, n_head=g.n_head, n_head_kv=g.n_head_kv, head_dim=g.d, value_dim=g.d,
            n_threads=n_threads, theta=np.ones(n_chunk),
            calibration={"dom_var": rank, "dom_ca": rank, "tip_budget": even_budgets(SHARES)},
        )  # fmt: skip
        self.method = FASA(**options)
        cache = self.method.layer(self.spec)
        assert isinstance(cache, FASACache)
        self.cache = cache
        n_tip = self.method.n_tip or g.d // (8 if self.method.metric == "var" else 4)
        forced = self.method.force == "default"
        self.twin = FASATwin(rank, n_tip, self.method.budget.rows, forced, g.n_head)
        self.walk = rng.standard_normal((g.n_head, g.d))
        self.weight = np.ones((g.n_head_kv, 1, g.d))
        for kv in range(g.n_head_kv):
            self.weight[kv, 0, rank[kv, :3]] = 3

    def rows(self, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q (H, n, d), k (G, n, d), v (G, n, d) of n tokens, K and V representable in f16."""
        g = self.geometry
        queries = []
        for _ in range(n):
            self.walk = 0.9 * self.walk + 0.4 * self.rng.standard_normal(self.walk.shape)
            queries.append(self.walk.copy())
        k = self.rng.standard_normal((g.n_head_kv, n, g.d)) * self.weight
        v = self.rng.standard_normal((g.n_head_kv, n, g.d))
        return np.stack(queries, axis=1).astype(np.float32), half(k), half(v)

    def prefill(self, n: int) -> tuple[np.ndarray, ...]:
        """n tokens into the cache alone, in chunks."""
        q, k, v = self.rows(n)
        prefill(self.cache, q, k, v)
        return q, k, v

    def step(self) -> np.ndarray:
        """One token into the cache alone: a copy of its output (H, d)."""
        q, k, v = (x[:, 0] for x in self.rows(1))
        out = self.cache.decode(row_input(q, k, v, self.cache.n))
        return out[:, : self.geometry.d].copy()

    def decode(self, n_steps: int) -> int:
        """n_steps tokens in both, everything compared; how many choices were ties."""
        ties = 0
        for _ in range(n_steps):
            q, k, v = (x[:, 0] for x in self.rows(1))
            n = self.cache.n + 1
            choices = self.twin.choose(q, k, v)
            out = self.cache.decode(row_input(q, k, v, n - 1))
            if self.method.budget.rows(n) >= n:
                assert self.cache.attended is None
            else:
                assert self.cache.attended is not None
                for h, choice in enumerate(choices):
                    rows, counts = self.cache.attended
                    ties += reconcile(choice, rows[h, : counts[h]])
            expected = self.twin.attend(choices)
            np.testing.assert_allclose(out[:, : expected.shape[1]], expected, atol=1e-4)
        return ties


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def prefill(cache, q, k, v, chunk: int = 64) -> np.ndarray:
    """The dense output of the chunks, (H, n, d)."""
    pos, outs = cache.n, []
    for start in range(0, q.shape[1], chunk):
        parts = [x[:, start : start + chunk].copy() for x in (q, k, v)]
        outs.append(attend_chunk(cache, AttnInput(*parts, parts[0], parts[1], pos + start)))
    cache.finish_prefill()
    return np.concatenate(outs, axis=1)


def row_input(q, k, v, pos: int) -> AttnInput:
    def widen(x):
        wide = np.zeros((len(x), 1, padded(x.shape[1])), np.float32)
        wide[:, 0, : x.shape[1]] = x
        return wide

    q, k, v = widen(q), widen(k), widen(v)
    return AttnInput(q, k, v, q, k, pos)


def reconcile(choice: HeadChoice, actual: np.ndarray) -> bool:
    """Takes over a choice that differs only by a tie; AssertionError if it is none."""
    expected, got = set(choice.rows.tolist()), set(actual.tolist())
    assert len(got) == len(actual) == len(expected) and got >= choice.forced
    if got == expected:
        return False
    differing = choice.importance[sorted(expected ^ got)]
    assert (np.abs(differing - choice.cut) < TIE * (1 + abs(choice.cut))).all()
    choice.rows = np.array(sorted(got))
    return True
