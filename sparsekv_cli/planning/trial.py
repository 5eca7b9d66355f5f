"""A method on a document's rows: the speed of its steps, and what they lose.

Steps of a method and of ``full`` are timed in turn, because other work on a machine makes it slower
for minutes. Steps whose speed does not matter are decoded several at once. A row has the same bits
alone and with others.
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

N_COLD, N_TIMED = 2, 22  # steps of a method: the first ones are slower, the next ones are timed
N_COLD_PACE, N_PACE = 1, 6  # of ``full``, ahead of each method and after it
N_AT_ONCE = 8  # rows of a step that is not timed
NOISE = 1.05  # ratio of two speeds below which they count as equal
SMALL = 0.8  # share of the memory of ``full`` below which a method saves memory
UNEVEN = 1.3  # ratio of two paces of ``full`` above which the machine is busy


@dataclass(frozen=True)
class MethodTrial:
    """A method on a LossTask.

    A method that gains nothing does not get the task. ``same`` and ``kld`` are then empty.
    """

    method: Method
    step_s: np.ndarray  # f64 (n,), seconds of the timed steps
    full_s: np.ndarray  # f64 (m,), seconds of steps of ``full`` just before and after
    n_bytes: int  # of K, V and the index
    same: np.ndarray  # bool (N_WORDS,), whether the method chose the word that ``full`` chose
    kld: np.ndarray  # f64 (N_WORDS,), KLD(full || method)
    found: int = 0  # facts

    @property
    def speedup(self) -> float:
        """How many times as fast as ``full`` a step is."""
        return float(np.median(self.full_s) / np.median(self.step_s))

    def interval(self) -> tuple[float, float]:
        """Returns the interval of the speed-up."""
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
    """Tries methods on a task, one after the other, next to a sequence of ``full``."""

    def __init__(self, task: LossTask, full: Sequence, method: Method) -> None:
        """full: holds the task's prompt, and has the method ``method``."""
        self.task, self._full, self._paces = task, full, list[float]()
        self._reference: list[np.ndarray] = []
        self.full = self.try_method(full, method)

    @property
    def full_step_s(self) -> float:
        """Seconds of a step of ``full``, of all that were timed."""
        return float(np.median(self._paces))

    @property
    def is_uneven(self) -> bool:
        """Whether ``full`` was much slower at times, so that something else was running."""
        paces = np.reshape(self._paces, (-1, N_PACE))
        middles = np.median(paces, axis=1)
        return bool(middles.max() > UNEVEN * middles.min())

    def pace(self) -> list[float]:
        """Returns the seconds of some steps of ``full`` at the end of the prompt."""
        self._rewind()
        seconds = _timed_steps(self._full, self.task.following[: N_COLD_PACE + N_PACE])
        self._paces += seconds[N_COLD_PACE:]
        return seconds[N_COLD_PACE:]

    def _rewind(self) -> None:
        n = len(self.task.prompt)
        self._full.rewind(n)
        assert len(self._full.tokens) == n  # the end of its last prefill

    def try_method(self, sequence: Sequence, method: Method) -> MethodTrial:
        """Measures a method. sequence: holds the task's prompt."""
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
    """Returns medians of bootstrap draws. A step that other work delays hardly changes them."""
    drawn = np.random.RandomState(seed).randint(0, len(values), (N_DRAWS, len(values)))
    return np.median(values[drawn], axis=1)


def _timed_steps(
    sequence: Sequence, tokens: list[int], see: Callable[[int, np.ndarray], None] | None = None
) -> list[float]:
    """Decodes ``tokens`` one by one; returns the seconds of each step."""
    seconds = []
    for step, token in enumerate(tokens):
        before = sequence.timings.decode_s
        logits = sequence.decode(token)
        seconds.append(sequence.timings.decode_s - before)
        if see is not None:
            see(step, logits)
    return seconds
