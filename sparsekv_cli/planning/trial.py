"""Tries a method on a document's rows: how fast its steps are, and how much they lose.

Steps of a method and of ``full`` are timed in turn, because other work slows a machine down for
minutes. Steps that are not timed are decoded several at once. A row has the same bits alone and
with others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from sparsekv_cli.cache.counters import held_bytes
from sparsekv_cli.evaluation.intervals import N_DRAWS, interval, is_equal
from sparsekv_cli.evaluation.observer import Measured
from sparsekv_cli.methods.base import Method
from sparsekv_cli.planning.reading import N_WORDS, LossTask

if TYPE_CHECKING:
    from sparsekv_cli.sequence import Sequence

N_COLD, N_TIMED = 2, 22  # first steps of a method, which are slower; then steps that are timed
N_COLD_PACE, N_PACE = 1, 6  # the same for ``full``, before and after each method
N_AT_ONCE = 8  # rows of one step that is not timed
NOISE = 1.05  # speeds with a smaller ratio count as equal
SMALL = 0.8  # a method saves memory if it needs at most this share of full's
UNEVEN = 1.3  # if the speed of ``full`` varies by more than this ratio, the machine is busy


@dataclass(frozen=True)
class MethodTrial:
    """The result of a method on a LossTask.

    A method that gains nothing does not run the task: ``same`` and ``kld`` are then empty.
    """

    method: Method
    step_s: np.ndarray  # f64 (n,), seconds of the timed steps
    full_s: np.ndarray  # f64 (m,), seconds of steps of ``full`` just before and after the method's
    n_bytes: int  # bytes of K, V and index
    same: np.ndarray  # bool (N_WORDS,), whether method and ``full`` chose the same word
    kld: np.ndarray  # f64 (N_WORDS,), KLD(full || method)
    found: int = 0  # number of facts that the method found

    @property
    def speedup(self) -> float:
        """How many times as fast as a step of ``full`` a step is."""
        return float(np.median(self.full_s) / np.median(self.step_s))

    def interval(self) -> tuple[float, float]:
        """Returns the bootstrap interval of ``speedup``."""
        return interval(self._draws())

    def _draws(self) -> np.ndarray:
        return _drawn_medians(self.full_s, 0) / _drawn_medians(self.step_s, 1)

    @property
    def is_faster(self) -> bool:
        return self.speedup >= NOISE and self.interval()[0] > 1

    @property
    def is_slower(self) -> bool:
        return self.speedup <= 1 / NOISE and self.interval()[1] < 1

    def is_as_fast_as(self, other: MethodTrial) -> bool:
        """Returns whether the two speeds differ by no more than noise."""
        ratio = self.speedup / other.speedup
        return 1 / NOISE < ratio < NOISE or is_equal(self._draws(), other._draws())

    def saves_memory(self, full_bytes: int) -> bool:
        return self.n_bytes <= SMALL * full_bytes


class Trials:
    """Tries methods on a task, one after another, and times ``full`` between them."""

    def __init__(self, task: LossTask, full: Sequence, method: Method) -> None:
        """full: a sequence of the method ``method``, which ends with the task's prompt."""
        self.task, self._full, self._paces = task, full, list[float]()
        self._reference: list[np.ndarray] = []
        self.full = self.try_method(full, method)

    @property
    def full_step_s(self) -> float:
        """The median seconds of all timed steps of ``full``."""
        return float(np.median(self._paces))

    @property
    def is_uneven(self) -> bool:
        """Whether ``full`` was much slower at some times, so that other work was running."""
        paces = np.reshape(self._paces, (-1, N_PACE))
        middles = np.median(paces, axis=1)
        return bool(middles.max() > UNEVEN * middles.min())

    def pace(self) -> list[float]:
        """Returns the seconds of some steps of ``full`` after the prompt."""
        self._rewind()
        seconds = _timed_steps(self._full, self.task.following[: N_COLD_PACE + N_PACE])
        self._paces += seconds[N_COLD_PACE:]
        return seconds[N_COLD_PACE:]

    def _rewind(self) -> None:
        n = len(self.task.prompt)
        self._full.rewind(n)
        # the prompt ends a prefill, so every method can go back there
        assert len(self._full.tokens) == n

    def try_method(self, sequence: Sequence, method: Method) -> MethodTrial:
        """Returns the trial of a method. sequence: has this method and ends with the prompt."""
        before = self.pace()
        following, measured, is_full = self.task.following, Measured(), sequence is self._full
        found = dict.fromkeys(range(len(self.task.facts)), True)
        if is_full:
            self._rewind()

        def see(step: int, logits: np.ndarray) -> None:
            if step < N_WORDS:
                if is_full:
                    self._reference.append(logits.copy())
                measured.add_step(self._reference[step], logits)
            for fact, steps in enumerate(self.task.facts):
                if step in steps and int(logits.argmax()) != following[step + 1]:
                    found[fact] = False

        n_alone = N_COLD + N_TIMED
        seconds = _timed_steps(sequence, following[:n_alone], see)[N_COLD:]
        n_bytes = held_bytes(sequence.caches)
        pace = [*before, *(seconds if is_full else self.pace())]
        nothing = np.empty(0)
        trial = MethodTrial(method, np.array(seconds), np.array(pace), n_bytes, nothing, nothing)
        if not is_full and trial.speedup < NOISE and not trial.saves_memory(self.full.n_bytes):
            return trial
        for first in range(n_alone, len(following), N_AT_ONCE):
            rows = following[first : first + N_AT_ONCE]
            (outcomes,) = sequence.engine.decode([sequence], [rows])
            sequence.keep(len(sequence.tokens))
            for i, logits in enumerate(outcomes):
                see(first + i, np.asarray(logits))
        same, kld = np.array(measured.same_top1), np.array(measured.kld)
        return replace(trial, same=same, kld=kld, found=sum(found.values()))


def _drawn_medians(values: np.ndarray, seed: int) -> np.ndarray:
    """Returns medians of bootstrap draws of ``values``. One delayed step hardly changes them."""
    drawn = np.random.RandomState(seed).randint(0, len(values), (N_DRAWS, len(values)))
    return np.median(values[drawn], axis=1)


def _timed_steps(
    sequence: Sequence, tokens: list[int], see: Callable[[int, np.ndarray], None] | None = None
) -> list[float]:
    """Decodes ``tokens`` one by one. Returns the seconds of each step.

    see: called with the number and the logits of each step.
    """
    seconds = []
    for step, token in enumerate(tokens):
        before = sequence.timings.decode_s
        logits = sequence.decode(token)
        seconds.append(sequence.timings.decode_s - before)
        if see is not None:
            see(step, logits)
    return seconds
