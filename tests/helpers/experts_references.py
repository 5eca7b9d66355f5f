"""Numpy forms of the kernels of experts, which tests compare with them."""

from __future__ import annotations

import numpy as np

from sparsekv_cli.cpu.experts.routing import ALL_GROUPS, LEAST_SUM, NO_BIAS


def experts_ref(
    normed, router, gates, ups, downs, n_used, normalised, bias=NO_BIAS, given=None, scale=None
) -> np.ndarray:
    """numpy reference of the chosen experts' sum: normed (B, n_embd), f64 of the same shape.

    given: the experts' inputs; None: normed. scale (experts,): factors of their results; None: 1.
    router (experts, n_embd); gates, ups (experts, n_ff, n_embd); downs (experts, n_embd, n_ff).
    """
    chosen, weights = route_ref(normed @ router.T, bias, n_used, normalised, len(bias) > 0)
    out = np.zeros(normed.shape)
    weights = weights if scale is None else weights * scale[chosen]
    for b, row in enumerate(normed if given is None else given):
        for e, weight in zip(chosen[b], weights[b], strict=True):
            gate = gates[e] @ row
            out[b] += weight * (downs[e] @ (gate / (1 + np.exp(-gate)) * (ups[e] @ row)))
    return out


def route_ref(
    logits: np.ndarray,
    bias: np.ndarray,
    n_used: int,
    normalised: bool,
    sigmoid: bool = False,
    groups: tuple[int, int] = ALL_GROUPS,
) -> tuple[np.ndarray, np.ndarray]:
    """numpy reference: returns each row's experts, best first (T, used), and their weights."""
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    shares = shifted / shifted.sum(1, keepdims=True)
    if sigmoid:
        shares = 1 / (1 + np.exp(-logits))
    order = -(shares + bias) if len(bias) else -shares
    of_group = np.sort(order.reshape(len(order), groups[0], -1), axis=2)[..., :2].sum(2)
    worse = np.argsort(of_group, axis=1, kind="stable")[:, groups[1] :]
    np.put_along_axis(order.reshape(len(order), groups[0], -1), worse[..., None], np.inf, axis=1)
    chosen = np.argsort(order, axis=1, kind="stable")[:, :n_used]
    weights = np.take_along_axis(shares, chosen, axis=1)
    if normalised:
        weights = weights / np.maximum(weights.sum(1, keepdims=True), LEAST_SUM)
    return chosen, weights


def group_ref(chosen: np.ndarray, n_expert: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """numpy reference of ``group_rows``: offsets, rows, places."""
    order = np.argsort(chosen.reshape(-1), kind="stable")
    places = np.empty(chosen.size, np.int64)
    places[order] = np.arange(chosen.size)
    offsets = np.searchsorted(chosen.reshape(-1)[order], np.arange(n_expert + 1))
    return offsets, order // chosen.shape[1], places.reshape(chosen.shape)
