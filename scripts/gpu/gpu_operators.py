"""The attention operators of scripts/gpu/bench: one layer's decode step, B sequences at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_models import fill, random_calibration
from torch.nn.functional import scaled_dot_product_attention

from sparsekv_cli.cache.spec import Budget, LayerSpec
from sparsekv_cli.device.batching import prepare_runs
from sparsekv_cli.device.cache import DeviceInput, StepNumbers, grid_bound
from sparsekv_cli.device.engine import device_cache
from sparsekv_cli.evaluation.compare import build_spec
from sparsekv_cli.kernels.attention import decode, select
from sparsekv_cli.kernels.fasa import chunks
from sparsekv_cli.kernels.quest import pages
from sparsekv_cli.kernels.quest.rows import page_rows

BUDGET = 512  # rows that the methods attend to
N_TIP = 16  # FASA: dominant chunks of 64
PAGE = 16


class Shape(NamedTuple):
    """Heads of one layer."""

    name: str
    n_head: int
    n_head_kv: int
    d: int


SHAPES = (Shape("llama-3.1-8b", 32, 8, 128), Shape("llama-2-7b", 32, 32, 128))


class Operator(NamedTuple):
    """run: the operator's launches. n_bytes: the fewest that it must move through device memory."""

    name: str
    run: Callable[[], Any]
    n_bytes: int


class OperatorRows:
    """K and V of B sequences of n random rows, a query each, and what the methods keep of them."""

    def __init__(self, shape: Shape, n_batch: int, n: int, device: torch.device) -> None:
        self.shape, self.n_batch, self.n_rows = shape, n_batch, n
        _, n_head, n_kv, d = shape
        self.q = torch.randn(n_batch, n_head, d, device=device)
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

    def full(self) -> torch.Tensor:
        return decode.attend_dense(self.q, self.k, self.v, self.n, self.n_rows, self.scale)

    def sdpa(self) -> torch.Tensor:
        """torch's own: FlashAttention or what it takes for one query."""
        gqa = self.shape.n_head != self.shape.n_head_kv
        q = self.q.half()[:, :, None]
        return scaled_dot_product_attention(q, self.k, self.v, scale=self.scale, enable_gqa=gqa)

    def _attend_best(self, scores: torch.Tensor) -> torch.Tensor:
        idx, counts = select.select_largest(scores, self.n, self.n_rows, self.budget, BUDGET, 4, 16)
        return decode.attend_rows(self.q, self.k, self.v, idx, counts, self.scale)

    def topk(self) -> torch.Tensor:
        return self._attend_best(select.score_rows(self.q, self.k, self.n, self.n_rows, self.scale))

    def fasa(self) -> torch.Tensor:
        return self._attend_best(
            chunks.score_chunks(self.q, self.dom_dims, self.dom, self.n, self.n_rows)
        )

    def quest(self) -> torch.Tensor:
        n_page = self.hi.shape[2]
        pooled = pages.pool_pages(
            self.q, self.hi, self.lo, self.n, self.budget, n_page, PAGE, self.scale, softmax=False
        )
        chosen, sizes = select.select_largest(
            pooled.scores, pooled.n_page, n_page, pooled.n_best, BUDGET // PAGE
        )
        idx, counts = page_rows(chosen, sizes, self.n, PAGE, 4)
        return decode.attend_rows(self.q, self.k, self.v, idx, counts, self.scale)

    def operators(self) -> Iterator[Operator]:
        n_head, n_kv, d = self.shape[1:]
        units = self.n_batch * n_kv
        chosen = self.n_batch * n_head * BUDGET * self.row_bytes
        everything = units * self.n_rows * self.row_bytes
        yield Operator("full", self.full, everything)
        yield Operator("torch sdpa", self.sdpa, everything)
        yield Operator("topk", self.topk, units * self.n_rows * 2 * d + chosen)
        yield Operator("fasa-c", self.fasa, units * self.n_rows * 4 * N_TIP + chosen)
        summaries = units * (self.n_rows // PAGE) * 4 * d
        yield Operator("quest", self.quest, summaries + units * BUDGET * self.row_bytes)


def cache_operators(
    names: Sequence[str], shape: Shape, n_batch: int, n: int, device: torch.device
) -> Iterator[Operator]:
    """sals and freekv: the decode of B layer caches, in common launches, as ``bench -b`` runs them.

    A replay takes the same step again, so freekv finds all its pages; whole tokens tell what recall
    costs.
    """
    spec = LayerSpec(
        layer=2, n_layer=4, n_head=shape.n_head, n_head_kv=shape.n_head_kv, head_dim=shape.d,
        value_dim=shape.d, n_threads=1, theta=5e5 ** (-np.arange(shape.d // 2) / (shape.d // 2)),
    )  # fmt: skip
    spec = replace(spec, calibration=random_calibration(spec, np.random.default_rng(0)))
    generator = torch.Generator(device=device).manual_seed(0)
    for name in names:
        method: Any = build_spec(name)
        if name == "freekv":
            method = replace(method, budget=Budget(tokens=BUDGET))
        caches = [device_cache(method)(spec, device, method) for _ in range(n_batch)]
        for cache in caches:
            cache.reserve(n + 2)
            fill(cache, spec, n, generator)
        launch = _planned(caches, spec, n + 1)
        before = _bytes_read(caches)
        launch()  # a first step, which chooses ahead for the second
        for cache in caches:
            cache.settle(n + 1)
        n_bytes = _bytes_read(caches) - before
        yield Operator(name, _planned(caches, spec, n + 2), n_bytes)


def _planned(caches: Sequence[Any], spec: LayerSpec, n: int) -> Callable[[], None]:
    """The launches of a step that brings all of the caches to n rows, with random ones."""
    keys = [cache.plan(n, grid_bound(n)) for cache in caches]
    (run,) = prepare_runs(caches, keys)
    leader, device, n_batch = run.cache, run.cache.device, len(caches)
    heads = [
        torch.randn(n_batch, count, spec.head_dim, device=device)
        for count in (spec.n_head, spec.n_head_kv, spec.n_head_kv, spec.n_head, spec.n_head_kv)
    ]
    numbers = torch.tensor([n - 1, n, leader.budget_rows(n)], dtype=torch.int32, device=device)
    x = DeviceInput._make((*heads, StepNumbers(*numbers[:, None].repeat(1, n_batch))))

    def launch() -> None:
        leader.decode(x)
        if leader.side is not None:
            leader.side.join()

    return launch


def _bytes_read(caches: Sequence[Any]) -> int:
    return sum(cache.counters().get("bytes_read", 0) for cache in caches)
