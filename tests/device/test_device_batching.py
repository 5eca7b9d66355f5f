"""Several sequences in one launch a kernel, against each of them alone."""

import numpy as np
import pytest
import torch
from side_by_side import Geometry

from sparsekv_cli.cache.spec import AttnInput, Budget, LayerSpec
from sparsekv_cli.calibration import fasa, sals
from sparsekv_cli.calibration.allocation import even_budgets
from sparsekv_cli.device.batching import Planner, launch_order, lengths_to_plan, prepare_runs
from sparsekv_cli.device.cache import DeviceCache, DeviceInput, StepNumbers, grid_bound
from sparsekv_cli.device.methods import device_cache
from sparsekv_cli.device.methods.full import DeviceDense
from sparsekv_cli.device.streams import join_all
from sparsekv_cli.kernels.attention.arrivals import NONE_ARRIVED, none_arrived
from sparsekv_cli.methods.fasa import FASA
from sparsekv_cli.methods.freekv import FreeKV
from sparsekv_cli.methods.quest import Quest
from sparsekv_cli.methods.sals import SALS
from sparsekv_cli.methods.streaming import Streaming
from sparsekv_cli.methods.topk import TopK

BUDGET = {"budget": Budget(tokens=40)}
Q8 = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
METHODS = {
    "full": None,
    "topk": TopK(**BUDGET),
    "streaming": Streaming(**BUDGET),
    "quest": Quest(**BUDGET, page=8),
    "topk, q8_0": TopK(**BUDGET, **Q8),
    "quest, q8_0": Quest(**BUDGET, page=8, **Q8),
    "fasa": FASA(**BUDGET),
    "fasa-m": FASA(**BUDGET, variant="m"),
    "sals": SALS(sinks=4, window=20, budget=Budget(tokens=24)),
    "freekv": FreeKV(budget=Budget(tokens=64), page=8, sinks=8, window=16),
}
GEOMETRY = Geometry(4, 2, 32, 32, 32)  # the interpreter is slow
LENGTHS = (38, 120, 64)  # the first is dense for a while


