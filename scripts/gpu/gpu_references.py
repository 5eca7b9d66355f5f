"""What the operators of scripts/gpu/bench must give at the timed shapes, in plain torch."""

from typing import Any

import torch

SAME = 1e-2  # of a head's norm: queries, keys and values are rounded at different places
HEADS = 0.9  # that must be the same: where two scores are close, roundings choose between them


def attend_ref(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
    is_chosen: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """q (B, H, d) over k, v f16 (B, G, n, d) -> f32 (B, H, d), in f32, a kv head at a time.

    is_chosen: bool (B, G or H, n), the rows that are attended to; None: all.
    """
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q, dtype=torch.float32)
    for g in range(k.shape[1]):
        heads = slice(g * group, (g + 1) * group)
        scores = q[:, heads].float() @ k[:, g].float().transpose(1, 2) * scale
        if is_chosen is not None:
            lists = slice(g, g + 1) if is_chosen.shape[1] == k.shape[1] else heads
            scores = scores.masked_fill(~is_chosen[:, lists], -torch.inf)
        out[:, heads] = scores.softmax(-1) @ v[:, g].float()
    return out


def best_rows_ref(scores: torch.Tensor, budget: int, n_first: int, n_last: int) -> torch.Tensor:
    """The first and last rows and the best between, ``budget`` + n_first in all: bool (B, H, n)."""
    forced = scores.clone()
    forced[..., :n_first] = forced[..., scores.shape[2] - n_last :] = torch.inf
    best = forced.topk(min(budget + n_first, scores.shape[2]), dim=2).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(2, best, True)


def page_rows_ref(
    q: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor, scale: float, n: int, budget: int,
    page: int, n_sinks: int,
) -> torch.Tensor:  # fmt: skip
    """Quest's rows: the best pages, sinks and the current page: bool (B, G, n).

    The best pages have the largest mean of the group's softmax.
    """
    grouped = q.float().unflatten(1, (hi.shape[1], -1))
    end = (n - 1) // page
    bounds = grouped.clamp(min=0) @ hi[:, :, :end].float().transpose(2, 3)
    bounds += grouped.clamp(max=0) @ lo[:, :, :end].float().transpose(2, 3)
    pooled = (scale * bounds).softmax(-1).mean(2)
    best = pooled.topk(min((budget - 1) // page, end), dim=2).indices
    is_page = torch.zeros_like(pooled, dtype=torch.bool).scatter_(2, best, True)
    is_row = torch.ones(*pooled.shape[:2], n, dtype=torch.bool, device=q.device)
    is_row[..., : end * page] = is_page.repeat_interleave(page, dim=2)
    is_row[..., :n_sinks] = True
    return is_row


def compare(found: Any, expected: torch.Tensor) -> tuple[float, bool]:
    """The median of the heads' errors, relative to their norms, and whether that is the same."""
    error = (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(error.median()), bool((error < SAME).float().mean() >= HEADS)
