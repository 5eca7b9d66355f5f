"""SALS and its naive form: also what the latents and values in memory are."""

import numpy as np
from naive_pair import Pair

from sparsekv_cli.methods.sals import SALSCache


class SALSPair(Pair):
    """The naive form goes on with each latent and value as they are stored."""

    def check_stored(self) -> None:
        """Holds new latents and values against the naive ones; a code may be the next one."""
        naive = self.naive
        assert naive.compressed == (self.cache._latents is not None)
        if not naive.compressed:
            return
        latents, values = stored(self.cache)
        assert (
            len(latents) == len(naive.latents) == max(0, naive.n - self.method.window - naive.first)
        )
        if n_old := self.seen["encoded"]:  # they stay as they are
            np.testing.assert_array_equal(latents[:n_old], np.stack(naive.latents[:n_old]))
            np.testing.assert_array_equal(values[:n_old], np.stack(naive.values[:n_old]))
        for i in range(n_old, len(latents)):
            step = 1.01 * np.abs(latents[i]).max() / (127 * 256)  # numbers of 16 bits; others f16
            np.testing.assert_allclose(latents[i], naive.latents[i], rtol=1e-3, atol=step)
            wrong = np.abs(values[i] - naive.values[i])
            v = naive.v[:, naive.first + i]
            step = (v.max() - v.min()) / (2**self.method.bits - 1)
            assert (wrong > 1e-6).mean() < 0.02 and (wrong <= 1.01 * step + 1e-6).all()
            naive.latents[i], naive.values[i] = latents[i], values[i]
        self.seen["encoded"] = len(latents)

    def truncate(self, n: int) -> None:
        super().truncate(n)
        self.seen["encoded"] = len(self.naive.latents)


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
