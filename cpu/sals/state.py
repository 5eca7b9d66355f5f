"""Everything that a step of SALS reads and writes, declared once.

H heads, G kv heads. d', d_v': head sizes of K and V, padded to 16.
"""

import numpy as np

from sparsekv_cli.cpu.attention.decode import BLOCK as ATTENDED_AT_ONCE
from sparsekv_cli.cpu.attention.decode import TILE
from sparsekv_cli.cpu.attention.tile import PAD
from sparsekv_cli.cpu.jit.value import LANES
from sparsekv_cli.cpu.sals.latent import LatentBasis, Latents
from sparsekv_cli.cpu.sals.queries import SPAN, BlockBasis
from sparsekv_cli.cpu.sals.scores import CHUNK
from sparsekv_cli.cpu.vector.declared import Size, f32, i32, words
from sparsekv_cli.cpu.vector.fields import KernelFields, Scratch

N_SPANS = f"(n_latent + {SPAN - 1}) // {SPAN}"
N_PIECES = f"(n_chosen + {ATTENDED_AT_ONCE - 1}) // {ATTENDED_AT_ONCE} + 1"
N_SCORED_HEADS = "1 + by_head * (n_head - 1)"


class SALSState(KernelFields):
    """One layer's cache and its next step."""

    n_head: Size
    n_kv: Size
    width: Size  # d'
    width_v: Size  # d_v'
    n_key_dims: Size  # G d'
    encode_columns: Size
    rank: Size
    decode_columns: Size
    n_turns: Size
    score_rank: Size
    block_words: Size
    n_block_dims: Size
    n_block_pairs: Size
    n_exact: Size
    n_chosen: Size
    n_kept: Size

    n_threads: int
    thread: int  # the address of ``run_thread`` (sals/step.py)
    by_head: bool  # whether each head has its own softmax (brope), or all share the paper's sum
    scale: np.float32
    softcap: np.float32  # of the scores; 0 for none
    exact: np.ndarray = words(8)  # layout (attention/rows.py) of the sinks and the last rows
    rows: np.ndarray = words(8)  # layout of the reconstructed rows
    latents: Latents
    leaving: int  # the row that leaves the window and becomes the last latent, or -1
    n_latent: int
    n_front: int  # first latents that are always chosen
    n_back: int  # last latents that are always chosen
    n_new: np.ndarray = words(1)  # latents that the step has reconstructed

    basis: LatentBasis
    blocks: BlockBasis
    # Each head's sink: a score without a value. It takes part in the softmax of the attention, and
    # in the softmax by which the latents are chosen.
    sinks: np.ndarray = f32("n_head", optional=True)
    q: np.ndarray = f32("n_head", 1, "width")
    q_nope: np.ndarray = f32("n_head", 1, "width")  # before the rotation
    exact_rows: np.ndarray = i32("n_exact")  # the exact rows that take part
    chosen: np.ndarray = i32("n_chosen")  # the step sets it to the chosen latents, ascending
    kept: np.ndarray = i32("n_kept")  # the latents that ``rows`` holds, or -1; n_kept >= n_chosen
    out: np.ndarray = f32("n_head", "width_v")


class SALSWork(Scratch, of=SALSState):
    """Arrays that the tasks of a step share."""

    queries: np.ndarray = f32("n_head", "width")  # scaled
    # The softmax states of the heads: of the exact rows, then of each piece of the chosen rows.
    peak: np.ndarray = f32(N_PIECES, "n_head")
    mass: np.ndarray = f32(N_PIECES, "n_head")
    acc: np.ndarray = f32(N_PIECES, "n_head", "width_v")
    # Queries of the spans' blocks as bytes, see ``block_queries``.
    words: np.ndarray = i32(N_SPANS, N_SCORED_HEADS, "(score_rank + 3) // 4 + 1", LANES)
    factors: np.ndarray = f32(N_SPANS, N_SCORED_HEADS, LANES)
    units: np.ndarray = f32("n_head")  # ``query_units``
    # The spans' parts of the heads' softmax sums, then the exact rows'. None without by_head.
    peaks: np.ndarray = f32(f"by_head * ({N_SPANS} + 1)", "n_head")
    masses: np.ndarray = f32(f"by_head * ({N_SPANS} + 1)", "n_head")
    bias: np.ndarray = f32("by_head * n_head")  # ``head_biases``
    keys: np.ndarray = i32("n_latent")  # sort latents by their importance
    slots: np.ndarray = i32("n_chosen")  # the row of each chosen latent
    missing: np.ndarray = i32("n_chosen")  # chosen latents that must be reconstructed
    missing_slots: np.ndarray = i32("n_chosen")


class SALSBuffers(Scratch, of=SALSState):
    """Buffers of one thread."""

    scores: np.ndarray = f32(TILE, ATTENDED_AT_ONCE + PAD)
    weights: np.ndarray = f32(CHUNK)
