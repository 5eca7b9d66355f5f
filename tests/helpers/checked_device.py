"""A tiny model whose decoder runs on a fake CUDA device (fake_cuda.py) or the interpreter alone.

Work of the host that neither torch nor Triton does is declared here: what it reads and writes of
memory that streams copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda, as_one
from memory_ranges import EMPTY, Ranges
from tiny_models import make_model

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.calibration import fasa, sals
from sparsekv_cli.calibration.allocation import even_budgets
from sparsekv_cli.config import SessionConfig
from sparsekv_cli.device import cuda as found_devices
from sparsekv_cli.device import decoder as device_decoder
from sparsekv_cli.device.decoder import DeviceDecoder
from sparsekv_cli.device.host import HostCache
from sparsekv_cli.device.methods import fasa as fasa_caches
from sparsekv_cli.device.methods import freekv_pages
from sparsekv_cli.device.step import StepBuffers
from sparsekv_cli.kernels import clock
from sparsekv_cli.kernels.freekv import pages as page_cache
from sparsekv_cli.kernels.weights import matmul, matvec
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import Model, load_model

SHAPE = {"n_layer": 2, "n_ctx": 512, "n_embd": 64, "n_ff": 64, "n_vocab": 259, "n_head": 2,
         "n_head_kv": 1, "head_dim": 32, "wtype": "F32"}  # fmt: skip
# Methods with options that make them choose among a prompt of N_PROMPT rows.
METHODS: dict[str, tuple[str, dict[str, str]]] = {
    "full": ("full", {}),
    "topk": ("topk", {"budget": "24"}),
    "streaming": ("streaming", {"budget": "24"}),
    "quest": ("quest", {"budget": "24", "page": "8"}),
    "fasa": ("fasa", {"budget": "24"}),
    "fasa-m": ("fasa", {"budget": "24", "variant": "m"}),
    "sals": ("sals", {"budget": "24", "sinks": "4", "window": "12"}),
    "freekv": ("freekv", {"budget": "40", "page": "8", "sinks": "8", "window": "16",
                          "tau": "0.9"}),
    "lfps": ("lfps", {"budget": "24", "epsilon": "0.5"}),
    "snapkv": ("snapkv", {"budget": "24"}),
}  # fmt: skip
N_PROMPT, N_STEPS = 60, 3  # run as it is; captured and replayed; replayed
LENGTHS = N_PROMPT, N_PROMPT - 9  # of sequences that decode together


@dataclass
class Checked:
    """One engine, and the caches of the method that decodes."""

    model: Model
    cuda: FakeCuda | None

    def caches(self, name: str) -> list[LayerCache]:
        """New caches of a method in METHODS."""
        kind, options = METHODS[name]
        method = build_method(kind, options, dense_layers=None if kind == "full" else "none")
        decoder, engine = self.model.decoder, self.model.engine
        rng, size = np.random.default_rng(5), SHAPE["n_head_kv"] * SHAPE["head_dim"]
        ranks = [rng.permutation(SHAPE["head_dim"] // 2) for _ in range(SHAPE["n_head_kv"])]
        vectors = np.linalg.qr(rng.standard_normal((size, size)))[0].astype(np.float32)
        calibration = {
            "dom_var": np.stack(ranks).astype(np.uint8), "dom_ca": np.stack(ranks).astype(np.uint8),
            "vectors_diag": vectors, "vectors_pca": vectors,
            "tip_budget": even_budgets(fasa.SHARES), "rank_budget": even_budgets(sals.SHARES),
            "weights": np.ones(size, np.float32),
        }  # fmt: skip
        specs = [replace(spec, calibration=calibration) for spec in decoder.layer_specs()]
        return [engine.layer(method, spec) for spec in specs]

    def prefill(self, caches: Ids[LayerCache], n: int = N_PROMPT) -> np.ndarray:
        ids = np.random.default_rng(0).integers(3, SHAPE["n_vocab"], n).tolist()
        for cache in caches:
            cache.reserve(n + 64)
        self.model.decoder.prepare(n)
        return self.model.decoder.forward(ids, 0, caches)

    def step(self, batch: Ids[Ids[LayerCache]]) -> np.ndarray:
        """Logits of a step of sequences together: f32 (B, n_vocab)."""
        lengths = [caches[0].n for caches in batch]
        tokens = [5 + n for n in lengths]
        return self.model.decoder.decode_batch(tokens, lengths, batch)

    def decode(self, caches: Ids[LayerCache], n: int, n_steps: int = N_STEPS) -> np.ndarray:
        """Logits of steps behind n rows: f32 (n_steps, n_vocab)."""
        decoder = self.model.decoder
        return np.stack([decoder.decode(5 + n + i, n + i, caches) for i in range(n_steps)])


def steps(engine: Checked, method: str, lengths: Ids[int] = (N_PROMPT,)) -> Iterator[np.ndarray]:
    """Logits f32 (B, n_vocab) of a prompt for each sequence, and of N_STEPS steps together."""
    batch = [engine.caches(method) for _ in lengths]
    yield np.stack([engine.prefill(caches, n) for caches, n in zip(batch, lengths, strict=True)])
    for _ in range(N_STEPS):
        yield engine.step(batch)


def come_and_go(engine: Checked, method: str) -> Iterator[np.ndarray]:
    """As ``steps`` of LENGTHS; then one is rewound, one ends, and another takes its place."""
    batch = [engine.caches(method) for _ in LENGTHS]
    yield np.stack([engine.prefill(caches, n) for caches, n in zip(batch, LENGTHS, strict=True)])
    for _ in range(N_STEPS):
        yield engine.step(batch)
    for cache in batch[1]:
        assert cache.truncate(LENGTHS[1]) == LENGTHS[1]
    yield engine.step(batch)
    del batch[0]
    yield engine.step(batch)
    batch.insert(0, engine.caches(method))
    yield engine.prefill(batch[0], N_PROMPT - 4)[None]
    yield engine.step(batch)


def check(
    engine: Checked, steps: Iterator[np.ndarray], expected: Ids[np.ndarray]
) -> list[list[Any]]:
    """Steps of this engine: no race, nothing refused, as many launches, the same bits.

    expected: what they give on an engine that is not fake. Returns what each of them launched.
    """
    cuda = engine.cuda
    assert cuda is not None
    cuda.launches.clear()
    logits, launched = [], []
    for found in steps:
        logits.append(found)
        launched.append(list(cuda.launches))
        cuda.launches.clear()
    _, as_it_is, captured, replayed, *_ = launched
    if cuda.found:
        raise cuda.found[0]
    assert as_it_is == captured and len(captured) > 10, "a capture launches something else"
    assert replayed == []
    for ours, theirs in zip(logits, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    return launched


def ranges_of(x: Any) -> Ranges:
    """The memory of an array or a tensor of the host."""
    return Ranges.of_tensor(torch.from_numpy(x) if isinstance(x, np.ndarray) else x)


@contextmanager
def checked(path: Path, cuda: FakeCuda | None) -> Iterator[Checked]:
    """Opens the model of SHAPE on a fake device; on the interpreter alone, if cuda is None."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul, "PROGRAMS", 1)  # the interpreter takes as long for a small program
        patch.setattr(matvec, "_rows_a_program", lambda n_rows: 64)
        patch.setattr(matvec, "_tiling", lambda *_: (64, 1))
        config = SessionConfig(threads=1, device="cuda", prefill_dtype="f32", chunk=32)
        if cuda is None:
            yield Checked(load_model(path, build_method("full", {}), config), None)
            return
        with cuda:
            declare(patch, cuda)
            patch.setattr(found_devices, "find_cuda", lambda _: torch.device("cuda"))
            yield Checked(load_model(path, build_method("full", {}), config), cuda)


