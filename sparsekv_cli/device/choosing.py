"""The next token, chosen on the device: launches of torch without any read by the host."""

from __future__ import annotations

import math

import torch

from sparsekv_cli.sampling.chain import FIRST_SORTED
from sparsekv_cli.sampling.plain import PlainChain


def choose(logits: torch.Tensor, chain: PlainChain, chance: torch.Tensor) -> torch.Tensor:
    """The token that sampling/chain.py chooses, and the highest logit, which tells damage.

    logits f32 (V,); chance f64 (1,), uniform in [0, 1). Returns f64 (2,).
    """
    highest = logits.max()
    token = logits.argmax()[None] if chain.is_greedy else _drawn(logits, highest, chain, chance)
    return torch.cat([token.double(), highest.double()[None]])


def _drawn(
    logits: torch.Tensor, highest: torch.Tensor, chain: PlainChain, chance: torch.Tensor
) -> torch.Tensor:
    """A token of what the chain keeps: i64 (1,)."""
    if chain.top_k == 0 and chain.top_p == 1:
        return _index(_powers(logits, highest, chain), chance)
    values, ids = logits.sort(descending=True, stable=True)
    if chain.top_k > 0:
        values, ids = values[: chain.top_k], ids[: chain.top_k]
    powers, rank = _powers(values, highest, chain), torch.arange(len(ids), device=ids.device)
    is_kept = rank >= 0
    if chain.top_p < 1:
        mass = torch.exp(values - highest)
        is_kept = rank <= (torch.cumsum(mass / mass.sum(), 0) < chain.top_p).sum()
        powers = torch.where(is_kept, powers, 0.0)
    # The id at a rank without indexing, which could leave the list in a step of garbled numbers.
    token = torch.where(rank == _index(powers, chance), ids, 0).sum(0, keepdim=True)
    if chain.top_k > 0 or len(ids) <= FIRST_SORTED:
        return token
    # So many tokens are left in the order of their ids.
    in_order = _index(torch.zeros_like(powers).scatter_(0, ids, powers), chance)
    return torch.where(is_kept[FIRST_SORTED], in_order, token)


def _powers(values: torch.Tensor, highest: torch.Tensor, chain: PlainChain) -> torch.Tensor:
    """Proportional to the probabilities of the logits ``values``: min_p and the temperature."""
    powers = torch.exp(values / chain.temp - highest / chain.temp)
    if chain.min_p == 0:
        return powers
    return torch.where(values >= highest + math.log(chain.min_p), powers, 0.0)


def _index(powers: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """Where ``chance`` is in the distribution powers / sum(powers): i64 (1,)."""
    total = powers.cumsum(0, dtype=torch.float64)
    at, last_possible = (total <= chance * total[-1]).sum(), (total < total[-1]).sum()
    return torch.minimum(at, last_possible)[None]
