"""Routing on the GPU: chooses each row's experts and weights, and adds up their outputs.

A pair is a row and one of its experts. cpu/experts/routing.py has the same steps.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.checks import check

TYPES = (torch.float32, torch.float16, torch.bfloat16)
LEAST_SUM = 2**-14  # the smallest normal f16, as in llama.cpp's build_moe_ffn


class Routing(NamedTuple):
    """How products become weights. The vectors are f32 (E,), or None.

    is_sigmoid: of each product; False: a softmax over all. bias: added to the products.
    choice_bias: added to the weights for the choice alone. scales: factors of the weights.
    n_group, n_group_used: only experts of the best groups are chosen. A group has E / n_group
    experts, and counts as the sum of its two best.
    """

    n_used: int
    is_sigmoid: bool = False
    is_normalised: bool = True
    bias: torch.Tensor | None = None
    choice_bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    n_group: int = 1
    n_group_used: int = 1


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, choice_ptr, scales_ptr, chosen_ptr, weights_ptr, stride_logits, n_expert,
    n_used, group_size, n_group_used, least_sum, SIGMOID: tl.constexpr, NORMALISED: tl.constexpr,
    BIAS: tl.constexpr, CHOICE: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    e, j = tl.arange(0, BLOCK), tl.arange(0, USED)
    is_expert = e < n_expert
    x = tl.load(logits_ptr + t * stride_logits + e, mask=is_expert, other=float("-inf"))
    if BIAS:
        x += tl.load(bias_ptr + e, mask=is_expert, other=0.0)
    if SIGMOID:
        share = 1.0 / (1.0 + tl.exp(-x))
    else:
        share = tl.exp(x - tl.max(x, 0))
        share /= tl.sum(share, 0)
    rank = share
    if CHOICE:
        rank += tl.load(choice_ptr + e, mask=is_expert, other=0.0)
    rank = tl.where(is_expert, rank, float("-inf"))
    if GROUPS > 1:
        of_group = tl.full([BLOCK], float("-inf"), tl.float32)  # for each expert, of its group
        for g in range(GROUPS):
            here = tl.where(e // group_size == g, rank, float("-inf"))
            second = tl.where(e == tl.argmax(here, 0), float("-inf"), here)
            both = tl.max(here, 0) + tl.max(second, 0)
            of_group = tl.where(e // group_size == g, both, of_group)
        of_group = tl.where(is_expert, of_group, float("-inf"))
        is_open = e < 0
        for _ in range(n_group_used):
            best = tl.argmax(tl.where(is_open, float("-inf"), of_group), 0)
            is_open = is_open | (e // group_size == best // group_size)
        rank = tl.where(is_open, rank, float("-inf"))
    chosen = tl.zeros([USED], tl.int32)
    weights = tl.zeros([USED], tl.float32)
    for i in range(n_used):
        best = tl.minimum(tl.argmax(rank, 0), n_expert - 1)  # also if products are NaN
        weight = tl.sum(tl.where(e == best, share, 0.0), 0)
        chosen = tl.where(j == i, best, chosen)
        weights = tl.where(j == i, weight, weights)
        rank = tl.where(e == best, float("-inf"), rank)
    if NORMALISED:
        weights /= tl.maximum(tl.sum(weights, 0), least_sum)
    if SCALES:
        weights *= tl.load(scales_ptr + chosen)
    tl.store(chosen_ptr + t * n_used + j, chosen, mask=j < n_used)
    tl.store(weights_ptr + t * n_used + j, weights, mask=j < n_used)


def route(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the experts of each row, best first, int32 (T, n_used), and their weights f32.

    logits f32 (T, E), the products of the router. The first of several equal experts is chosen.
    """
    (n_rows, n_expert), device, n_used = logits.shape, logits.device, routing.n_used
    check("logits", logits, torch.float32, (n_rows, n_expert), device, strided=True)
    vectors = {name: getattr(routing, name) for name in ("bias", "choice_bias", "scales")}
    for name, vector in vectors.items():
        if vector is not None:
            check(name, vector, torch.float32, (n_expert,), device)
    n_group, n_open = routing.n_group, routing.n_group_used
    if n_expert % n_group or not 1 <= n_used <= n_open * (n_expert // n_group):
        raise ValueError(f"{n_used} of {n_expert} experts, {n_open} of {n_group} groups")
    chosen = torch.empty(n_rows, n_used, dtype=torch.int32, device=device)
    weights = torch.empty(n_rows, n_used, dtype=torch.float32, device=device)
    _route_kernel[(n_rows,)](
        logits, *vectors.values(), chosen, weights, logits.stride(0), n_expert, n_used,
        n_expert // n_group, n_open, LEAST_SUM, SIGMOID=routing.is_sigmoid,
        NORMALISED=routing.is_normalised, BIAS=routing.bias is not None,
        CHOICE=routing.choice_bias is not None, SCALES=routing.scales is not None,
        GROUPS=n_group if n_open < n_group else 1, BLOCK=triton.next_power_of_2(n_expert),
        USED=triton.next_power_of_2(n_used), num_warps=1 if n_expert <= 128 else 4,
    )  # fmt: skip
    return chosen, weights


class Shared(NamedTuple):
    """The output of the expert that all rows use.

    out (T, n): f32, f16 or bf16. gate: f32 (T,), whose sigmoid is its weight; None: 1.
    """

    out: torch.Tensor
    gate: torch.Tensor | None = None


@triton.jit
def _mix_kernel(
    results_ptr, places_ptr, chosen_ptr, weights_ptr, bias_ptr, shared_ptr, gate_ptr, out_ptr, n,
    n_used, stride_shared, stride_gate, PLACES: tl.constexpr, BIAS: tl.constexpr,
    SHARED: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for j in range(n_used):
        pair = t * n_used + j
        place = pair
        if PLACES:
            place = tl.load(places_ptr + pair).to(tl.int64)
        result = tl.load(results_ptr + place * n + c, mask=c < n, other=0).to(tl.float32)
        if BIAS:
            expert = tl.load(chosen_ptr + pair).to(tl.int64)
            result += tl.load(bias_ptr + expert * n + c, mask=c < n, other=0)
        acc += tl.load(weights_ptr + pair) * result
    if SHARED:
        shared = tl.load(shared_ptr + t * stride_shared + c, mask=c < n, other=0).to(tl.float32)
        if GATED:
            shared *= 1.0 / (1.0 + tl.exp(-tl.load(gate_ptr + t * stride_gate)))
        acc += shared
    tl.store(out_ptr + t * n + c, acc, mask=c < n)


def mix(
    results: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    *,
    places: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    shared: Shared | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the weighted sum of each row's experts, f32 (T, n), and of the shared one.

    results (pairs, n) f32, f16 or bf16: row t's expert j is pair t n_used + j. It lies at
    places[t, j], int32 (T, n_used), if these are given. bias f32 (E, n): added to an expert's
    output.
    """
    (n_rows, n_used), n, device = chosen.shape, results.shape[1], results.device
    check("results", results, TYPES, (n_rows * n_used, n), device)
    check("chosen", chosen, torch.int32, (n_rows, n_used), device)
    check("weights", weights, torch.float32, (n_rows, n_used), device)
    if places is not None:
        check("places", places, torch.int32, (n_rows, n_used), device)
    if bias is not None:
        check("bias", bias, torch.float32, (None, n), device)
    if shared is not None:
        check("shared.out", shared.out, TYPES, (n_rows, n), device, strided=True)
    out = torch.empty(n_rows, n, dtype=torch.float32, device=device) if out is None else out
    check("out", out, torch.float32, (n_rows, n), device)
    of_shared, gate = (None, None) if shared is None else shared
    _mix_kernel[(triton.cdiv(n, 512), n_rows)](
        results, places, chosen, weights, bias, of_shared, gate, out, n, n_used,
        0 if of_shared is None else of_shared.stride(0), 0 if gate is None else gate.stride(0),
        PLACES=places is not None, BIAS=bias is not None, SHARED=shared is not None,
        GATED=gate is not None, BLOCK=512, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _add_biases_kernel(
    rows_ptr, chosen_ptr, bias_ptr, n, stride_rows, BLOCK: tl.constexpr
):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(chosen_ptr + pair).to(tl.int64)
    at = rows_ptr + pair * stride_rows + c
    rows = tl.load(at, mask=c < n, other=0).to(tl.float32)
    rows += tl.load(bias_ptr + expert * n + c, mask=c < n, other=0)
    tl.store(at, rows.to(rows_ptr.dtype.element_ty), mask=c < n)


def add_biases(rows: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor) -> None:
    """Adds to each pair's row, (pairs, n), the bias f32 (E, n) of its expert, in place.

    chosen: int32 (pairs,), the expert of each row.
    """
    (n_pair, n), device = rows.shape, rows.device
    check("rows", rows, TYPES, (n_pair, n), device, strided=True)
    check("chosen", chosen, torch.int32, (n_pair,), device)
    check("bias", bias, torch.float32, (None, n), device)
    _add_biases_kernel[(triton.cdiv(n, 512), n_pair)](
        rows, chosen, bias, n, rows.stride(0), BLOCK=512, num_warps=4
    )
