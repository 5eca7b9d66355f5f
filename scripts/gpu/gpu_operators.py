"""The attention operators of scripts/gpu/bench: one layer's decode step, B sequences at once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_models import fill, random_calibration
from gpu_references import attend_ref, best_rows_ref, page_rows_ref
from gpu_rows import RandomRows
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparsekv_cli.cache.spec import Budget, LayerSpec
from sparsekv_cli.device.batching import prepare_runs
from sparsekv_cli.device.cache import DeviceInput, StepNumbers, grid_bound
from sparsekv_cli.device.methods import device_cache
from sparsekv_cli.evaluation.compare import build_spec
from sparsekv_cli.kernels.attention import decode, select
from sparsekv_cli.kernels.attention.arrivals import none_arrived
from sparsekv_cli.kernels.attention.rows import NewRow
from sparsekv_cli.kernels.attention.scores import score_rows
from sparsekv_cli.kernels.fasa import chunks
from sparsekv_cli.kernels.quest import pages
from sparsekv_cli.kernels.quest.step import PageRules, step_rows

BUDGET = 512  # rows that the methods attend to
N_TIP = 16  # FASA: dominant chunks of 64
PAGE = 16
N_FIRST, N_LAST = 4, 16  # rows that are attended to anyway


class Shape(NamedTuple):
    """Heads of one layer."""

    name: str
    n_head: int
    n_head_kv: int
    d: int


SHAPES = (Shape("llama-3.1-8b", 32, 8, 128), Shape("llama-2-7b", 32, 32, 128))


class Operator(NamedTuple):
    """run: the operator's launches. n_bytes: the fewest that it must move through device memory.

    expected: what run must give, (B, H, d). restore: puts back what a run changes.
    """

    name: str
    run: Callable[[], torch.Tensor]
    n_bytes: int
    expected: Callable[[], torch.Tensor]
    restore: Callable[[], None] = lambda: None


class OperatorInputs:
    """K and V of B sequences of n random rows, a query each, and what the methods keep of them."""

    def __init__(self, shape: Shape, n_batch: int, n: int, device: torch.device) -> None:
        self.shape, self.n_batch, self.n_rows = shape, n_batch, n
        _, n_head, n_kv, d = shape
        self.q = torch.randn(n_batch, n_head, d, device=device)
        self.q_half = self.q.half()  # what the baselines take
        self.k, self.v = (
            torch.randn(n_batch, n_kv, n, d, device=device, dtype=torch.float16) for _ in range(2)
        )
        self.n = torch.full((n_batch,), n, dtype=torch.int32, device=device)
        self.budget = torch.full_like(self.n, BUDGET)
        self.scale = d**-0.5
        self.row_bytes = 2 * 2 * d
        self.dom_dims = torch.arange(2 * N_TIP, dtype=torch.int32, device=device).repeat(n_kv, 1)
        capacity = -(-n // 16) * 16
        self.dom = torch.empty(
            n_batch, n_kv, 2 * N_TIP, capacity, dtype=torch.float16, device=device
        )
        self.dom[..., :n] = self.k[..., : 2 * N_TIP].transpose(2, 3)
        n_page = n // PAGE
        shape_of_pages = (n_batch, n_kv, n_page, d)
        self.hi, self.lo = (
            torch.empty(shape_of_pages, dtype=torch.float16, device=device) for _ in range(2)
        )
        pages.page_summaries(self.k, self.hi, self.lo, PAGE, False, 0, n_page)
        # Quest's step stores the last row again.
        self.last = NewRow(*(x[:, :, -1].float().contiguous() for x in (self.k, self.v)))
        self.arrived = none_arrived(n_batch, n_kv, device)

    def full(self) -> torch.Tensor:
        return decode.attend_dense(self.q, self.k, self.v, self.n, self.n_rows, self.scale)

    def sdpa(self) -> torch.Tensor:
        """torch's own: FlashAttention or what it takes for one query."""
        gqa = self.shape.n_head != self.shape.n_head_kv
        q = self.q_half[:, :, None]
        out = scaled_dot_product_attention(q, self.k, self.v, scale=self.scale, enable_gqa=gqa)
        return out[:, :, 0]

    def cudnn(self) -> torch.Tensor:
        """The same by cuDNN's attention."""
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return self.sdpa()

    def flash_attention(self, attend: Callable[..., Any]) -> torch.Tensor:
        """FlashAttention's decode; k and v are (B, n, G, d) there."""
        q, k, v = self.q_half[:, None], self.k.transpose(1, 2), self.v.transpose(1, 2)
        out: torch.Tensor = attend(q, k, v, cache_seqlens=self.n, softmax_scale=self.scale)
        return out[:, 0]

    def flash_infer(self, attend: Callable[..., Any]) -> torch.Tensor:
        """FlashInfer's decode of one sequence."""
        out: torch.Tensor = attend(
            self.q_half[0], self.k[0], self.v[0], kv_layout="HND", sm_scale=self.scale
        )
        return out[None]

    def baselines(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Dense attention by others: torch's, and that of libraries which are installed."""
        yield "torch sdpa", self.sdpa
        if self.q.device.type == "cuda":
            yield "cudnn sdpa", self.cudnn
        for module in ("flash_attn_interface", "flash_attn"):  # version 3, version 2
            attend = _installed(module, "flash_attn_with_kvcache")
            if attend is not None:
                yield module, partial(self.flash_attention, attend)
        attend = _installed("flashinfer", "single_decode_with_kv_cache")
        if attend is not None and self.n_batch == 1:
            yield "flashinfer", partial(self.flash_infer, attend)

    def everything(self) -> torch.Tensor:
        return attend_ref(self.q, self.k, self.v, self.scale)

    def best(self, scores: torch.Tensor) -> torch.Tensor:
        """Attention to the rows with the best scores f32 (B, H, n)."""
        is_best = best_rows_ref(scores, BUDGET, N_FIRST, N_LAST)
        return attend_ref(self.q, self.k, self.v, self.scale, is_best)

    def all_scores(self) -> torch.Tensor:
        """f32 (B, H, n), a kv head at a time: an f32 copy of all keys may not fit the device."""
        groups = self.q.unflatten(1, (self.shape.n_head_kv, -1)).unbind(1)
        each = zip(groups, self.k.unbind(1), strict=True)
        return torch.cat([q @ k.float().transpose(1, 2) for q, k in each], 1)

    def in_best_pages(self) -> torch.Tensor:
        is_row = page_rows_ref(
            self.q, self.hi, self.lo, self.scale, self.n_rows, BUDGET, PAGE, N_FIRST
        )
        return attend_ref(self.q, self.k, self.v, self.scale, is_row)

    def _attend_best(self, score: Callable[..., torch.Tensor]) -> torch.Tensor:
        tops = select.empty_tops(*self.q.shape[:2], self.n_rows, BUDGET, self.q.device)
        idx, counts = select.select_largest(
            score(tops=tops), self.n, self.n_rows, self.budget, BUDGET, N_FIRST, N_LAST, tops=tops
        )
        return decode.attend_rows(self.q, self.k, self.v, idx, counts, self.scale)

    def topk(self) -> torch.Tensor:
        return self._attend_best(
            partial(score_rows, self.q, self.k, self.n, self.n_rows, self.scale)
        )

    def fasa(self) -> torch.Tensor:
        return self._attend_best(
            partial(chunks.score_chunks, self.q, self.dom_dims, self.dom, self.n, self.n_rows)
        )

    def quest(self) -> torch.Tensor:
        idx, counts = step_rows(
            self.q, self.last, self.k, self.v, self.hi, self.lo, self.arrived, self.n, self.budget,
            BUDGET // PAGE, PageRules(PAGE, False, N_FIRST, self.scale),
        )  # fmt: skip
        return decode.attend_rows(self.q, self.k, self.v, idx, counts, self.scale)

    def operators(self) -> Iterator[Operator]:
        n_head, n_kv, d = self.shape[1:]
        units = self.n_batch * n_kv
        chosen = self.n_batch * n_head * BUDGET * self.row_bytes
        everything = units * self.n_rows * self.row_bytes
        for name, run in self.baselines():
            yield Operator(name, run, everything, self.everything)
        yield Operator("full", self.full, everything, self.everything)
        scan = units * self.n_rows * 2 * d
        yield Operator("topk", self.topk, scan + chosen, lambda: self.best(self.all_scores()))
        scan = units * self.n_rows * 4 * N_TIP
        yield Operator(
            "fasa-c", self.fasa, scan + chosen,
            lambda: self.best(
                chunks.score_chunks_ref(self.q, self.dom_dims, self.dom[..., : self.n_rows])
            ),
        )  # fmt: skip
        scan = units * (self.n_rows // PAGE) * 4 * d
        n_bytes = scan + units * BUDGET * self.row_bytes
        yield Operator("quest", self.quest, n_bytes, self.in_best_pages)


def _installed(module: str, name: str) -> Callable[..., Any] | None:
    """A function of a module, if there is that module."""
    try:
        found: Callable[..., Any] = getattr(import_module(module), name)
    except ImportError:
        return None
    return found


def cache_operators(
    names: Sequence[str], shape: Shape, n_batch: int, n: int, device: torch.device
) -> Iterator[Operator]:
    """sals and freekv: the decode of B layer caches, in common launches, as ``bench -b`` runs them.

    What a step changes is put back ahead of the next one, which then does the same. What it must
    give is what the first step of the same state gave, outside of a graph.
    """
    spec = LayerSpec(
        layer=2, n_layer=4, n_head=shape.n_head, n_head_kv=shape.n_head_kv, head_dim=shape.d,
        value_dim=shape.d, n_threads=1, theta=5e5 ** (-np.arange(shape.d // 2) / (shape.d // 2)),
    )  # fmt: skip
    spec = replace(spec, calibration=random_calibration(spec, np.random.default_rng(0)))
    rows = RandomRows(device)
    for name in names:
        method: Any = build_spec(name)
        if name.startswith("freekv"):
            method = replace(method, budget=Budget(tokens=BUDGET))
        caches = [device_cache(method)(spec, device, method) for _ in range(n_batch)]
        for cache in caches:
            cache.reserve(n + 2)
            fill(cache, spec, n, rows)
        launch = _planned(caches, spec, n + 1)
        before = _bytes_read(caches)
        launch()  # a first step, which chooses ahead for the second
        for cache in caches:
            cache.end_step(n + 1)
        n_bytes = _bytes_read(caches) - before
        run = _planned(caches, spec, n + 2)
        restore = _restore(caches)
        expected = run().clone()
        restore()
        yield Operator(name, run, n_bytes, lambda expected=expected: expected, restore)


def _restore(caches: Sequence[Any]) -> Callable[[], None]:
    """Puts the caches' tensors on the device back to what they hold now."""
    kept = [(x, x.clone()) for cache in caches for x in cache.tensors()]

    def restore() -> None:
        for tensor, copy in kept:
            tensor.copy_(copy)

    return restore


def _planned(caches: Sequence[Any], spec: LayerSpec, n: int) -> Callable[[], torch.Tensor]:
    """The launches of a step that brings all of the caches to n rows, with random ones."""
    plans = [cache.begin_step(n, grid_bound(n)) for cache in caches]
    (run,), _ = prepare_runs(caches, plans, len(caches))
    leader, device, n_batch = run.cache, run.cache.device, len(caches)
    heads = [
        torch.randn(n_batch, count, spec.head_dim, device=device)
        for count in (spec.n_head, spec.n_head_kv, spec.n_head_kv, spec.n_head, spec.n_head_kv)
    ]
    numbers = torch.tensor([n - 1, n, leader.budget_rows(n)], dtype=torch.int32, device=device)
    arrived = none_arrived(n_batch, spec.n_head, device)
    x = DeviceInput._make((*heads, StepNumbers(*numbers[:, None].repeat(1, n_batch), arrived)))

    def launch() -> torch.Tensor:
        out: torch.Tensor = leader.decode(x)
        if leader.side is not None:
            leader.side.join()
        return out

    return launch


def _bytes_read(caches: Sequence[Any]) -> int:
    return sum(cache.counters().get("bytes_read", 0) for cache in caches)
