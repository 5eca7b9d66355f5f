"""A layer of SALS and its twin on the same rows, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from chunks import attend_chunk
from sals_twin import Choice, SALSTwin, TwinOptions

from sparsekv_cli.cache.spec import AttnInput, Budget, LayerSpec
from sparsekv_cli.cache.store import padded
from sparsekv_cli.calibration.allocation import even_budgets
from sparsekv_cli.calibration.sals import SHARES
from sparsekv_cli.methods.sals import SALS, SALSCache

N_STEPS = 300
TOLERANCE = 2e-3  # of outputs: a reconstructed key may be rounded to the neighbouring f16
# Scores are of bytes: importance within a factor of the cut, or within a part of the largest score,
# is a tie.
NEAR, ROUNDED = 1.3, 0.02


@dataclass(frozen=True)
class Layer:
    """Sizes of one layer; n_rot of its d dims are rotated."""

    n_head: int = 9
    n_kv: int = 3
    d: int = 64
    n_rot: int = 64
    rope_scale: float = 1.0

    @property
    def theta(self) -> np.ndarray:
        return 1e4 ** (-2 * np.arange(self.n_rot // 2) / self.n_rot)

    def __str__(self) -> str:
        return f"H{self.n_head}-G{self.n_kv}-d{self.d}-rot{self.n_rot}-scale{self.rope_scale}"


class Stream:
    """Tokens whose keys are nearly of low rank, some of them heavy, and queries that drift."""

    def __init__(self, layer: Layer, seed: int = 0) -> None:
        self.layer, self.position = layer, 0
        rng = self.rng = np.random.default_rng(seed)
        size = layer.n_kv * layer.d
        self.mean = 0.5 * rng.standard_normal(size)
        self.directions = rng.standard_normal((12, size)) * 2 / np.sqrt(layer.d)
        self.walk = rng.standard_normal((layer.n_head, layer.d))

    def next(self) -> tuple[np.ndarray, ...]:
        """q, k, v, q_nope, k_nope of one token, f32 (heads, d)."""
        layer, rng = self.layer, self.rng
        self.walk = 0.9 * self.walk + 0.4 * rng.standard_normal(self.walk.shape)
        mix = rng.standard_normal(12) * (3.0 if rng.random() < 0.1 else 0.8)
        k_nope = self.mean + mix @ self.directions + 0.3 * rng.standard_normal(self.mean.shape)
        k_nope = (k_nope * (8.0 if self.position == 0 else 1.0)).reshape(layer.n_kv, layer.d)
        v = rng.standard_normal((layer.n_kv, layer.d))
        q, k = (rotate(x, self.position, layer) for x in (self.walk, k_nope))
        self.position += 1
        return tuple(x.astype(np.float32) for x in (q, k, v, self.walk, k_nope))

    def rows(self, n: int) -> tuple[np.ndarray, ...]:
        """The same of n tokens, (heads, n, d)."""
        tokens = [self.next() for _ in range(n)]
        return tuple(np.stack([token[i] for token in tokens], axis=1) for i in range(5))


def rotate(x: np.ndarray, position: int, layer: Layer) -> np.ndarray:
    half = layer.n_rot // 2
    cos, sin = (layer.rope_scale * f(position * layer.theta) for f in (np.cos, np.sin))
    a, b = x[:, :half], x[:, half : 2 * half]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos, x[:, 2 * half :]], axis=1)


def make_calibration(layer: Layer, seed: int = 0) -> dict[str, np.ndarray]:
    """Bases of keys like the stream's, weighted by random pairs."""
    keys = Stream(layer, seed).rows(400)[4]  # (G, 400, d)
    keys = keys.transpose(1, 0, 2).reshape(400, -1)
    covariance = keys.T @ keys / 400
    weights = np.random.default_rng(seed).uniform(0.5, 2, (layer.n_kv, layer.d))
    half = layer.n_rot // 2
    weights[:, half : 2 * half] = weights[:, :half]
    weights = weights.reshape(-1)
    tensors = {"weights": weights.astype(np.float32), "rank_budget": even_budgets(SHARES)}
    for basis, w in (("diag", weights), ("pca", np.ones_like(weights))):
        vectors = np.linalg.eigh(w[:, None] * covariance * w)[1][:, ::-1]
        tensors[f"vectors_{basis}"] = vectors.astype(np.float32)
    return tensors


