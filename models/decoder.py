"""The decoder, twice: a readable torch path for chunks of rows, and fused CPU calls for one row.

``forward`` is the reference and the prefill: it walks layer by layer over thousands of rows, so a
layer's weights are dequantised seldom, into a scratch of one layer's size. ``decode`` runs the
numba kernels of cpu/layer.py on the quantised weights, for a row of one sequence or of several.
tests/models/test_decoder.py holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from llvmlite import binding
from torch.nn.functional import linear

from sparsekv_cli.cache import AttnInput, LayerCache, LayerSpec
from sparsekv_cli.cpu import matvec
from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.decode_step import DecodeStep
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.prefill_rows import FusedRows, Rows, TorchRows, rms_norm
from sparsekv_cli.models.rope import RopeTable
from sparsekv_cli.models.weights import LayerWeights, Weights

Progress = Callable[[int, int], None]
ROWS_AT_ONCE = 4096  # of a prompt, through all layers; dequantising takes 1 to 2 % of their time


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
        fused_rows = prefill_dtype == torch.bfloat16
        interleaved = architecture.rope_interleaved
        self._rows: Rows = (
            FusedRows(hparams, self.rope, interleaved, n_threads)
            if fused_rows
            else TorchRows(hparams, self.rope, interleaved, prefill_dtype)
        )
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

        Every cache gets the rows in chunks, then ``finish_prefill``. A long prompt takes the layers
        in parts, so that its residual stream is never there as a whole; but not if a cache would
        wait with many rows for its end, or if all of the stream is wanted.
        """
        n, n_layer = len(ids), self.hparams.n_layer
        self.rope.reserve(pos + n)
        size = n
        if not all_logits and all(cache.keeps_rows for cache in caches):
            size = max(1, ROWS_AT_ONCE // self.chunk) * self.chunk
        for first in range(0, n, size):
            x = self._embed(ids[first : first + size])  # (T, n_embd) f32
            for i, cache in enumerate(caches):
                before = first * n_layer + i * len(x)  # rows times layers
                for done in self._forward_layer(i, x, pos + first, cache):
                    if progress is not None:
                        progress((before + done) // n_layer, n)
                if first + size >= n:
                    cache.finish_prefill()
            rows = x if all_logits else x[-1:].clone()
            del x  # before the next part comes
        logits = self._logits(rms_norm(rows, self.weights.output_norm, self.hparams.norm_eps))
        return logits if all_logits else logits[0]

    def _forward_layer(self, i: int, x: torch.Tensor, pos: int, cache: LayerCache) -> Iterator[int]:
        """One layer over x f32 (T, n_embd), updated in place; yields how many rows are done."""
        weights = self._dequantize_layer(self.weights.layers[i])
        for start in range(0, len(x), self.chunk):
            stop = min(len(x), start + self.chunk)
            self._forward_chunk(i, weights, x[start:stop], pos + start, cache)
            yield stop

    def _forward_chunk(
        self, i: int, weights: dict[str, torch.Tensor], x: torch.Tensor, pos: int, cache: LayerCache
    ) -> None:
        """One layer over a chunk: x f32 (T, n_embd), updated in place."""
        layer, h, rows = self.weights.layers[i], self.hparams, self._rows
        raw = linear(rows.norm(x, layer.attn_norm), weights["qkv"])
        attended = cache.prefill(rows.heads(raw, layer, h.n_head[i], h.n_head_kv[i], pos))
        attended = attended.transpose(0, 1).reshape(len(x), h.n_head[i] * h.value_dim)
        rows.add(x, linear(attended, weights["o"]))
        gate_up = linear(rows.norm(x, layer.ffn_norm), weights["gate_up"])
        rows.add(x, linear(rows.gate(gate_up), weights["down"]))

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
