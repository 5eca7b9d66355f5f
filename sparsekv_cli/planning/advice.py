"""Advice from trials: which methods are worth it on a document, and why, in a sentence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsekv_cli.evaluation.intervals import drawn_means, groups_of, is_equal
from sparsekv_cli.methods import spec_of
from sparsekv_cli.planning.auto import ORACLE
from sparsekv_cli.planning.trial import MethodTrial

N_BEST = 3  # methods in the report, ``full`` not counted
MISSED = 1  # an advised method may miss so many facts that ``full`` finds


@dataclass(frozen=True)
class Advice:
    """The conclusion from trials of methods on a document."""

    full: MethodTrial
    full_step_s: float  # seconds of a step of ``full``; all speeds refer to it
    trials: Sequence[MethodTrial]
    max_loss: float  # mean KLD up to which a method loses little
    left_out: Mapping[str, str]  # name of a method that is not in the report -> the reason
    is_busy: bool  # the machine was busy, so speeds rank no method
    n_facts: int
    facts_from: int  # position of the first fact, in tokens

    def loses_little(self, trial: MethodTrial) -> bool:
        is_near = float(trial.kld.mean()) <= self.max_loss
        return is_near and trial.found >= self.full.found - MISSED

    def gains(self, trial: MethodTrial) -> bool:
        """Returns whether a method is faster than ``full``, or as fast with less memory."""
        saves = trial.saves_memory(self.full.n_bytes) and not trial.is_slower
        return trial.is_faster or saves

    @property
    def best(self) -> list[MethodTrial]:
        """Up to N_BEST methods: those that lose little, fastest first, then others by loss."""
        asked = [trial for trial in self.trials if len(trial.same)]
        good = [trial for trial in asked if self.loses_little(trial)]
        others = [trial for trial in asked if not self.loses_little(trial)]
        for trials in (good, others):
            trials.sort(key=lambda trial: float(trial.kld.mean()))
        if not self.is_busy:
            good.sort(key=lambda trial: (not self.gains(trial), -trial.speedup))
        return [*good, *others][:N_BEST]

    @property
    def chosen(self) -> MethodTrial:
        """The fastest method that loses little.

        If several are equally fast, the one that loses least.
        """
        good = [each for each in self.best if self.loses_little(each) and self.gains(each)]
        if self.is_busy or not good:
            return self.full
        alike = [each for each in good if each is good[0] or each.is_as_fast_as(good[0])]
        return min(alike, key=lambda each: float(each.kld.mean()))

    def reasons(self) -> dict[str, str]:
        """Returns name -> reason, for each method that is not in the report."""
        best = [id(trial) for trial in self.best]
        others = {
            trial.method.name: f"{N_BEST} others are better here; it {self.losses(trial)}"
            for trial in self.trials
            if len(trial.same) and id(trial) not in best
        }
        return {**others, **self.left_out}

    def tps(self, trial: MethodTrial) -> float:
        return (1.0 if trial is self.full else trial.speedup) / self.full_step_s

    @property
    def equal(self) -> dict[str, list[list[str]]]:
        """Groups of reported methods that are equal within noise: by speed, and by chosen words."""
        shown = [self.full, *self.best]
        by_speed = sorted(shown, key=self.tps)
        by_words = sorted((each for each in shown if len(each.same)), key=lambda e: e.same.mean())
        found = {
            "speed": groups_of(by_speed, self._is_as_fast),
            "words": groups_of(by_words, _are_as_near),
        }
        if self.is_busy:
            del found["speed"]
        return {
            what: [[spec_of(each.method) for each in group] for group in groups]
            for what, groups in found.items()
        }

    def _is_as_fast(self, a: MethodTrial, b: MethodTrial) -> bool:
        if self.full in (a, b):
            other = b if a is self.full else a
            return not (other.is_faster or other.is_slower)
        return a.is_as_fast_as(b)

    @property
    def oracle(self) -> MethodTrial | None:
        """The trial of exact top-k if every method loses too much, exact top-k too; else None."""
        asked = [trial for trial in self.trials if len(trial.same)]
        if any(map(self.loses_little, asked)):
            return None
        return next((trial for trial in asked if trial.method.name == "topk"), None)

    @property
    def why(self) -> str:
        """The reason for ``chosen``, in a sentence."""
        chosen = self.chosen
        if chosen is self.full:
            if not self.n_facts:
                return "full: the document is short, so no method gains anything"
            if self.is_busy:
                return "full: the machine was busy, and its speeds are not to be believed"
            if not self.best:
                return "full: no method that was tried is faster here or takes less memory"
            if (oracle := self.oracle) is not None:
                return "full: " + ORACLE.format(
                    spec=spec_of(oracle.method),
                    kld=float(oracle.kld.mean()),
                    max_loss=self.max_loss,
                )
            return "full: the methods that gain something lose too much, or gain too little"
        share = f"{chosen.n_bytes / self.full.n_bytes:.0%} of the memory of full"
        gain = f"{chosen.speedup:.1f} times as fast as full" if chosen.is_faster else (
            f"as fast as full, with {share}"
        )  # fmt: skip
        return f"{spec_of(chosen.method)}: {gain}, and it {self.losses(chosen)}"

    def losses(self, trial: MethodTrial) -> str:
        """Returns a method's loss as words of a sentence."""
        same = f"would have chosen the same word {int(trial.same.sum())} times of {len(trial.same)}"
        return f"{same} and found {trial.found} of {self.n_facts} planted facts"

    def as_dict(self, trial: MethodTrial) -> dict[str, Any]:
        """Returns the figures of one method of the report, for ``--json``."""
        speedup, ends = (
            (1.0, (1.0, 1.0)) if trial is self.full else (trial.speedup, trial.interval())
        )
        return {
            "spec": spec_of(trial.method),
            "name": trial.method.name,
            "options": trial.method.options(),
            "decode_tps": self.tps(trial),
            "times_as_fast": speedup,
            "times_as_fast_interval": list(ends),
            "bytes": trial.n_bytes,
            "same_words": int(trial.same.sum()),
            "words": len(trial.same),
            "facts_found": trial.found,
            "facts": self.n_facts,
            "kld_mean": float(trial.kld.mean()) if len(trial.kld) else None,
            "loses_little": trial is self.full or self.loses_little(trial),
        }


def _are_as_near(a: MethodTrial, b: MethodTrial) -> bool:
    return is_equal(drawn_means(a.same), drawn_means(b.same))