def make_spec(layer: Layer, n_threads: int = 1, seed: int = 0) -> LayerSpec:
    return LayerSpec(
        layer=2, n_layer=4, n_head=layer.n_head, n_head_kv=layer.n_kv, head_dim=layer.d,
        value_dim=layer.d, n_threads=n_threads, theta=layer.theta, rope_scale=layer.rope_scale,
        calibration=make_calibration(layer, seed),
    )  # fmt: skip


def make_cache(layer: Layer, n_threads: int = 1, **options: Any) -> SALSCache:
    options.setdefault("budget", Budget(tokens=40))
    cache = SALS(**options).layer(make_spec(layer, n_threads))
    assert isinstance(cache, SALSCache)
    cache.records_attended = True
    return cache


def prefill(cache: Any, rows: tuple[np.ndarray, ...], pos: int = 0, chunk: int = 64) -> np.ndarray:
    outs = []
    for start in range(0, rows[0].shape[1], chunk):
        part = (x[:, start : start + chunk].copy() for x in rows)
        outs.append(attend_chunk(cache, AttnInput(*part, pos + start)))
    cache.finish_prefill()
    return np.concatenate(outs, axis=1)


def row_input(token: tuple[np.ndarray, ...], pos: int) -> AttnInput:
    wide = []
    for x in token:
        wide.append(np.zeros((len(x), 1, padded(x.shape[1])), np.float32))
        wide[-1][:, 0, : x.shape[1]] = x
    return AttnInput(*wide, pos)


def decode(cache: Any, token: tuple[np.ndarray, ...]) -> np.ndarray:
    out = cache.decode(row_input(token, cache.n))
    return out[:, : token[2].shape[1]].copy()


