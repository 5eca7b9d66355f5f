"""A mixture of experts: a router chooses a few gated feed-forward layers for each token.

``route`` is the choice. ``prefill_experts`` groups a chunk's rows by expert; ``DecodeExperts``
takes the rows of a decode step one by one, so that a sequence's bits do not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparsekv_cli.cpu.jit.floats import as_f32
from sparsekv_cli.cpu.jit.pointers import address, on_lines
from sparsekv_cli.cpu.layer import decode as fused
from sparsekv_cli.cpu.weights import dot
from sparsekv_cli.cpu.weights.integer import BLOCK, quantized_stride
from sparsekv_cli.models.hparams import ExpertParams
from sparsekv_cli.models.weights import ExpertWeights, GatedWeights, Linear

# Products of rows with stacked matrices, by a name that says whose memory the result may share.
StackProduct = Callable[[str, Sequence[Linear], Any], Any]
LEAST_SUM = np.float32(2**-14)  # the smallest normal f16, as in llama.cpp's build_moe_ffn


def route(logits: np.ndarray, params: ExpertParams) -> tuple[np.ndarray, np.ndarray]:
    """The experts of each token, best first (T, used), and their weights f32 (T, used).

    logits f32 (T, experts). Of experts that are alike the first is chosen.
    """
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    shares = shifted / shifted.sum(1, keepdims=True)
    chosen = np.argsort(-shares, axis=1, kind="stable")[:, : params.n_expert_used]
    weights = np.take_along_axis(shares, chosen, axis=1)
    if params.normalised:
        weights = weights / np.maximum(weights.sum(1, keepdims=True), LEAST_SUM)
    return chosen, weights


def route_rows(
    ffn: ExpertWeights, normed: np.ndarray, n_threads: int
) -> tuple[np.ndarray, np.ndarray]:
    """``route`` of rows f32 (T, n_embd)."""
    router = ffn.router
    logits = dot.matvec(router.code, router.data, router.n_columns, normed, n_threads)
    return route(logits, ffn.params)


def shared_weight(ffn: ExpertWeights, normed: np.ndarray) -> np.ndarray:
    """What weighs the shared expert: f32 (T, 1), for rows f32 (T, n_embd)."""
    if ffn.shared_gate is None:
        return np.ones((len(normed), 1), np.float32)
    products = (normed * ffn.shared_gate).sum(1, keepdims=True, dtype=np.float32)
    return np.float32(1) / (np.float32(1) + np.exp(-products))


def prefill_experts(
    ffn: ExpertWeights,
    normed: np.ndarray,
    rows: Any,
    multiply: StackProduct,
    gate: Callable[[Any], Any],
    n_threads: int,
) -> np.ndarray:
    """The output f32 (T, n_embd) of a chunk.

    normed f32 (T, n_embd) is routed; rows, the same in the type of the products, are multiplied.
    gate: silu(gate) * up, as Rows.gate.
    """
    chosen, weights = route_rows(ffn, normed, n_threads)
    out = np.zeros_like(normed)

    def run(name: str, expert: GatedWeights, some: Any) -> np.ndarray:
        hidden = gate(multiply(f"{name}gate_up", (expert.gate, expert.up), some))
        return as_f32(multiply(f"{name}down", (expert.down,), hidden))

    for e in np.unique(chosen):
        at, place = np.nonzero(chosen == e)
        out[at] += weights[at, place, None] * run("expert_", ffn.expert(int(e)), rows[at])
    if ffn.shared is not None:
        out += shared_weight(ffn, normed) * run("shared_", ffn.shared, rows)
    return out


class DecodeExperts:
    """The experts of a decode step's rows, over the weights as decode reads them."""

    def __init__(self, ffn: ExpertWeights, n_planes: int, n_threads: int) -> None:
        params = ffn.params
        self._ffn, self._n_threads = ffn, n_threads
        self._experts = fused.matrix_table(ffn.experts.linears(), n_planes)
        self._experts[:, fused.ROWS] //= params.n_expert
        self._shared = None
        if ffn.shared is not None:
            self._shared = fused.matrix_table(ffn.shared.linears(), n_planes)
        widest = max(params.n_ff_expert, params.n_ff_shared)
        n_embd = ffn.router.n_columns
        self._hidden = on_lines(2 * widest + fused.LANES, np.float32)
        self._out = on_lines(n_embd, np.float32)
        stride = quantized_stride(-(-max(widest, n_embd) // BLOCK) * BLOCK)
        self._quantized = on_lines(stride, np.uint8)

    def run(self, normed: np.ndarray) -> np.ndarray:
        """Rows f32 (B, n_embd) through their experts: f32 (B, n_embd), a new array."""
        ffn = self._ffn
        out = np.zeros_like(normed)
        for b in range(len(normed)):
            row = normed[b : b + 1]
            chosen, weights = route_rows(ffn, row, self._n_threads)
            for e, weight in zip(chosen[0], weights[0], strict=True):
                table = self._experts.copy()
                table[:, fused.WEIGHTS] += e * table[:, fused.ROWS] * table[:, fused.ROW_BYTES]
                out[b] += weight * self._run_one(table, row)
            if self._shared is not None:
                out[b] += shared_weight(ffn, row)[0] * self._run_one(self._shared, row)
        return out

    def _run_one(self, table: np.ndarray, row: np.ndarray) -> np.ndarray:
        """A row through one expert; valid until the next call."""
        fused.run_gated(
            table, address(row), address(self._hidden), address(self._quantized),
            address(self._out), self._n_threads,
        )  # fmt: skip
        return self._out
