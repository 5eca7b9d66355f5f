"""How much work a calibration does: rows through all layers, passes, and logits.

A minute for a model with 1.5B parameters was measured; five for one with 8B are estimated from it.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from reference_decoder import log_softmax
from tiny_sequences import SHAPE, tokens

from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.calibration import trials
from sparsekv_cli.calibration.calibrations import LEAST_ROWS, PRODUCTS, affordable_rows
from sparsekv_cli.calibration.fasa import _attend_best
from sparsekv_cli.calibration.run import CalibrationRun
from sparsekv_cli.calibration.study import LEAST_SCORED, N_PREFIX, N_SCORED, Study
from sparsekv_cli.calibration.trials import ROWS_AT_ONCE, Trial, Window, unchanged
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import load_model
from sparsekv_cli.settings.config import SessionConfig

N_LAYER = 4


@pytest.mark.parametrize(("n_weights", "n_used"), [(10**8, 8), (10**12, 8), (10**12, 1)])
def test_rows_follow_from_the_weights_that_a_row_takes(n_weights, n_used):
    tensors: dict[str, Any] = {
        "blk.0.ffn_up_exps.weight": SimpleNamespace(n_elements=n_weights, shape=(8, 2, 2)),
        "token_embd.weight": SimpleNamespace(n_elements=10**15, shape=(2, 2)),
        "output.weight": SimpleNamespace(n_elements=10**15, shape=(2, 2)),
    }
    layer = SimpleNamespace(experts=SimpleNamespace(n_expert=8, n_expert_used=n_used))
    file, hparams = SimpleNamespace(tensors=tensors), SimpleNamespace(layers=[layer])
    found = affordable_rows(file, hparams)  # type: ignore[arg-type]
    assert found == max(LEAST_ROWS, PRODUCTS / (n_weights * n_used / 8))


def plan(
    n_layer: int, n_trials: int, dense: tuple[int, ...], n_rows: int, has_text: bool, least: int = 6
) -> Study:
    specs: Any = [SimpleNamespace(layer=i, source=-1, shares_input=False) for i in range(n_layer)]
    nothing: Any = None
    run = CalibrationRun(specs, range(4096), nothing, lambda share: None, n_rows)
    layers = [i for i in range(n_layer) if i not in dense for _ in range(n_trials)]
    return Study(run, 16, 64, layers, len(run.statistics_ids) if has_text else 0, least)


@pytest.mark.parametrize(
    ("n_trials", "dense", "has_text"),
    [(22 + 4, (), False), (5, (0, 1), True), (5, (0, 1, -1), True)],
    ids=["faedkv", "fasa", "sals"],
)
@pytest.mark.parametrize(("n_layer", "n_weights"), [(28, 1.31e9), (32, 6.98e9)])
def test_large_models_take_the_rows_of_their_time(n_layer, n_weights, n_trials, dense, has_text):
    """Two cores take 60 rows a second of 1.5B, all included; 8B is an estimate by its weights."""
    dense = tuple(i % n_layer for i in dense)
    n_rows = max(LEAST_ROWS, int(PRODUCTS / n_weights))
    found = plan(n_layer, n_trials, dense, n_rows, has_text)
    assert found.n_rows <= 1.01 * n_rows and len(found.starts) == 1
    assert n_rows * n_weights <= (4.8e12 if n_layer == 28 else 2.6e13)
    assert found.n_scored == LEAST_SCORED if not has_text else found.n_scored > 4 * LEAST_SCORED
    wider = plan(n_layer, n_trials, dense, n_rows, has_text, 24)
    assert wider.n_scored == max(24, found.n_scored) and wider.n_rows < 3.5 * n_rows
    small = plan(n_layer, n_trials, dense, 1 << 30, has_text)
    assert len(small.starts) == 2 and small.n_scored == N_SCORED


@pytest.fixture(scope="module")
def model(tiny_model):
    config = SessionConfig(threads=1, prefill_dtype="f32", chunk=100)
    opened = load_model(
        tiny_model(**{**SHAPE, "n_layer": N_LAYER}), build_method("full", {}), config
    )
    yield opened
    opened.gguf.close()


class Counted:
    """A decoder's forward passes, their rows by layer, and the logits that they compute."""

    def __init__(self, model, monkeypatch: pytest.MonkeyPatch) -> None:
        decoder, self.passes, self.n_logits = model.decoder, 0, 0
        self.rows: Counter[int] = Counter()
        forward, chunk, output = decoder.forward, decoder.forward_chunk, decoder.output

        def count_pass(*args: Any, **options: Any) -> Any:
            self.passes += 1
            return forward(*args, **options)

        def count_rows(i: int, products: Any, x: Any, *rest: Any) -> None:
            self.rows[i] += len(x)
            chunk(i, products, x, *rest)

        def count_logits(normed: Any, vocabulary: np.ndarray | None) -> np.ndarray:
            logits = output(normed, vocabulary)
            self.n_logits += logits.size
            return logits

        self.forward = count_pass
        monkeypatch.setattr(decoder, "forward_chunk", count_rows)
        monkeypatch.setattr(decoder, "output", count_logits)


