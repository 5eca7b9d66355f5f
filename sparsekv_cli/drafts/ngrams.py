"""Drafts of an answer: what followed where the last tokens stand in the text already.

The text is the prompt and the answer so far. A table leads from the last LEAST tokens to the newest
place where the same tokens end. A list leads from each place to the one before it, as in LZ77. The
place with the longest match counts.
"""

from collections.abc import Sequence

from sparsekv_cli.models.tokenizer.ids import n_common

LEAST = 3  # tokens of the shortest match
LONGEST = 64  # tokens; longer matches count as this long
N_PLACES = 64  # places that are compared: newer ones first


class NgramDrafts:
    """The places of all n-grams of a text that grows. A draft is at most as long as the match."""

    alone = False
    sequence = None

    def __init__(self) -> None:
        self.n_matched = 0  # tokens of the last match
        self._tokens: list[int] = []
        self._newest: dict[tuple[int, ...], int] = {}  # by the last LEAST tokens: where they end
        self._before: list[int] = []  # of each place: an older one with the same tokens, or -1
        self._is_whole = True  # False: an interrupt has left a part of a change

    def begin(self, tokens: Sequence[int]) -> None:
        """Forgets the text after what it has in common with ``tokens``."""
        self._cut(n_common(self._tokens, tokens))

    def draft(self, tokens: Sequence[int], last: int, most: int) -> list[int]:
        """See Drafts."""
        return self.following(tokens, last, most)[: self.n_matched]

    def following(self, tokens: Sequence[int], last: int, most: int) -> list[int]:
        """Returns ``most`` tokens that follow the longest match; none if there is no match."""
        self._grow(tokens, last)
        place, self.n_matched = self._longest_match()
        if not self.n_matched:
            return []
        repeated = self._tokens[place : place + most]  # short if the text repeats itself
        return [repeated[i % len(repeated)] for i in range(most)]

    def checked(self, n_drafted: int, n_accepted: int, seconds: float) -> None:
        """Does nothing, because the length of a draft depends on the match."""

    def _grow(self, tokens: Sequence[int], last: int) -> None:
        """Makes ``tokens`` and ``last`` the text. The tokens that it has of them stay."""
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
        """Forgets the text after n tokens, and all of it if an interrupt has left a part."""
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
        """Returns where the longest earlier match of the text's end ends, and its length; or 0."""
        text, n, best, length = self._tokens, len(self._tokens), 0, 0
        place = self._before[-1] if n else -1
        for _ in range(N_PLACES):
            if place < 0 or length == LONGEST:
                break
            # A longer match also has the token that is one ahead of the best one.
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
