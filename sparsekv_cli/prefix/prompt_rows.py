"""The interface of a store of prompts' rows, for an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.models.reuse.repair import Known
from sparsekv_cli.prefix.blocks import BlockHeader
from sparsekv_cli.prefix.difference import Difference

ALL = 1 << 62  # more tokens than any sequence has


class Moved(NamedTuple):
    """The rows of a sequence that were moved from other prompts.

    n_exact: first tokens whose rows are those of a prefill; later ones were moved, or attend to
    moved ones. reused_at: bit p is set if token p is of a known passage. repaired_at: of these, the
    tokens whose rows were computed again.
    """

    n_exact: int = ALL
    reused_at: int = 0
    repaired_at: int = 0

    @property
    def reused(self) -> int:
        """The number of tokens of known passages."""
        return self.reused_at.bit_count()

    @property
    def repaired(self) -> int:
        """The number of these tokens whose rows were computed again."""
        return self.repaired_at.bit_count()

    def within(self, n: int) -> Moved:
        """Returns the same of the first n rows."""
        low = (1 << n) - 1
        exact = self.n_exact if self.n_exact < n else ALL
        return Moved(exact, self.reused_at & low, self.repaired_at & low)

    def after(self, n: int) -> Moved:
        """Returns the same without the first n rows."""
        return self._replace(reused_at=self.reused_at >> n, repaired_at=self.repaired_at >> n)

    def and_then(self, n: int, reused: np.ndarray, repaired: np.ndarray) -> Moved:
        """Returns the same with the rows of bool ``reused`` and ``repaired``, from row n on."""
        if not reused.any():
            return self
        reused_at, repaired_at = (
            int.from_bytes(np.packbits(rows, bitorder="little").tobytes(), "little") << n
            for rows in (reused, repaired)
        )
        return Moved(
            min(self.n_exact, n), self.reused_at | reused_at, self.repaired_at | repaired_at
        )

    def usage(self) -> dict[str, int]:
        """Returns the counts as the fields of an answer; empty if no row was moved."""
        counts = {"reused_tokens": self.reused, "repaired_tokens": self.repaired}
        return counts if self.reused_at else {}


NONE_MOVED: Moved = Moved()


class Found(NamedTuple):
    """The rows of a prompt: blocks in order, how many tokens they share, how many to reuse.

    difference: where the prompt leaves a kept one of which it has a later part too. moved: of the
    rows that are reused.
    """

    headers: tuple[BlockHeader, ...] = ()
    n_common: int = 0
    n: int = 0
    difference: Difference | None = None
    moved: Moved = NONE_MOVED


class PromptRows(Protocol):
    """A store of prompts' rows: an engine reads rows from it and writes new ones to it.

    repair: the share of known passages that is computed again; None: passages are not moved.
    """

    repair: float | None

    def find(self, ids: Sequence[int]) -> Found:
        """Returns the longest beginning of ``ids`` in the store."""

    def load(self, found: Found, caches: Sequence[LayerCache], n_room: int) -> int:
        """Loads the rows of ``found`` into empty caches. Returns how many tokens have rows."""

    def move(
        self, ids: Sequence[int], first: int, caches: Sequence[LayerCache], n_room: int
    ) -> Known | None:
        """Writes rows of known passages of ids[first:] into the caches (``move_passages``).

        Returns None if no passage is known, or if only exact rows are reused.
        """

    def begin(
        self, ids: Sequence[int], found: Found, n_loaded: int, caches: Sequence[LayerCache]
    ) -> None:
        """Called when a prefill of ``ids`` starts. The caches hold the first ``n_loaded`` rows."""

    def take(self, layer: int, cache: LayerCache) -> None:
        """Called when a layer has all rows of the prefill. The method has not changed them yet."""

    def take_part(self, n: int) -> None:
        """Called when all caches hold the first n rows of a longer prefill, and will keep them."""

    def abandon(self) -> None:
        """Called when the prefill has failed. The parts that it has taken may serve later ones."""

    def finish(self) -> None:
        """Called when the answer is finished."""
