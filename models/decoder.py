"""The decoder, twice: a readable torch path for chunks of rows, and fused CPU calls for one row.

``forward`` (forward.py) is the reference and the prefill; each layer's weights are dequantised for
it, into a scratch of one layer's size. ``decode`` runs the numba kernels of cpu/layer.py on the
quantised weights, for a row of one sequence or of each of several. tests/models/test_decoder.py
holds the two together.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import numpy as np
import torch
from llvmlite import binding
from torch.nn.functional import linear

from sparsekv_cli.cache import AttnInput, LayerCache
from sparsekv_cli.cpu import matvec
from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.decode_step import DecodeStep
from sparsekv_cli.models.forward import Forward
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.prefill_rows import FusedRows, Rows, TorchRows
from sparsekv_cli.models.repacked import repack_weights, wants_repacking
from sparsekv_cli.models.rope import RopeTable
from sparsekv_cli.models.weights import Weights


def cpu_prefill_dtype() -> torch.dtype:
    """bf16 where the CPU multiplies it in hardware (AMX, AVX-512 BF16, Arm BF16), otherwise f32."""
    features = binding.get_host_cpu_features()
    has_bf16 = any(features.get(name) for name in ("avx512bf16", "amx-bf16", "bf16"))
    return torch.bfloat16 if has_bf16 else torch.float32


def give_back_memory() -> None:
    """Hands what was freed back to the system, which glibc keeps for later in part."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


class Decoder(Forward):
    """The CPU's decoder."""

    def __init__(
        self,
        hparams: HParams,
        architecture: Architecture,
        weights: Weights,
        *,
        n_threads: int,
        prefill_dtype: torch.dtype,
        chunk: int,
        repack: str = "auto",
    ) -> None:
        """repack: ``auto``, ``on`` or ``off``, of the weights that ``decode`` reads."""
        self.hparams = hparams
        self.architecture = architecture
        self.weights = weights
        self.n_threads = n_threads
        self.dtype = prefill_dtype
        self.chunk = chunk
        self.rope = RopeTable(hparams, weights.rope_freqs)
        fused_rows = prefill_dtype == torch.bfloat16
        interleaved = architecture.rope_interleaved
        self.rows: Rows = (
            FusedRows(hparams, self.rope, interleaved, n_threads)
            if fused_rows
            else TorchRows(hparams, self.rope, interleaved, prefill_dtype)
        )
        self.layers, self.output_norm = weights.layers, weights.output_norm
        repacks = wants_repacking(weights, repack)
        self._decode_weights = repack_weights(weights) if repacks else weights
        self._step = self._new_step(1)
        self._scratch: dict[str, torch.Tensor] = {}  # a layer's matrices during ``forward``

    # --- a row a sequence, fused ----------------------------------------------------------------

    def decode(self, token: int, pos: int, caches: Sequence[LayerCache]) -> np.ndarray:
        """Logits f32 (n_vocab,) after ``token`` at position ``pos``; adds a row to every cache."""
        step = self._begin([token], [pos])
        i = 0
        while i < len(caches):
            last = step.begin(i, caches)
            if last > i:
                step.run(i, last)
                for cache in caches[i:last]:
                    cache.end()
            else:
                last = i + 1
                step.finish(i, caches[i].decode(AttnInput(*step.inputs[i][0], pos)), 1)
            i = last
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
            self.embed_row(token, step.x[b])
            step.cos[b], step.sin[b] = self.rope.cos[pos], self.rope.sin[pos]
        step.project(n_rows)
        return step

    def _new_step(self, n_rows: int) -> DecodeStep:
        interleaved = self.architecture.rope_interleaved
        return DecodeStep(self.hparams, self._decode_weights, interleaved, n_rows, self.n_threads)

    # --- many rows, layer by layer ----------------------------------------------------------------

    def output(self, normed: torch.Tensor) -> np.ndarray:
        """Few rows use the quantised weights as they lie."""
        self._scratch = {}  # the layers are done, and the peak of a long prompt's memory is now
        give_back_memory()
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

    def matrices(self, i: int) -> dict[str, torch.Tensor]:
        layer = self.weights.layers[i]
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
            stack = self._room(name, sum(p.n_rows for p in parts), n_columns)
            row_bytes = n_columns * stack.element_size()
            at = stack.data_ptr()
            for part in parts:
                matvec.dequantize_into(
                    part.code, part.data, n_columns, at, row_bytes, target, self.n_threads
                )
                at += part.n_rows * row_bytes
            out[name] = stack
        decoded = self._decode_weights.layers[i]
        for in_file, copy in zip(layer.linears(), decoded.linears(), strict=True):
            if copy.repacked:  # which is what decode reads
                self.weights.file.release(in_file.data)
        return out

    def _room(self, name: str, n_rows: int, n_columns: int) -> torch.Tensor:
        """An uninitialised matrix in the scratch, which all layers use: fresh memory costs more to
        get from the system than dequantising takes.
        """
        size = n_rows * n_columns
        if name not in self._scratch or self._scratch[name].numel() < size:
            self._scratch[name] = torch.empty(size, dtype=self.dtype)
        return self._scratch[name][:size].view(n_rows, n_columns)