def make_twin(cache: SALSCache, layer: Layer, method: SALS) -> SALSTwin:
    size = layer.n_kv * layer.d
    rank = method.rank or round(size / 4)
    options = TwinOptions(
        critical=method.budget.rows(0), rank=rank, score_rank=method.score_rank or -(-rank // 2),
        bits=method.bits, score=method.score, sinks=method.sinks, exact_sinks=method.exact_sinks,
        window=method.window,
    )  # fmt: skip
    tensors = cache.spec.calibration
    vectors = tensors[f"vectors_{method.basis}"]
    weights = tensors["weights"] if method.basis == "diag" else np.ones(size, np.float32)
    return SALSTwin(
        options, layer.n_head, layer.n_kv, layer.theta, layer.rope_scale,
        weights[:, None] * vectors, vectors / weights[:, None],
    )  # fmt: skip


def stored(cache: SALSCache) -> tuple[np.ndarray, np.ndarray]:
    """Latents f64 (n, r) and dequantised values (n, G, d_v), read as the layout says."""
    store = cache._latents
    assert store is not None
    (rank, r_star, bits), n_words = store._shape, -(-store._shape[1] // 4)
    tiles = store._scored.reshape(-1, n_words + 1, 16, 4)
    high = tiles[:, :n_words].transpose(0, 2, 1, 3).reshape(store.capacity, -1)
    scales = tiles[:, n_words].copy().view(np.float32).reshape(-1, 1)
    records = store._records[: store.n * store.table.record].reshape(store.n, -1)
    low, rest, raw = np.split(records, [4 * n_words, 4 * n_words + 2 * (rank - r_star)], axis=1)
    scored = high[: store.n].astype(float) - 128 + low.view(np.int8) / 256
    scored = (scored * scales[: store.n])[:, :r_star]
    rest = np.ascontiguousarray(rest).view(np.float16).reshape(store.n, rank - r_star)
    latents = np.concatenate([scored, rest.astype(float)], axis=1)
    d_v, n_kv = cache.spec.value_dim, cache.spec.n_head_kv
    blocks = raw.reshape(store.n, n_kv, -1)
    if bits == 16:
        return latents, blocks.copy().view(np.float16)[..., :d_v].astype(float)
    n_bytes = 4 * bits
    blocks = blocks.reshape(store.n, n_kv, -1, 4 + n_bytes)
    ends = np.ascontiguousarray(blocks[..., :4]).view(np.float16).astype(float)
    codes = np.stack(
        [
            blocks[..., 4 + i % n_bytes] >> (bits * (i // n_bytes)) & (2**bits - 1)
            for i in range(32)
        ],
        axis=-1,
    )
    values = ends[..., 1:2] + ends[..., :1] * codes
    return latents, values.reshape(store.n, n_kv, -1)[..., :d_v]


def follow_latents(cache: SALSCache, twin: SALSTwin) -> int:
    """Holds new latents against the twin's, then lets it go on with the stored ones."""
    due = twin.due()
    assert twin.compressed == (cache._latents is not None)
    if not twin.compressed:
        return 0
    latents, values = stored(cache)
    assert len(latents) == len(twin.latents) + len(due)
    if twin.latents:
        np.testing.assert_array_equal(latents[: len(twin.latents)], np.stack(twin.latents))
        np.testing.assert_array_equal(values[: len(twin.values)], np.stack(twin.values))
    for p in due:
        i = p - twin.first
        expected = twin.encode(p)
        size = np.abs(twin.k[p]).max()
        np.testing.assert_allclose(latents[i], expected, rtol=1e-3, atol=1e-4 * size)
        quantized, step = twin.quantize(p)
        wrong = np.abs(values[i] - quantized) > 1e-6
        # A value in the middle between two codes may go either way.
        assert wrong.mean() < 0.02 and (np.abs(values[i] - quantized) <= step + 1e-6).all()
        twin.adopt(latents[i], values[i])
    return len(due)


def reconcile(twin: SALSTwin, choice: Choice, actual: np.ndarray) -> bool:
    """Makes a choice that differs by ties equal to ``actual``; AssertionError if it is none."""
    expected, got = set(choice.chosen.tolist()), set(actual.tolist())
    assert len(got) == len(actual) == len(expected)
    if got == expected:
        return False
    scores = choice.importance[np.array(sorted(expected ^ got)) - twin.first]
    if twin.options.score == "brope":
        assert (abs(np.log(scores / choice.cut)) < np.log(NEAR)).all(), "no tie"
    else:
        size = np.abs(choice.importance).max()
        assert (abs(scores - choice.cut) < ROUNDED * size).all(), "no tie"
    choice.chosen = np.array(sorted(got))
    return True


def follow(cache: SALSCache, twin: SALSTwin, stream: Stream, n_steps: int) -> dict[str, int]:
    """Decodes n_steps tokens in both and compares everything."""
    seen = {"dense": 0, "sparse": 0, "encoded": 0, "ties": 0, "left_out": 0}
    for _ in range(n_steps):
        token = stream.next()
        q, k, v, q_nope, _ = token
        out = decode(cache, token)
        twin.add(k, v)
        seen["encoded"] += follow_latents(cache, twin)
        if not twin.compressed:
            assert cache.attended is None
            seen["dense"] += 1
            expected = twin.attend(q, np.empty(0))
        else:
            assert cache.attended is not None
            rows, counts = cache.attended
            assert rows.shape == (1, counts[0])
            middle = rows[0, (rows[0] >= twin.first)]
            middle = middle[middle < twin.first + len(twin.latents)]
            exact = [*range(twin.first), *range(twin.first + len(twin.latents), twin.n)]
            assert sorted(rows[0].tolist()) == sorted([*exact, *middle.tolist()])
            choice = twin.choose(q, q_nope)
            seen["ties"] += reconcile(twin, choice, middle)
            seen["left_out"] += len(choice.chosen) < len(twin.latents)
            seen["sparse"] += 1
            expected = twin.attend(q, choice.chosen)
        np.testing.assert_allclose(out, expected, atol=TOLERANCE)
    return seen
