"""Tokens that a device chooses against those of the host's chain, at the same random numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsekv_cli.device.choosing import choose
from sparsekv_cli.sampling.chain import make_sampler
from sparsekv_cli.sampling.params import SamplingParams
from sparsekv_cli.sampling.plain import PlainSampler

CHAINS = {
    "greedy": {"temp": 0.0},
    "defaults": {},
    "all off": {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "temperature": {"temp": 1.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "top-k": {"top_k": 7, "top_p": 1.0, "min_p": 0.0},
    "top-k of all": {"top_k": 2000, "top_p": 0.99, "min_p": 0.0, "temp": 3.0},
    "top-p of few": {"top_k": 0, "top_p": 0.5, "min_p": 0.0},
    "top-p of many": {"top_k": 0, "top_p": 0.97, "min_p": 0.0, "temp": 2.0},
    "min-p": {"top_k": 0, "top_p": 1.0, "min_p": 0.02},
    "top-p, min-p": {"top_k": 0, "top_p": 0.9, "min_p": 0.1, "temp": 0.6},
}


@pytest.mark.parametrize("n_vocab", [200, 1000])
@pytest.mark.parametrize("name", CHAINS)
def test_device_and_host_draw_the_same(name, n_vocab, device):
    params = SamplingParams(**CHAINS[name], seed=3)
    host, on_device = make_sampler(params), make_sampler(params)
    assert isinstance(on_device, PlainSampler)
    rng, found = np.random.default_rng(0), set()
    for step in range(100):
        logits = rng.normal(0, 1 + 2 * (step % 3), n_vocab).astype(np.float32)
        logits[rng.integers(n_vocab, size=7)] = logits.max() - step % 3  # several are equal
        chance = torch.tensor([on_device.chance()], dtype=torch.float64, device=device)
        given = torch.from_numpy(logits).to(device)
        token, highest = choose(given, on_device.chain, chance).tolist()
        assert token == host(logits, []) and highest == logits.max()
        found.add(token)
    assert len(found) > 30


@pytest.mark.parametrize(
    "options",
    [
        {"repeat_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"typ_p": 0.9},
        {"dynatemp_range": 0.2},
        {"temp": 0.0, "dynatemp_range": 0.2},
        {"temp": 0.0, "xtc_probability": 0.5},
        {"samplers": ("temperature", "top_k")},
    ],
    ids=str,
)
def test_other_chains_are_the_hosts(options):
    assert not isinstance(make_sampler(SamplingParams(**options)), PlainSampler)
