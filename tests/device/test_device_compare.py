"""``compare`` on a device: the figures that the CPU has."""

import json
import weakref

import numpy as np
import pytest
from tiny_models import make_model

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation import prefill
from sparsekv_cli.evaluation.compare import compare, parse_methods
from sparsekv_cli.evaluation.result import contents
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import load_model
from sparsekv_cli.settings.config import SessionConfig

IDS = [int(token) for token in np.random.default_rng(0).integers(3, 270, 84)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    sizes = {"n_layer": 2, "n_embd": 32, "n_ff": 32, "n_vocab": 270, "head_dim": 32, "n_ctx": 512}
    return make_model(tmp_path_factory.mktemp("tiny") / "m.gguf", wtype="F32", **sizes)


def model_on(path, device):
    config = SessionConfig(threads=1, device=device, prefill_dtype="f32", chunk=64)
    return load_model(path, build_method("full", {}), config)


def test_figures_are_those_of_the_cpu(path, monkeypatch):
    """And no method's caches are there any more when the next one's are made."""
    monkeypatch.setattr(prefill, "N_TRIAL", 10)
    monkeypatch.setattr(prefill, "N_TRIAL_STEPS", 1)
    methods = parse_methods("topk,lfps", {"budget": "24", "dense_layers": "0"})
    models = [model_on(path, where) for where in ("cpu", "cuda")]
    caches: list[weakref.ref] = []
    full_ones = []
    real = models[1].engine.layer

    def kept(cache):
        full_ones.append(sum(ref() is not None and ref().n > 20 for ref in caches))
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(models[1].engine, "layer", lambda *given: kept(real(*given)))
    host, device = (list(compare(model, methods, IDS[:80], 3, IDS[80:])) for model in models)
    assert len(caches) == 2 * 3 * 3 and max(full_ones) == 0
    assert [row.name for row in device] == ["full", "topk", "lfps"]
    for expected, found in zip(host, device, strict=True):
        # The interpreter's differ by some 1e-6 of each; a GPU's sums are in another order.
        assert found.kld_mean == pytest.approx(expected.kld_mean, rel=0.05)
        assert found.rows_attended_mean == expected.rows_attended_mean
        assert found.attn_mass_recall == pytest.approx(expected.attn_mass_recall, abs=2e-3)
        assert found.topk_overlap == pytest.approx(expected.topk_overlap, abs=0.02)
        assert found.decode_tps > 0 and found.ttft_s > 0
    full, topk, lfps = device
    assert full.kld_mean == 0 and min(topk.kld_mean, lfps.kld_mean) > 0
    assert full.bytes_device == topk.bytes_device > lfps.bytes_device > 0
    assert full.bytes_host == topk.bytes_host == 0 < lfps.bytes_host
    json.dumps(contents(80, 3, device, [], {}))


def test_what_cannot_run_is_refused_first(path):
    model = model_on(path, "cuda")
    steps = []
    model.decoder.forward_steps = lambda *_, **__: steps.append(1)
    with pytest.raises(SparseKVError, match="caches on a GPU are f16 or q8_0"):
        next(compare(model, parse_methods("topk,quest:cache_type_k=q5_1"), IDS[:80], 4))
    assert not steps
