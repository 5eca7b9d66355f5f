"""A calibration's trials on a device, whose decoder computes all but their attention."""

import numpy as np
from tiny_models import make_model

from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.calibration.faedkv import without
from sparsekv_cli.calibration.fasa import _attend_best
from sparsekv_cli.calibration.run import CalibrationRun
from sparsekv_cli.calibration.trials import Trial, Window, unchanged
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import load_model
from sparsekv_cli.settings.config import SessionConfig


def test_trials_give_what_they_give_on_the_cpu(tmp_path):
    """Changed rows, another attention, and copies that share one, in chunks of several trials."""
    path = make_model(
        tmp_path / "m.gguf", wtype="F32", n_layer=2, n_embd=64, n_ff=64, n_vocab=400, head_dim=32,
        attention_gain=4.0,
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(3, 400, 131).tolist()
    found = []
    for device in ("cpu", "cuda"):
        config = SessionConfig(threads=1, device=device, prefill_dtype="f32", chunk=50)
        decoder = load_model(path, build_method("full", {}), config).decoder
        run = CalibrationRun(decoder.layer_specs(), ids, decoder.forward, lambda share: None)
        dims = np.tile(np.arange(8, dtype=np.int32), (run.specs[0].n_head_kv, 1))
        caches = [DenseCache(spec) for spec in run.specs]
        run.forward(ids[:110], 0, caches)
        window = Window(run, ids, 20, slice(10, 90), caches)
        trials = [Trial(layer, without(np.arange(3, 30))) for layer in range(2)]
        trials += [Trial(1, unchanged, _attend_best(dims, 4, 8)), Trial(-1, unchanged)]
        found.append(window.score(trials))
    (kld, nll), (on_device, nll_on_device) = found
    assert kld[:2].min() > 1e-3 and max(abs(kld[3]), abs(on_device[3])) < 1e-6
    np.testing.assert_allclose(on_device, kld, rtol=0.02, atol=1e-5)
    np.testing.assert_allclose(nll_on_device, nll, atol=2e-3)
