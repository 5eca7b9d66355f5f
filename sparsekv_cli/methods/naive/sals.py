"""SALS, naively ("Sparse Attention in Latent Space", Mu et al.).

| paper | here |
|---|---|
| section 4.2, latents by the eigenvectors of C = K'K | NaiveSALS.encode, with calibrated E and D |
| section 5.1, quantised values | NaiveSALS.quantize |
| section 4.3, s_j = q~[:r*] . k~_j[:r*] | NaiveSALS.summed; by_block is ``score=brope`` |
| Algorithm 1 lines 5 to 7, top-k, reconstruction, RoPE | NaiveSALS.select, reconstruct |
| eq 5, softmax over the selected rows | Naive.attend |

K and V stay whole. ``latents`` and ``values`` are the rows that steps read in compressed form.
Scores are not rounded. Letters: r rank, r* scored columns, theta and t of RoPE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparsekv_cli.cache.spec import AttnInput, LayerSpec
from sparsekv_cli.methods.naive.base import FORCED, Choice, Naive, best, half, rotate

if TYPE_CHECKING:
    from sparsekv_cli.methods.sals import SALS

BLOCK = 128  # tokens that share a query in brope
CHANNELS = 32  # channels of a value that share a scale


class NaiveSALS(Naive):
    """The compressed rows of a layer: a latent (r,) and quantised values (G, d_v) for each."""

    method: SALS

    def __init__(self, method: SALS, spec: LayerSpec) -> None:
        super().__init__(method, spec)
        self.rank, self.score_rank = method.ranks(spec)
        u, w = (x.astype(np.float64) for x in method.basis_of(spec))
        self.e, self.d = (w[:, None] * u)[:, : self.rank], (u / w[:, None])[:, : self.rank]
        self.first = method.sinks if method.exact_sinks else 0  # the position of latent 0
        self.latents: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.compressed, self.start = False, (0, False, 0)

    def is_dense_at(self, n: int) -> bool:
        return not self.compressed and n <= (
            self.method.sinks + self.method.window + self.method.budget.rows(n)
        )

    def compress(self) -> None:
        """Step 2: makes latents of rows that have left the window."""
        self.compressed = True
        for p in range(self.first + len(self.latents), self.n - self.method.window):
            self.latents.append(self.encode(p))
            self.values.append(self.quantize(p))

    def encode(self, p: int) -> np.ndarray:
        """Returns the latent (r,) of the row at position p."""
        k_nope = rotate(self.k[:, [p]], -np.array([p]), self.spec.theta, 1 / self.spec.rope_scale)
        latent = k_nope.reshape(-1) @ self.e
        step = np.abs(latent[: self.score_rank]).max() / (127 * 256) or 1.0
        scored = np.round(latent[: self.score_rank] / step) * step
        return np.append(scored, half(latent[self.score_rank :]))

    def quantize(self, p: int) -> np.ndarray:
        """Returns the quantised values (G, d_v) of the row at position p."""
        out, top = self.v[:, p].copy(), 2**self.method.bits - 1
        for i in range(0, out.shape[1], CHANNELS) if self.method.bits < 16 else ():
            part = out[:, i : i + CHANNELS]
            low = half(part.min(1, keepdims=True))
            step = half((part.max(1, keepdims=True) - part.min(1, keepdims=True)) / top)
            codes = np.clip(np.round((part - low) / np.where(step, step, 1)), 0, top)
            out[:, i : i + CHANNELS] = low + step * codes
        return out

    def view(self) -> tuple[np.ndarray, np.ndarray]:
        """Step 5: returns K and V, with keys and values that are made from the latents.

        These keys are reconstructed and rotated to their positions.
        """
        k, v, n = self.k.copy(), self.v.copy(), len(self.latents)
        if n:
            places = slice(self.first, self.first + n)
            k_nope = (np.stack(self.latents) @ self.d.T).reshape(n, self.n_kv, -1).swapaxes(0, 1)
            positions = self.first + np.arange(n)
            k[:, places] = half(rotate(k_nope, positions, self.spec.theta, self.spec.rope_scale))
            v[:, places] = half(np.stack(self.values, 1))
        return k, v

    def choose(self, x: AttnInput) -> list[Choice]:
        self.q_nope = x.q_nope[:, 0, : self.spec.head_dim].astype(np.float64)
        return super().choose(x)

    def select(self) -> list[Choice]:
        """Steps 3 and 4: compresses rows, then returns one choice for all heads."""
        self.compress()
        o, n, n_latent = self.method, self.n, len(self.latents)
        importance = np.full(n, FORCED)
        scores = self.summed() if o.score == "paper" else self.by_block()
        importance[self.first : self.first + n_latent] = scores
        forced = np.flatnonzero((np.arange(n) < o.sinks) | (importance == FORCED))
        return [best(importance, forced, o.budget.rows(n))]

    def summed(self) -> np.ndarray:
        """Returns q~ . latent[:r*] of each latent. q~ is the sum over heads of D'q before RoPE."""
        q = self.q_nope.reshape(self.n_kv, self.group, -1).sum(1).reshape(-1)  # (G d,)
        return np.stack(self.latents)[:, : self.score_rank] @ (q @ self.d[:, : self.score_rank])

    def by_block(self) -> np.ndarray:
        """Returns scores (n_latent,): softmax weights of the latents, summed over heads.

        The queries are rotated to the centre of each block of 128 tokens.
        """
        n_latent, c, n_kv = len(self.latents), len(self.spec.theta), self.n_kv
        x = self.spec.theta * BLOCK / 2
        damping = np.where(x < np.pi, np.sinc(x / np.pi), 0) * self.spec.rope_scale**2
        latents = np.stack(self.latents)[:, : self.score_rank]
        d = self.d[:, : self.score_rank].reshape(n_kv, -1, self.score_rank)
        s = np.empty((self.n_head, n_latent))
        sampled: list[int] = []  # a quarter of the latents, to estimate the softmax's sum
        for i in range(0, n_latent, BLOCK):
            distance = self.n - 1 - (self.first + i + (BLOCK - 1) / 2)
            q = rotate(self.q_nope[:, None], np.array([distance]), self.spec.theta, 1.0)[:, 0]
            q[:, : 2 * c] *= np.tile(damping, 2)
            q = q.reshape(n_kv, self.group, -1)
            projected = np.einsum("ghd,gdr->ghr", q, d).reshape(self.n_head, -1)
            s[:, i : i + BLOCK] = projected @ latents[i : i + BLOCK].T
            of_block = range(i + 32, i + 64) if i + 64 <= n_latent else range(i, i + 32)
            sampled += [j for j in of_block if j < n_latent]
        s = self.capped(s * self.scale)
        exact = np.r_[: self.first, self.first + n_latent : self.n]
        total = np.zeros(n_latent)
        for h in range(self.n_head):
            peak = s[h].max()
            others = np.append(self.scores(h, self.q, self.k, exact), self.sinks[h])
            mass = np.exp(s[h, sampled] - peak).sum() * n_latent / len(sampled)
            total += np.exp(s[h] - peak) / (mass + np.exp(others - peak).sum())
        return total

    def finish_prefill(self, q: np.ndarray) -> None:
        if not self.is_dense_at(self.n):
            self.compress()
        self.start = self.n, self.compressed, len(self.latents)

    def truncate(self, n: int) -> None:
        n_latent = max(0, n - self.method.window - self.first)
        if n == self.start[0]:
            _, self.compressed, n_latent = self.start
        del self.latents[n_latent:], self.values[n_latent:]
        super().truncate(n)
