"""The interface of a store of prompts' rows, for an engine."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.prefix.blocks import BlockHeader


class Found(NamedTuple):
    """The rows of a prompt: blocks in order, how many tokens they share, how many to reuse."""

    headers: tuple[BlockHeader, ...] = ()
    n_common: int = 0
    n: int = 0


class PromptRows(Protocol):
    """Where an engine looks for rows of a prompt, and puts those that it computes."""

    def find(self, ids: Sequence[int]) -> Found:
        """Returns the longest beginning of ``ids`` that there is."""

    def load(self, found: Found, caches: Sequence[LayerCache], n_room: int) -> int:
        """Puts the rows of ``found`` into caches that are empty; how many tokens' there are."""

    def begin(
        self, ids: Sequence[int], found: Found, n_loaded: int, caches: Sequence[LayerCache]
    ) -> None:
        """A prefill of ``ids`` begins, of which the caches hold ``n_loaded``."""

    def take(self, layer: int, cache: LayerCache) -> None:
        """A layer has all rows of the prefill, and the method has not touched them."""

    def abandon(self) -> None:
        """The prefill has failed."""

    def finish(self) -> None:
        """The answer is out."""
