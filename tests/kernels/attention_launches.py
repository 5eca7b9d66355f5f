"""Launches of the kernels in kernels/attention to compile; see launches.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sparsekv_cli.kernels.attention import decode, prefill, recent, rows, scores, select
from sparsekv_cli.kernels.attention.merge import merge
from sparsekv_cli.kernels.attention.rows import NewRow, row_items
from sparsekv_cli.kernels.attention.softmax import RingWindow, ScoreSoftmax

Launches = Iterator[Callable[[], object]]
CPU = torch.device("cpu")
# (H, G, d), (B, capacity, rows listed): few small tiles, or many large ones.
ATTENDED = (
    ((32, 8, 128), (1, 128, 64)),
    ((32, 8, 128), (2, 32768, 8192)),
    ((32, 32, 128), (2, 32768, 8192)),
    ((9, 3, 64), (2, 32768, 8192)),
    ((6, 2, 80), (1, 128, 64)),
)


def quantised(n_batch: int, n_kv: int, n: int, d: int) -> torch.Tensor:
    return torch.zeros(n_batch, n_kv, n, row_items(d, torch.uint8), dtype=torch.uint8)


def attention_decode() -> Launches:
    for (n_head, n_kv, d), (n_batch, capacity, m) in ATTENDED:
        new = torch.empty(n_batch, n_kv, d)
        cache = torch.empty(n_batch, n_kv, capacity, d, dtype=torch.float16)
        n = torch.zeros(n_batch, dtype=torch.int32)
        q = torch.empty(n_batch, n_head, d)
        row = NewRow(new, new)
        yield partial(decode.attend_dense, q, cache, cache, n, capacity, 1.0, new=row)
        if (n_kv, capacity) == (8, 32768):
            yield partial(decode.attend_dense, q, cache, cache, n, capacity, 1.0)
            capped = ScoreSoftmax(1.0, 50.0, torch.empty(n_head))
            of_window = partial(decode.attend_dense, q, cache, cache, n, 1024, new=row)
            yield partial(of_window, softmax=1.0, window=RingWindow(1024, 1152))
            yield partial(of_window, softmax=capped, window=RingWindow(1024, 1152))
            yield partial(decode.attend_dense, q, cache, cache, n, capacity, capped, new=row)
            others = decode.Attended(torch.empty(n_batch, n_head, d), torch.empty(n_batch, n_head))
            yield partial(decode.attend_dense, q, cache, cache, n, 4, 1.0, others=others)
        n_list = n_kv if d == 64 else n_head
        idx = torch.zeros(n_batch, n_list, m, dtype=torch.int32)
        counts = torch.zeros(n_batch, n_list, dtype=torch.int32)
        lse = torch.empty(n_batch, n_head)
        yield partial(decode.attend_rows, q, cache, cache, idx, counts, 1.0, lse=lse)
        few = idx[:, :, :512].contiguous()
        joined = partial(decode.attend_rows, q, cache, cache, few, counts, arrived=counts.clone())
        yield partial(joined, 1.0)
        if (n_kv, capacity) == (8, 32768):
            yield partial(decode.attend_rows, q, cache, cache, idx, counts, capped)
    yield partial(decode.attend_dense, q.half(), cache, cache, n, capacity, 1.0)
    for n_head, n_kv, d in ((32, 8, 128), (9, 3, 64), (6, 2, 80), (8, 4, 256)):
        cache, new = quantised(2, n_kv, 32768, d), torch.empty(2, n_kv, d)
        q, n = torch.empty(2, n_head, d), torch.zeros(2, dtype=torch.int32)
        idx, row = torch.zeros(2, n_kv, 512, dtype=torch.int32), NewRow(new, new)
        yield partial(decode.attend_dense, q, cache, cache, n, 32768, 1.0, new=row)
        yield partial(decode.attend_rows, q, cache, cache, idx, idx[:, :, 0].contiguous(), 1.0)


def attention_merge() -> Launches:
    for n_piece, n_head, d in ((3, 32, 128), (17, 9, 64), (99, 8, 80)):
        outs, lses = torch.empty(n_piece, 2, n_head, d), torch.empty(n_piece, 2, n_head)
        yield partial(merge, outs, lses)
        yield partial(merge, outs, lses, lse=torch.empty(2, n_head))


def attention_prefill() -> Launches:
    for n_head, n_kv, d in ((32, 8, 128), (8, 4, 256), (8, 1, 512), (9, 3, 64), (6, 2, 80)):
        q = torch.empty(n_head, 2048, d, dtype=torch.bfloat16)
        k = torch.empty(n_kv, 8192, d, dtype=torch.float16)
        softmax = ScoreSoftmax(1.0, 50.0, torch.empty(n_head))
        yield partial(prefill.attend_causal, q, k, k, softmax, 1024)
        yield partial(prefill.attend_causal, q.float(), k, k, softmax)
        if n_kv == 8:
            yield partial(prefill.attend_causal, q, k, k, 1.0, 1024)
            yield partial(prefill.attend_causal, q[:, :3].contiguous(), k, k, 1.0, 1024)


def attention_recent() -> Launches:
    n = torch.zeros(2, dtype=torch.int32)
    for n_kv, d in ((8, 128), (3, 64), (2, 80)):
        k, new = torch.empty(2, n_kv, 4096, d, dtype=torch.float16), torch.empty(2, n_kv, d)
        for held in (k, quantised(2, n_kv, 4096, d)):
            yield partial(recent.recent_rows, n, n, 512, 4, NewRow(new, new), held, held)


def attention_scores() -> Launches:
    n = torch.zeros(2, dtype=torch.int32)
    for n_head, n_kv, d in ((32, 8, 128), (32, 32, 128), (9, 3, 64), (6, 2, 80)):
        k = torch.empty(2, n_kv, 32768, d, dtype=torch.float16)
        q, new = torch.empty(2, n_head, d), torch.empty(2, n_kv, d)
        for n_max in (64, 32768) if n_kv == 8 else (32768,):
            tops = select.empty_tops(2, n_head, n_max, 512, CPU)
            row = NewRow(new, new)
            for held in (k, quantised(2, n_kv, 32768, d)):
                yield partial(scores.score_rows, q, held, n, n_max, 1.0, new=row, v=held, tops=tops)


def attention_select() -> Launches:
    n = torch.zeros(2, dtype=torch.int32)
    for n_max, k_max in (
        (8, 2),
        (1000, 40),
        (3000, 256),
        (8192, 512),
        (32768, 512),
        (131072, 32768),
    ):
        scores = torch.empty(2, 8, n_max)
        yield partial(select.select_largest, scores, n, n_max, n, k_max, 4, 16)


def attention_rows() -> Launches:
    n = torch.zeros(4, dtype=torch.int32)
    for n_kv, d in ((8, 128), (3, 64), (2, 80)):
        new = torch.empty(4, n_kv, d)
        halves = torch.empty(1, n_kv, 4096, d, dtype=torch.float16)
        for held in (halves, quantised(1, n_kv, 4096, d)):
            shared = held.expand(4, -1, -1, -1)
            for n_slot in (0, 1152):
                yield partial(rows.store_rows, NewRow(new, new), shared, shared, n, n_slot)
