"""Makes drafts where they save time, judged by measured seconds and by accepted tokens.

A step of one token takes ``step_s`` seconds. Each row of a draft adds ``row_s`` seconds. A token
that is accepted with probability p saves p step_s. So a draft continues while p > row_s / step_s.
The i-th token of an n-gram draft is accepted with probability c^i. c is the share of accepted
tokens in earlier drafts whose match was about as long.

Drafts may only lose a limited number of seconds. The limit is a share of all decode seconds, plus
the seconds that earlier drafts have saved.
"""

import math
import time
from collections import deque
from collections.abc import Sequence as Ids
from statistics import median

from sparsekv_cli.drafts import MOST_DRAFTED
from sparsekv_cli.drafts.draft_model import ModelDrafts
from sparsekv_cli.drafts.ngrams import NgramDrafts
from sparsekv_cli.sequence import Sequence

LOSS = 0.015  # share of the seconds of all steps that drafts may lose
FIRST_LOSS = 1.5  # steps whose time the first drafts may lose
N_SECONDS = 9  # measurements of which the median is used
ROW_SHARE = 0.3  # row_s / step_s before it is measured
LEAST_SHARE = 0.01  # least value of row_s / step_s
LEAST_S = 1e-6  # least step_s, in seconds
MOST_SAVED = 20  # time saved by earlier drafts counts up to so many steps
FEW = 4  # rows that a draft may risk even if they are more than half
MEMORY = 0.8  # factor of the weight of earlier drafts at each new draft
PRIOR = 3.0  # the weight of CHANCES, in tokens
# The first guess of c for matches of 2 or 3 tokens, 4 to 7, 8 to 15, 16 to 31, and more.
CHANCES = (0.5, 0.6, 0.8, 0.9, 0.95)


class AutoDrafts:
    """Chooses the source and the length of each draft. Often the draft is empty.

    It drafts only for a sequence that is decoded alone. Several sequences already share the reads
    of weights, so drafts save little there.
    """

    alone = True

    def __init__(self, ngrams: NgramDrafts, model: ModelDrafts | None = None) -> None:
        self._ngrams, self._model = ngrams, model
        self._is_warm = False  # whether a step was decoded; the first step also loads kernels
        # whether the draft model has made a draft; its first one also loads kernels
        self._has_drafted = False
        self._steps_s: deque[float] = deque(maxlen=N_SECONDS)  # seconds of steps without a draft
        # seconds of each further row of a step
        self._rows_s: deque[float] = deque(maxlen=N_SECONDS)
        # seconds of each token of the draft model
        self._tokens_s: deque[float] = deque(maxlen=N_SECONDS)
        self._left_s = 0.0  # seconds that drafts may lose now
        self._draft_s = 0.0  # seconds that the last draft took
        # index in ``_counts`` of the last draft's match; -1: the draft model made the draft
        self._of_match = -1
        # (accepted tokens, checked tokens), for each range of match lengths in CHANCES.
        self._counts = [(PRIOR * chance, PRIOR) for chance in CHANCES]

    @property
    def sequence(self) -> Sequence | None:
        return None if self._model is None else self._model.sequence

    def begin(self, tokens: Ids[int]) -> None:
        self._ngrams.begin(tokens)
        if self._model is not None:
            self._model.begin(tokens)

    def draft(self, tokens: Ids[int], last: int, most: int) -> list[int]:
        """See Drafts. Returns no draft until a step without a draft has been measured.

        The first step is not measured, because it also loads kernels.
        """
        self._draft_s = 0.0
        if not self._steps_s:
            return []
        started, step_s = time.perf_counter(), median(self._steps_s)
        row_s = median(self._rows_s) if self._rows_s else ROW_SHARE * step_s
        row_s = max(row_s, LEAST_SHARE * step_s)
        most = min(most, self._n_allowed(row_s))
        if most <= 0:
            return []
        draft = self._ngrams.following(tokens, last, most)
        self._of_match = min(self._ngrams.n_matched.bit_length() - 2, len(CHANCES) - 1)
        if draft:
            accepted, checked = self._counts[self._of_match]
            draft = draft[: n_worth(accepted / checked, row_s / step_s)]
        if not draft and self._model is not None:
            draft, self._of_match = self._by_model(tokens, last, most, row_s, step_s), -1
        self._draft_s = time.perf_counter() - started
        return draft

    def checked(self, n_drafted: int, n_accepted: int, seconds: float) -> None:
        if not self._is_warm:
            self._is_warm = True
            return
        seconds = max(seconds, LEAST_S)
        self._left_s += LOSS * seconds - self._draft_s
        if not n_drafted:
            self._steps_s.append(seconds)
            if len(self._steps_s) == 1:
                self._left_s += FIRST_LOSS * seconds
            return
        step_s = median(self._steps_s)
        self._rows_s.append(max(0.0, seconds - step_s) / n_drafted)
        self._left_s += (1 + n_accepted) * step_s - seconds
        self._left_s = min(self._left_s, MOST_SAVED * step_s)
        if self._of_match >= 0:
            accepted, checked = (MEMORY * count for count in self._counts[self._of_match])
            n_checked = min(n_accepted + 1, n_drafted)
            self._counts[self._of_match] = accepted + n_accepted, checked + n_checked

    def _n_allowed(self, row_s: float) -> int:
        """Returns the most rows that a draft may have. row_s: seconds of a row, above 0.

        A draft may risk half of the seconds that drafts may lose. If these are fewer than FEW rows,
        it may risk all.
        """
        n_lost = int(max(0.0, self._left_s) / row_s)
        return min(MOST_DRAFTED, n_lost if n_lost < FEW else max(FEW, n_lost // 2))

    def _by_model(
        self, tokens: Ids[int], last: int, most: int, row_s: float, step_s: float
    ) -> list[int]:
        assert self._model is not None
        token_s = median(self._tokens_s) if self._tokens_s else ROW_SHARE * step_s
        least_chance = (row_s + token_s) / step_s
        most = min(most, self._n_allowed(row_s + token_s))
        if most <= 0 or least_chance >= 1:
            return []
        started = time.perf_counter()
        draft = self._model.draft(tokens, last, most, least_chance)
        seconds = time.perf_counter() - started
        if self._has_drafted and not self._model.is_reading:
            # The draft model has also computed the token at which the draft ended.
            self._tokens_s.append(seconds / (len(draft) + 1))
        else:
            # ``checked`` subtracts these seconds, but reading the text once is no loss
            self._left_s += seconds
            self._has_drafted |= not self._model.is_reading
        return draft


def n_worth(chance: float, cost: float) -> int:
    """Returns how many tokens of a draft save more than they cost: the largest i, chance^i > cost.

    n_worth(0.8, 0.3) is 5, because 0.8^5 is 0.33 and 0.8^6 is 0.26.
    """
    if chance <= cost:
        return 0
    if chance >= 1 or cost <= 0:
        return MOST_DRAFTED
    return min(MOST_DRAFTED, math.ceil(math.log(cost) / math.log(chance)) - 1)
