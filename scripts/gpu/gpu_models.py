"""Models and caches for scripts/gpu/bench: random weights in known shapes, rows without a prefill.

All layers of a model share one layer's random numbers on the host, so that a shape of 8 billion
weights is there in seconds; on the device each layer has its own copy, as in a real model.
"""

import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_rows import RandomRows

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import AttnInput, LayerSpec
from sparsekv_cli.calibration import fasa, sals
from sparsekv_cli.calibration.allocation import even_budgets
from sparsekv_cli.device.engine import DeviceEngine, open_device_engine
from sparsekv_cli.device.host import HostCache
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.base import Method
from sparsekv_cli.models.architectures import Architecture, architecture_of
from sparsekv_cli.models.gguf.file import open_gguf
from sparsekv_cli.models.gguf.keys import read_architecture
from sparsekv_cli.models.hparams import HParams, read_hparams
from sparsekv_cli.models.weights import Weights, read_weights
from sparsekv_cli.settings.config import SessionConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "models"))

from tiny_models import make_model

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "n_layer": 16, "n_embd": 2048, "n_head": 32, "n_head_kv": 8, "n_ff": 8192,
        "n_vocab": 128256,
    },
    "llama-3.1-8b": {
        "n_layer": 32, "n_embd": 4096, "n_head": 32, "n_head_kv": 8, "n_ff": 14336,
        "n_vocab": 128256,
    },
    "heads of llama-3.1-8b": {
        "n_layer": 2, "n_embd": 512, "n_head": 32, "n_head_kv": 8, "head_dim": 128, "n_ff": 1024,
        "n_vocab": 259,
    },
    "tiny": {
        "n_layer": 2, "n_embd": 64, "n_head": 2, "n_head_kv": 1, "n_ff": 64, "n_vocab": 259,
    },
}  # fmt: skip


@dataclass(frozen=True)
class RandomModel:
    """What an engine is made of."""

    name: str
    hparams: HParams
    architecture: Architecture
    weights: Weights


def random_model(name: str, n_layer: int = 0) -> RandomModel:
    """Random weights in a shape of SHAPES: Q4_K (F32 for ``tiny``), the output Q6_K.

    n_layer: layers, if not as many as the shape has.
    """
    shape = dict(SHAPES[name])
    n_layer = shape.pop("n_layer") if n_layer == 0 else n_layer
    shape.pop("n_layer", None)
    kinds = {"wtype": "Q4_K", "wtypes": {"token_embd.weight": "Q6_K"}} if name != "tiny" else {}
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(
            Path(folder) / "model.gguf", n_layer=1, n_ctx=1 << 18, freq_base=5e5,
            attention_gain=1.0, **kinds, **shape,
        )  # fmt: skip
        file = open_gguf(path)
        one = read_hparams(file)
        architecture = architecture_of(read_architecture(file))
        weights = read_weights(file, one, architecture)
    return RandomModel(
        name,
        replace(one, layers=one.layers * n_layer),
        architecture,
        replace(weights, layers=weights.layers * n_layer),
    )


def tiny_model(folder: str) -> Path:
    """A file with random weights for a run without a GPU."""
    return make_model(
        Path(folder) / "tiny.gguf", n_ctx=512, n_embd=64, n_ff=64, n_vocab=400, head_dim=32
    )


def open_engine(
    model: RandomModel, device: torch.device, n_threads: int, kv: str, gpu_weights: str = "auto"
) -> DeviceEngine:
    """Returns an engine for any method. There is no tokenizer."""
    config = SessionConfig(kv=kv, gpu_weights=gpu_weights)
    return open_device_engine(
        device, model.hparams, model.architecture, model.weights, build_method("full", {}), config,
        n_threads, n_ctx=1,
    )  # fmt: skip


def random_calibration(spec: LayerSpec, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
    """A layer's tensors for every method that reads some: of the right form, saying nothing."""
    size, n_chunk = spec.n_head_kv * spec.head_dim, spec.n_chunk
    rank = np.stack([rng.permutation(n_chunk) for _ in range(spec.n_head_kv)]).astype(np.uint8)
    basis = np.eye(size, dtype=np.float32)[rng.permutation(size)]
    return {
        "dom_var": rank,
        "dom_ca": rank,
        "tip_budget": even_budgets(fasa.SHARES),
        "vectors_diag": basis,
        "vectors_pca": basis,
        "rank_budget": even_budgets(sals.SHARES),
        "weights": np.ones(size, np.float32),
    }


def filled_caches(
    engine: DeviceEngine, method: Method, n: int, n_more: int, rows: Any = None,
    end: float = math.inf,
) -> Sequence[LayerCache]:  # fmt: skip
    """A cache of every layer with n rows and room for n_more, as a prefill leaves it.

    rows: of gpu_rows.py; None: random ones. Raises TimeoutError at the time ``end``.
    """
    engine.n_ctx = n + n_more
    rows = rows or RandomRows(engine.device)
    calibration = random_calibration(engine.decoder.layer_specs()[0], np.random.default_rng(0))
    caches = []
    for spec in engine.decoder.layer_specs():
        if time.monotonic() > end:
            raise TimeoutError(f"{len(caches)} of {spec.n_layer} layers were filled in time")
        cache = engine.layer(method, replace(spec, calibration=calibration))
        cache.reserve(n + n_more)
        fill(cache, spec, n, rows)
        caches.append(cache)
    return caches


def fill(cache: Any, spec: LayerSpec, n: int, rows: Any) -> None:
    """Prefills n rows."""
    inner = cache.cache if isinstance(cache, HostCache) else cache
    for pos in range(0, n, rows.at_once):
        made = rows.piece(spec, pos, min(rows.at_once, n - pos))
        if inner is not cache:
            made = [x.float().cpu().numpy() for x in made]
        q, k, v = made
        inner.extend(AttnInput(q, k, v, q, k, pos))
    inner.finish_prefill()
