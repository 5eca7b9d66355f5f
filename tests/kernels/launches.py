"""Launches of every kernel to compile, a function a module of kernels/; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from attention_launches import (
    CPU,
    Launches,
    attention_decode,
    attention_merge,
    attention_prefill,
    attention_recent,
    attention_rows,
    attention_scores,
    attention_select,
    quantised,
)
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from sparsekv_cli.kernels.attention import select
from sparsekv_cli.kernels.attention.rows import NewRow
from sparsekv_cli.kernels.clock import take_time
from sparsekv_cli.kernels.experts import routing
from sparsekv_cli.kernels.fasa import chunks, row_cache
from sparsekv_cli.kernels.freekv import choice, correction, recall
from sparsekv_cli.kernels.freekv import pages as page_cache
from sparsekv_cli.kernels.layer import rows as layer
from sparsekv_cli.kernels.quest import pages, step
from sparsekv_cli.kernels.quest import scores as of_quest
from sparsekv_cli.kernels.sals import attention, latent
from sparsekv_cli.kernels.sals import scores as of_sals
from sparsekv_cli.kernels.weights import dot, matvec, packed
from sparsekv_cli.kernels.weights.dequantize import dequantize

__all__ = [
    "attention_decode", "attention_merge", "attention_prefill", "attention_recent",
    "attention_rows", "attention_scores", "attention_select",
]  # fmt: skip


def empty_matrix(name: str, n_rows: int, n_columns: int) -> packed.PackedMatrix:
    n_elements, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    data = torch.zeros(1, n_columns // n_elements * n_bytes, dtype=torch.uint8)
    return packed.repack(name, data.repeat(n_rows, 1), n_columns)


def clock() -> Launches:
    for stop in (False, True):
        yield partial(take_time, torch.zeros(2, dtype=torch.int64), stop=stop)


def experts_routing() -> Launches:
    for n_expert, n_used, n_group in ((8, 2, 1), (128, 8, 1), (256, 8, 8), (512, 10, 1)):
        vector = torch.zeros(n_expert)
        logits = torch.zeros(2, n_expert)
        plain = routing.Routing(n_used, n_group=n_group, n_group_used=max(1, n_group // 2))
        yield partial(routing.route, logits, plain)
        yield partial(routing.route, logits, plain._replace(is_sigmoid=True, choice_bias=vector))
        yield partial(routing.route, logits, plain._replace(bias=vector, scales=vector))
    chosen, weights = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 8)
    for dtype in (torch.float32, torch.bfloat16):
        results, bias = torch.zeros(16, 2880, dtype=dtype), torch.zeros(4, 2880)
        shared = routing.Shared(torch.zeros(2, 2880, dtype=dtype), torch.zeros(2))
        sum_up = partial(routing.mix, results, chosen, weights)
        yield sum_up
        yield partial(sum_up, places=chosen, bias=bias, shared=shared)
        yield partial(routing.add_biases, results, chosen.flatten(), bias)


def fasa_chunks() -> Launches:
    capacity = 4096
    # The last two: N_tip = d/4, and sizes that are no powers of two.
    for n_head, n_kv, d, n_dim in ((32, 8, 128, 32), (32, 32, 128, 32), (9, 3, 64, 16),
                                   (32, 8, 128, 64), (6, 2, 80, 20)):  # fmt: skip
        q, new = torch.zeros(2, n_head, d), torch.zeros(2, n_kv, d)
        dims = torch.zeros(n_kv, d, dtype=torch.int32)
        dom = torch.zeros(2, n_kv, n_dim, capacity, dtype=torch.float16)
        rest = torch.zeros(2, n_kv, capacity, d - n_dim, dtype=torch.float16)
        v = torch.zeros(2, n_kv, capacity, d, dtype=torch.float16)
        n = torch.zeros(2, dtype=torch.int32)
        score = partial(chunks.score_chunks, q, dims[:, :n_dim], dom, n, capacity)
        if (n_kv, n_dim) == (8, 32):
            yield partial(score, new=NewRow(new, new), into=(v, v))
            tops = select.GroupTops(torch.zeros(2, n_head, capacity // 8, dtype=torch.int32), 8)
            yield partial(score, new=NewRow(new, new), into=(v, v), tops=tops)
        yield partial(score, new=NewRow(new, new), into=(rest, v), k_dims=dims[:, n_dim:])


def fasa_row_cache() -> Launches:
    capacity, m = 4096, 256
    # The last two: N_tip = d/4, and sizes that are no powers of two.
    for n_head, n_kv, d, n_dim in ((32, 8, 128, 32), (32, 32, 128, 32), (9, 3, 64, 16),
                                   (32, 8, 128, 64), (6, 2, 80, 20)):  # fmt: skip
        dom = torch.zeros(2, n_kv, n_dim, capacity, dtype=torch.float16)
        rest = torch.zeros(2, n_kv, capacity, d - n_dim, dtype=torch.float16)
        v = torch.zeros(2, n_kv, capacity, d, dtype=torch.float16)
        n = torch.zeros(2, dtype=torch.int32)
        idx = torch.zeros(2, n_head, m, dtype=torch.int32)
        counts = torch.zeros(2, n_head, dtype=torch.int32)
        slots = row_cache.empty_resident(2, n_kv, n_head // n_kv * m, d, d, capacity, CPU)
        yield partial(row_cache.place_rows, slots, idx, counts, n, torch.zeros_like(idx))
        yield partial(row_cache.fetch_rows, slots, dom, rest, v)


def freekv_choice() -> Launches:
    n = torch.zeros(1, dtype=torch.int32)
    for n_head, n_kv, d, page, m, n_page in (
        (32, 8, 128, 32, 16, 1024), (32, 8, 128, 32, 128, 8192), (32, 32, 128, 8, 54, 1024),
        (9, 3, 64, 4, 108, 64), (6, 2, 80, 5, 3, 16384),
    ):  # fmt: skip
        layout = page_cache.Layout(4, 5, meanstd=True)
        pages = page_cache.empty_pages(1, n_kv, d, d, page, n_page, 2 * m, m, layout, CPU)
        q, lists = torch.empty(1, n_head, d), torch.zeros(1, n_kv, m, dtype=torch.int32)
        heads = lists[..., 0].contiguous()
        scratch = of_quest.page_scratch(1, n_head, n_kv, d, n_page, CPU)
        buffers = choice.ChoiceBuffers(heads, heads, lists, scratch)
        choose = partial(choice.choose_pages, pages, layout, q, n, n, 64, 192, 1.0, buffers)
        yield partial(choose, q=q, previous=q)
        if n_kv == 8:
            yield choose


def freekv_correction() -> Launches:
    n, layout = torch.zeros(1, dtype=torch.int32), page_cache.Layout(4, 5, meanstd=True)
    for n_head, n_kv, d, page in ((32, 8, 128, 32), (32, 32, 128, 8), (9, 3, 64, 8), (6, 2, 80, 5)):
        pages = page_cache.empty_pages(1, n_kv, d, d, page, 9, 8, 4, layout, CPU)
        q, new = torch.empty(1, n_head, d), torch.empty(1, n_kv, d)
        wanted = torch.zeros(1, n_kv, dtype=torch.int32)
        enter = partial(correction.enter_row, pages, layout, q, q, new, new, n, n, 64, 128, 0.8)
        for current in (False, True):
            yield partial(enter, current=current, wanted=wanted, query=q)


def freekv_recall() -> Launches:
    n = torch.zeros(1, dtype=torch.int32)
    for n_kv, d, page, m in ((8, 128, 32, 128), (32, 128, 8, 54), (3, 64, 4, 108), (2, 80, 5, 3)):
        layout = page_cache.Layout(4, 5, meanstd=page != 32)
        pages = page_cache.empty_pages(1, n_kv, d, d, page, 100, 2 * m, m, layout, CPU)
        heads, lists = torch.zeros(1, n_kv, dtype=torch.int32), torch.zeros(1, n_kv, 8192).int()
        leave = partial(recall.offload_pages, pages, layout, n, 64)
        apart = torch.zeros(1, dtype=torch.int64)
        yield partial(leave, ahead=1, budget=n, reserved=9, wanted=heads)
        yield partial(recall.fetch_pages, pages, layout, n, 64, lists, heads)
        if n_kv == 8:
            yield leave
            yield partial(leave, pools=apart)
            yield partial(recall.fetch_pages, pages, layout, pools=apart)
            yield partial(recall.fetch_pages, pages, layout)


def summaries_of_pages() -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """kv heads, rows of a page, queries of two sequences and their pages' summaries."""
    for n_head, n_kv, d, page in (
        (32, 8, 128, 16),
        (32, 32, 128, 32),
        (9, 3, 64, 16),
        (6, 2, 80, 5),
    ):
        hi = torch.empty(2, n_kv, 16384, d, dtype=torch.float16)
        yield n_kv, page, torch.empty(2, n_head, d), hi


