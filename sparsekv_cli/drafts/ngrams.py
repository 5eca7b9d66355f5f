"""Drafts from the text itself: the tokens that followed an earlier copy of its last tokens.

The text is the prompt and the answer so far. A place is a position in it at which some tokens end.
A table leads from the last LEAST tokens to the newest place where the same tokens end. A list leads
from each place to the place before it, as in LZ77. The place with the longest match is used.
Example: the text "1 2 3 4 1 2 3". Its last three tokens match at place 3. The draft is "4 1 2".
"""

from collections.abc import Sequence

from sparsekv_cli.models.tokenizer.ids import n_common

LEAST = 3  # tokens of the shortest match that counts
LONGEST = 64  # tokens; a longer match counts as this long
N_PLACES = 64  # places that are compared, from the newest on


class NgramDrafts:
    """The places of all n-grams of a growing text. A draft is at most as long as its match."""

    alone = False
    sequence = None

    def __init__(self) -> None:
        self.n_matched = 0  # length of the last match, in tokens
        self._tokens: list[int] = []
        # the last LEAST tokens -> newest place where they end
        self._newest: dict[tuple[int, ...], int] = {}
        # for each place: the one before it with the same tokens, or -1
        self._before: list[int] = []
        self._is_whole = True  # False: an interrupt has stopped a change of the lists

    def begin(self, tokens: Sequence[int]) -> None:
        """Forgets the text from the first token on that differs from ``tokens``."""
        self._cut(n_common(self._tokens, tokens))

    def draft(self, tokens: Sequence[int], last: int, most: int) -> list[int]:
        """See Drafts."""
        return self.following(tokens, last, most)[: self.n_matched]

    def following(self, tokens: Sequence[int], last: int, most: int) -> list[int]:
        """Returns ``most`` tokens that follow the longest match; none without a match.

        If the text ends before that, the tokens after the match are repeated.
        """
        self._grow(tokens, last)
        place, self.n_matched = self._longest_match()
        if not self.n_matched:
            return []
        # fewer than ``most`` if the match ends near the text's end
        repeated = self._tokens[place : place + most]
        return [repeated[i % len(repeated)] for i in range(most)]

    def checked(self, n_drafted: int, n_accepted: int, seconds: float) -> None:
        """Does nothing, because the length of a draft depends on the match."""

    def _grow(self, tokens: Sequence[int], last: int) -> None:
        """Makes the text ``tokens`` and then ``last``. It begins with the same tokens already."""
        self._cut(len(tokens))
        text, known = self._tokens, len(self._tokens)
        self._is_whole = False
        text += [*tokens[known:], last]
        for end in range(known + 1, len(text) + 1):
            self._before.append(-1)
            if end >= LEAST:
                key = tuple(text[end - LEAST : end])
                self._before[-1] = self._newest.get(key, -1)
                self._newest[key] = end
        self._is_whole = True

    def _cut(self, n: int) -> None:
        """Forgets the text after its first n tokens. After an interrupt it forgets all."""
        text, newest = self._tokens, self._newest
        if not self._is_whole:
            text.clear()
            newest.clear()
            self._before.clear()
        self._is_whole = False
        for end in range(len(text), n, -1):
            before = self._before.pop()
            if end >= LEAST:
                key = tuple(text[end - LEAST :])
                if before < 0:
                    del newest[key]
                else:
                    newest[key] = before
            text.pop()
        self._is_whole = True

    def _longest_match(self) -> tuple[int, int]:
        """Returns the place and the length of the longest match of the text's end; (0, 0): none."""
        text, n, best, length = self._tokens, len(self._tokens), 0, 0
        place = self._before[-1] if n else -1
        for _ in range(N_PLACES):
            if place < 0 or length == LONGEST:
                break
            # A longer match must also agree in the token before the best match.
            if length == 0 or (place > length and text[place - 1 - length] == text[n - 1 - length]):
                found = 0
                while (
                    found < min(place, LONGEST) and text[place - 1 - found] == text[n - 1 - found]
                ):
                    found += 1
                if found > length:
                    best, length = place, found
            place = self._before[place - 1]
        return best, length
