"""Consecutive layers of a decode step in one call, where their attention is compiled code.

Streaming a layer's weights drives code and objects of the interpreter out of the CPU's caches, so
what Python does between two layers takes 20 us where it takes 5 in a loop of its own. A cache that
can (LayerCache.begin) gives the address of a function instead, and of int64 words that say all the
function needs beside the layer's q, k and v: 2 to 5% off a token.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from sparsekv_cli.cpu.attention.decode import append_row, attend_dense
from sparsekv_cli.cpu.jit.pointers import (
    address,
    call_through,
    double_pointer,
    function_address,
    integer_pointer,
)
from sparsekv_cli.cpu.layer.decode import float_rows, next_layer, padded

FUNCTION, WORDS = 0, 1  # columns of a table of steps, int64 (layers, 2)
N_LAYOUT = 8  # words of a KV store's layout (attention/rows.py)


@intrinsic
def _call_step(typingctx, function, words, q, k, v, out):
    """Calls a step through its address."""
    return call_through(5)


@njit(cache=True, nogil=True)
def run_layers(layers, steps, first, last, n_threads):
    """Layers first..last of a step of one row, and ``inputs`` of layer ``last`` if there is one.

    layers: records of layer/decode.py; steps int64 (>= last, 2), of each layer the function,
    void(words, q, k, v, out) of addresses, and its words.
    """
    for i in range(first, last):
        layer = layers[i]
        _call_step(
            steps[i, FUNCTION], steps[i, WORDS], layer.q, layer.k, layer.v, layer.attended
        )  # fmt: skip
        attended = float_rows(layer.attended, layer.n_head, padded(layer.value_dim))
        next_layer(layers, i, attended, 1, n_threads)


class CompiledStep:
    """A function for ``run_layers`` and its words, int64 (n_words,), as ``LayerCache.begin`` gives
    them: ``step`` is the pair of addresses.
    """

    def __init__(self, function: Any, n_words: int) -> None:
        self._function = function
        self.words = np.zeros(n_words, np.int64)

    @cached_property
    def step(self) -> tuple[int, int]:  # not before it is wanted: it is compiled, or loaded
        return function_address(self._function, (types.int64,) * 5), address(self.words)

    def run(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray) -> None:
        """The step by itself: f32 q (H, 1, d), k (G, 1, d), v (G, 1, d_v), out (H, d_v)."""
        arrays = [np.ascontiguousarray(x, np.float32) for x in (q, k, v)]
        self._function(address(self.words), *(address(x) for x in arrays), address(out))


# --- dense attention ----------------------------------------------------------------------------

# Words behind the layout.
N, N_HEAD, N_HEAD_KV, K_WIDTH, V_WIDTH, SCALE, N_THREADS = range(N_LAYOUT, N_LAYOUT + 7)
N_DENSE = N_LAYOUT + 7


@njit(cache=True, nogil=True)
def dense_step(words, q, k, v, out):
    """Stores the row as row N - 1 and attends to all N. q f32 (H, d), k (G, d), v (G, d_v)."""
    word = carray(integer_pointer(words), N_DENSE)
    layout, n = word[:N_LAYOUT], word[N]
    k_width, v_width = word[K_WIDTH], word[V_WIDTH]
    append_row(
        float_rows(k, word[N_HEAD_KV], k_width), float_rows(v, word[N_HEAD_KV], v_width), layout,
        n - 1,
    )  # fmt: skip
    scale = np.float32(carray(double_pointer(words), N_DENSE)[SCALE])
    attend_dense(
        float_rows(q, word[N_HEAD], k_width), layout, n, word[N_HEAD_KV], scale,
        float_rows(out, word[N_HEAD], v_width), word[N_THREADS],
    )  # fmt: skip


class DenseStep(CompiledStep):
    """``dense_step`` over a KV store, for a LayerSpec."""

    def __init__(self, store: Any, spec: Any) -> None:
        super().__init__(dense_step, N_DENSE)
        self.words[N_HEAD : V_WIDTH + 1] = (
            spec.n_head, spec.n_head_kv, store.k_type.width, store.v_type.width
        )  # fmt: skip
        self.words.view(np.float64)[SCALE] = spec.scale
        self.words[N_THREADS] = spec.n_threads

    def at(self, layout: np.ndarray, n: int) -> tuple[int, int]:
        """``step`` to n rows of a store of that layout."""
        self.words[:N_LAYOUT] = layout
        self.words[N] = n
        return self.step