def layer_rows() -> Launches:
    """For a step of two sequences, and for a chunk of a prefill."""
    for n_rows, dtype in ((2, torch.float32), (2048, torch.bfloat16)):
        for n in (576, 4096):
            x, weight = torch.zeros(n_rows, n), torch.zeros(n)
            out, y = torch.zeros(n_rows, n, dtype=dtype), torch.zeros(n_rows, n, dtype=dtype)
            yield partial(layer.rms_norm, x, weight, 1e-5, out=out)
            yield partial(layer.rms_norm, x, weight, 1e-5, layer.Added(y))
            yield partial(layer.add_rows, x, 1e-5, layer.Added(y, 1.0, weight, weight))
        for activation in layer.ACTIVATIONS:
            gate_up = torch.zeros(n_rows, 2 * 14336, dtype=dtype)
            yield partial(layer.gate_rows, gate_up, activation)
        yield from _heads(n_rows, dtype)


def _heads(n_rows: int, dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    for n_head, n_kv, d in ((32, 8, 128), (32, 32, 128), (9, 3, 64), (6, 2, 80), (8, 4, 256)):
        is_first = n_rows > 2
        out = layer.empty_heads(n_rows, (n_head, n_kv, d, d), CPU, dtype, heads_first=is_first)
        raw = torch.zeros(n_rows, (n_head + 2 * n_kv) * d, dtype=dtype)
        table, scale, norm = torch.zeros(4096, d // 2), torch.zeros(4096), torch.zeros(d)
        pos = torch.zeros(n_rows, dtype=torch.int32)
        biases = torch.zeros(n_head * d), torch.zeros(n_kv * d), torch.zeros(n_kv * d)
        variants = (
            (layer.HeadVectors(*biases, norm, norm, norm), False),
            (layer.HeadVectors(), True),
            (layer.HeadVectors(q_norm=biases[0], k_norm=biases[1]), False),
        )
        for weights, interleaved in variants if n_kv == 8 else variants[:1]:
            rotation = layer.Rotation(pos, table, table, scale, d, interleaved)
            yield partial(layer.split_heads, raw, out, rotation, weights, heads_first=is_first)


def quest_pages() -> Launches:
    for n_kv, d, page in ((8, 128, 16), (32, 128, 32), (3, 64, 16), (2, 80, 5)):
        k = torch.empty(2, n_kv, 8192 * page // 4, d, dtype=torch.float16)
        hi = torch.empty(2, n_kv, 8192, d, dtype=torch.float16)
        for meanstd in (True, False) if n_kv == 8 else (True,):
            yield partial(pages.page_summaries, k, hi, hi, page, meanstd, 0, 100)
        bytes_of_k = quantised(2, n_kv, 8192, d)
        yield partial(pages.page_summaries, bytes_of_k, hi, hi, page, True, 0, 100)


def quest_step() -> Launches:
    n = torch.zeros(2, dtype=torch.int32)
    for n_kv, page, q, hi in summaries_of_pages():
        d = q.shape[2]
        arrived, new = torch.zeros(2, n_kv, dtype=torch.int32), torch.empty(2, n_kv, d)
        for n_page in (8192, 2048, 64, 16384) if n_kv == 8 else (8192,):
            k = torch.empty(2, n_kv, n_page * page, d, dtype=torch.float16)
            few = hi[:, :, :n_page].contiguous()
            for meanstd in (True, False) if n_page == 2048 else (False,):
                yield partial(
                    step.step_rows, q, NewRow(new, new), k, k, few, few, arrived, n, n, 32,
                    step.PageRules(page, meanstd, 4, 1.0),
                )  # fmt: skip
        k = quantised(2, n_kv, n_page * page, d)
        yield partial(
            step.step_rows, q, NewRow(new, new), k, k, few, few, arrived, n, n, 32,
            step.PageRules(page, True, 4, 1.0),
        )  # fmt: skip


def sals_attention() -> Launches:
    m = 432
    for n_batch, n_head, n_kv, d, n_rot, rank, bits in (
        (1, 32, 8, 128, 128, 256, 4), (2, 32, 8, 128, 128, 256, 4), (1, 32, 32, 128, 128, 1024, 4),
        (16, 32, 32, 128, 128, 512, 2), (1, 9, 3, 64, 64, 48, 4), (1, 6, 2, 80, 40, 40, 16),
    ):  # fmt: skip
        ones, theta = np.ones(n_kv * d), np.ones(n_rot // 2)
        basis = latent.make_basis(np.ones((n_kv * d, rank)), ones, theta, 1.0, n_kv, CPU)
        latents = torch.zeros(n_batch, 512, rank, dtype=torch.float16)
        shape = n_batch, 512, n_kv, latent.head_bytes(d, bits)
        values = torch.zeros(shape, dtype=torch.uint8)
        idx = torch.zeros(n_batch, 1, m, dtype=torch.int32)
        counts = torch.zeros(n_batch, 1, dtype=torch.int32)
        out = attention.empty_pieces(n_batch, n_head, n_kv, d, m, 1, CPU)
        yield partial(
            attention.attend_latents, torch.zeros(n_batch, n_head, d), idx, counts, latents,
            values, basis, bits, d, 1.0, 16, out,
        )  # fmt: skip


def sals_latent() -> Launches:
    for n_kv, d, rank, bits in (
        (8, 128, 256, 4),
        (32, 128, 1024, 4),
        (3, 64, 48, 2),
        (2, 80, 40, 16),
    ):
        exact = latent.empty_exact(2, n_kv, (d, d), 16, 64, 80, CPU)
        latents = torch.zeros(2, 512, rank, dtype=torch.float16)
        size = latent.head_bytes(d, bits)
        values = torch.zeros(2, 512, n_kv, size, dtype=torch.uint8)
        new, n = torch.zeros(2, n_kv, d), torch.zeros(2, dtype=torch.int32)
        ones, theta = np.ones(n_kv * d), np.ones(d // 2)
        basis = latent.make_basis(np.ones((n_kv * d, rank)), ones, theta, 1.0, n_kv, CPU)
        yield partial(
            latent.append_latent, new, NewRow(new, new), n, n, latents, values, exact, basis, bits,
            16, 64,
        )  # fmt: skip


def sals_scores() -> Launches:
    capacity = 16384
    tops = select.empty_tops(2, 1, capacity, 512, CPU)
    for n_head, n_kv, d, n_rot, rank in ((32, 8, 128, 128, 256), (32, 32, 128, 128, 1024),
                                         (9, 3, 64, 64, 48), (6, 2, 80, 40, 40)):  # fmt: skip
        ones, theta = np.ones(n_kv * d), np.ones(n_rot // 2)
        basis = latent.make_basis(np.ones((n_kv * d, rank)), ones, theta, 1.0, n_kv, CPU)
        latents = torch.zeros(2, capacity, rank, dtype=torch.float16)
        n = torch.zeros(2, dtype=torch.int32)
        yield partial(
            of_sals.score_latents, torch.zeros(2, n_head, d), torch.zeros(n_rot // 2), basis,
            latents, rank // 2, n, capacity, 1.0, 16, torch.zeros(1, 2, n_head),
            torch.zeros(2, n_head, dtype=torch.int32), tops,
        )  # fmt: skip
        query = torch.zeros(2, rank // 2)
        yield partial(of_sals.score_summed, query, latents, n, capacity, 16, tops)


def weights_dequantize() -> Launches:
    for name in ("Q4_0", "Q4_K", "Q6_K", "Q8_0"):
        yield partial(dequantize, empty_matrix(name, 96, 768))


def weights_matmul() -> Launches:
    for name in packed.PACKABLE:
        yield partial(dot.multiply, empty_matrix(name, 8192, 4096), torch.zeros(16, 4096))
    pair = empty_matrix("Q4_K", 5120, 4096), empty_matrix("Q6_K", 1024, 4096)
    yield partial(dot.multiply_pair, *pair, torch.zeros(16, 4096))
    for name in ("Q4_K", "Q6_K", "Q8_0", "Q5_0"):
        joined = partial(dot.multiply, empty_matrix(name, 8192, 4096), joined=True)
        yield partial(joined, torch.zeros(16, 4096))
    yield partial(dot.multiply_pair, *pair, torch.zeros(16, 4096), joined=True)
    # the columns in parts
    yield partial(dot.multiply, empty_matrix("Q4_K", 4096, 14336), torch.zeros(8, 14336))


def weights_matvec() -> Launches:
    for name in packed.PACKABLE:
        w = empty_matrix(name, 8192, 4096)
        for n_batch in (1, 2) if name in ("Q4_K", "Q6_K", "F16") else (1,):
            yield partial(dot.multiply, w, torch.zeros(n_batch, 4096))
    for second in ("Q6_K", "Q5_0"):
        pair = empty_matrix("Q4_K", 5120, 4096), empty_matrix(second, 1024, 4096)
        for n_batch in (1, 2):
            yield partial(dot.multiply_pair, *pair, torch.zeros(n_batch, 4096))
    for name in ("Q4_0", "Q6_K"):  # one warp a row
        yield partial(dot.multiply, empty_matrix(name, 96, 768), torch.zeros(1, 768))
    yield partial(dot.multiply, empty_matrix("Q4_K", 4096, 14336), torch.zeros(1, 14336))
    of_pairs = matvec.PairChoice(torch.zeros(16, dtype=torch.int32), 8, 4)  # of experts
    for name in packed.PACKABLE:
        w = empty_matrix(name, 4 * 1536, 2048)
        yield partial(dot.multiply_chosen, w, torch.zeros(2, 2048), of_pairs)


@triton.jit
def _every_other_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + 2 * at))


@triton.jit
def _all_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


def scalar_loads() -> Launches:
    """One kernel reads single elements, and one does not."""
    x = torch.empty(2048, dtype=torch.float16)
    kernels: tuple[Any, ...] = (_every_other_kernel, _all_kernel)
    for kernel in kernels:
        yield partial(kernel[(1,)], x, x, BLOCK=1024, num_warps=4)
