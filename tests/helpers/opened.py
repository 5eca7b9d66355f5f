"""A model and one sequence of it, for tests that need no more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsekv_cli.config import SessionConfig
from sparsekv_cli.methods.base import Method
from sparsekv_cli.model import Model, load_model
from sparsekv_cli.models.forward import OnProgress
from sparsekv_cli.prefix.prompt_rows import PromptRows
from sparsekv_cli.sequence import Sample, Sequence, Timings


@dataclass(eq=False)
class OpenSequence(Sequence):
    """A sequence that knows the model that was opened for it."""

    model: Any = None
    rows: PromptRows | None = None  # finds and keeps the rows of its prompts

    def prefill(self, ids: Ids[int], progress: OnProgress | None = None, **options: Any) -> Any:
        return super().prefill(ids, progress, **{"rows": self.rows, **options})

    def another(self) -> OpenSequence:
        """Returns a sequence of the same model without tokens, which attends alike."""
        return OpenSequence(self.engine, self.attention, model=self.model)


def sequence_of(model: Model) -> OpenSequence:
    assert model.attention is not None
    timings = Timings(load_s=model.load_s)
    return OpenSequence(model.engine, model.attention, timings=timings, model=model)


def open_sequence(path: Path, method: Method, config: SessionConfig, *told: Any) -> OpenSequence:
    """As load_model, with a sequence of the model."""
    return sequence_of(load_model(path, method, config, *told))


def decode_together(sequences: Iterable[Sequence], tokens: Iterable[int]) -> list[Any]:
    """One step of several sequences, a token each: their logits f32 (n_vocab,)."""
    sequences = list(sequences)
    outcomes = sequences[0].engine.decode(sequences, [[token] for token in tokens])
    return [logits for (logits,) in outcomes]


def generated(sequence: Sequence, ids: Ids[int], sample: Sample, n: int) -> Iterator[int]:
    """Prefills ``ids`` and yields n sampled tokens, each ahead of its decode step.

    A negative n yields tokens until the context is full. Without ``ids`` it goes on from the end of
    the last prefill.
    """
    if len(ids):
        sequence.prefill(ids)
    assert sequence.checkpoint is not None and sequence.checkpoint.n == len(sequence.tokens)
    outcome: Any = sequence.checkpoint.logits
    n_left = n
    while n_left != 0:
        token = outcome if isinstance(outcome, int) else sample(outcome, sequence.tokens)
        yield token
        n_left -= 1
        if n_left == 0 or sequence.is_full:
            return
        ((outcome,),) = sequence.engine.decode([sequence], [[token]], [sample])
