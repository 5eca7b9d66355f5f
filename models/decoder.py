"""The decoder, twice: a readable torch path for chunks of rows, and fused CPU calls for one row.

``forward`` is the reference and the prefill: it walks layer by layer over the whole prompt, so each
layer's weights are dequantised once, into a scratch of one layer's size. ``decode`` runs the numba
kernels of cpu/layer.py on the quantised weights, for a row of one sequence or of each of several.
tests/models/test_decoder.py holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from llvmlite import binding
from torch.nn.functional import linear, silu

from sparsekv_cli.cache import AttnInput, LayerCache, LayerSpec
from sparsekv_cli.cpu import matvec
from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.decode_step import DecodeStep
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.rope import RopeTable
from sparsekv_cli.models.weights import LayerWeights, Linear, Weights

Progress = Callable[[int, int], None]


def cpu_prefill_dtype() -> torch.dtype:
    """bf16 where the CPU multiplies it in hardware (AMX, AVX-512 BF16, Arm BF16), otherwise f32."""
    features = binding.get_host_cpu_features()
    has_bf16 = any(features.get(name) for name in ("avx512bf16", "amx-bf16", "bf16"))
    return torch.bfloat16 if has_bf16 else torch.float32


class Decoder:
    """A model's forward pass; it holds weights and scratch, never a sequence's state."""

    def __init__(
        self,
        hparams: HParams,
        architecture: Architecture,
        weights: Weights,
        *,
        n_threads: int,
        prefill_dtype: torch.dtype,
        chunk: int,
    ) -> None:
        self.hparams = hparams
        self.architecture = architecture
        self.weights = weights
        self.n_threads = n_threads
        self.dtype = prefill_dtype
        self.chunk = chunk
        self.rope = RopeTable(hparams, weights.rope_freqs)
        self._step = self._new_step(1)

    def layer_specs(self) -> list[LayerSpec]:
        h = self.hparams
        return [
            LayerSpec(
                layer=i,
                n_layer=h.n_layer,
                n_head=h.n_head[i],
                n_head_kv=h.n_head_kv[i],
                head_dim=h.head_dim,
                value_dim=h.value_dim,
                n_threads=self.n_threads,
                theta=self.rope.theta,
                rope_scale=self.rope.magnitude,
            )
            for i in range(h.n_layer)
        ]

    # --- a row a sequence, fused ----------------------------------------------------------------

    def decode(self, token: int, pos: int, caches: Sequence[LayerCache]) -> np.ndarray:
        """Logits f32 (n_vocab,) after ``token`` at position ``pos``; adds a row to every cache."""
        step = self._begin([token], [pos])
        for i, (cache, rows) in enumerate(zip(caches, step.inputs, strict=True)):
            step.finish(i, cache.decode(AttnInput(*rows[0], pos)), 1)
        return step.logits(1)[0]

    def decode_batch(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        caches: Sequence[Sequence[LayerCache]],
    ) -> np.ndarray:
        """``decode`` of B sequences, which share every weight that is loaded: logits (B, n_vocab).

        caches: those of all layers for each sequence, all different. A sequence's logits are the
        same bits as by itself.
        """
        step, n_rows = self._begin(tokens, positions), len(tokens)
        for i, layer_caches in enumerate(zip(*caches, strict=True)):
            rows = zip(layer_caches, step.inputs[i][:n_rows], positions, strict=True)
            attended = [cache.decode(AttnInput(*row, pos)) for cache, row, pos in rows]
            step.finish(i, np.concatenate(attended), n_rows)
        return step.logits(n_rows)

    def _begin(self, tokens: Sequence[int], positions: Sequence[int]) -> DecodeStep:
        """A step whose ``inputs`` of layer 0 are those of the tokens."""
        n_rows = len(tokens)
        if n_rows > self._step.capacity:
            self._step = self._new_step(n_rows)
        step = self._step
        self.rope.reserve(max(positions) + 1)
        for b, (token, pos) in enumerate(zip(tokens, positions, strict=True)):
            self._embed_row(token, step.x[b])
            step.cos[b], step.sin[b] = self.rope.cos[pos], self.rope.sin[pos]
        step.project(n_rows)
        return step

    def _new_step(self, n_rows: int) -> DecodeStep:
        interleaved = self.architecture.rope_interleaved
        return DecodeStep(self.hparams, self.weights, interleaved, n_rows, self.n_threads)

    def _embed_row(self, token: int, out: np.ndarray) -> None:
        """The token's embedding, f32 (n_embd,)."""
        table = self.weights.token_embd
        row = table.data[token : token + 1]
        matvec.dequantize_into(
            table.code, row, table.n_columns, matvec.address(out), out.nbytes, matvec.TO_F32
        )

    # --- many rows, layer by layer ----------------------------------------------------------------

    def forward(
        self,
        ids: Sequence[int],
        pos: int,
        caches: Sequence[LayerCache],
        *,
        progress: Progress | None = None,
        all_logits: bool = False,
    ) -> np.ndarray:
        """Dense forward of T rows starting at ``pos``: logits f32 (n_vocab,), or (T, n_vocab).

        Every cache gets the rows in chunks, then ``finish_prefill``.
        """
        n = len(ids)
        self.rope.reserve(pos + n)
        x = self._embed(ids)  # (T, n_embd) f32
        starts = range(0, n, self.chunk)
        n_layer = self.hparams.n_layer
        for i, cache in enumerate(caches):
            weights = self._dequantize_layer(self.weights.layers[i])
            for start in starts:
                stop = min(n, start + self.chunk)
                self._forward_chunk(i, weights, x[start:stop], pos + start, cache)
                if progress is not None:
                    progress((i * n + stop) // n_layer, n)
            cache.finish_prefill()
        rows = x if all_logits else x[-1:]
        logits = self._logits(self._norm(rows, self.weights.output_norm))
        return logits if all_logits else logits[0]

    def _forward_chunk(
        self, i: int, weights: dict[str, torch.Tensor], x: torch.Tensor, pos: int, cache: LayerCache
    ) -> None:
        """One layer over a chunk: x f32 (T, n_embd), updated in place."""
        layer, h = self.weights.layers[i], self.hparams
        n_head, n_kv = h.n_head[i], h.n_head_kv[i]
        normed = self._norm(x, layer.attn_norm).to(self.dtype)
        q, k, v = linear(normed, weights["qkv"]).split(
            [n_head * h.head_dim, n_kv * h.head_dim, n_kv * h.value_dim], dim=1
        )
        q_nope = self._heads(q, layer.q, layer.q_norm, n_head)
        k_nope = self._heads(k, layer.k, layer.k_norm, n_kv)
        q, k = self._rotate(q_nope, pos), self._rotate(k_nope, pos)
        v = _add_bias(v, layer.v).reshape(-1, n_kv, h.value_dim).transpose(0, 1)
        q, k, v, q_nope, k_nope = (t.to(self.dtype) for t in (q, k, v, q_nope, k_nope))
        inputs = AttnInput(q, k, v, q_nope, k_nope, pos)
        attended = cache.prefill(inputs).transpose(0, 1).reshape(len(x), n_head * h.value_dim)
        x += linear(attended, weights["o"])
        normed = self._norm(x, layer.ffn_norm).to(self.dtype)
        gate, up = linear(normed, weights["gate_up"]).chunk(2, dim=1)
        x += linear(silu(gate).mul_(up), weights["down"])

    def _norm(self, x: torch.Tensor, weight: np.ndarray) -> torch.Tensor:
        return torch.nn.functional.rms_norm(
            x, (x.shape[-1],), torch.from_numpy(weight), self.hparams.norm_eps
        )

    def _heads(
        self, rows: torch.Tensor, projection: Linear, norm: np.ndarray | None, n_head: int
    ) -> torch.Tensor:
        """(T, heads d) -> f32 (heads, T, d) with bias and norm, in half-split order."""
        n_rot, d = self.hparams.n_rot, self.hparams.head_dim
        heads = _add_bias(rows.float(), projection).reshape(-1, n_head, d)
        if norm is not None:
            heads = self._norm(heads, norm)
        if self.architecture.rope_interleaved:
            pairs = heads[..., :n_rot].unflatten(-1, (n_rot // 2, 2)).transpose(-1, -2).flatten(-2)
            heads = torch.cat([pairs, heads[..., n_rot:]], dim=-1)
        return heads.transpose(0, 1)

    def _rotate(self, heads: torch.Tensor, pos: int) -> torch.Tensor:
        """f32 (heads, T, d) half-split -> rotated."""
        half = self.hparams.n_rot // 2
        rows = slice(pos, pos + heads.shape[1])
        cos, sin = (torch.from_numpy(t[rows]) for t in (self.rope.cos, self.rope.sin))  # (T, half)
        a, b = heads[..., :half], heads[..., half : 2 * half]
        return torch.cat([a * cos - b * sin, a * sin + b * cos, heads[..., 2 * half :]], dim=-1)

    def _embed(self, ids: Sequence[int]) -> torch.Tensor:
        embedding = self.weights.token_embd
        rows = np.ascontiguousarray(embedding.data[np.asarray(ids)])
        return torch.from_numpy(matvec.dequantize(embedding.code, rows, embedding.n_columns))

    def _logits(self, normed: torch.Tensor) -> np.ndarray:
        """f32 (T, n_embd) -> f32 (T, n_vocab); few rows use the quantised weights as they lie."""
        head = self.weights.output
        if len(normed) <= 4:
            rows = normed.contiguous().numpy()
            return matvec.matvec(head.code, head.data, head.n_columns, rows, self.n_threads)
        step = 8192  # vocabulary rows dequantised at a time
        out = np.empty((len(normed), head.n_rows), np.float32)
        for start in range(0, head.n_rows, step):
            part = head.data[start : start + step]
            weight = torch.from_numpy(matvec.dequantize(head.code, part, head.n_columns))
            out[:, start : start + step] = linear(normed, weight).numpy()
        return out

    def _dequantize_layer(self, layer: LayerWeights) -> dict[str, torch.Tensor]:
        """One layer's matrices in the compute type, those that share an input stacked."""
        stacks = {
            "qkv": (layer.q, layer.k, layer.v),
            "o": (layer.o,),
            "gate_up": (layer.gate, layer.up),
            "down": (layer.down,),
        }
        target = matvec.TO_BF16 if self.dtype == torch.bfloat16 else matvec.TO_F32
        out = {}
        for name, parts in stacks.items():
            n_columns = parts[0].n_columns
            stack = torch.empty(sum(p.n_rows for p in parts), n_columns, dtype=self.dtype)
            row_bytes = n_columns * stack.element_size()
            at = stack.data_ptr()
            for part in parts:
                matvec.dequantize_into(
                    part.code, part.data, n_columns, at, row_bytes, target, self.n_threads
                )
                at += part.n_rows * row_bytes
            out[name] = stack
        return out


def _add_bias(rows: torch.Tensor, projection: Linear) -> torch.Tensor:
    if projection.bias is None:
        return rows
    return rows + torch.from_numpy(projection.bias)
