"""FreeKV on a device against FreeKV on the host: the same pages and attention, step by step."""

import numpy as np
import pytest
import torch
from layer_rows import Geometry, Stream
from layer_stream import attended_rows
from layer_stream import decode as decode_on_host
from layer_stream import make_cache as make_on_host
from layer_stream import prefill as prefill_on_host
from opened import open_sequence
from side_by_side import prepare
from tiny_models import make_model

from sparsekv_cli.cache.spec import AttnInput, Budget, LayerSpec
from sparsekv_cli.device.cache import DeviceInput, StepNumbers
from sparsekv_cli.device.methods.freekv import DeviceFreeKV
from sparsekv_cli.kernels.attention.arrivals import none_arrived
from sparsekv_cli.kernels.freekv import pages as page_cache
from sparsekv_cli.kernels.freekv import recall
from sparsekv_cli.methods.freekv import FreeKV
from sparsekv_cli.settings.config import SessionConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = {"budget": Budget(tokens=44), "page": 8, "sinks": 8, "window": 10, "overlap": "true"}


class Traced(DeviceFreeKV):
    """Keeps the positions that the last step attended to, before pages are chosen ahead."""

    attended_pages: list[list[int]]

    def decode(self, x):
        out = super().decode(x)
        if self._pages is not None and not self._ahead:
            self._keep()
        return out

    def _recall_ahead(self, arrays, previous, n, budget):
        if self.n:
            self._keep()
        super()._recall_ahead(arrays, previous, n, budget)

    def _keep(self):
        arrays = self._pages.arrays
        n_chosen = arrays.state[0, :, page_cache.N_CHOSEN.value].tolist()
        chosen = zip(arrays.chosen[0].tolist(), n_chosen, strict=True)
        self.attended_pages = [pages[:count] for pages, count in chosen]


def make_on_device(method, geometry):
    g = geometry
    spec = LayerSpec(
        layer=2, n_layer=4, n_head=g.n_head, n_head_kv=g.n_head_kv, head_dim=g.d, value_dim=g.d,
        n_threads=1,
    )  # fmt: skip
    return Traced(spec, DEVICE, method)


def prefill(cache, rows, chunk=64):
    for start in range(0, rows[0].shape[1], chunk):
        q, k, v = (torch.from_numpy(x[:, start : start + chunk].copy()).to(DEVICE) for x in rows)
        cache.extend(AttnInput(q, k, v, q, k, cache.n))
    cache.finish_prefill()


def decode(cache, rows, n_max=None):
    n = cache.n + 1
    prepare(cache, n, n_max or n + 7)
    numbers = torch.tensor([n - 1, n, cache.budget_rows(n)], dtype=torch.int32, device=DEVICE)
    q, k, v = (torch.from_numpy(x[None, :, 0].copy()).to(DEVICE) for x in rows)
    step = StepNumbers(*numbers[:, None], none_arrived(1, q.shape[1], DEVICE))
    x = DeviceInput(q=q, k=k, v=v, q_nope=q, k_nope=k, step=step)
    try:
        out = cache.decode(x)[0].cpu().numpy()
    except BaseException:
        cache.drop_step(n - 1)
        raise
    cache.side.join()
    cache.end_step(n)
    return out


