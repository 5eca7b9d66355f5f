"""The interface of a store of prompts' rows, for an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.models.reuse.repair import Known
from sparsekv_cli.prefix.blocks import BlockHeader
from sparsekv_cli.prefix.difference import Difference

ALL = 1 << 62  # more tokens than any sequence has


class Moved(NamedTuple):
    """The rows of a sequence that were moved from other prompts.

    n_exact: first tokens whose rows are those of a prefill; later ones were moved, or attend to
    moved ones. reused: tokens of known passages. repaired: of these, tokens whose rows were
    computed again.
    """

    n_exact: int = ALL
    reused: int = 0
    repaired: int = 0

    def and_then(self, n: int, reused: int, repaired: int) -> Moved:
        """Returns the same with ``reused`` more tokens, moved after the first n; 0: none are."""
        n_exact = min(self.n_exact, n) if reused else self.n_exact
        return Moved(n_exact, self.reused + reused, self.repaired + repaired)

    def usage(self) -> dict[str, int]:
        """Returns the counts as the fields of an answer; empty if no row was moved."""
        return {f"{name}_tokens": getattr(self, name) for name in self._fields[1:] if self.reused}


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
