"""Everything that a step of FASA reads and writes, declared once. H heads, G kv heads."""

import numpy as np

from sparsekv_cli.cpu.fasa.chunks import BLOCK
from sparsekv_cli.cpu.vector.declared import Size, f16, f32, i32
from sparsekv_cli.cpu.vector.fields import KernelFields, Scratch


class FASAState(KernelFields):
    """One layer's cache and its next step."""

    n_head: Size
    n_kv: Size
    width: Size  # elements of a query and of a new key, padded
    d_v: Size  # elements of a value, padded
    d: Size  # dims of a key
    n_dom: Size  # dominant dims
    d_rest: Size  # d - n_dom, the dims that are not dominant, padded to a multiple of 16
    n_block: Size
    capacity: Size
    n_fac: Size  # rows that a head attends to

    n_threads: int
    thread: int  # the address of ``run_thread`` (fasa/step.py)
    n: int  # rows, with the current token's
    n_sinks: int  # first rows, to which every head attends
    n_recent: int  # last rows, to which every head attends; with the sinks fewer than n
    scale: np.float32
    softcap: np.float32  # of the scores; 0 for none

    dims: np.ndarray = i32("n_kv", "d")  # a permutation of the dims, the dominant ones first
    dom: np.ndarray = f16("n_kv", "n_block", "n_dom", BLOCK)  # see fasa/split.py
    rest: np.ndarray = f16("n_kv", "capacity", "d_rest")
    values: np.ndarray = f16("n_kv", "capacity", "d_v")
    sinks: np.ndarray = f32("n_head", optional=True)  # scores without values
    q: np.ndarray = f32("n_head", 1, "width")
    k: np.ndarray = f32("n_kv", 1, "width")  # the current token's key
    # the current token's value; missing if the values are the rows of ``rest``
    v: np.ndarray = f32("n_kv", 1, "d_v", optional=True)
    rows: np.ndarray = i32("n_head", "n_fac")  # the step sets them to those attended to, ascending
    out: np.ndarray = f32("n_head", "d_v")


class FASAWork(Scratch, of=FASAState):
    """Arrays that the tasks of a step share."""

    q_dom: np.ndarray = f32("n_head", "n_dom")
    q_rest: np.ndarray = f32("n_head", "d_rest")
    best: np.ndarray = f32("n_head", f"(n + {BLOCK - 1}) // {BLOCK}")  # see ``score_pieces``


class FASABuffers(Scratch, of=FASAState):
    """Buffers of one thread."""

    scores: np.ndarray = f32("n_fac")
