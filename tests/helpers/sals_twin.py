"""SALS step by step as docs/methods.md numbers it, in numpy f64: slow, literal, no shared code.

Letters: H query heads, G kv heads, n tokens, d head size, r rank, r* score rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BLOCK = 128  # tokens that share a query in brope
GROUP = 32  # value channels that share a scale


@dataclass(frozen=True)
class TwinOptions:
    """The options that change what is computed, as in the method, all of them given."""

    critical: int
    rank: int
    score_rank: int
    bits: int = 4
    score: str = "brope"
    sinks: int = 16
    exact_sinks: bool = True
    window: int = 64


@dataclass
class Choice:
    """What a step attends to."""

    importance: np.ndarray  # (n latents,)
    chosen: np.ndarray  # positions of the chosen latents, ascending
    cut: float  # importance of the last one that was chosen by it


class SALSTwin:
    """One layer: ``add`` a token, ``adopt`` what has become a latent, ``choose``, ``attend``."""

    def __init__(
        self,
        options: TwinOptions,
        n_head: int,
        n_kv: int,
        theta: np.ndarray,
        rope_scale: float,
        encode: np.ndarray,
        decode: np.ndarray,
    ) -> None:
        self.options, self.n_head, self.n_kv = options, n_head, n_kv
        self.theta, self.rope_scale = theta, rope_scale
        self.encoder = encode.astype(np.float64)[:, : options.rank]  # E (G d, r)
        self.decoder = decode.astype(np.float64)[:, : options.rank]  # D (G d, r)
        self.k: list[np.ndarray] = []  # (G, d) rotated, as f16 holds it
        self.v: list[np.ndarray] = []  # (G, d_v)
        self.latents: list[np.ndarray] = []  # (r,) of the positions from ``first`` on
        self.values: list[np.ndarray] = []  # (G, d_v), dequantised
        self.first = options.sinks if options.exact_sinks else 0
        self.compressed = False

    @property
    def n(self) -> int:
        return len(self.k)

    def add(self, k: np.ndarray, v: np.ndarray) -> None:
        """A token's rotated key (G, d) and value (G, d_v)."""
        self.k.append(half(k))
        self.v.append(half(v))

    def due(self) -> list[int]:
        """Positions that must be latents from now on and are none yet."""
        o = self.options
        if self.n > o.sinks + o.window + o.critical:
            self.compressed = True
        if not self.compressed:
            return []
        return list(range(self.first + len(self.latents), self.n - o.window))

    def rotate(self, x: np.ndarray, position: float, scale: float) -> np.ndarray:
        """x (heads, d), pairs (i, i + n_rot/2)."""
        n_pairs = len(self.theta)
        out = x.astype(np.float64)
        turned = (out[:, :n_pairs] + 1j * out[:, n_pairs : 2 * n_pairs]) * scale
        turned *= np.exp(1j * position * self.theta)
        out[:, :n_pairs], out[:, n_pairs : 2 * n_pairs] = turned.real, turned.imag
        return out

    def encode(self, position: int) -> np.ndarray:
        """Step 2: the latent (r,), before it is rounded."""
        nope = self.rotate(self.k[position], -position, 1 / self.rope_scale)
        return nope.reshape(-1) @ self.encoder

    def quantize(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Step 2: values after quantisation (G, d_v), and the step size of each."""
        top = 2**self.options.bits - 1
        out, steps = self.v[position].copy(), np.zeros_like(self.v[position])
        if self.options.bits == 16:
            return out, steps
        for g in range(self.n_kv):
            for start in range(0, out.shape[1], GROUP):
                part = self.v[position][g, start : start + GROUP]
                low = float(np.float16(part.min()))
                step = float(np.float16((part.max() - part.min()) / top))
                codes = np.clip(np.round((part - low) / (step or 1.0)), 0, top)
                out[g, start : start + GROUP] = low + step * codes
                steps[g, start : start + GROUP] = step
        return out, steps

    def adopt(self, latent: np.ndarray, values: np.ndarray) -> None:
        """Goes on with the next latent and its values as they are stored."""
        self.latents.append(latent)
        self.values.append(values)

    def reconstruct(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Step 5: key (G, d), rotated, and value (G, d_v) of a latent, as f16 holds them."""
        i = position - self.first
        nope = self.decoder @ self.latents[i]
        key = self.rotate(nope.reshape(self.n_kv, -1), position, self.rope_scale)
        return half(key), half(self.values[i])

    def choose(self, q: np.ndarray, q_nope: np.ndarray) -> Choice:
        """Steps 3 and 4: q, q_nope (H, d) of the newest token."""
        o, n_latent = self.options, len(self.latents)
        if o.score == "paper":
            importance = self.summed(q_nope)
        else:
            importance = self.by_block(q, q_nope)
        forced = {p for p in range(self.first, self.first + n_latent) if p < o.sinks}
        free = [p for p in range(self.first, self.first + n_latent) if p not in forced]
        best = sorted(free, key=lambda p: -importance[p - self.first])[: o.critical]
        cut = min((importance[p - self.first] for p in best), default=np.inf)
        if len(best) == len(free):
            cut = -np.inf
        return Choice(importance, np.array(sorted([*forced, *best]), int), cut)

    def summed(self, q_nope: np.ndarray) -> np.ndarray:
        """Step 3, paper: s_j = q~ . latent_j[:r*]."""
        d, r_star = q_nope.shape[1], self.options.score_rank
        projected = np.zeros(r_star)
        for h in range(self.n_head):
            g = h * self.n_kv // self.n_head
            projected += self.decoder[g * d : (g + 1) * d, :r_star].T @ q_nope[h]
        return np.array([projected @ latent[:r_star] for latent in self.latents])

    def by_block(self, q: np.ndarray, q_nope: np.ndarray) -> np.ndarray:
        """Step 3, brope: softmax per head, whose sum has exact scores of exact tokens.

        Of the others the sum has the 33rd to 64th of each block, or the first 32 of a short one.
        """
        d, r_star, t = q_nope.shape[1], self.options.score_rank, self.n - 1
        half, n_latent = len(self.theta), len(self.latents)
        x = self.theta * BLOCK / 2
        damping = np.where(x < np.pi, np.sin(x) / x, 0)
        latents = np.stack(self.latents)[:, :r_star]
        exact = [*range(self.first), *range(self.first + n_latent, self.n)]
        importance = np.zeros(n_latent)
        scores = np.zeros((self.n_head, n_latent))
        for start in range(0, n_latent, BLOCK):
            centre = self.first + start + (BLOCK - 1) / 2
            turned = self.rotate(q_nope, t - centre, 1.0)
            turned[:, :half] *= damping * self.rope_scale**2
            turned[:, half : 2 * half] *= damping * self.rope_scale**2
            for h in range(self.n_head):
                g = h * self.n_kv // self.n_head
                projected = self.decoder[g * d : (g + 1) * d, :r_star].T @ turned[h]
                scores[h, start : start + BLOCK] = latents[start : start + BLOCK] @ projected
        sampled: list[int] = []
        for start in range(0, n_latent, BLOCK):
            first_of_them = start + 32 if start + 64 <= n_latent else start
            sampled += range(first_of_them, min(first_of_them + 32, n_latent))
        scores /= np.sqrt(d)
        for h in range(self.n_head):
            g = h * self.n_kv // self.n_head
            others = np.array([self.k[p][g] @ q[h] for p in exact]) / np.sqrt(d)
            total = np.exp(scores[h, sampled]).sum() * n_latent / len(sampled)
            importance += np.exp(scores[h]) / (total + np.exp(others).sum())
        return importance

    def rows(self, chosen: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Keys and values of the exact rows and of the chosen latents."""
        behind = self.first + len(self.latents)
        exact = [*range(self.first), *range(behind, self.n)]
        pairs = [(self.k[p], self.v[p]) for p in exact]
        pairs += [self.reconstruct(int(p)) for p in chosen]
        return [key for key, _ in pairs], [value for _, value in pairs]

    def attend(self, q: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Step 5: q (H, d) -> (H, d_v)."""
        keys, values = self.rows(chosen)
        return attention(q, np.stack(keys, 1), np.stack(values, 1))

    def prefill(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """A later prefill: q (H, T, d), k, v (G, T, d) -> (H, T, d_v), dense over what is kept.

        Latents are reconstructed.
        """
        past = []
        for p in range(self.n):
            i = p - self.first
            if self.compressed and 0 <= i < len(self.latents):
                past.append(self.reconstruct(p))
            else:
                past.append((self.k[p], self.v[p]))
        out = []
        for t in range(q.shape[1]):
            self.add(k[:, t], v[:, t])
            past.append((self.k[-1], self.v[-1]))
            keys, values = (np.stack([row[i] for row in past], 1) for i in range(2))
            out.append(attention(q[:, t], keys, values))
        return np.stack(out, 1)


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Softmax attention: q (H, d), k (G, n, d), v (G, n, d_v)."""
    n_head, n_kv = len(q), len(k)
    out = []
    for h in range(n_head):
        g = h * n_kv // n_head
        out.append(softmax(k[g] @ q[h] / np.sqrt(q.shape[1])) @ v[g])
    return np.stack(out)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()
