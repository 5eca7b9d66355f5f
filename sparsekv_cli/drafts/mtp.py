"""Drafts by the block of a model that predicts the token after the next one."""

from collections.abc import Sequence as Ids

from sparsekv_cli.models.next_token.rows import NextTokenRows

LONGEST_DRAFT = 3  # most tokens of a draft; the block is trained for the first one only


class MtpDrafts:
    """Drafts of the likeliest tokens. The block gets its own output for each further token."""

    alone = False
    sequence = None

    def __init__(self, rows: NextTokenRows) -> None:
        """rows: the block's rows. The sequence owns them and removes rows from them."""
        self._rows = rows

    def begin(self, tokens: Ids[int]) -> None:
        """Does nothing, because the rows follow the sequence."""

    def draft(self, tokens: Ids[int], last: int, most: int) -> list[int]:
        """See Drafts."""
        return self._rows.draft(last, min(most, LONGEST_DRAFT))

    def checked(self, n_drafted: int, n_accepted: int, seconds: float) -> None:
        """Does nothing, because the length of a draft is fixed."""
