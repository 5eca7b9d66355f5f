"""The contracts of a layer's cache: each member is of one of them, and a cache can be asked."""

from __future__ import annotations

import inspect

import pytest

from sparsekv_cli.cache import contracts
from sparsekv_cli.cache.layer import BoundedCache, DenseCache, LayerCache
from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.cache.split_store import SplitStore
from sparsekv_cli.cache.state import StateCache
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.cache.window import WindowCache
from sparsekv_cli.device.cache import DeviceCache
from sparsekv_cli.device.host import HostCache, HostWorker
from sparsekv_cli.device.layers.store import DeviceStore
from sparsekv_cli.methods import METHODS, method_class

CONTRACTS = [
    each for name, each in vars(contracts).items() if name.endswith("Contract")
]  # in the order of the file


def members(of: type) -> set[str]:
    """Public members that the class itself defines or declares."""
    names = {*vars(of), *inspect.get_annotations(of)}
    return {name for name in names if not name.startswith("_")}


def test_a_member_belongs_to_one_contract():
    assert [each.__name__.removesuffix("Contract") for each in CONTRACTS] == [
        "Store", "Prefill", "Step", "Ledger", "Undo",
    ]  # fmt: skip
    of_contracts = [members(each) for each in CONTRACTS]
    assert all(of_contracts)
    assert sum(map(len, of_contracts)) == len(set().union(*of_contracts))


def test_a_cache_has_the_contracts_and_only_helpers_besides():
    known = set().union(*map(members, CONTRACTS))
    assert {name for name in members(LayerCache) if name not in known} == {"attend_all"}
    for each in (DenseCache, BoundedCache, StateCache, WindowCache, DeviceCache, HostCache):
        assert all(issubclass(each, contract) for contract in CONTRACTS)


def test_only_dense_caches_attend_together_and_only_plain_stores_share_rows():
    assert DenseCache.attends_together and not LayerCache.attends_together
    assert KVStore.can_share_rows and not SplitStore.can_share_rows
    assert not DeviceStore.can_share_rows
    for name in METHODS:
        module = inspect.getmodule(method_class(name))
        found = [
            each
            for each in vars(module).values()
            if inspect.isclass(each) and issubclass(each, LayerCache)
            if each.__module__ == module.__name__
        ]
        assert not any(each.attends_together for each in found), name


@pytest.fixture
def spec() -> LayerSpec:
    return LayerSpec(
        layer=0, n_layer=1, n_head=4, n_head_kv=2, head_dim=16, value_dim=16, n_threads=1
    )


def test_a_host_cache_has_the_rows_and_counts_of_its_cache(spec):
    import torch

    inner = DenseCache(spec)
    inner.ledger.step(8, 8, 8, 64, False)
    cache = HostCache(inner, HostWorker(torch.device("cpu")))
    assert cache.store is inner.store and cache.ledger is inner.ledger
    assert cache.counters() == inner.counters() and cache.counters()["bytes_read"] == 64
    cache.store = other = KVStore(spec)
    assert inner.store is other
    undo = cache.save()
    other.n = 1
    cache.take_back(undo)
    assert cache.n == inner.n == 0
