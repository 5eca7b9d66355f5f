"""The cache of a window layer: what it attends to, what memory it takes, how far it goes back."""

import numpy as np
import pytest

from sparsekv_cli.cache.attend import attend_causal
from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.cache.spec import N_SPARE, N_STEPS, AttnInput, LayerSpec, window_rows
from sparsekv_cli.cache.window import WindowCache

WINDOW, N_HEAD, N_KV, D = 40, 4, 2, 16
CAPACITY = window_rows(WINDOW)
ROWS = np.random.default_rng(0).standard_normal((3, N_HEAD, 2000, D)).astype(np.float32)


def spec_of(cache_type: str = "f16") -> LayerSpec:
    return LayerSpec(
        0, 1, N_HEAD, N_KV, D, D, 1, cache_type_k=cache_type, cache_type_v=cache_type,
        kind="window", window=WINDOW,
    )  # fmt: skip


def rows_at(start: int, stop: int) -> AttnInput:
    q, k, v = ROWS[:, :, start:stop].copy()
    return AttnInput(q, k[:N_KV], v[:N_KV], q, k[:N_KV], start)


def prefill(cache, start: int, stop: int, chunk: int = 64) -> np.ndarray:
    out = []
    for first in range(start, stop, chunk):
        x = rows_at(first, min(stop, first + chunk))
        out.append(attend_causal(x.q, cache.extend(x), cache.spec))
    cache.finish_prefill()
    return np.concatenate(out, axis=1)


def decode(cache, start: int, stop: int) -> np.ndarray:
    return np.stack([cache.decode(rows_at(pos, pos + 1)).copy() for pos in range(start, stop)])


def all_rows(start: int, stop: int, cache_type: str = "f16") -> np.ndarray:
    """What steps give that have all rows and look at the window's."""
    cache = DenseCache(spec_of(cache_type))
    prefill(cache, 0, start)
    return decode(cache, start, stop)


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_it_attends_to_the_window_and_takes_its_memory(cache_type):
    cache, dense = WindowCache(spec_of(cache_type)), DenseCache(spec_of(cache_type))
    for each in (cache, dense):
        each.reserve(1200)
    np.testing.assert_allclose(prefill(cache, 0, 500), prefill(dense, 0, 500), atol=1e-6)
    np.testing.assert_array_equal(decode(cache, 500, 1000), decode(dense, 500, 1000))
    np.testing.assert_allclose(prefill(cache, 1000, 1200), prefill(dense, 1000, 1200), atol=1e-6)
    assert cache.n == dense.n == 1200
    assert cache.memory().host == dense.memory().host * CAPACITY // 1200
    assert set(cache.counters()) == {"bytes_read"}


def test_a_short_sequence_takes_no_more_than_its_own_rows():
    cache = WindowCache(spec_of())
    cache.reserve(10)
    prefill(cache, 0, 10)
    assert cache.store.capacity == 10


@pytest.mark.parametrize("n_steps", [5, N_SPARE + N_STEPS + WINDOW, 900])
def test_it_goes_back_to_the_end_of_a_prefill(n_steps):
    cache = WindowCache(spec_of())
    prefill(cache, 0, 300)
    first = decode(cache, 300, 300 + n_steps)
    memory = cache.memory().host
    assert cache.truncate(300) == 300
    np.testing.assert_array_equal(decode(cache, 300, 300 + n_steps), first)
    assert cache.memory().host == memory
    assert memory <= 2 * cache.store.row_bytes * N_KV * CAPACITY


@pytest.mark.parametrize("n_back", [1, WINDOW, N_SPARE])
def test_it_goes_back_by_some_rows_at_any_time(n_back):
    for n in range(700, 700 + N_STEPS + 3, 13):
        cache = WindowCache(spec_of())
        prefill(cache, 0, 400)
        decode(cache, 400, n)
        assert cache.truncate(n - n_back) == n - n_back
        steps = slice(n - n_back, n - n_back + 3)
        found = decode(cache, steps.start, steps.stop)
        np.testing.assert_array_equal(found, all_rows(steps.start, steps.stop))


def test_it_goes_back_to_where_the_last_prefill_began():
    cache = WindowCache(spec_of())
    prefill(cache, 0, 300)
    decode(cache, 300, 400)
    prefill(cache, 400, 900)
    decode(cache, 900, 1300)
    assert (cache.reach(1250), cache.reach(1000), cache.reach(899), cache.reach(399)) == (
        1250, 900, 400, 0,
    )  # fmt: skip
    assert cache.memory().host <= 3 * cache.store.row_bytes * N_KV * CAPACITY
    for n in (900, 400):
        assert cache.truncate(n) == n
        np.testing.assert_array_equal(decode(cache, n, n + 10), all_rows(n, n + 10))


def test_where_rows_are_gone_nothing_is_forgotten():
    cache = WindowCache(spec_of())
    prefill(cache, 0, 400)
    assert cache.truncate(100) == 0 and cache.n == 400
    np.testing.assert_array_equal(decode(cache, 400, 410), all_rows(400, 410))


def test_a_prefill_that_fails_can_be_taken_back():
    cache = WindowCache(spec_of())
    prefill(cache, 0, 300)
    decode(cache, 300, 800)
    for first in range(800, 1200, 64):
        cache.extend(rows_at(first, first + 64))
    assert cache.truncate(800) == 800
    np.testing.assert_array_equal(decode(cache, 800, 810), all_rows(800, 810))