@pytest.mark.parametrize(
    ("n_rows", "n_given"), [(900, 0), (1 << 30, 0), (1 << 30, 5), (900, 30), (900, 48)]
)
@pytest.mark.parametrize("name", ["fasa", "sals", "faedkv"])
def test_passes_take_the_rows_that_are_planned(name, n_rows, n_given, model, monkeypatch):
    """Progress counts the same rows. n_given: scored rows by choice, 0 for none."""
    plans: list[Study] = []
    begin = Study.__init__

    def kept(self: Study, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        plans.append(self)

    monkeypatch.setattr(Study, "__init__", kept)
    monkeypatch.setattr(trials, "TOKENS_A_ROW", 4)
    counted, shares = Counted(model, monkeypatch), []
    ids = tokens(1400)
    run = CalibrationRun(
        model.decoder.layer_specs(), ids, counted.forward, shares.append, n_rows, n_scored=n_given
    )
    build_method(name, {}).calibrate(run)
    (made,) = plans
    n_windows, n_scored = len(made.starts), made.n_scored
    assert n_windows == (2 if (n_given or n_rows) > (20 if n_given else 900) else 1)
    assert n_scored == n_given if n_given else n_scored >= LEAST_SCORED
    assert counted.rows.total() == pytest.approx(made.n_rows * N_LAYER)
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1)

    n_trials = {"faedkv": 26 * N_LAYER, "fasa": 5 * (N_LAYER - 2), "sals": 5 * (N_LAYER - 3)}[name]
    n_text = 0 if name == "faedkv" else len(run.statistics_ids)
    n_prefixes = n_windows - (n_text > 0)
    assert counted.rows[N_LAYER - 1] == (
        n_text + n_prefixes * N_PREFIX + n_windows * (1 + n_trials) * n_scored
    )
    least = n_windows * n_trials // (ROWS_AT_ONCE // n_scored)
    assert least <= counted.passes - (n_text > 0) - n_prefixes - n_windows <= least + 2 * n_windows
    # Of the trials a few logits a row; of the other passes one row, and the scored rows once.
    n_vocab, n_trial_rows = model.decoder.weights.output.n_rows, n_windows * n_trials * n_scored
    others = (n_prefixes + (n_text > 0) + n_windows * n_scored) * n_vocab
    assert counted.n_logits - others <= n_trial_rows * 5 * n_scored


def test_likely_tokens_alone_are_compared(model, monkeypatch):
    """KLD of what both say of these tokens; with all tokens it is that of the whole answers."""
    specs, ids = model.decoder.layer_specs(), tokens(231)
    run = CalibrationRun(specs, ids, model.decoder.forward, lambda share: None)
    dims = np.tile(np.arange(8, dtype=np.int32), (specs[0].n_head_kv, 1))
    changed = [Trial(i, unchanged, _attend_best(dims, 0, 1)) for i in (1, 3)]
    caches = [DenseCache(spec) for spec in specs]
    model.decoder.forward(ids[:200], 0, caches)
    found = []
    for n_tokens in (1 << 30, 20):
        monkeypatch.setattr(trials, "TOKENS_A_ROW", n_tokens)
        window = Window(run, ids, 30, slice(10, 150), caches)
        answers = window._logits_of(changed)
        likely = window._vocabulary
        assert likely is not None
        if n_tokens == 20:
            assert 20 <= len(likely) < len(found[0][1][0, 0]) and set(ids[201:231]) <= set(likely)
            np.testing.assert_allclose(answers, found[0][1][:, :, likely], rtol=1e-4, atol=1e-4)
        p, q = (log_softmax(each) for each in (window._logits, answers.astype(np.float64)))
        expected = (np.exp(p) * (p - q)).sum(-1).mean(-1)
        np.testing.assert_allclose(window.score(changed)[0], expected, rtol=1e-3, atol=1e-6)
        found.append((expected, answers))
    assert found[0][0].min() > 1e-5 and not np.allclose(found[0][0], found[1][0], rtol=1e-3)
