"""Drafts of an answer by the model's own next-token block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsekv_cli.models.next_token.rows import NextTokenRows

MOST_MTP = 3  # tokens of a draft; the block is trained for the first one


class MtpDrafts:
    """The likeliest tokens, each by the block's own output for the one before."""

    def __init__(self, rows: NextTokenRows) -> None:
        self._rows = rows

    def draft(self, tokens: Sequence[int], last: int, most: int = MOST_MTP) -> list[int]:
        """Returns at most ``most`` tokens that may follow ``tokens`` and then ``last``."""
        return self._rows.draft(last, min(most, MOST_MTP))

    def kept(self, n: int) -> None:
        """The sequence was cut to n tokens."""
        self._rows.truncate(n)
