"""Runs the passes of a calibration: one over the text, then windows and trials.

Work is counted in rows that go through all layers. A trial's row joins a pass at the trial's layer
and counts only for the layers from there on.
"""

from collections.abc import Callable, Sequence

import numpy as np

from sparsekv_cli.cache.layer import DenseCache, LayerCache
from sparsekv_cli.cache.spec import FULL, STATE, AttnInput, LayerSpec
from sparsekv_cli.cache.state import StateCache
from sparsekv_cli.calibration import allocation
from sparsekv_cli.calibration.run import CalibrationRun
from sparsekv_cli.calibration.trials import Trial, Window, depth

# rows of a window's prefix, scored rows of a window, windows
N_PREFIX, N_SCORED, N_WINDOWS = 1024, 48, 2
WORTH_A_WINDOW = 20  # scored rows; if two windows had fewer each, there is one window
LEAST_SCORED = 6  # scored rows of a window, at least, for a large model


def middle_rows(n_ids: int, n_sinks: int, n_recent: int) -> slice:
    """Returns which rows of a window's prefix trials change, in a text of n_ids tokens.

    They lie between n_sinks first rows and n_recent last rows.
    """
    n_scored = min(N_SCORED, n_ids // 4)
    return slice(n_sinks, min(N_PREFIX, n_ids - n_scored - 1) - n_recent)


class TextCache(LayerCache):
    """A layer's cache in the pass over the text. At the end only N_PREFIX rows stay."""

    def finish_prefill(self) -> None:
        self.store = self.store.copy(min(self.store.n, N_PREFIX))

    def decode(self, x: AttnInput) -> np.ndarray:
        raise AssertionError("a calibration only prefills")


class Study:
    """One calibration: how many rows it computes, and the windows that score its trials.

    middle: the rows of a window's prefix that trials change. n_scored: rows of a window that score
    a trial. starts: positions in the text where the windows begin. n_rows: rows of all passes.
    """

    def __init__(
        self,
        run: CalibrationRun,
        n_sinks: int,
        n_recent: int,
        layers: Sequence[int],
        n_text: int = 0,
        least_scored: int = LEAST_SCORED,
    ) -> None:
        """n_sinks, n_recent: rows of a prefix that no trial changes. layers: each trial's layer.

        n_text: tokens that ``pass_over_text`` reads. The first window's prefix is part of that
        pass. least_scored: rows of a window that score a trial, at least, for a large model.
        """
        self.run = run
        n_ids, depths = len(run.ids), sum(depth(layer, run.specs) for layer in layers)
        self.middle = middle_rows(n_ids, n_sinks, n_recent)
        self.n_prefix = self.middle.stop + n_recent
        self.n_scored = min(N_SCORED, n_ids // 4)
        n_windows = N_WINDOWS if n_ids > self.n_prefix + self.n_scored + 1 else 1
        n_affordable = run.n_scored or self._affordable(n_text, n_windows, depths)
        if n_affordable < min(self.n_scored, WORTH_A_WINDOW):
            n_windows, n_affordable = 1, self._affordable(n_text, 1, depths)
        self.n_scored = min(self.n_scored, run.n_scored or max(least_scored, n_affordable))
        last = n_ids - self.n_prefix - self.n_scored - 1
        self.starts = np.linspace(0, last, n_windows).astype(int).tolist() if layers else []
        self.n_rows = self._rows(n_text, len(self.starts), depths)
        self._n_text, self._done = n_text, 0.0
        self._kept: Sequence[LayerCache] = ()
        self._windows: list[Window] = []

    def _affordable(self, n_text: int, n_windows: int, depths: float) -> int:
        """Returns how many rows can score each trial in a window, an even number."""
        left = self.run.n_rows - self._rows(n_text, n_windows, 0)
        return int(left / (2 * n_windows * (depths + 1))) * 2

    def _rows(self, n_text: int, n_windows: int, depths: float) -> float:
        """Returns the rows of all passes. depths: the sum of all trials' ``depth``."""
        n_prefixes = n_windows - (1 if n_text and n_windows else 0)
        return n_text + n_prefixes * self.n_prefix + n_windows * (depths + 1) * self.n_scored

    def pass_over_text(self, make: Callable[[LayerSpec], LayerCache]) -> None:
        """Runs a forward pass over the start of the text. make: makes the cache of a full layer."""
        self._kept = self._prefilled(self.run.ids[: self._n_text], make)

    def score(self, trials: Sequence[Trial]) -> tuple[np.ndarray, np.ndarray]:
        """Returns KLD(full || trial) and the rise of -ln likelihood, f64 (trials,) each.

        Both are means over the windows; see Window.score.
        """
        windows = self._windows or self._new_windows()
        scored = [window.score(trials, self._advance) for window in windows]
        rises = [nlls - window.nll for window, (_, nlls) in zip(windows, scored, strict=True)]
        return np.mean([klds for klds, _ in scored], axis=0), np.mean(rises, axis=0)

    def _new_windows(self) -> list[Window]:
        ids, n_scored = self.run.ids, self.n_scored
        for start in self.starts:
            rows = _window(ids[start:], self.n_prefix, n_scored, self.middle)
            caches = self._kept if start == 0 else ()
            if not caches:
                caches = self._prefilled(rows[: self.n_prefix], DenseCache)
            self._windows.append(Window(self.run, rows, n_scored, self.middle, caches))
            self._advance(n_scored)
        return self._windows

    def _prefilled(
        self, ids: Sequence[int], make: Callable[[LayerSpec], LayerCache]
    ) -> list[LayerCache]:
        """Returns caches with the rows of a window's prefix, after a pass over ``ids``."""
        caches = [self._cache(spec, make) for spec in self.run.specs]
        done = self._done

        def follow(n_done: int, n: int) -> None:
            self._advance(done + n_done - self._done)

        self.run.forward(ids, 0, caches, progress=follow)
        for cache in caches:
            assert cache.truncate(self.n_prefix) == self.n_prefix
        return caches

    def _cache(self, spec: LayerSpec, make: Callable[[LayerSpec], LayerCache]) -> LayerCache:
        if spec.kind == STATE:
            cache: LayerCache = StateCache(spec)
            cache.mark([self.n_prefix])
            return cache
        return (make if spec.kind == FULL else DenseCache)(spec)

    def _advance(self, n_rows: float) -> None:
        """Reports the progress after ``n_rows`` more rows."""
        self._done += n_rows
        self.run.progress(min(1.0, self._done / self.n_rows))


def study_shares(
    study: Study,
    specs: Sequence[LayerSpec],
    trial_of: Callable[[LayerSpec, float], Trial],
    shares: Sequence[float],
) -> tuple[np.ndarray, np.ndarray]:
    """Measures the loss of each layer at each of ``shares``, and divides budgets by it.

    specs: the layers to measure; all others get the mean share. trial_of: (layer, share) -> its
    trial. Returns KLD(full || trial) f32 (L, shares), and budgets f32 (L, shares, 2) as
    ``allocation.budgets_of_levels`` returns them. The last share, 1, gets the KLD of the share
    before it: it is rounding, which no share removes.
    """
    n_layer = len(study.run.specs)
    kld = np.zeros((n_layer, len(shares)))
    budgets = np.tile(allocation.even_budgets(shares), (n_layer, 1, 1))
    if specs:
        klds, _ = study.score([trial_of(spec, share) for spec in specs for share in shares[:-1]])
        layers = [spec.layer for spec in specs]
        kld[layers, :-1] = klds.reshape(len(specs), -1)
        kld[layers, -1] = kld[layers, -2]
        budgets[layers] = allocation.budgets_of_levels(kld[layers], shares)
    return kld.astype(np.float32), budgets.astype(np.float32)


def _window(ids: Sequence[int], n_prefix: int, n_scored: int, middle: slice) -> list[int]:
    """Returns the ids of a window: its prefix, n_scored rows, and the token after them.

    Half of the scored rows continue the text. The others repeat a passage of the prefix, which
    needs exact recall. Plain text hardly needs recall, so layers that only recall would seem
    useless.
    """
    n_repeated = n_scored // 2
    first = middle.start + (middle.stop - middle.start) // 3
    passage = ids[first : first + n_repeated + 1]
    return [*ids[: n_prefix + n_scored - n_repeated], *passage]
