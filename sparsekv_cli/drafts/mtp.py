"""Drafts of a model's own next-token block."""

from collections.abc import Sequence as Ids

from sparsekv_cli.models.next_token.rows import NextTokenRows

MOST = 3  # tokens of a draft; the block is trained for the first one


class MtpDrafts:
    """The likeliest tokens, each by the block's own output for the one before."""

    alone = False
    sequence = None

    def __init__(self, rows: NextTokenRows) -> None:
        """rows: of the sequence, which owns them and cuts them."""
        self._rows = rows

    def begin(self, tokens: Ids[int]) -> None:
        """Does nothing, because the rows follow the sequence."""

    def draft(self, tokens: Ids[int], last: int, most: int) -> list[int]:
        """See Drafts."""
        return self._rows.draft(last, min(most, MOST))

    def checked(self, n_drafted: int, n_accepted: int, seconds: float) -> None:
        """Does nothing, because the length of a draft is fixed."""
