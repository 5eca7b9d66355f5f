"""The interface of a store of prompts' rows, for an engine."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.prefix.blocks import BlockHeader
from sparsekv_cli.prefix.difference import Difference


class Found(NamedTuple):
    """The rows of a prompt: blocks in order, how many tokens they share, how many to reuse.

    difference: where the prompt leaves a kept one of which it has a later part too.
    """

    headers: tuple[BlockHeader, ...] = ()
    n_common: int = 0
    n: int = 0
    difference: Difference | None = None


class PromptRows(Protocol):
    """A store of prompts' rows: an engine reads rows from it and writes new ones to it."""

    def find(self, ids: Sequence[int]) -> Found:
        """Returns the longest beginning of ``ids`` in the store."""

    def load(self, found: Found, caches: Sequence[LayerCache], n_room: int) -> int:
        """Loads the rows of ``found`` into empty caches. Returns how many tokens have rows."""

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
