"""A method twice, on the host and on the device, fed the same: one layer, or a tiny model."""

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chunks import attend_chunk
from opened import open_sequence
from tiny_models import make_model

from sparsekv_cli.cache.spec import AttnInput, LayerSpec
from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.sals.latent import rotate_ref
from sparsekv_cli.device.batching import prepare_runs
from sparsekv_cli.device.cache import DeviceCache, DeviceInput, StepNumbers, grid_bound
from sparsekv_cli.device.layers.prefill import attend_causal
from sparsekv_cli.device.methods import device_cache
from sparsekv_cli.kernels.attention.arrivals import none_arrived
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.base import Method
from sparsekv_cli.settings.config import SessionConfig

Rows = tuple[np.ndarray, ...]  # q, k, v, q_nope, k_nope: f32 (heads, T, d)


@dataclass(frozen=True)
class Geometry:
    n_head: int
    n_head_kv: int
    d: int
    d_v: int
    n_rot: int

    def __str__(self) -> str:
        return f"H{self.n_head}-G{self.n_head_kv}-d{self.d}-dv{self.d_v}-rot{self.n_rot}"


GEOMETRIES = [
    Geometry(2, 2, 64, 64, 64),
    Geometry(9, 3, 64, 64, 64),
    Geometry(8, 2, 80, 80, 80),
    Geometry(4, 1, 128, 128, 128),
    Geometry(6, 2, 80, 64, 40),
]


