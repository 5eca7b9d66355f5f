"""Sequences that read the first rows in the same memory: equal rows, equal bits, no trace."""

import numpy as np
import pytest
from tiny_sequences import tokens

from sparsekv_cli.cache import kinds
from sparsekv_cli.cache.kinds import bytes_to_come
from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.system import memory_file
from sparsekv_cli.system.memory_file import PAGE, MemoryFile, Part

N = 1100  # rows


def cache_of(cache_type: str = "f16", n: int = 0, seed: int = 0, d: int = 64) -> DenseCache:
    types = {"cache_type_k": cache_type, "cache_type_v": cache_type}
    cache = DenseCache(LayerSpec(0, 1, 4, 2, d, 48, 1, **types))
    append(cache.store, n, seed)
    return cache


def append(store: KVStore, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    widths = store.k_type.d, store.v_type.d
    k, v = (rng.standard_normal((2, n, d)).astype(np.float32) for d in widths)
    store.append(k, v)


def rows_of(store: KVStore) -> list[np.ndarray]:
    return [store.keys().copy(), store.values().copy()]


def assert_rows(store: KVStore, expected: list[np.ndarray]) -> None:
    for found, rows in zip(rows_of(store), expected, strict=True):
        np.testing.assert_array_equal(found, rows)


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "q4_0"])
def test_a_store_that_changes_changes_no_other(cache_type):
    given, others = cache_of(cache_type, N + 30), [cache_of(cache_type) for _ in range(3)]
    expected = rows_of(given.store)
    for other in others:
        kinds.share_prefix([given], [other], N, N + 5)
        assert_rows(other.store, [rows[:, :N] for rows in expected])
        assert other.store.prefix is given.store.prefix and other.store.n_prefix >= 1024
    assert_rows(given.store, expected)
    changed, grown, _ = others
    changed.truncate(700)  # within the prefix
    append(changed.store, 800, 1)  # more than there is room for
    append(grown.store, 400, 2)
    given.truncate(3)
    append(given.store, 2000, 3)
    fresh = cache_of(cache_type, N + 30)
    for n, seed, store in ((700, 1, changed.store), (N, 2, grown.store), (3, 3, given.store)):
        fresh.truncate(n)
        append(fresh.store, store.n - n, seed)
        assert_rows(store, rows_of(fresh.store))
        fresh = cache_of(cache_type, N + 30)
    assert_rows(others[2].store, [rows[:, :N] for rows in expected])


def test_shared_rows_count_once():
    given, others = cache_of(n=N), [cache_of() for _ in range(3)]
    alone = given.store.nbytes
    for other in others:
        kinds.share_prefix([given], [other], N, N)
    held = sum(cache.memory().host for cache in (given, *others))
    assert alone <= held < 1.25 * alone
    assert given.spared_bytes > 0.6 * alone
    del others, other
    assert given.spared_bytes == 0 and given.memory().host >= alone


def test_few_rows_are_copied():
    given, other = cache_of(n=600), cache_of()
    kinds.share_prefix([given], [other], 512, 700)
    assert other.store.prefix is None and other.n == 512
    assert_rows(other.store, [rows[:, :512] for rows in rows_of(given.store)])


def test_rows_of_which_so_many_fill_no_page():
    """2048 rows of 86 bytes are the least that fill whole pages."""
    given, other = cache_of("q8_0", N, d=80), cache_of("q8_0", d=80)
    kinds.share_prefix([given], [other], N, N)
    assert other.store.prefix is None
    assert_rows(other.store, rows_of(given.store))


def test_shared_rows_are_not_asked_for_again():
    given, other = cache_of(n=N), cache_of()
    kinds.share_prefix([given], [other], N, N)
    assert bytes_to_come([other], N) == 0


@pytest.mark.parametrize(
    ("of_donor", "name"),
    [("full", name) for name in ("full", "topk", "quest", "lfps", "snapkv", "freekv")]
    + [("lfps", "lfps")],
)
def test_texts_have_the_bits_of_sequences_that_share_nothing(of_donor, name, sequence_of):
    donor = sequence_of(
        of_donor, ctx_size=2048, budget=None if of_donor == "full" else "64", chunk=128
    )
    engine, model = donor.engine, donor.model
    budget = {} if name == "full" else {"budget": "64"}
    attention = model.attention_of(build_method(name, {}, **budget))
    ids, steps = tokens(1300), tokens(16, 5)
    donor.prefill(ids[:1200])
    sharing, alone = ([model.sequence(attention) for _ in range(2)] for _ in range(2))
    for i, (one, other) in enumerate(zip(sharing, alone, strict=True)):
        kinds.share_prefix(donor.caches, one.caches, 1024, 1400)
        one.tokens = ids[:1024]
        for each in (one, other):
            each.prefill((ids[:1024] + tokens(216 + 20 * i, 3))[len(each.tokens) :])
    donor.decode(7)
    for token in steps:
        together = engine.decode([donor, *sharing], [[token]] * 3)[1:]
        for found, other in zip(together, alone, strict=True):
            np.testing.assert_array_equal(found[0], other.decode(token))
    donor.rewind(1100)
    donor.prefill(tokens(50, 9))
    np.testing.assert_array_equal(sharing[1].decode(9), alone[1].decode(9))


def test_pages_of_a_block_are_its_own_once_written():
    file = MemoryFile(2 * PAGE)
    file.write(0, np.arange(2 * PAGE, dtype=np.uint8))
    first, second = (file.block(3 * PAGE, [Part(PAGE, 0, 2 * PAGE)]) for _ in range(2))
    del file
    first[PAGE] = 9
    assert first[PAGE] == 9 and second[PAGE] == 0 and second[PAGE + 5] == 5
    assert not second[:PAGE].any()


def test_no_memory_is_a_line(monkeypatch):
    monkeypatch.setattr("os.pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
    with pytest.raises(SparseKVError, match=r"no memory for rows that sequences share: .*No space"):
        kinds.share_prefix([cache_of(n=N)], [cache_of()], N, N)


def test_a_system_that_refuses_files_in_memory(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", refuse)
    memory_file.is_available.cache_clear()
    given, other = cache_of(n=N), cache_of()
    kinds.share_prefix([given], [other], N, N)
    memory_file.is_available.cache_clear()
    assert other.store.prefix is None
    assert_rows(other.store, rows_of(given.store))