def follow(on_host, on_device, stream, method, n_steps):
    """Decodes n_steps rows in both; how often kv heads chose other pages than all."""
    n_partial = 0
    for _ in range(n_steps):
        rows = stream.rows(1)
        wanted, actual = decode_on_host(on_host, rows), decode(on_device, rows)
        np.testing.assert_allclose(actual, wanted, atol=2e-3)
        if on_host.attended is None:
            continue
        plan = method.plan(on_host.n, on_host._cache.n_sink)
        p = method.page
        for rows_read, chosen in zip(attended_rows(on_host), on_device.attended_pages, strict=True):
            pages = sorted({row // p for row in rows_read})
            assert [j for j in pages if plan.n_sink <= j < plan.window] == chosen
            n_partial += len(chosen) < plan.window - plan.n_sink
    return n_partial


def run_both(geometry, n_steps, **options):
    method = FreeKV(**{**SMALL, **options})
    stream = Stream(geometry, seed=1)
    on_host, on_device = make_on_host(method, geometry), make_on_device(method, geometry)
    rows = stream.rows(100)
    prefill_on_host(on_host, rows)
    prefill(on_device, rows)
    assert follow(on_host, on_device, stream, method, n_steps) >= n_steps
    return on_host, on_device, stream, method


def counts_of(cache, *names):
    counters = cache.counters()
    return {name: counters[name] for name in names}


ALWAYS = ("pages_offloaded", "heads_stepped", "rows_attended", "sparse_rows_total")
CACHE = ("pages_hit", "pages_recalled", "heads_corrected", "rows_scored", "bytes_moved")


def test_follows_the_host_for_many_pages():
    on_host, on_device, *_ = run_both(Geometry(2, 1, 16), 50, tau=0.99)
    expected = counts_of(on_host, *ALWAYS, *CACHE)
    assert counts_of(on_device, *ALWAYS, *CACHE) == expected
    assert all(expected.values())


@pytest.mark.parametrize(
    "options",
    [
        {"summary": "minmax", "page": 6, "cache_pages": 1, "tau": 0.99},
        {"page": 4, "tau": 0.99},
        {"tau": 2.0},
        {"correct": False},
        {"speculate": False},
        {"overlap": "false", "tau": 0.99},
        {"budget": Budget(share=0.4), "tau": 0.99},
    ],
    ids="-".join,
)
def test_follows_the_host_with_other_options(options):
    on_host, on_device, *_ = run_both(Geometry(4, 2, 24), 9, **options)
    assert counts_of(on_device, *ALWAYS) == counts_of(on_host, *ALWAYS)
    corrected = counts_of(on_device, "heads_corrected")
    assert corrected == counts_of(on_host, "heads_corrected")
    assert (corrected["heads_corrected"] > 0) == (
        options.get("speculate", True) and "correct" not in options
    )


def test_dense_to_pages_and_back():
    """From a short prompt through the border of the budget, back for a second prompt, and on."""
    geometry = Geometry(2, 1, 16)
    method = FreeKV(**SMALL)
    stream = Stream(geometry, seed=3)
    on_host, on_device = make_on_host(method, geometry), make_on_device(method, geometry)
    rows = stream.rows(40)
    prefill_on_host(on_host, rows)
    prefill(on_device, rows)
    assert on_device.memory().host == 0
    follow(on_host, on_device, stream, method, 9)
    assert on_device.memory().host > 0 and on_device.n == on_host.n == 49
    rows = stream.rows(27)
    prefill_on_host(on_host, rows)
    prefill(on_device, rows)
    follow(on_host, on_device, stream, method, 3)
    for cache in (on_host, on_device):
        assert cache.truncate(70) == 70
    follow(on_host, on_device, stream, method, 3)
    assert counts_of(on_device, *ALWAYS) == counts_of(on_host, *ALWAYS)


def test_rows_come_back_from_pages_bit_for_bit():
    geometry = Geometry(2, 2, 16)
    cache = make_on_device(FreeKV(**SMALL), geometry)
    stream = Stream(geometry, seed=4)
    rows = stream.rows(90)
    prefill(cache, rows)
    parts = [rows, *(stream.rows(1) for _ in range(9))]
    for row in parts[1:]:
        decode(cache, row)
    k, v = (np.concatenate([part[i] for part in parts], axis=1) for i in (1, 2))
    cache.truncate(98)
    np.testing.assert_array_equal(cache.store.keys().float().cpu(), k[:, :98])
    np.testing.assert_array_equal(cache.store.values().float().cpu(), v[:, :98])


@pytest.mark.parametrize("n_prompt", [90, 40])
def test_back_to_the_end_of_the_prompt(n_prompt):
    """The same bits as the first time; of 40 rows none has left the window yet."""
    geometry = Geometry(2, 2, 16)
    cache = make_on_device(FreeKV(**SMALL), geometry)
    stream = Stream(geometry, seed=4)
    prefill(cache, stream.rows(n_prompt))
    rows = [stream.rows(1) for _ in range(16)]
    first = [decode(cache, row).copy() for row in rows]
    assert cache.truncate(n_prompt) == n_prompt == cache.n
    again = [decode(cache, row).copy() for row in rows[:8]]
    np.testing.assert_array_equal(again, first[:8])


def test_a_step_that_was_broken_off_leaves_no_trace(monkeypatch):
    """It has given slots to pages that were not fetched, and its query is no earlier one."""
    geometry = Geometry(4, 2, 16)
    caches = [make_on_device(FreeKV(**SMALL, tau=2.0), geometry) for _ in range(2)]
    stream = Stream(geometry, seed=7)
    rows = stream.rows(90)
    for cache in caches:
        prefill(cache, rows)
    whole, broken = caches
    for _ in range(3):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(recall, "fetch_pages", interrupt)
            decode(broken, stream.rows(1))
        row = stream.rows(1)
        np.testing.assert_array_equal(decode(broken, row), decode(whole, row))
    assert broken.n == whole.n == 93


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_a_step_under_one_key_allocates_nothing_that_stays():
    """The buffers of a key stay where they are, as a captured graph needs; growth changes it."""
    geometry = Geometry(2, 1, 16)
    cache = make_on_device(FreeKV(**SMALL), geometry)
    stream = Stream(geometry, seed=5)
    prefill(cache, stream.rows(90))
    decode(cache, stream.rows(1), n_max=120)  # the first step chooses with its own query
    keys, places = [], []
    for _ in range(3):
        keys.append(prepare(cache, cache.n + 1, 120))
        places.append(
            [
                x.data_ptr()
                for x in (*cache._pages.arrays, *cache._work.choice.scratch, cache._work.idx)
            ]
        )
        decode(cache, stream.rows(1), n_max=120)
    assert keys[0] == keys[1] == keys[2] and places[0] == places[1] == places[2]
    assert prepare(cache, cache.n + 1, 400) != keys[0]


def test_a_sequence_on_the_device_counts_what_one_on_the_host_does(tmp_path):
    path = make_model(
        tmp_path / "m.gguf", wtype="F32", n_embd=64, n_ff=64, n_vocab=259, head_dim=32
    )
    prompt = [int(token) for token in np.random.default_rng(0).integers(3, 259, 60)]
    sequences = []
    for device in ("cpu", "cuda"):
        config = SessionConfig(threads=1, device=device, prefill_dtype="f32")
        sequences.append(open_sequence(path, FreeKV(**SMALL), config))
    expected, actual = (sequence.prefill(prompt) for sequence in sequences)
    for _ in range(2):
        np.testing.assert_allclose(actual, expected, atol=4e-3)
        expected, actual = (sequence.decode(int(expected.argmax())) for sequence in sequences)
    host, device = (sequence.ledger() for sequence in sequences)
    own = {"bytes_host", "bytes_device", "index_bytes", "us_waited"}
    assert {k: host[k] for k in host.keys() - own} == {k: device[k] for k in device.keys() - own}
    assert device["pages_recalled"] > 0 and device["bytes_host"] > 0
    assert host["us_waited"] > 0 and device["us_waited"] > 0
