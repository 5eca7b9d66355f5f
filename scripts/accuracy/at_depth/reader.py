"""A model that reads long texts: once each, with the rows on disk, for all methods."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparsekv_cli.commands.options.prefix import PrefixOptions, prefixes_maker
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation.prefill import greedy_answer, new_sequence
from sparsekv_cli.evaluation.ruler.tasks import score
from sparsekv_cli.generation.conversation import chat_template, encode_messages
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.base import Method
from sparsekv_cli.model import Model
from sparsekv_cli.prefix.prefixes import BLOCK, LEAST, Prefixes
from sparsekv_cli.sequence import Sequence as Tokens

FULL = build_method("full", {})
MOST_GIB = 1 << 20  # of a folder
Messages = Sequence[Mapping[str, str]]


class NoTimeError(Exception):
    """The deadline has passed."""


@dataclass(frozen=True)
class Reader:
    """A model that reads densely or sparsely, each with a folder of its own.

    Rows that were read densely would otherwise serve a sparse reader.
    """

    model: Model
    folder: Path
    gib: float  # of the folder
    ends: float  # the deadline, of time.perf_counter()
    texts: dict[str, list[int]] = field(default_factory=dict)  # the ids that all questions share

    def key(self) -> dict[str, Any]:
        """Returns what tells rows of this reader from those of others, for a row of results.

        identity: of the model's values, with what changes them. reading: empty for a dense one, or
        the budget, the chunk and the number of dense layers.
        """
        changes = self.model.config.stated()
        return {
            "identity": self.model.calibrations.identity.digest()[:12],
            "reading": list(self.model.decoder.identity_of(FULL.kv_types).reading),
            **({"changes": changes} if changes else {}),
        }

    def check(self, *_: int) -> None:
        if time.perf_counter() > self.ends:
            raise NoTimeError

    def encode(self, messages: Messages, answer: str) -> list[int]:
        """Returns the ids of a conversation and of the beginning of its last answer."""
        tokenizer, template = self.model.tokenizer, chat_template(self.model.gguf)
        if template is None:
            text = "\n".join([*(message["content"] for message in messages), answer])
            return tokenizer.encode(text, add_eos=False, parse_special=False)
        ids = encode_messages(tokenizer, template, messages)
        return ids + tokenizer.encode(answer, add_bos=False, parse_special=False)

    def rows(self, method: Method) -> Prefixes | None:
        """Returns the rows of prompts on disk; None for a method that needs the whole prompt."""
        options = PrefixOptions(self.folder / self.name, self.gib, False, None)
        return prefixes_maker(self.model, options)(method)

    @property
    def name(self) -> str:
        """``dense``, or ``sparse 8192``."""
        reading = self.key()["reading"]
        return f"sparse {reading[0]}" if reading else "dense"

    def read(self, ids: Sequence[int]) -> None:
        """Reads a text, unless its rows are on disk. Each part of 4096 tokens is kept at once.

        All methods then take the same rows from the disk. NoTimeError: the deadline. SparseKVError
        if the folder is so small that rows would be rounded to 8 bits, or not kept.
        """
        least = 2 * self.model.row_bytes(len(ids)) / 2**30
        if not least <= self.gib < MOST_GIB:
            needed = f"at least {least:.2g} for {len(ids)} tokens, less than {MOST_GIB}"
            raise SparseKVError(f"--keep {self.gib:g}: must be {needed}")
        rows = self.rows(FULL)
        if rows is not None and rows.find(ids).n < len(ids) - LEAST - BLOCK:
            new_sequence(self.model, FULL).prefill(ids, self.check, rows=rows)
            rows.finish()

    def prefilled(
        self,
        method: Method,
        ids: Sequence[int],
        sequence: Tokens | None = None,
        goes_on: bool = False,
    ) -> tuple[np.ndarray, Tokens]:
        """Returns the logits after ``ids``, and the sequence. NoTimeError: the deadline.

        sequence: of the same method, whose rows serve again; the logits are those of a new one.
        goes_on: it goes on as a conversation does, with the rows of its answer.
        """
        self.check()
        sequence = sequence or new_sequence(self.model, method)
        rest = sequence.keep_common(ids, goes_on=goes_on)
        rows = None if sequence.tokens else self.rows(method)
        logits = sequence.prefill(rest, self.check, rows=rows)
        if rows is not None:
            rows.finish()
        return logits, sequence

    def answer(
        self, sequence: Tokens, logits: np.ndarray, references: list[str], most: int
    ) -> tuple[str, float]:
        """Returns the greedy answer and its score. It ends when it holds all references."""
        tokens: list[int] = []
        text = ""
        for token in greedy_answer(sequence, logits, self.model.tokenizer.eog_ids, most):
            tokens.append(token)
            text = self.model.tokenizer.decode(tokens, skip_special=True)
            if score(text, references) == 1:
                break
        return text, score(text, references)

    def conversation(
        self, method: Method, context: str, turns: Sequence[Any], most: int, sequence: Tokens | None
    ) -> tuple[list[str], list[float], int, Tokens | None]:
        """Asks questions about a text. Returns answers, scores, tokens, and the sequence.

        turns: of minutes.py. A later one follows the answers that the method has given.
        """
        messages: list[dict[str, str]] = []
        answers, scores = [], []
        for turn in turns:
            asked = turn.question if messages else f"{context}\n\n{turn.question}"
            messages.append({"role": "user", "content": asked})
            ids = self.encode(messages, turn.answer)
            logits, sequence = self.prefilled(method, ids, sequence, goes_on=bool(answers))
            text, points = self.answer(sequence, logits, turn.references, most)
            messages.append({"role": "assistant", "content": turn.answer + text})
            answers.append(text)
            scores.append(points)
        return answers, scores, len(ids), sequence

    def shared(self, context: str) -> list[int]:
        """Returns the ids with which all conversations about a text begin."""
        if context not in self.texts:
            one, other = (
                self.encode([{"role": "user", "content": f"{context}\n\n{x}"}], "") for x in "#A"
            )
            n = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
            self.texts[context] = one[:n]
        return self.texts[context]