def write_model(folder: Path, **options: Any) -> Path:
    return make_model(folder / "checked.gguf", **SHAPE | options)


def declare(patch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    """Tells ``cuda`` of the host's work, and of functions of torch that it does not see into."""

    def around(
        owner: Any,
        name: str,
        does: str,
        reads: Callable[..., Ranges] = lambda *_: EMPTY,
        writes: Callable[..., Ranges] = lambda *_: EMPTY,
    ) -> None:
        call = getattr(owner, name)

        @wraps(call)
        def declared(*args: Any, **kwargs: Any) -> Any:
            cuda.host_work(does, reads(*args), writes(*args))
            return call(*args, **kwargs)

        patch.setattr(owner, name, declared)

    def packed(decoder: DeviceDecoder, *_: Any) -> Ranges:
        return ranges_of(decoder._buffers._host_packed)

    def received(decoder: DeviceDecoder, i: int, *_: Any) -> Ranges:
        return Ranges.union(map(ranges_of, decoder._buffers.from_host(i)))

    around(DeviceDecoder, "_attend_on_host", "attention on the host", packed, received)
    around(DeviceDecoder, "_learn_on_host", "learning on the host")
    around(DeviceDecoder, "embed_row", "embedding", writes=lambda _, token, x: ranges_of(x))

    def reads(name: str, parts: Ids[str]) -> None:
        """The host reads these buffers at the end of a method of StepBuffers."""
        call = getattr(StepBuffers, name)

        def read(buffers: StepBuffers, *args: Any) -> Any:
            out = call(buffers, *args)
            for part in parts:
                cuda.host_work(f"reading {part}", ranges_of(getattr(buffers, part)))
            return out

        patch.setattr(StepBuffers, name, read)

    reads("logits", ["_host_logits"])
    reads("outcomes", ["_host_logits", "_host_chosen"])
    begin = HostCache.__init__

    def watched(host: HostCache, cache: LayerCache, *args: Any) -> None:
        begin(host, cache, *args)
        extend: Any = cache.extend

        def extended(x: Any) -> Any:
            cuda.host_work("rows taken in", Ranges.union(map(ranges_of, x[:5])))
            return extend(x)

        cache.extend = extended  # type: ignore[method-assign]

    patch.setattr(HostCache, "__init__", watched)
    patch.setattr(
        device_decoder, "attend_causal", as_one(cuda, "attend_causal", device_decoder.attend_causal)
    )

    for module in (freekv_pages, fasa_caches, page_cache):
        patch.setattr(module, "zeros_on_host", cuda.locked)

    def take_time(times: torch.Tensor, *, stop: bool) -> None:
        cuda.launch("take_time", lambda: None, EMPTY, Ranges.of_tensor(times))

    patch.setattr(clock, "take_time", take_time)
