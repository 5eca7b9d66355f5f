"""llama-perplexity's figures: perplexity, and KLD, perplexities and Δp against a base.

The base is a file of log-probabilities (kld_file.py), or other logits. The KLD leaves out entries
of the vocabulary whose log-probability in the base is -16 or less.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LEAST_LOG_PROB = -16.0
LEAST_COUNT = 10  # up to so many values, an uncertainty is 0
SHARES = (0.999, 0.99, 0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.01, 0.001)
KLD_SHARES = tuple(share for share in SHARES if share not in (0.75, 0.25))


class Statistic(NamedTuple):
    """A figure and its standard error; None: the figure has no standard error."""

    value: float
    stderr: float | None = None


def log_probs_of(logits: np.ndarray) -> np.ndarray:
    """Returns log-probabilities f32 (T, n_vocab) of logits f32 (T, n_vocab)."""
    best = logits.max(axis=-1, keepdims=True)
    total = np.exp(logits - best).sum(axis=-1, keepdims=True, dtype=np.float64)
    return logits - (best + np.log(total).astype(np.float32))


def negative_log_probs(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns -ln p f64 (T,) of the targets int (T,) by logits f32 (T, n_vocab)."""
    best = logits.max(axis=-1)
    total = np.exp(logits - best[:, None]).sum(axis=-1, dtype=np.float64)
    return np.log(total) - (logits[np.arange(len(targets)), targets] - best)


def token_scores(
    logits: np.ndarray, targets: np.ndarray, base: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Returns name -> a score of each token (T,). ``nll`` is -ln p of the targets int (T,).

    logits: f32 (T, n_vocab). base: log-probabilities f32 (T, n_vocab); with a base there are also
    ``nll_base``, ``kld`` and ``same_top``.
    """
    nll = negative_log_probs(logits, targets)
    if base is None:
        return {"nll": nll}
    terms = np.exp(base) * (base - log_probs_of(logits))
    return {
        "nll": nll,
        "nll_base": -base[np.arange(len(targets)), targets].astype(np.float64),
        "kld": np.where(base > LEAST_LOG_PROB, terms, 0).sum(axis=-1, dtype=np.float64),
        "same_top": (base.argmax(axis=-1) == logits.argmax(axis=-1)).astype(np.int64),
    }


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of tokens with -ln p ``nll`` (T,), and llama-perplexity's standard error."""

    nll: np.ndarray

    @property
    def value(self) -> float:
        return float(np.exp(np.mean(self.nll)))

    @property
    def stderr(self) -> float:
        return self.value * float(np.std(self.nll)) / max(1, len(self.nll) - 1) ** 0.5


@dataclass(frozen=True)
class Divergence:
    """Scores of T tokens by ``token_scores`` with a base, and llama-perplexity's statistics."""

    nll: np.ndarray
    nll_base: np.ndarray
    kld: np.ndarray
    same_top: np.ndarray

    def statistics(self) -> dict[str, Statistic]:
        """Returns llama-perplexity's name -> statistic. Δp and same top are shares from 0 to 1."""
        p_diff = np.exp(-self.nll) - np.exp(-self.nll_base)
        log_ppl, log_base = mean(self.nll), mean(self.nll_base)
        (var, cov), (_, var_base) = covariance(self.nll, self.nll_base)
        ratio = log_ppl.value - log_base.value
        ratio_error = error_of(var + var_base - 2 * cov)
        ppl, base = np.exp(log_ppl.value), np.exp(log_base.value)
        difference = error_of(ppl**2 * var + base**2 * var_base - 2 * ppl * base * cov)
        square = mean(p_diff**2)
        rms = square.value**0.5
        top = float(self.same_top.mean())
        found = {
            "Mean PPL(Q)": Statistic(ppl, ppl * error_of(var)),
            "Mean PPL(base)": Statistic(base, base * error_of(var_base)),
            "Cor(ln(PPL(Q)), ln(PPL(base)))": Statistic(
                cov / (var * var_base) ** 0.5 if var * var_base > 0 else 0.0
            ),
            "Mean ln(PPL(Q)/PPL(base))": Statistic(ratio, ratio_error),
            "Mean PPL(Q)/PPL(base)": Statistic(np.exp(ratio), np.exp(ratio) * ratio_error),
            "Mean PPL(Q)-PPL(base)": Statistic(ppl - base, difference),
            "Mean KLD": mean(self.kld),
            **quantiles("KLD", self.kld, KLD_SHARES),
            "Mean Δp": mean(p_diff),
            **quantiles("Δp", p_diff, SHARES),
            "RMS Δp": Statistic(rms, 0.5 / rms * (square.stderr or 0.0) if rms else 0.0),
            "Same top p": Statistic(top, error_of(top * (1 - top) / max(1, len(self.kld) - 1))),
        }
        return {
            name: Statistic(float(value), None if stderr is None else float(stderr))
            for name, (value, stderr) in found.items()
        }


def error_of(variance: float) -> float:
    """Returns the square root of a variance; 0 if rounding has made the variance negative."""
    return float(max(0.0, variance)) ** 0.5


def mean(values: np.ndarray) -> Statistic:
    return Statistic(float(values.mean()), error_of(covariance(values, values)[0][0]))


def covariance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the covariance (2, 2) of the means of two series; zeros for up to 10 values."""
    if len(one) <= LEAST_COUNT:
        return np.zeros((2, 2))
    return np.cov(one, other, ddof=0) / (len(one) - 1)


def quantiles(of: str, values: np.ndarray, shares: tuple[float, ...]) -> dict[str, Statistic]:
    """Returns maximum, quantiles at ``shares`` (interpolated) and minimum, by name."""
    found = {f"Maximum {of}": Statistic(values.max())}
    for share in shares:
        name = "Median" if share == 0.5 else f"{100 * share:.1f}%"
        found[f"{name} {of}"] = Statistic(np.quantile(values, share))
    return {**found, f"Minimum {of}": Statistic(values.min())}
