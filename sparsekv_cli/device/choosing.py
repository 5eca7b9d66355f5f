"""The next tokens, chosen on the device: launches of torch without any read by the host.

The settings of the sequences' samplers lie in device memory. So a captured step also serves others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from sparsekv_cli.sampling.chain import FIRST_SORTED
from sparsekv_cli.sampling.plain import PlainChain, PlainSampler


class Settings(NamedTuple):
    """The settings of a sequence's samplers and its random number; or of B, tensors f64 (B, 1).

    least: the largest distance to the highest logit at which a logit stays. chance: uniform in
    [0, 1). The defaults choose greedily. An infinite value switches a sampler off.
    """

    is_greedy: Any = 1.0
    top_k: Any = math.inf
    top_p: Any = math.inf
    least: Any = -math.inf
    temp: Any = 1.0
    chance: Any = 0.0


def settings_of(sampler: PlainSampler | None) -> Settings:
    """Returns the settings that choose a sampler's next token. None: they choose the best token."""
    if sampler is None or sampler.chain.is_greedy:
        return Settings()
    chain = sampler.chain
    return Settings(
        0.0,
        chain.top_k or math.inf,
        chain.top_p if chain.top_p < 1 else math.inf,
        math.log(chain.min_p) if chain.min_p > 0 else -math.inf,
        chain.temp,
        sampler.chance(),
    )


class Drawing(NamedTuple):
    """The data that a step's chains need in addition to the highest logits.

    A captured step always does the same.

    sorts: tokens in the order of their logits. by_id: draws among tokens in the order of their ids.
    """

    sorts: bool
    by_id: bool


def drawing_of(chains: Iterable[PlainChain]) -> Drawing:
    random = [chain for chain in chains if not chain.is_greedy]
    return Drawing(
        any(chain.top_k > 0 or chain.top_p < 1 for chain in random),
        any(chain.top_k == 0 for chain in random),
    )


class Choosing(NamedTuple):
    """Where a step's logits go. drawing: None if no token is chosen on the device."""

    drawing: Drawing | None
    downloads: bool  # whether the logits come to the host

    @classmethod
    def of(cls, samplers: Sequence[PlainSampler | None]) -> Choosing:
        chains = [sampler.chain for sampler in samplers if sampler is not None]
        return cls(drawing_of(chains) if chains else None, len(chains) < len(samplers))


def choose(logits: torch.Tensor, settings: torch.Tensor, drawing: Drawing) -> torch.Tensor:
    """Returns the tokens that sampling/chain.py chooses, and the highest logits, which show damage.

    logits f32 (B, V); settings f64 (B, 6), a Settings a row. Returns f64 (B, 2).
    """
    highest, token = logits.amax(1, keepdim=True), logits.argmax(1, keepdim=True)
    if drawing.sorts or drawing.by_id:
        each = Settings(*settings.split(1, dim=1))
        token = torch.where(each.is_greedy > 0, token, _drawn(logits, highest, each, drawing))
    return torch.cat([token.double(), highest.double()], 1)


def _drawn(
    logits: torch.Tensor, highest: torch.Tensor, settings: Settings, drawing: Drawing
) -> torch.Tensor:
    """Returns a token of those that each sequence's samplers keep: i64 (B, 1)."""
    top_k, top_p, chance = settings.top_k, settings.top_p, settings.chance
    if not drawing.sorts:
        return _index(_powers(logits, highest, settings), chance)
    values, ids = logits.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    is_kept = rank < top_k
    mass = torch.where(is_kept, torch.exp(values - highest), 0.0)
    share = torch.cumsum(mass / mass.sum(1, keepdim=True), 1)
    is_kept = is_kept & (rank <= (share < top_p.float()).sum(1, keepdim=True))
    powers = torch.where(is_kept, _powers(values, highest, settings), 0.0)
    # Finds the id at a rank without an index, which could lie outside if numbers are garbled.
    token = torch.where(rank == _index(powers, chance), ids, 0).sum(1, keepdim=True)
    if not drawing.by_id:
        return token
    in_order = _index(torch.zeros_like(powers).scatter_(1, ids, powers), chance)
    # If nothing is sorted, or top_p is off, tokens are in the order of their ids.
    is_by_id = torch.isinf(top_p)
    if logits.shape[1] > FIRST_SORTED:
        is_by_id = is_by_id | is_kept[:, FIRST_SORTED, None]
    return torch.where(torch.isinf(top_k) & is_by_id, in_order, token)


def _powers(values: torch.Tensor, highest: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Returns values proportional to the probabilities of the logits, by min_p and temperature."""
    temp, least = settings.temp.float(), settings.least.float()
    powers = torch.exp(values / temp - highest / temp)
    return torch.where(values >= highest + least, powers, 0.0)


def _index(powers: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """Returns where ``chance`` (B, 1) is in the distributions powers / sum(powers): i64 (B, 1)."""
    total = powers.cumsum(1, dtype=torch.float64)
    whole = total[:, -1:]
    at, last_possible = (total <= chance * whole).sum(1), (total < whole).sum(1)
    return torch.minimum(at, last_possible)[:, None]
