"""Repacks weights for decode into the interleaved layout of cpu/weights/interleaved.py."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sparsekv_cli.cpu.jit.pointers import LINE, on_lines
from sparsekv_cli.cpu.weights.interleaved import can_repack, repack
from sparsekv_cli.models.weights import Linear, Weights
from sparsekv_cli.system.memory import physical_memory

OnLoad = Callable[[int, int], None]  # called with loaded bytes and all bytes
SHARE = 4  # ``auto`` repacks weights of at most 1 / SHARE of the machine's memory


def wants_repacking(weights: Weights, choice: str) -> bool:
    """Returns whether to repack. choice: ``on``, ``off`` or ``auto``.

    ``auto`` repacks if the copy is small compared with the machine's memory. The file's pages may
    stay in the system's page cache.
    """
    if choice != "auto":
        return choice == "on"
    memory = physical_memory()
    return memory is None or weights.n_bytes_held <= memory // SHARE


def repack_weights(weights: Weights, on_load: OnLoad | None = None) -> Weights:
    """Returns ``weights`` with all supported matrices repacked, except token_embd.

    on_load: called with the progress.

    The copies lie in one block in the order of their use. The copied pages of the memory map are
    released, so the process needs no more memory.
    """
    linears = [linear for layer in weights.layers for linear in layer.linears()]
    left = [w for w in (*linears, weights.output) if not w.repacked]
    chosen = [w for w in left if can_repack(w.code, w.n_rows // w.n_matrices)]
    sizes = [-(-w.data.nbytes // LINE) * LINE for w in chosen]
    room, at = on_lines(sum(sizes), np.uint8), 0
    copies: dict[int, Linear] = {}
    for linear, size in zip(chosen, sizes, strict=True):
        data = room[at : at + linear.data.nbytes].reshape(linear.data.shape)
        repack(linear.code, linear.data, data)
        weights.file.release(linear.data)
        copies[id(linear)] = replace(linear, data=data, repacked=True)
        at += size
        if on_load is not None:
            on_load(at, len(room))

    def repacked(linear: Linear) -> Linear:
        return copies.get(id(linear), linear)

    return replace(
        weights,
        layers=tuple(layer.mapped(repacked) for layer in weights.layers),
        output=repacked(weights.output),
    )
