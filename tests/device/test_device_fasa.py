"""FASA on a device against FASA on the host, step by step."""

import numpy as np
import pytest
from side_by_side import GEOMETRIES, SideBySide, assert_devices_agree, watch
from sweeps import sweep

from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.cache.store import padded
from sparsekv_cli.calibration.allocation import even_budgets
from sparsekv_cli.calibration.fasa import SHARES
from sparsekv_cli.kernels.fasa import row_cache as resident
from sparsekv_cli.methods.fasa import FASA


def make(geometry, device, **options) -> SideBySide:
    rng, n_chunk = np.random.default_rng(5), geometry.n_rot // 2
    rank = np.stack([rng.permutation(n_chunk) for _ in range(geometry.n_head_kv)]).astype(np.uint8)
    calibration = {"dom_var": rank, "dom_ca": rank, "tip_budget": even_budgets(SHARES)}
    return SideBySide(geometry, FASA(**options), calibration, device)


def follow(pair: SideBySide, n_steps: int) -> int:
    """n_steps tokens in both; how many rows of how many lists were chosen by one side only."""
    selected = watch(pair.device, "select")
    ties = 0
    for _ in range(n_steps):
        expected, found = pair.decode()
        np.testing.assert_allclose(found, expected, atol=2e-3)
        if pair.host.attended is None:
            continue
        idx, counts = (x[0].cpu().numpy() for x in selected[-1])
        wanted, _ = pair.host.attended
        for h, rows in enumerate(wanted):
            assert counts[h] == len(rows)
            ties += len(set(rows.tolist()) - set(idx[h, : counts[h]].tolist()))
    del pair.device.select  # no longer watched
    return ties


VARIANTS = {
    "c": {},
    "m": {"variant": "m"},
    "share": {"budget": Budget(share=0.3), "n_tip": 3},
    "m share": {"variant": "m", "budget": Budget(share=0.3), "force": "none"},
}


# The interpreter takes half a second a step, so one case is followed for long.
CASES = [(0, "c", 20), (1, "m", 6), (2, "share", 4), (3, "m share", 6), (4, "m", 6), (1, "c", 4)]


@pytest.mark.parametrize(("geometry", "variant", "n_steps"), sweep(CASES, fast=1))
def test_device_and_host_choose_alike(geometry, variant, n_steps, device):
    """Dense at first, sparse from 50 rows on, another prompt, and a rewind to a dense context."""
    options = {"budget": Budget(tokens=50), **VARIANTS[variant]}
    pair = make(GEOMETRIES[geometry], device, **options)
    pair.prefill(48)
    ties = follow(pair, n_steps)
    pair.prefill(70)
    ties += follow(pair, 2)
    for n in (100, 30):
        for cache in (pair.host, pair.device):
            assert cache.truncate(n) == n
        ties += follow(pair, 2)
    assert ties <= 2
    host, found = dict(pair.host.counters()), dict(pair.device.counters())
    if pair.method.variant == "m":  # the host pads its rows, and fetches all of them each time
        rest = GEOMETRIES[geometry].d - pair.device._dom_dims.shape[1]
        d_v = GEOMETRIES[geometry].d_v
        n_fetched = host["bytes_moved"] / (2 * (padded(rest) + padded(d_v)))
        assert n_fetched == pytest.approx(found["rows_hit"] + found["rows_recalled"], rel=0.01)
        assert found["rows_hit"] > found["rows_recalled"] > 0
        assert found["bytes_moved"] == found["rows_recalled"] * 2 * (rest + d_v)
    for name in ("rows_total", "rows_scored", "rows_attended"):
        assert host.get(name, 0) == pytest.approx(found.get(name, 0), rel=0.01), name


def test_a_step_that_was_broken_off_leaves_no_trace(device, monkeypatch):
    """It has given slots to rows that were not fetched, and to a row that becomes another."""
    pairs = [make(GEOMETRIES[1], device, variant="m", budget=Budget(tokens=50)) for _ in range(2)]
    for pair in pairs:
        pair.prefill(100)
        pair.decode()
    broken, whole = pairs
    other = whole.rows(1)  # the same as broken's next rows would be: both have one seed
    broken.rows(1)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(resident, "fetch_rows", interrupt)
        broken.decode_on_device(tuple(x + 1 for x in other), 102)
    for _ in range(3):
        expected, found = whole.decode(), broken.decode()
        np.testing.assert_array_equal(found[1], expected[1])


def interrupt(*_):
    raise KeyboardInterrupt


def test_memory_of_the_variants(device):
    c, m = (make(GEOMETRIES[1], device, budget=Budget(tokens=50), variant=v) for v in "cm")
    for pair in (c, m):
        pair.prefill(300)
        follow(pair, 1)
    capacity, room = c.device.store.capacity, m.device._dom.shape[3]
    dominant, n_slot = 2 * 3 * 16, 3 * 50
    assert c.device.memory().device == 2 * 3 * 128 * capacity
    assert c.device.memory().index == dominant * c.device._dom.shape[3]
    memory = m.device.memory()
    assert memory.device == dominant * room + 2 * 3 * 128 * n_slot
    assert memory.host == 2 * 3 * (48 + 64) * m.device._host.capacity


def test_host_and_device_agree(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = {"dense_layers": "0", "variant": "m", "budget": "30"}
    assert_devices_agree(tmp_path, "fasa", options, n_prompt=60, n_steps=1)
