"""Everything that a step of FreeKV reads and writes, declared once. H heads, G kv heads."""

import numpy as np

from sparsekv_cli.cpu.attention.decode import BLOCK, TILE
from sparsekv_cli.cpu.attention.tile import PAD
from sparsekv_cli.cpu.freekv.pages import HostPages
from sparsekv_cli.cpu.vector.declared import Size, f32, i32, i64
from sparsekv_cli.cpu.vector.fields import KernelFields, Scratch


class FreeKVState(KernelFields):
    """One layer's cache and its next step."""

    n_head: Size
    n_kv: Size
    d: Size  # padded, as d_v
    d_v: Size
    k_words: Size  # of a row, uint64
    v_words: Size
    page: Size  # rows of a page
    n_pool_k: Size  # words of a kv head in the pool
    n_pool_v: Size
    n_resident: Size  # room for pages, groups and slots
    n_page: Size
    n_group: Size
    n_slot: Size
    n_listed: Size  # rows that are listed; 0: none are

    n_threads: int
    thread: int  # the address of ``run_thread`` (freekv/step.py)
    n_sink: int  # pages
    n_ring: int  # pages
    meanstd: bool  # whether summaries are mean + std and mean - std
    tau: float  # cosine of successive queries below which a kv head chooses again
    scale: np.float32
    softcap: np.float32  # of the scores; 0 for none
    n: int  # rows of the step, the new one included
    window: int  # the first page of the step's window
    offloaded: int  # pages from this one to the window are summarised before the step
    n_best: int  # most pages that are chosen
    current: bool  # whether all kv heads choose with the step's own query

    pages: HostPages
    sinks: np.ndarray = f32("n_head", optional=True)  # scores without values, in the attention
    q: np.ndarray = f32("n_head", 1, "d")
    previous: np.ndarray = f32("n_head", "d")  # the query of the previous step
    k: np.ndarray = f32("n_kv", 1, "d")  # of the current token, as v
    v: np.ndarray = f32("n_kv", 1, "d_v")
    out: np.ndarray = f32("n_head", "d_v")
    attended: np.ndarray = i32("n_kv", "n_listed", optional=True)  # rows, ascending
    n_attended: np.ndarray = i64("n_kv")


class FreeKVBuffers(Scratch, of=FreeKVState):
    """Buffers of one thread."""

    scores: np.ndarray = f32(TILE, BLOCK + PAD)
    rows: np.ndarray = i32("(n_sink + n_best) * page + n - window * page")
