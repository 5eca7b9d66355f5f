"""Divides a budget of the whole model among its layers, by each layer's loss.

The budget counts frequencies for FAEDKV, columns of latents for SALS, and chunks for FASA.
"""

from collections.abc import Sequence

import numpy as np

from sparsekv_cli.cpu.faedkv.frequencies import LEAST_SHARE

# shares of the frequencies at which FAEDKV measures a layer's loss
LEVELS = (LEAST_SHARE, 0.0625, 0.25, 0.5, 1.0)


def budgets_of_levels(layer_kld: np.ndarray, shares: Sequence[float] = LEVELS) -> np.ndarray:
    """Returns the range of the model's budget in which a layer has each level: f32 (L, levels, 2).

    layer_kld (L, levels): the KLD when only this layer is compressed to each of ``shares``, whose
    last value is 1. All layers start at the lowest share. The budget then buys steps, one after
    another. A step raises one layer to a higher share. The step that saves the most KLD for its
    cost comes first. While a step is being bought, the layer's share grows linearly, so that every
    budget is used up. A level that a step skips has an empty range.
    """
    n_layer, levels = len(layer_kld), np.array(shares)
    rises = []  # (saved KLD a share, layer, from, to)
    for layer, kld in enumerate(layer_kld):
        low = 0
        while low < len(levels) - 1:
            gains = (kld[low] - kld[low + 1 :]) / (levels[low + 1 :] - levels[low])
            high = low + 1 + int(np.argmax(gains))
            rises.append((float(gains[high - low - 1]), layer, low, high))
            low = high
    budgets = np.zeros((*layer_kld.shape, 2))
    budgets[:, -1] = 1
    spent = levels[0]
    for _, layer, low, high in sorted(rises, key=lambda rise: -rise[0]):
        reached = spent + (levels[low : high + 1] - levels[low]) / n_layer
        budgets[layer, low, 1] = spent
        budgets[layer, low + 1 : high] = reached[1:-1, None]
        budgets[layer, high, 0] = spent = reached[-1]
    return np.minimum(budgets, 1).astype(np.float32)


def layer_share(budget: float, budgets: np.ndarray, shares: Sequence[float] = LEVELS) -> float:
    """Returns a layer's share for the model's ``budget``.

    budgets: the layer's row (levels, 2) of ``budgets_of_levels``.
    """
    return float(np.interp(budget, budgets.ravel(), np.repeat(shares, 2)))


def even_budgets(shares: Sequence[float]) -> np.ndarray:
    """Returns the row (shares, 2) for a layer whose share is always the model's budget."""
    return np.repeat(np.array(shares, np.float32), 2).reshape(-1, 2)


def layer_count(
    mean_count: int, size: int, budgets: np.ndarray, shares: Sequence[float] = LEVELS
) -> int:
    """Returns how many of ``size`` items a layer gets when layers get ``mean_count`` on average.

    budgets: the layer's row of ``budgets_of_levels``. If the mean is at most the least share, every
    layer gets the mean.
    """
    if mean_count <= shares[0] * size:
        return mean_count
    return max(1, round(size * layer_share(mean_count / size, budgets, shares)))
