"""Trials: how the model's answers change when one layer's K and V, or its attention, change.

FAEDKV leaves out frequencies (paper, section 3.2), SALS cuts latents to fewer columns, FASA chooses
rows by fewer chunks.

A window of text is a prefix, whose K and V are computed once, and scored rows after it. A trial
changes one layer's K and V of the prefix, between sinks and recent rows. One forward pass computes
many trials: it has a copy of the scored rows for each. In the changed layer, a copy attends to its
own changed prefix. In all layers below, a copy equals the text's rows. So it joins the pass only at
the changed layer. Copies are rotated to their true positions.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sparsekv_cli.cache.attend import attend_causal
from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import AttnInput, LayerSpec, StateInput
from sparsekv_cli.cache.state import StateCache
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.calibration.run import CalibrationRun
from sparsekv_cli.models.forward import Copies
from sparsekv_cli.models.rope import rotate_heads

ROWS_AT_ONCE = 512  # scored rows of one forward pass, all copies together
# Only so many likeliest tokens after each scored row are compared. They have 98 to 99.9% of the
# probability in a window, for models with 152K tokens.
TOKENS_A_ROW = 4096
MOST_CHANGE = 80.0  # most change of a logit, because e^80 fits f32

# A function that changes rows of K and V in place: f16 (G, rows, padded d).
Change = Callable[[np.ndarray, np.ndarray], None]
# A function with the arguments and the result of attend_causal (cache/attend.py).
Attend = Callable[[np.ndarray, KVStore, LayerSpec], np.ndarray]


class Trial(NamedTuple):
    """One trial: ``layer`` has changed K and V in its prefix, all other layers are unchanged."""

    layer: int  # -1: no layer, nothing changes
    change: Change
    attend: Attend = attend_causal  # how the scored rows attend in this layer


def unchanged(k: np.ndarray, v: np.ndarray) -> None:
    """Changes nothing, as the change of a trial."""


def first_layer(trial: Trial, specs: Sequence[LayerSpec]) -> int:
    """Returns the layer at which the copy of a trial joins a pass.

    It is the trial's layer, or the one before it if both have the same input. It is 0 if layers
    read rows of other layers.
    """
    if trial.layer < 0 or any(spec.source >= 0 for spec in specs):
        return 0
    return trial.layer - specs[trial.layer].shares_input


def depth(layer: int, specs: Sequence[LayerSpec]) -> float:
    """Returns the share of all layers that a trial of ``layer`` computes.

    In a model of 32 layers, a trial of layer 24 computes 8 of them: 0.25.
    """
    return 1 - first_layer(Trial(layer, unchanged), specs) / len(specs)


class Window:
    """A prefix and the scored rows after it. ``score`` measures how trials change their logits."""

    def __init__(
        self,
        run: CalibrationRun,
        ids: Sequence[int],
        n_scored: int,
        middle: slice,
        caches: Sequence[LayerCache],
    ) -> None:
        """ids: of the prefix, of n_scored rows, and of the token after them.

        middle: the rows of the prefix that trials change. caches: one a layer, with all rows of the
        prefix or a StateCache.
        """
        self._run, self._middle = run, middle
        self._n_prefix = len(ids) - n_scored - 1
        self._rows = list(ids[self._n_prefix : -1])
        self._caches, self._copies = caches, Copies()
        self._vocabulary: np.ndarray | None = None
        logits = self._logits_of([Trial(-1, unchanged)])[0]  # (rows, n_vocab)
        self._following = np.array(ids[self._n_prefix + 1 :])[:, None]
        full = logits - logits.max(-1, keepdims=True)
        full -= np.log(np.exp(full).sum(-1, keepdims=True))
        self._losses = -np.take_along_axis(full, self._following, 1)[:, 0]
        self._vocabulary = _likely(full, self._following)
        self._following = np.searchsorted(self._vocabulary, self._following)
        self._logits = logits[:, self._vocabulary]
        self._full = np.exp(full[:, self._vocabulary])
        self._full /= self._full.sum(-1, keepdims=True)
        self._plain = slice(n_scored - n_scored // 2)  # the scored rows that continue the text
        self.nll = float(self._losses[self._plain].mean())

    def score(
        self, trials: Sequence[Trial], advance: Callable[[float], None] = lambda rows: None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns KLD(full || trial) and -ln likelihood of each trial, f64 (trials,) each.

        The KLD is the mean over all scored rows. The likelihood is the mean over the rows that
        continue the text, as in the paper. Both leave out tokens that the full model thinks
        unlikely (TOKENS_A_ROW). advance: called with the number of rows computed since the last
        call.
        """
        order = np.argsort([trial.layer for trial in trials], kind="stable")
        scored = np.empty((2, len(trials)))
        step = max(1, ROWS_AT_ONCE // len(self._rows))
        for i in range(0, len(trials), step):
            part = order[i : i + step]
            together = [trials[j] for j in part]
            scored[:, part] = self._run.scores_of(len(part), partial(self._measured, together))
            depths = sum(depth(trial.layer, self._run.specs) for trial in together)
            advance(depths * len(self._rows))
        return scored[0], scored[1]

    def _measured(self, trials: Sequence[Trial]) -> np.ndarray:
        """Returns KLD and -ln likelihood of trials of one pass, f64 (2, trials)."""
        return np.transpose([self._compare(logits) for logits in self._logits_of(trials)])

    def _logits_of(self, trials: Sequence[Trial]) -> np.ndarray:
        """Returns logits f32 (trials, rows, vocabulary). Trials must be sorted by layer.

        The first call also records the streams that later calls' copies join with.
        """
        run = self._run
        n_prefix, n_rows = self._n_prefix, len(self._rows)
        caches = [
            _TrialState(cache, n_prefix, n_rows)
            if isinstance(cache, StateCache)
            else _TrialCache(cache.spec, cache.store, n_prefix, n_rows, trials, self._middle)
            for cache in self._caches
        ]
        if self._copies.streams:
            first = [first_layer(trial, run.specs) for trial in trials]
            joining = np.bincount(first, minlength=len(caches)).tolist()
            self._copies = Copies(self._copies.streams, joining)
        logits = run.forward(
            self._rows * len(trials), self._n_prefix, caches, all_logits=True,
            attend=_TrialCache.attend, copies=self._copies, vocabulary=self._vocabulary,
        )  # fmt: skip
        return logits.reshape(len(trials), len(self._rows), -1)

    def _compare(self, logits: np.ndarray) -> tuple[float, float]:
        """Returns KLD and -ln likelihood of a trial's logits (rows, tokens).

        It overwrites the logits. Let p be the full model's probabilities and D the change of the
        logits. The log of the normaliser rises by r = log sum p e^D, and KLD = r - sum p D. This is
        exact for small changes too, and needs only a difference, a product and an exponential a
        token.
        """
        change = np.minimum(np.subtract(logits, self._logits, out=logits), MOST_CHANGE, out=logits)
        mean = (self._full * change).sum(-1)
        change_of_next = np.take_along_axis(change, self._following, 1)[:, 0]
        rise = np.log1p((self._full * np.expm1(change, out=change)).sum(-1))
        losses = (self._losses + rise - change_of_next)[self._plain]
        return float((rise - mean).mean()), float(losses.mean())


def _likely(full: np.ndarray, following: np.ndarray) -> np.ndarray:
    """Returns the likeliest tokens of all rows, and the tokens that follow: int64, ascending."""
    if full.shape[1] <= TOKENS_A_ROW:
        return np.arange(full.shape[1])
    best = np.argpartition(full, -TOKENS_A_ROW, axis=1)[:, -TOKENS_A_ROW:]
    return np.unique(np.concatenate([best, following], axis=1))


class _TrialCache(LayerCache):
    """One layer's cache for all trials of a pass. Rows come trial by trial."""

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
        """Returns the attention of a chunk's rows, which may belong to several trials."""
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
        """Returns how many trials, from ``trial`` on, have the same rows here. At most ``most``.

        They are equal if they only change later layers.
        """
        n = 0
        while n < most and self._trials[trial + n].layer > self.spec.layer:
            n += 1
        return max(1, n)

    def _one_trial(self, x: AttnInput, rows: slice, trial: int, first: int) -> np.ndarray:
        """Returns the attention of rows of one trial to the trial's own prefix and rows.

        rows: the trial's rows in x. first: the number of the first of them in the trial.
        """
        changed = self._trials[trial]
        if first == 0:
            self.store = self._prefix_of(changed)
        q, k = (self._rotated(each[:, rows], first) for each in (x.q_nope, x.k_nope))
        self.store.append(k, x.v[:, rows])
        attend = changed.attend if changed.layer == self.spec.layer else attend_causal
        return attend(q, self.store, self.spec)

    def _prefix_of(self, trial: Trial) -> KVStore:
        """Returns the store of the prefix; for the layer that ``trial`` changes, a changed copy."""
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
        """Returns rows (heads, T, d) of a trial, from its row ``first`` on, rotated by RoPE."""
        cos, sin = (turn[first : first + heads.shape[1]] for turn in self._turns)
        return rotate_heads(heads, cos, sin)

    def decode(self, x: AttnInput) -> np.ndarray:
        raise AssertionError("a calibration only prefills")


class _TrialState(LayerCache):
    """A recurrent layer's cache for all trials of a pass.

    Each trial begins with the prefix's state.
    """

    def __init__(self, prefix: StateCache, n_prefix: int, n_rows: int) -> None:
        super().__init__(prefix.spec)
        self._prefix, self._n_prefix, self._n_rows = prefix, n_prefix, n_rows
        self._n_done = 0

    def extend(self, x: Any) -> np.ndarray:
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
    """Returns cosines and sines, f32 (n, n_rot/2), of n positions from ``position`` on.

    They include RoPE's scale.
    """
    angles = np.arange(position, position + n)[:, None] * spec.theta  # (n, n_rot/2)
    return (
        (spec.rope_scale * np.cos(angles)).astype(np.float32),
        (spec.rope_scale * np.sin(angles)).astype(np.float32),
    )
