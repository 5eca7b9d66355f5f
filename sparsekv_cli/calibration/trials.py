"""What changing one layer's K and V does to the model's answers, many variants in a forward pass.

FAEDKV's ablation study (paper, section 3.2) leaves out frequencies, SALS cuts latents to fewer
columns, FASA chooses rows by fewer chunks.

A window of text is a prefix, whose K and V are computed once, and scored rows behind it. A trial
changes one layer's K and V of the prefix, between sinks and recent rows. One forward pass takes a
copy of the scored rows for each trial; a layer's cache rotates each copy to its true positions and
lets it attend to its own prefix. Below the layer that a trial changes, copies are equal and share
one attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsekv_cli.cache.attend import attend_causal
from sparsekv_cli.cache.layer import DenseCache, LayerCache
from sparsekv_cli.cache.spec import STATE, AttnInput, LayerSpec, StateInput
from sparsekv_cli.cache.state import StateCache
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.calibration import allocation
from sparsekv_cli.calibration.run import CalibrationRun
from sparsekv_cli.models.rope import rotate_heads

N_PREFIX, N_SCORED, N_WINDOWS = 1024, 48, 2  # rows of a window; windows
LEAST_SCORED = 6  # rows of a window of a large model, for which there is little time
ROWS_AT_ONCE = 512  # rows of a forward pass: bounds the logits, which are held for all of them
MOST_CHANGE = 80.0  # of a logit: its exponential fits f32


# Changes rows of K and V in place: f16 (G, rows, padded d).
Change = Callable[[np.ndarray, np.ndarray], None]
# As attend_causal (cache/attend.py).
Attend = Callable[[np.ndarray, KVStore, LayerSpec], np.ndarray]


class Trial(NamedTuple):
    """A change of one layer (-1: none), and how its scored rows attend, if not to everything."""

    layer: int
    change: Change
    attend: Attend = attend_causal


def unchanged(k: np.ndarray, v: np.ndarray) -> None:
    """No change."""


class Window:
    """A prefix and the scored rows behind it; ``score`` says what trials do to these rows."""

    def __init__(
        self, run: CalibrationRun, ids: Sequence[int], n_scored: int, middle: slice
    ) -> None:
        """ids: prefix, n_scored rows, the token that follows; middle: rows that trials change."""
        self._run, self._middle = run, middle
        self._n_prefix = len(ids) - n_scored - 1
        self._rows = list(ids[self._n_prefix : -1])
        self._following = np.array(ids[self._n_prefix + 1 :])[:, None]
        self._caches: list[LayerCache] = [
            (StateCache if spec.kind == STATE else DenseCache)(spec) for spec in run.specs
        ]
        run.forward(ids[: self._n_prefix], 0, self._caches)
        self._logits = self._logits_of([Trial(-1, unchanged)])[0]  # (rows, n_vocab)
        full = self._logits - self._logits.max(-1, keepdims=True)
        full -= np.log(np.exp(full).sum(-1, keepdims=True))
        self._full = np.exp(full)
        self._losses = -np.take_along_axis(full, self._following, 1)[:, 0]
        self._plain = slice(n_scored - n_scored // 2)  # rows that go on with the text
        self.nll = float(self._losses[self._plain].mean())

    def score(
        self, trials: Sequence[Trial], advance: Callable[[int], None] = lambda count: None
    ) -> tuple[np.ndarray, np.ndarray]:
        """KLD(full || trial) and negative log-likelihood of each trial: f64 (trials,) each.

        KLD is the mean over all rows; the likelihood that over the rows that continue the text (as
        in the paper). advance: called with the number of trials that were done since the last call.
        """
        scored = []
        step = max(1, ROWS_AT_ONCE // len(self._rows))
        for i in range(0, len(trials), step):
            scored += [self._compare(logits) for logits in self._logits_of(trials[i : i + step])]
            advance(len(trials[i : i + step]))
        return np.array([kld for kld, _ in scored]), np.array([nll for _, nll in scored])

    def _logits_of(self, trials: Sequence[Trial]) -> np.ndarray:
        """f32 (trials, rows, n_vocab)"""
        run = self._run
        n_prefix, n_rows = self._n_prefix, len(self._rows)
        caches = [
            _TrialState(cache, n_prefix, n_rows)
            if isinstance(cache, StateCache)
            else _TrialCache(cache.spec, cache.store, n_prefix, n_rows, trials, self._middle)
            for cache in self._caches
        ]
        logits = run.forward(
            self._rows * len(trials), self._n_prefix, caches, all_logits=True,
            attend=_TrialCache.attend,
        )  # fmt: skip
        return logits.reshape(len(trials), len(self._rows), -1)

    def _compare(self, logits: np.ndarray) -> tuple[float, float]:
        """KLD and negative log-likelihood of a trial's logits (rows, n_vocab), which are used up.

        With p the full model's probabilities and D the change of the logits, the normaliser rises
        by log sum p e^D, and KLD is that less sum p D: exact for small changes too, and vocabulary
        by vocabulary only a difference, a product and an exponential.
        """
        change = np.minimum(np.subtract(logits, self._logits, out=logits), MOST_CHANGE, out=logits)
        mean = (self._full * change).sum(-1)
        change_of_next = np.take_along_axis(change, self._following, 1)[:, 0]
        rise = np.log1p((self._full * np.expm1(change, out=change)).sum(-1))
        losses = (self._losses + rise - change_of_next)[self._plain]
        return float((rise - mean).mean()), float(losses.mean())


class _TrialCache(LayerCache):
    """One layer for all trials of a forward pass; the rows come trial by trial."""

    def __init__(
        self,
        spec: LayerSpec,
        prefix: KVStore,
        n_prefix: int,
        n_rows: int,
        trials: Sequence[Trial],
        middle: slice,
    ) -> None:
        super().__init__(spec)
        self._prefix, self._n_prefix, self._n_rows = prefix, n_prefix, n_rows
        self._trials, self._middle = trials, middle
        self._turns = _rotation(spec, n_prefix, n_rows)

    def attend(self, x: AttnInput) -> np.ndarray:
        """The attention of a chunk's rows, which may be of several trials."""
        out, done = [], 0
        while done < x.q.shape[1]:
            trial, first = divmod(x.pos - self._n_prefix + done, self._n_rows)
            left = x.q.shape[1] - done
            count = min(self._n_rows - first, left)
            n_equal = self._n_equal(trial, left // self._n_rows) if first == 0 else 1
            part = self._one_trial(x, slice(done, done + count), trial, first)
            out += [part] * n_equal
            done += n_equal * count
        return np.concatenate(out, axis=1)

    def _n_equal(self, trial: int, most: int) -> int:
        """How many trials from this one on change later layers only; their rows are equal here."""
        n = 0
        while n < most and self._trials[trial + n].layer > self.spec.layer:
            n += 1
        return max(1, n)

    def _one_trial(self, x: AttnInput, rows: slice, trial: int, first: int) -> np.ndarray:
        """Attention of a trial's rows, from row ``first`` on, over its own prefix."""
        changed = self._trials[trial]
        if first == 0:
            self.store = self._prefix_of(changed)
        q, k = (self._rotated(each[:, rows], first) for each in (x.q_nope, x.k_nope))
        self.store.append(k, x.v[:, rows])
        attend = changed.attend if changed.layer == self.spec.layer else attend_causal
        return attend(q, self.store, self.spec)

    def _prefix_of(self, trial: Trial) -> KVStore:
        """The stored prefix, or for the trial's own layer a changed copy."""
        self._prefix.truncate(self._n_prefix)
        if trial.layer != self.spec.layer:
            return self._prefix
        changed = KVStore(self.spec)
        changed.reserve(self._n_prefix + self._n_rows)
        for target, source in ((changed.k, self._prefix.k), (changed.v, self._prefix.v)):
            target[:, : self._n_prefix] = source[:, : self._n_prefix]
        trial.change(changed.k[:, self._middle], changed.v[:, self._middle])
        changed.n = self._n_prefix
        return changed

    def _rotated(self, heads: np.ndarray, first: int) -> np.ndarray:
        """(heads, T, d) before RoPE, a trial's rows from ``first`` on -> rotated."""
        cos, sin = (turn[first : first + heads.shape[1]] for turn in self._turns)
        return rotate_heads(heads, cos, sin)

    def decode(self, x: AttnInput) -> np.ndarray:
        raise AssertionError("a calibration only prefills")


class _TrialState(LayerCache):
    """A recurrent layer, which no trial changes, for all trials: each begins behind the prefix."""

    def __init__(self, prefix: StateCache, n_prefix: int, n_rows: int) -> None:
        super().__init__(prefix.spec)
        self._prefix, self._n_prefix, self._n_rows = prefix, n_prefix, n_rows
        self._n_done = 0

    def extend(self, x: Any) -> np.ndarray:
        """As StateCache."""
        out, done = [], 0
        while done < len(x.rows):
            first = self._n_done % self._n_rows
            if first == 0:
                self._prefix.truncate(self._n_prefix)
            part = slice(done, min(len(x.rows), done + self._n_rows - first))
            out.append(self._prefix.extend(StateInput(x.rows[part], x.gates[part])))
            self._n_done += part.stop - part.start
            done = part.stop
        return np.concatenate(out)

    def decode(self, x: AttnInput) -> np.ndarray:
        raise AssertionError("a calibration only prefills")


def _rotation(spec: LayerSpec, position: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of n positions from ``position`` on, times RoPE's scale: f32."""
    angles = np.arange(position, position + n)[:, None] * spec.theta  # (n, n_rot/2)
    return (
        (spec.rope_scale * np.cos(angles)).astype(np.float32),
        (spec.rope_scale * np.sin(angles)).astype(np.float32),
    )


def _window(ids: Sequence[int], n_prefix: int, n_scored: int, middle: slice) -> list[int]:
    """A prefix, n_scored rows and the token that follows.

    Half of the rows continue the text. The others repeat a passage from the prefix, which needs
    exact recall; plain text hardly does, so that layers that only recall would seem useless.
    """
    n_repeated = n_scored // 2
    first = middle.start + (middle.stop - middle.start) // 3
    passage = ids[first : first + n_repeated + 1]
    return [*ids[: n_prefix + n_scored - n_repeated], *passage]


def middle_rows(n_ids: int, n_sinks: int, n_recent: int) -> slice:
    """The rows of a window's prefix that trials change, in a text of n_ids tokens."""
    n_scored = min(N_SCORED, n_ids // 4)
    return slice(n_sinks, min(N_PREFIX, n_ids - n_scored - 1) - n_recent)


def windows_of(
    run: CalibrationRun, middle: slice, n_recent: int, n_trials: int, n_rows: int
) -> list[Window]:
    """Windows spread over the text; middle: as ``middle_rows`` says.

    n_trials: that each will score. n_rows: about as many as forward passes may take for that; with
    few there is one window, or fewer rows are scored.
    """
    n_ids, n_prefix = len(run.ids), middle.stop + n_recent
    n_scored = min(N_SCORED, n_ids // 4)
    n_windows = N_WINDOWS if n_rows >= N_WINDOWS * (n_prefix + n_scored * n_trials) else 1
    n_affordable = (n_rows - n_prefix) // (2 * n_trials) * 2  # half continue, half repeat
    n_scored = min(n_scored, max(LEAST_SCORED, n_affordable))
    starts = np.linspace(0, n_ids - n_prefix - n_scored - 1, n_windows).astype(int)
    return [
        Window(run, _window(run.ids[start:], n_prefix, n_scored, middle), n_scored, middle)
        for start in starts
    ]


def study_shares(
    run: CalibrationRun,
    is_dense: Callable[[LayerSpec], bool],
    trial_of: Callable[[LayerSpec, float], Trial],
    shares: Sequence[float],
    middle: slice,
    n_recent: int,
    progress: Callable[[float], None],
) -> tuple[np.ndarray, np.ndarray]:
    """What ``shares`` of something cost in each layer, and how a budget of it is shared out.

    trial_of: the trial of one layer with a share. Returns KLD(full || trial) f32 (L, shares), and
    f32 (L, shares, 2) as ``allocation.budgets_of_levels`` has it. The last share, 1, gets the KLD
    of the one before it: what is left there is rounding, which no share takes away. Layers that are
    dense by the method's default have no trials; their share is the mean.
    """
    specs = [spec for spec in run.specs if not is_dense(spec)]
    n_layer = len(run.specs)
    kld = np.zeros((n_layer, len(shares)))
    budgets = np.tile(allocation.even_budgets(shares), (n_layer, 1, 1))
    if specs:
        trials = [trial_of(spec, share) for spec in specs for share in shares[:-1]]
        n_rows = run.n_rows - len(run.statistics_ids)
        windows, done = windows_of(run, middle, n_recent, len(trials), n_rows), 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress(done / (len(windows) * len(trials)))

        klds = np.mean([window.score(trials, advance)[0] for window in windows], axis=0)
        layers = [spec.layer for spec in specs]
        kld[layers, :-1] = klds.reshape(len(specs), -1)
        kld[layers, -1] = kld[layers, -2]
        budgets[layers] = allocation.budgets_of_levels(kld[layers], shares)
    return kld.astype(np.float32), budgets.astype(np.float32)
