"""Tokens that a device chooses against those of the host's chain, at the same random numbers."""

import numpy as np
import pytest
import torch

from sparsekv_cli.device.choosing import choose, drawing_of, settings_of
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
def test_device_and_host_draw_the_same(n_vocab, device):
    """Each sequence of a batch by its own chain and seed, and each alone."""
    params = [SamplingParams(**chain, seed=3 + i) for i, chain in enumerate(CHAINS.values())]
    hosts, samplers = ([make_sampler(each) for each in params] for _ in range(2))
    together = drawing_of(sampler.chain for sampler in samplers)
    rng, found = np.random.default_rng(0), [set() for _ in params]
    for step in range(100):
        logits = rng.normal(0, 1 + 2 * (step % 3), (len(params), n_vocab)).astype(np.float32)
        for row in logits:
            row[rng.integers(n_vocab, size=7)] = row.max() - step % 3  # several are equal
        given = torch.from_numpy(logits).to(device)
        settings = [settings_of(sampler) for sampler in samplers]
        assert settings == [settings_of(sampler) for sampler in samplers], "drawn once a token"
        numbers = torch.tensor(settings, dtype=torch.float64, device=device)
        chosen = choose(given, numbers, together)
        for b, (sampler, host) in enumerate(zip(samplers, hosts, strict=True)):
            row = slice(b, b + 1)
            alone = choose(given[row], numbers[row], drawing_of([sampler.chain]))
            assert torch.equal(alone[0], chosen[b])
            assert chosen[b].tolist() == [host(logits[b], []), logits[b].max()]
            sampler.drawn()
            found[b].add(int(chosen[b, 0]))
    assert min(map(len, found)) > 30


@pytest.mark.parametrize(
    "options",
    [
        {"repeat_penalty": 1.1}, {"logit_bias": {3: 1.0}}, {"typ_p": 0.9}, {"dynatemp_range": 0.2},
        {"temp": 0.0, "dynatemp_range": 0.2}, {"temp": 0.0, "xtc_probability": 0.5},
        {"samplers": ("temperature", "top_k")},
    ],
    ids=str,
)  # fmt: skip
def test_other_chains_are_the_hosts(options):
    assert not isinstance(make_sampler(SamplingParams(**options)), PlainSampler)
