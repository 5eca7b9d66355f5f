"""Everything that attention over FAEDKV's blocks reads and writes, declared once.

H heads, G kv heads.
"""

import numpy as np

from sparsekv_cli.cpu.attention.decode import BLOCK as ATTENDED_AT_ONCE
from sparsekv_cli.cpu.attention.decode import TILE
from sparsekv_cli.cpu.attention.tile import PAD
from sparsekv_cli.cpu.vector.declared import Size, f32, words
from sparsekv_cli.cpu.vector.fields import KernelFields, Scratch

N_PARTS = "1 + (n_block + at_once - 1) // at_once"  # part 0: exact rows; others: at_once blocks


class BlocksState(KernelFields):
    """One layer's exact rows and blocks, and its next step."""

    n_head: Size
    d: Size
    d_v: Size
    n_rows: Size  # coefficient rows of a block
    quarter: Size  # a fourth of ``length``, or 0 if blocks keep their mean only
    capacity: Size  # blocks

    n_kv: int
    n_threads: int
    thread: int  # the address of ``run_thread`` (faedkv/blocks.py)
    n_exact: int
    n_block: int  # whole blocks
    length: int  # tokens of a block
    at_once: int  # blocks of a group
    scale: np.float32
    softcap: np.float32  # of the scores; 0 for none
    exact: np.ndarray = words(8)  # layout of the exact rows, see attention/rows.py
    layout: np.ndarray = words(8)  # of the coefficient rows
    n_waves: np.ndarray = words(4)  # of each part of ``centred_waves``

    waves: np.ndarray = f32("n_rows", "quarter")
    inverse: np.ndarray = f32(2, "capacity")  # 1 / gain of K and of V
    sinks: np.ndarray = f32("n_head", optional=True)  # scores without values
    q: np.ndarray = f32("n_head", "d")
    out: np.ndarray = f32("n_head", "d_v")


class BlocksWork(Scratch, of=BlocksState):
    """Arrays that the tasks of a step share."""

    queries: np.ndarray = f32("n_head", "d")  # scaled
    peak: np.ndarray = f32(N_PARTS, "n_head")  # the softmax states
    mass: np.ndarray = f32(N_PARTS, "n_head")
    acc: np.ndarray = f32(N_PARTS, "n_head", "d_v")


class BlocksBuffers(Scratch, of=BlocksState):
    """Buffers of one thread."""

    scores: np.ndarray = f32(TILE, ATTENDED_AT_ONCE + PAD)
    waves: np.ndarray = f32(TILE, f"at_once * n_rows + {PAD}")  # z of ``_weigh_blocks``
    tokens: np.ndarray = f32(f"at_once * length + {PAD}")  # x of ``_weigh_blocks``
