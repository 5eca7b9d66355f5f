"""Random inputs of one layer, for tests that follow a method step by step."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sparsekv_cli.cache.spec import N_SINKS

# q (H, T, d), k (G, T, d), v (G, T, d_v); of a layer with RoPE also q_nope and k_nope.
Rows = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Geometry:
    """Sizes of a layer; d_v = 0: as d; n_rot dims of a head are rotated."""

    n_head: int
    n_head_kv: int
    d: int
    d_v: int = 0
    n_rot: int = 0
    rope_scale: float = 1.0
    softcap: float = 0.0
    has_sinks: bool = False

    def __str__(self) -> str:
        text = f"H{self.n_head}-G{self.n_head_kv}-d{self.d}"
        text += f"-dv{self.d_v}" if self.d_v else ""
        text += f"-rot{self.n_rot}-scale{self.rope_scale}" if self.n_rot else ""
        return text + ("-capped" if self.softcap else "")

    @property
    def theta(self) -> np.ndarray:
        return 1e4 ** (-2 * np.arange(self.n_rot // 2) / max(1, self.n_rot))

    @property
    def sinks(self) -> np.ndarray:
        """f32 (H,): a score without a value, which some heads attend to most; or empty."""
        return np.linspace(-4, 11, self.n_head if self.has_sinks else 0, dtype=np.float32)


GEOMETRIES = [Geometry(2, 2, 64), Geometry(9, 3, 64), Geometry(8, 2, 80), Geometry(8, 1, 128)]


class Case(NamedTuple):
    """A layer, and how many rows its prompt has."""

    geometry: Geometry
    n_prefill: int

    def __str__(self) -> str:
        return f"{self.geometry}-n{self.n_prefill}"


class Stream:
    """Queries that drift, keys of which some are heavy; K and V are representable in f16."""

    def __init__(self, geometry: Geometry, seed: int = 0) -> None:
        g = self.geometry = geometry
        self.rng = np.random.default_rng(seed)
        self.topics = self.rng.standard_normal((g.n_head_kv, 4, g.d)) / g.d**0.25
        self.walk = self.rng.standard_normal((g.n_head, g.d))
        self.position = 0

    def rows(self, n: int) -> Rows:
        """The next ``n`` rows."""
        parts = [self._rotated_row() for _ in range(n)]
        return tuple(np.stack(each, axis=1) for each in zip(*parts, strict=True))

    def _rotated_row(self) -> Rows:
        q, k, v = self._row()
        rows = (q, k, v, q, k) if self.geometry.n_rot else (q, k, v)
        rows = (self._rotate(q), half(self._rotate(k)), half(v), *rows[3:])
        self.position += 1
        return tuple(x.astype(np.float32) for x in rows)

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        g, c = self.geometry, self.geometry.n_rot // 2
        turn = g.rope_scale * np.exp(1j * self.position * g.theta)
        pairs = (x[:, :c] + 1j * x[:, c : 2 * c]) * turn
        return np.concatenate([pairs.real, pairs.imag, x[:, 2 * c :]], axis=1)

    def _row(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k, v of a token before RoPE."""
        g, rng = self.geometry, self.rng
        self.walk = 0.95 * self.walk + 0.3 * rng.standard_normal(self.walk.shape)
        topic = self.position // 50 % 4
        q = self.walk + 2 * np.repeat(self.topics[:, topic], g.n_head // g.n_head_kv, axis=0)
        k = rng.standard_normal((g.n_head_kv, g.d))
        if rng.random() < 0.1:
            k += 5 * self.topics[:, rng.integers(4)]
        return q, k, rng.standard_normal((g.n_head_kv, g.d_v or g.d))


class HistoryStream(Stream):
    """For lfps: queries that look at sinks now and then, heavy keys, a slash pattern."""

    def __init__(self, geometry: Geometry, seed: int = 0, sink_strength: float = 3.0) -> None:
        super().__init__(geometry, seed)
        g = geometry
        self.directions = self.rng.standard_normal((g.n_head_kv, 6, g.d))
        self.directions /= np.linalg.norm(self.directions, axis=-1, keepdims=True)
        self.directions *= g.d**0.25
        self.sink = sink_strength
        self.period = self.rng.integers(11, 29, g.n_head_kv)

    def _row(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        g, rng, p = self.geometry, self.rng, self.position
        self.walk = 0.97 * self.walk + 0.25 * rng.standard_normal(self.walk.shape)
        q, k = self.walk.copy(), 0.6 * rng.standard_normal((g.n_head_kv, g.d))
        phase = 2 * np.pi * p / self.period
        slash = 1.6 * (
            np.cos(phase)[:, None] * self.directions[:, 3]
            + np.sin(phase)[:, None] * self.directions[:, 4]
        )
        for h in range(g.n_head):
            kv = h * g.n_head_kv // g.n_head
            heavy = self.directions[kv]
            q[h] += 1.2 * heavy[(p // 40 + h) % 3] + slash[kv]
            q[h] += self.sink * (1 + np.sin(p / 9 + 2 * h)) / 2 * heavy[5]
        for kv, heavy in enumerate(self.directions):
            k[kv] += slash[kv]
            if rng.random() < 0.06:
                k[kv] += 3 * heavy[rng.integers(3)]
            if p < N_SINKS:
                k[kv] = self.sink * heavy[5]
        return q, k, rng.standard_normal((g.n_head_kv, g.d_v or g.d))


class TurningStream(Stream):
    """For freekv: keys that follow a topic for a while, queries that stay on one, or turn."""

    def __init__(self, geometry: Geometry, seed: int = 0) -> None:
        super().__init__(geometry, seed)
        self.subjects = self.rng.standard_normal((12, geometry.d)) * 1.5
        self.subject = self.rng.integers(12, size=geometry.n_head_kv)  # of the keys

    def _row(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        g, rng, q = self.geometry, self.rng, self.walk.copy()
        group = g.n_head // g.n_head_kv
        for kv in range(g.n_head_kv):
            if rng.random() < 0.08:
                self.subject[kv] = rng.integers(12)
            heads = slice(kv * group, (kv + 1) * group)
            if rng.random() < 0.15:  # this kv head's queries turn
                self.walk[heads] = self.subjects[rng.integers(12)]
                self.walk[heads] += 0.6 * rng.standard_normal((group, g.d))
            wander = rng.uniform(0.1, 0.9)
            q[heads] = self.walk[heads] + wander * rng.standard_normal((group, g.d))
        k = self.subjects[self.subject] + rng.standard_normal((g.n_head_kv, g.d))
        return q, k, rng.standard_normal((g.n_head_kv, g.d_v or g.d))


class LowRankStream(Stream):
    """For sals: keys that are nearly of low rank, some of them heavy, and queries that drift."""

    def __init__(self, geometry: Geometry, seed: int = 0) -> None:
        super().__init__(geometry, seed)
        size = geometry.n_head_kv * geometry.d
        self.mean = 0.5 * self.rng.standard_normal(size)
        self.directions = self.rng.standard_normal((12, size)) * 2 / np.sqrt(geometry.d)

    def _row(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        g, rng = self.geometry, self.rng
        self.walk = 0.9 * self.walk + 0.4 * rng.standard_normal(self.walk.shape)
        mix = rng.standard_normal(12) * (3.0 if rng.random() < 0.1 else 0.8)
        k = self.mean + mix @ self.directions + 0.3 * rng.standard_normal(self.mean.shape)
        k = (k * (8.0 if self.position == 0 else 1.0)).reshape(g.n_head_kv, g.d)
        return self.walk.copy(), k, rng.standard_normal((g.n_head_kv, g.d_v or g.d))


STREAMS = {"lfps": HistoryStream, "freekv": TurningStream, "sals": LowRankStream}


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)
