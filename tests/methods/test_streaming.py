"""StreamingLLM: what it counts, and positions within the cache."""

from __future__ import annotations

import numpy as np
from chunks import attend_chunk
from tiny_sequences import N_HEAD, counts_after

from sparsekv_cli.cache.spec import AttnInput, LayerSpec
from sparsekv_cli.cpu.attention.decode import attend_dense_ref
from sparsekv_cli.methods import build_method


def test_ledger_of_streaming(sequence_of):
    sequence = sequence_of("streaming", {"sinks": "3"}, budget="10", dense_layers="0")
    counts = counts_after(sequence, 60, 5)
    dense = N_HEAD * sum(range(61, 66))
    assert counts["sparse_rows_attended"] == 3 * N_HEAD * 5 * (10 + 3)
    assert counts["rows_attended"] == dense + counts["sparse_rows_attended"]
    assert counts["sparse_rows_scored"] == 0


def rotate(x: np.ndarray, positions: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """x (..., n, d) half-split, rotated to ``positions`` (n,)."""
    half = len(theta)
    cos, sin = np.cos(np.outer(positions, theta)), np.sin(np.outer(positions, theta))
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos, x[..., 2 * half :]], axis=-1)


def test_repositioned_streaming_numbers_rows_within_the_cache():
    """Two turns: decode, prefill (the sinks are turned back), decode."""
    d, n_kv, n_head, budget, sinks = 64, 2, 4, 20, 3
    theta = 1e4 ** (-np.arange(d // 2) / (d // 2))
    spec = LayerSpec(
        layer=0, n_layer=1, n_head=n_head, n_head_kv=n_kv, head_dim=d, value_dim=d, n_threads=1,
        theta=theta,
    )  # fmt: skip
    options = {"reposition": "true", "sinks": str(sinks), "dense_layers": "none"}
    cache = build_method("streaming", options, budget=str(budget)).layer(spec)
    rng = np.random.default_rng(0)
    nope = {"q": rng.standard_normal((n_head, 200, d)), "k": rng.standard_normal((n_kv, 200, d))}
    v = rng.standard_normal((n_kv, 200, d)).astype(np.float16).astype(np.float32)
    q, k = (rotate(nope[name], np.arange(200), theta).astype(np.float32) for name in "qk")

    def part(start: int, stop: int) -> AttnInput:
        chunk = [x[:, start:stop].copy() for x in (q, k, v, nope["q"], nope["k"])]
        return AttnInput(*chunk, start)

    def prefill(start: int, stop: int) -> np.ndarray:
        out = attend_chunk(cache, part(start, stop))
        cache.finish_prefill()
        return out

    prefill(0, 60)
    for t in [*range(60, 100), *range(150, 180)]:
        if t == 150:
            out = prefill(100, 150)
            expected = attend_dense_ref(q[:, 149], k[:, :150], v[:, :150], d**-0.5)
            np.testing.assert_allclose(out[:, -1], expected, atol=3e-3)  # f16 keys
        kept = [*range(sinks), *range(t + 1 - budget, t + 1)]
        positions = np.arange(len(kept))
        inner_q = rotate(nope["q"][:, [t]], positions[-1:], theta)[:, 0]
        inner_k = rotate(nope["k"][:, kept], positions, theta)
        expected = attend_dense_ref(inner_q, inner_k, v[:, kept], d**-0.5)
        np.testing.assert_allclose(cache.decode(part(t, t + 1)), expected, atol=3e-3)