def calibration_of(g: Geometry) -> dict[str, np.ndarray]:
    rng, size = np.random.default_rng(5), g.n_head_kv * g.d
    rank = np.stack([rng.permutation(g.d // 2) for _ in range(g.n_head_kv)]).astype(np.uint8)
    vectors = np.linalg.qr(rng.standard_normal((size, size)))[0].astype(np.float32)
    return {
        "dom_var": rank, "dom_ca": rank, "vectors_diag": vectors, "vectors_pca": vectors,
        "tip_budget": even_budgets(fasa.SHARES), "rank_budget": even_budgets(sals.SHARES),
        "weights": np.ones(size, np.float32),
    }  # fmt: skip


def make(name: str, device: str) -> DeviceCache:
    g, method = GEOMETRY, METHODS[name]
    spec = LayerSpec(
        layer=2, n_layer=4, n_head=g.n_head, n_head_kv=g.n_head_kv, head_dim=g.d,
        value_dim=g.d_v, n_threads=1, theta=1e4 ** (-np.arange(g.n_rot // 2) / (g.n_rot // 2)),
        calibration=calibration_of(g),
    )  # fmt: skip
    spec = method.layer_spec(spec) if method else spec
    place = torch.device(device)
    return device_cache(method)(spec, place, method) if method else DeviceDense(spec, place)


def rows_of(cache: DeviceCache, generator: torch.Generator, n: int) -> list[torch.Tensor]:
    """q, k, v, q_nope, k_nope of n rows: f32 (heads, n, d)."""
    spec = cache.spec
    sizes = [(spec.n_head, spec.head_dim), (spec.n_head_kv, spec.head_dim)]
    sizes += [(spec.n_head_kv, spec.value_dim), *sizes]
    device = cache.device
    return [torch.randn(h, n, d, generator=generator).to(device) for h, d in sizes]


def step(caches: list[DeviceCache], rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, int]:
    """A row for each: the outputs (B, H, d_v), and in how many runs they were computed."""
    ns = [cache.n + 1 for cache in caches]
    n_max = grid_bound(max(ns))
    plans = [cache.begin_step(n, n_max) for cache, n in zip(caches, ns, strict=True)]
    (runs, _), outs = prepare_runs(caches, plans, len(caches)), []
    for first, last, leader in runs:
        of_run = range(first, last)
        budgets = [caches[b].budget_rows(ns[b]) for b in of_run]
        numbers = [[ns[b] - 1 for b in of_run], [ns[b] for b in of_run], budgets]
        numbers = torch.tensor(numbers, dtype=torch.int32, device=rows[0][0].device)
        heads = [
            torch.stack([x[:, 0] for x in of_all]) for of_all in zip(*rows[first:last], strict=True)
        ]
        arrived = none_arrived(*heads[0].shape[:2], numbers.device)
        outs.append(leader.decode(DeviceInput(*heads, StepNumbers(*numbers, arrived))))
        assert (arrived == NONE_ARRIVED).all()
        join_all([leader.side] if leader.side else [])
    for cache, n in zip(caches, ns, strict=True):
        cache.end_step(n)
    return torch.cat(outs), len(runs)


def prefill(cache: DeviceCache, rows: list[torch.Tensor]) -> None:
    cache.extend(AttnInput(*rows, cache.n))
    cache.finish_prefill()


@pytest.mark.parametrize("name", METHODS)
def test_sequences_in_one_launch_are_what_they_are_alone(name, device):
    """Of several lengths, beyond the room that they came with, two of three, and after a rewind."""
    generator = torch.Generator().manual_seed(0)
    # Products of three rows with a matrix, here the encoder, round both to 11 bits.
    rounding = 1e-3 if name == "sals" else 0
    alone, together = ([make(name, device) for _ in LENGTHS] for _ in range(2))

    def feed(b: int, n: int) -> None:
        rows = rows_of(alone[b], generator, n)
        for cache in (alone[b], together[b]):
            prefill(cache, rows)

    def follow(members: tuple[int, ...], n_steps: int) -> list[int]:
        """In how many runs each of the steps was computed."""
        counts = []
        for _ in range(n_steps):
            rows = [rows_of(alone[b], generator, 1) for b in members]
            parts = [step([alone[b]], [row])[0] for b, row in zip(members, rows, strict=True)]
            found, n_run = step([together[b] for b in members], rows)
            torch.testing.assert_close(found, torch.cat(parts), rtol=0, atol=rounding)
            counts.append(n_run)
        return counts

    for b, n in enumerate(LENGTHS):
        feed(b, n)
    n_run = 3 if name == "fasa-m" else 1
    dense_alone = 1 if name == "full" else 2
    assert follow((0, 1, 2), 1) == [max(n_run, dense_alone)]
    feed(0, 30)
    feed(1, 70)  # to 191, so that the second step needs more room
    assert follow((0, 1, 2), 2)[-1] == n_run
    for cache in (alone[2], together[2]):
        assert cache.truncate(LENGTHS[2]) == LENGTHS[2]
    follow((1, 2), 1)
    alone[0], together[0] = make(name, device), make(name, device)  # in the place of one that ended
    feed(0, 45)
    follow((0, 1, 2), 1)  # what is special behind a rewind may be a run of its own
    for a, b in zip(alone, together, strict=True):
        if n_run == 1:  # fasa-m's slots are made anew when the bound changes, which others may do
            expected, found = dict(a.counters()), dict(b.counters())
            assert expected.pop("us_waited", 0) >= 0 <= found.pop("us_waited", 0)
            assert found == expected


def test_lengths_are_shared_where_few_rows_are_wasted():
    assert lengths_to_plan([9000, 100, 5000, 4400], 0) == [9000, 100, 9000, 4400]
    assert lengths_to_plan([3, 4000, 10], 0) == [4000] * 3
    assert lengths_to_plan([10, 9000], 700) == [700, 9000]
    caches = [[make(name, "cpu")] for name in ("full", "topk", "full", "full")]
    assert launch_order([5, 7, 9, 5], caches) == [2, 0, 3, 1]


def test_a_sequence_has_the_memory_that_it_needs(device):
    """Beside a longer one, much longer ones, and when those that it lay beside are gone."""
    lengths, caches, planner = (9000, 5000, 100), [], Planner()
    for n in lengths:
        caches.append(make("full", device))
        prefill(caches[-1], rows_of(caches[-1], torch.Generator(), n))

    def parts() -> list[int]:
        """Of each sequence, how many have their rows in the same memory."""
        return [c.store.k.untyped_storage().nbytes() // c.store.k.nbytes for c in caches]

    planner.begin(lengths, [[cache] for cache in caches])
    capacities = [cache.store.capacity for cache in caches]
    assert capacities[0] == capacities[1] > 9000 and capacities[2] < 512
    assert parts() == [2, 2, 2]  # beside the last one lies padding
    kept = [cache.store.k[:, :, : cache.n].clone() for cache in caches]
    planner.begin(lengths[1:], [[cache] for cache in caches[1:]])
    assert parts() == [1, 1, 1]
    for cache, rows in zip(caches, kept, strict=True):
        assert torch.equal(cache.store.k[:, :, : cache.n], rows)
