"""FAEDKV's calibration (paper, section 3.2): which frequencies of K and V an answer needs."""

from collections.abc import Sequence

import numpy as np

from sparsekv_cli.cache.kinds import full_layers
from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.calibration import allocation
from sparsekv_cli.calibration.run import CalibrationArray, CalibrationRun, budgets_array
from sparsekv_cli.calibration.study import Study, middle_rows
from sparsekv_cli.calibration.trials import Change, Trial
from sparsekv_cli.cpu.faedkv import frequencies
from sparsekv_cli.cpu.faedkv.frequencies import waves
from sparsekv_cli.errors import SparseKVError

# Scored rows of a trial, at least. With 6 rows the 1.5B found no needle: layers that recall text
# had little of the budget.
LEAST_SCORED = 24


def without(dropped: np.ndarray) -> Change:
    """Returns a change that removes the bins ``dropped`` int64 from the spectrum of K and V.

    The spectrum is along the rows (eq 6, 5).
    """

    def change(k: np.ndarray, v: np.ndarray) -> None:
        n = k.shape[1]
        kept = np.setdiff1d(np.arange(n // 2 + 1), dropped)
        has_few = len(kept) < len(dropped)
        # the smaller of both lists
        part = waves(n, kept if has_few else dropped).astype(np.float32)
        for rows in (k, v):
            x = rows.astype(np.float32)
            of_part = part.T @ (part @ x)
            rows[:] = of_part if has_few else x - of_part

    return change


def arrays_of_frequencies(specs: Sequence[LayerSpec]) -> dict[str, CalibrationArray]:
    """Returns name -> shape and type of the arrays that ``study_frequencies`` returns."""
    n_layer, levels = len(specs), allocation.LEVELS
    worth = CalibrationArray("f4", (n_layer, frequencies.N_CHUNKS))
    return {
        "imp_kld": worth,
        "imp_ppl": worth,
        "layer_kld": CalibrationArray("f4", (n_layer, len(levels))),
        "layer_budget": budgets_array(n_layer, levels),
    }


def study_frequencies(run: CalibrationRun, n_sinks: int, n_recent: int) -> dict[str, np.ndarray]:
    """Measures how answers change without some frequencies: chunk by chunk, layer by layer.

    imp_kld, imp_ppl f32 (L, C): KLD and relative rise of the perplexity (eq 7) without one chunk of
    one layer. layer_kld f32 (L, levels): the KLD with one layer at each share of
    ``allocation.LEVELS``, its chunks by imp_kld. layer_budget f32 (L, levels, 2): see
    ``allocation.budgets_of_levels``. Raises SparseKVError if too few tokens lie between the exact
    rows.
    """
    n_layer, layers = len(run.specs), [spec.layer for spec in full_layers(run.specs)]
    middle = middle_rows(len(run.ids), n_sinks, n_recent)
    n = middle.stop - middle.start
    if n < 2 * frequencies.N_CHUNKS:
        raise SparseKVError(f"calibration of faedkv: a text of {len(run.ids)} tokens is too short")
    levels, borders = allocation.LEVELS[:-1], frequencies.chunk_borders(n // 2 + 1)
    of_trials = layers * (frequencies.N_CHUNKS + len(levels))
    study = Study(run, n_sinks, n_recent, of_trials, least_scored=LEAST_SCORED)
    chunks = [np.arange(*borders[c : c + 2]) for c in range(frequencies.N_CHUNKS)]
    changes = [without(chunk) for chunk in chunks]
    trials = [Trial(layer, change) for layer in layers for change in changes]
    losses, rises = study.score(trials)
    kld = losses.reshape(len(layers), -1)
    trials = [
        Trial(layer, without(np.setdiff1d(np.arange(n // 2 + 1), kept)))
        for layer, klds in zip(layers, kld, strict=True)
        for kept in (frequencies.kept_bins(n, level, klds) for level in levels)
    ]
    # the last level drops nothing: its KLD is 0
    layer_kld = np.zeros((len(layers), len(allocation.LEVELS)))
    layer_kld[:, :-1] = study.score(trials)[0].reshape(len(layers), -1)
    found = {
        "imp_kld": kld,
        "imp_ppl": np.expm1(rises).reshape(len(layers), -1),
        "layer_kld": layer_kld,
        "layer_budget": allocation.budgets_of_levels(layer_kld),
    }
    tensors = {name: np.zeros((n_layer, *x.shape[1:]), np.float32) for name, x in found.items()}
    for name, values in found.items():  # layers that are not full have zeros
        tensors[name][layers] = values
    return tensors
