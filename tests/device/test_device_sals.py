"""SALS on a device against SALS on the host, step by step."""

import numpy as np
import pytest
from opened import open_sequence
from side_by_side import GEOMETRIES, SideBySide, assert_devices_agree, watch
from sweeps import sweep
from tiny_models import make_model

from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.calibration.allocation import even_budgets
from sparsekv_cli.calibration.sals import SHARES
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.sals import SALS
from sparsekv_cli.settings.config import SessionConfig

SMALL = {"sinks": 4, "window": 20, "budget": Budget(tokens=24)}  # all rows up to 48
TIE = 0.06  # of an importance: what products of bytes on the host make of it
MOST_SWAPPED = 4  # latents of a step: two in place of two others


def make(geometry, device, **options) -> SideBySide:
    rng, size = np.random.default_rng(5), geometry.n_head_kv * geometry.d
    vectors = np.linalg.qr(rng.standard_normal((size, size)))[0].astype(np.float32)
    calibration = {"vectors_diag": vectors, "vectors_pca": vectors}
    calibration["rank_budget"] = even_budgets(SHARES)
    calibration["weights"] = rng.uniform(0.5, 2, size).astype(np.float32)
    return SideBySide(geometry, SALS(**{**SMALL, **options}), calibration, device)


def follow(pair: SideBySide, n_steps: int) -> int:
    """n_steps tokens in both; in how many of them rows of nearly equal importance were swapped."""
    importances, choices = (watch(pair.device, name) for name in ("_importance", "_choose"))
    swaps = 0
    for _ in range(n_steps):
        expected, found = pair.decode()
        if pair.host.attended is None:
            assert not choices
        elif len(at := differing_latents(pair, importances[-1], *choices[-1])):
            assert np.ptp(at) <= TIE * np.abs(at).max() and len(at) <= MOST_SWAPPED
            swaps += 1
            continue
        np.testing.assert_allclose(found, expected, atol=2e-3)
    for name in ("_importance", "_choose"):
        delattr(pair.device, name)  # no longer watched
    return swaps


def differing_latents(pair: SideBySide, importance, idx, counts) -> np.ndarray:
    """The importance, as the device has it, of the latents that one side only chose."""
    chosen = idx[0, 0, : int(counts[0, 0])].cpu().numpy()
    first, start = pair.device._first, pair.device._exact_from(pair.host.n)
    rows = pair.host.attended[0][0]
    wanted = rows[(rows >= first) & (rows < start)] - first
    assert len(chosen) == len(wanted)
    differing = sorted(set(wanted.tolist()) ^ set(chosen.tolist()))
    return importance[0, 0].cpu().numpy()[differing]


VARIANTS = {
    "tuned": {},
    "paper": {"preset": "paper", "basis": "pca", "score": "paper", "exact_sinks": False},
    "2 bits": {"bits": 2, "budget": Budget(share=0.3)},
    "16 bits": {"bits": 16, "sinks": 0},
}
# The interpreter takes a second a step, so one case is followed for long.
CASES = [(0, "tuned", 14), (1, "tuned", 3), (2, "2 bits", 3), (3, "16 bits", 3), (4, "paper", 3)]


@pytest.mark.parametrize(("geometry", "variant", "n_steps"), sweep(CASES, fast=1))
def test_device_and_host_choose_alike(geometry, variant, n_steps, device):
    """Whole at first, as latents from 49 rows on, another prompt, and rewinds within what the ring
    holds, and beyond it to the end of the prompt."""
    pair = make(GEOMETRIES[geometry], device, **VARIANTS[variant])
    pair.prefill(46)
    swaps = follow(pair, n_steps)
    pair.prefill(90)
    end = pair.host.n
    swaps += follow(pair, 5)
    total = n_steps + 5
    for n in (pair.host.n - 3, end):
        for cache in (pair.host, pair.device):
            assert cache.truncate(n) == n
        swaps += follow(pair, 2)
        total += 2
    assert swaps <= total * 2 // 3
    host, found = pair.host.counters(), pair.device.counters()
    for name in ("rows_total", "rows_scored", "rows_attended"):
        assert host[name] == found[name], name
    assert 0 < host["rows_reconstructed"] <= found["rows_reconstructed"]  # it keeps some rebuilt


def test_old_rows_have_one_copy(device):
    """Latents and packed values, and what the ring holds; K and V are gone."""
    pair = make(GEOMETRIES[1], device)
    pair.prefill(200)
    follow(pair, 1)
    cache = pair.device
    assert cache.store.nbytes == 0
    capacity = cache._latents.shape[1]
    exact = 2 * 3 * (4 + 20 + 16) * (64 + 64)  # and a copy of them as they were after the prompt
    assert cache.memory().device == capacity * (2 * 48 + 3 * 40) + 2 * exact
    for n in (3, 100):
        assert cache.truncate(n) == 0 and cache.n == 201


@pytest.mark.parametrize("n_prompt", [90, 44])
def test_back_to_the_end_of_the_prompt(n_prompt, device):
    """Of 44 rows, none of which is a latent yet: the same bits as the first time."""
    pair = make(GEOMETRIES[1], device)
    pair.prefill(n_prompt)
    rows = [pair.rows(1) for _ in range(12)]
    first = [pair.decode_on_device(row, n) for n, row in enumerate(rows, n_prompt + 1)]
    assert pair.device.truncate(n_prompt) == n_prompt == pair.device.n
    again = [pair.decode_on_device(row, n) for n, row in enumerate(rows[:6], n_prompt + 1)]
    np.testing.assert_array_equal(again, first[:6])


def test_host_and_device_agree(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = {"dense_layers": "0", "sinks": "4", "window": "16", "budget": "30"}
    # Where they swap a row of a tiny model, its logits move by some hundredths.
    assert_devices_agree(tmp_path, "sals", options, n_prompt=60, n_steps=1, atol=0.2)


def test_sequences_share_the_bases_of_a_layer(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_model(tmp_path / "m.gguf", n_ctx=512, n_embd=64, n_ff=64, n_layer=3, head_dim=32)
    config = SessionConfig(threads=1, device="cuda", prefill_dtype="f32")
    sequence = open_sequence(path, build_method("sals", {"dense_layers": "0"}), config)
    sequence.prefill([5, 6, 7])
    first = sequence.caches
    sequence.reset()
    sequence.prefill([5, 6])
    assert sequence.caches[1] is not first[1]
    for layer in range(1, sequence.model.hparams.n_layer):
        assert sequence.caches[layer]._basis is first[layer]._basis
    assert first[2]._basis is not first[1]._basis