class SideBySide:
    """Queries that drift, keys of which some are heavy; K and V are representable in f16.

    host, device: the two caches, of one ``spec`` and ``method``.
    """

    def __init__(
        self, geometry: Geometry, method: Method, calibration: dict[str, np.ndarray], device: str
    ) -> None:
        g, self.geometry = geometry, geometry
        self.rng = np.random.default_rng(0)
        self.spec = LayerSpec(
            layer=2, n_layer=4, n_head=g.n_head, n_head_kv=g.n_head_kv, head_dim=g.d,
            value_dim=g.d_v, n_threads=1, theta=1e4 ** (-np.arange(g.n_rot // 2) / (g.n_rot // 2)),
            calibration=calibration, cache_type_k=method.cache_type_k,
            cache_type_v=method.cache_type_v,
        )  # fmt: skip
        self.method = method
        self.host = method.layer(self.spec)
        self.host.records_attended = True
        self.device: DeviceCache = device_cache(method)(self.spec, torch.device(device), method)
        self.walk = self.rng.standard_normal((g.n_head, g.d))
        self.topics = self.rng.standard_normal((g.n_head_kv, 4, g.d))

    def rows(self, n: int) -> Rows:
        """The next n rows."""
        g, start = self.geometry, self.host.n
        queries, keys = [], []
        for _ in range(n):
            self.walk = 0.9 * self.walk + 0.4 * self.rng.standard_normal(self.walk.shape)
            key = self.rng.standard_normal((g.n_head_kv, g.d))
            if self.rng.random() < 0.2:
                key += self.topics[:, self.rng.integers(4)]
            queries.append(self.walk + np.repeat(self.topics[:, 1], g.n_head // g.n_head_kv, 0))
            keys.append(key)
        q_nope, k_nope = (np.stack(x, axis=1) for x in (queries, keys))
        at, theta = np.arange(start, start + n), self.spec.theta
        q, k = (rotate_ref(x, at, theta, self.spec.rope_scale) for x in (q_nope, k_nope))
        v = self.rng.standard_normal((g.n_head_kv, n, g.d_v))
        k, v = (x.astype(np.float16) for x in (k, v))
        return tuple(x.astype(np.float32) for x in (q, k, v, q_nope, k_nope))

    def prefill(self, n: int, chunk: int = 64) -> None:
        """n rows into both, whose dense outputs must be alike."""
        rows, pos = self.rows(n), self.host.n
        for start in range(0, n, chunk):
            x = AttnInput(*(part[:, start : start + chunk].copy() for part in rows), pos + start)
            expected = attend_chunk(self.host, x)
            tensors = [torch.from_numpy(part).to(self.device.device) for part in x[:5]]
            store = self.device.extend(AttnInput(*tensors, x.pos))
            out = attend_causal(tensors[0], store.keys(), store.values(), self.spec)
            np.testing.assert_allclose(out.cpu().numpy(), expected, rtol=0, atol=5e-3)
        for cache in (self.host, self.device):
            cache.finish_prefill()
            assert cache.n == pos + n

    def decode(self) -> tuple[np.ndarray, np.ndarray]:
        """A row into both: outputs f32 (H, d_v) of the host and of the device."""
        rows, n = self.rows(1), self.host.n + 1
        wide = [_widened(x) for x in rows]
        expected = self.host.decode(AttnInput(*wide, n - 1))[:, : self.geometry.d_v].copy()
        return expected, self.decode_on_device(rows, n)

    def decode_on_device(self, rows: Rows, n: int) -> np.ndarray:
        """A row into the device's cache: its output f32 (H, d_v)."""
        cache, device = self.device, self.device.device
        prepare(cache, n, grid_bound(n))
        numbers = (n - 1, n, cache.budget_rows(n))
        places = [torch.tensor([x], dtype=torch.int32, device=device) for x in numbers]
        step = StepNumbers(*places, none_arrived(1, len(rows[0]), device))
        inputs = [torch.from_numpy(x[:, 0].copy())[None].to(device) for x in rows]
        try:
            out = cache.decode(DeviceInput(*inputs, step))
        except BaseException:
            cache.drop_step(n - 1)
            raise
        cache.end_step(n)
        assert cache.n == n
        return out[0].cpu().numpy()


def prepare(cache: DeviceCache, n: int, n_max: int) -> Hashable:
    """Readies a cache for a step by itself to n rows; what tells its launches from others."""
    _, keys = prepare_runs([cache], [cache.begin_step(n, n_max)], 1)
    return keys[0]


def watch(cache: Any, name: str) -> list[Any]:
    """What calls of the cache's method ``name`` return from now on, the latest last."""
    results: list[Any] = []
    call = getattr(cache, name)

    def kept(*args: Any) -> Any:
        results.append(call(*args))
        return results[-1]

    setattr(cache, name, kept)
    return results


def _widened(x: np.ndarray) -> np.ndarray:
    wide = np.zeros((len(x), 1, padded(x.shape[2])), np.float32)
    wide[..., : x.shape[2]] = x
    return wide


def assert_devices_agree(
    folder: Path,
    method: str,
    options: dict[str, str],
    n_prompt: int,
    n_steps: int,
    kv: str = "auto",
    atol: float = 5e-3,
) -> None:
    """A tiny model on the host and on the device: logits of a prompt, of steps, of a second prompt
    and of one more step."""
    path = make_model(
        folder / "m.gguf", n_ctx=512, n_embd=64, n_ff=64, n_vocab=400, head_dim=32, wtype="F32"
    )
    prompt = [int(token) for token in np.random.default_rng(0).integers(3, 400, n_prompt + 40)]
    sequences = [
        open_sequence(
            path, build_method(method, options),
            SessionConfig(threads=1, device=device, prefill_dtype="f32", chunk=64, kv=kv),
        )
        for device in ("cpu", "cuda")
    ]  # fmt: skip
    logits = [sequence.prefill(prompt[:n_prompt]) for sequence in sequences]
    for step in range(n_steps + 1):
        if step == n_steps:
            logits = [sequence.prefill(prompt[n_prompt:]) for sequence in sequences]
        np.testing.assert_allclose(logits[1], logits[0], atol=atol)
        token = int(logits[0].argmax())
        logits = [sequence.decode(token) for sequence in sequences]
    np.testing.assert_allclose(logits[1], logits[0], atol=atol)
    host, device = (sequence.ledger() for sequence in sequences)
    assert host["sparse_rows_attended"] == device["sparse_rows_attended"] > 0
    assert device["bytes_device"] > 0
