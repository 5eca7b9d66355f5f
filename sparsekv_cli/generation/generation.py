"""One growing answer of ``chat``, ``run``, ``jsonl`` or ``serve``."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Any

from sparsekv_cli.drafts import MOST_DRAFTED
from sparsekv_cli.errors import StepError
from sparsekv_cli.generation.answer import STOP_EOS, STOP_LENGTH, STOP_TEXT, Answer, StopStrings
from sparsekv_cli.models.chat.thinking import ChannelSplitter, Thinking, ThinkingSplitter
from sparsekv_cli.models.tokenizer.marks import SPELLED, Marks, StopForms, TokenText, plain

if TYPE_CHECKING:
    import numpy as np

    from sparsekv_cli.generation.constraint import AnswerConstraint
    from sparsekv_cli.models.tokenizer.tokenizer import Tokenizer
    from sparsekv_cli.sampling.plain import Outcome
    from sparsekv_cli.sequence import Engine, Sample, Sequence


class LogProbs:
    """A sampler that stores log(softmax(logits)) of its choices and of the n likeliest tokens.

    The logits are the model's, before the temperature and other samplers change them.
    """

    def __init__(self, sample: Sample, n: int, tokenizer: Tokenizer) -> None:
        self._sample = sample
        self._n = n
        self._tokenizer = tokenizer
        # one entry for each call; the token that ends an answer has one too
        self.entries: list[dict[str, Any]] = []

    def __call__(self, logits: np.ndarray, history: Ids[int]) -> int:
        import numpy as np

        token = self._sample(logits, history)
        n = min(self._n, len(logits))
        likely = np.argpartition(-logits, n - 1)[:n] if n else np.zeros(0, np.int64)
        likely = likely[np.lexsort((likely, -logits[likely]))]
        maximum = float(logits.max())
        total = maximum + float(np.log(np.exp(logits - maximum, dtype=np.float64).sum()))
        top = [self._entry(int(each), logits, total) for each in likely]
        self.entries.append({**self._entry(token, logits, total), "top": top})
        return token

    def _entry(self, token: int, logits: np.ndarray, total: float) -> dict[str, Any]:
        """Returns the entry of a token. If it is a part of a character, ``token`` has a U+FFFD.

        ``bytes`` are the token's exact bytes. total: the log of the sum of e^logit.
        """
        data = self._tokenizer.token_bytes(token)
        text = data.decode("utf-8", errors="replace")
        logprob = float(logits[token]) - total
        return {"id": token, "token": text, "bytes": list(data), "logprob": logprob}


def _ignore(_text: str) -> None:
    """Discards the text, for callers that only need the finished answer."""


class Generation:
    """An answer that grows token by token, from the end of a sequence's prefill.

    Call ``choose``, then ``step``, until ``choose`` returns True. Then ``finish`` returns the
    answer.

    A step may decode a draft after the chosen token. The sampler sees the same logits and tokens as
    without drafts, in the same order. So it chooses the same tokens. The sequence keeps the draft's
    rows up to the first token that the sampler does not choose.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sequence: Sequence,
        sample: Sample,
        *,
        n_predict: int = -1,
        stops: Ids[str] = (),
        constraint: AnswerConstraint | None = None,
        thinking: Thinking | None = None,
        marks: Marks = SPELLED,
        logprobs: int | None = None,
        write: Callable[[str], None] = _ignore,
        write_thinking: Callable[[str], None] = _ignore,
    ) -> None:
        """sequence: ends with the prompt. sample: chooses tokens; it was made with ``constraint``.

        n_predict: the most tokens; a negative number means as many as fit. stops: texts before
        which the answer ends. constraint: ends the answer when no token can follow. thinking: the
        markers of the thinking, whose text goes to ``write_thinking``. marks: control tokens that
        ``write`` gets as single characters, for a reader of tool calls. Without marks ``write``
        gets their spelling. logprobs: the number of likeliest tokens to store with each token; None
        stores nothing. write: called with each text as soon as it is certain.
        """
        self.sequence, self.sample = sequence, sample
        self.logprobs: LogProbs | None = None
        if logprobs is not None:
            self.sample = self.logprobs = LogProbs(sample, logprobs, tokenizer)
        self.token = -1  # the last chosen token
        self.answer = Answer("", [], STOP_LENGTH)
        self._n_predict = n_predict
        self._tokenizer = tokenizer
        self._end_ids = frozenset(tokenizer.eog_ids)
        self._is_read = bool(marks.ids)
        characters = {**(thinking.marks.by_id() if thinking is not None else {}), **marks.by_id()}
        self._stop_forms = StopForms(tokenizer, stops, characters)
        self._characters = {**characters, **self._stop_forms.characters}
        self._decoder = TokenText(tokenizer, self._characters)
        self._matcher = StopStrings(self._stop_forms.stops, self._stop_forms.forms)
        self._constraint = constraint
        self._special = marks.shows_controls
        self._write, self._write_thinking = write, write_thinking
        self._splitter: ThinkingSplitter | ChannelSplitter | None = None
        # logits or tokens, one for each row of the last step or prefill
        self.outcomes: list[Outcome] = []
        self.drafts = sequence.drafts  # the source of drafts; None: steps have no drafts
        self.resume()
        if constraint is not None:
            n_room = sequence.n_ctx - len(sequence.tokens)
            n_most = n_room if n_predict < 0 else min(n_room, n_predict)
            constraint.restart(sequence.tokens, n_most)
        if thinking is not None:
            opened = thinking.opened_by(tokenizer, sequence.tokens)
            self.answer.written = opened
            self._splitter = thinking.splitter(is_open=bool(opened))

    @property
    def is_cut(self) -> bool:
        """Whether a full context has ended the answer."""
        answer = self.answer
        is_short = answer.stop_reason == STOP_LENGTH and len(answer.tokens) != self._n_predict
        return is_short and self.sequence.is_full

    def resume(self) -> None:
        """Goes on from the end of the sequence's last prefill. Raises ValueError elsewhere."""
        at = self.sequence.checkpoint
        if at is None or at.n != len(self.sequence.tokens):
            raise ValueError("the sequence does not end with a prefill")
        self.outcomes = [at.logits.copy()]
        self._draft: list[int] = []  # the draft that the last step decoded
        self._is_told = False  # whether ``drafts`` made this draft and must hear the result
        self._verify_s = 0.0  # seconds of the last step
        if self.drafts is not None:
            self.drafts.begin(self.sequence.tokens)

    def rows(self, is_alone: bool) -> list[int]:
        """Returns the tokens of the next step: the token chosen last, then a draft.

        is_alone: whether the step decodes this sequence only.
        """
        drafts = self.drafts
        self._is_told = drafts is not None and (is_alone or not drafts.alone)
        if drafts is None or not self._is_told:
            return [self.token]
        started, sequence = time.perf_counter(), self.sequence
        n_left = self._n_predict - len(self.answer.tokens)
        most = min(MOST_DRAFTED, n_left - 1) if self._n_predict >= 0 else MOST_DRAFTED
        most = sequence.most_rows(1 + most) - 1
        draft = drafts.draft(sequence.tokens, self.token, most)
        seconds = time.perf_counter() - started
        sequence.timings.decode_s += seconds
        sequence.timings.speculation.draft_s += seconds
        return [self.token, *draft]

    def take(self, draft: list[int], outcomes: list[Outcome], seconds: float) -> None:
        """Stores the outcomes of a step: after the chosen token, and after each draft token.

        seconds: the step's time. An outcome is logits, or a token that the engine has chosen.
        """
        self.outcomes, self._draft, self._verify_s = outcomes, draft, seconds

    def choose(self) -> bool:
        """Chooses the next tokens from ``outcomes``. Returns whether the answer is done.

        It goes on along the draft while it chooses the draft's tokens. The token that it chooses
        last has no row yet: the next step decodes it.
        """
        if self._n_predict == 0:
            return True
        draft, tokens, is_done = self._draft, self.sequence.tokens, False
        n = len(tokens) - len(draft)
        if draft:
            tokens = tokens[:n]  # a copy: the sequence's own list still ends with the draft
        try:
            for i, outcome in enumerate(self.outcomes):
                is_done = self._choose(outcome, tokens)
                if is_done or i == len(draft) or self.token != draft[i]:
                    return is_done
                tokens.append(self.token)
        finally:
            if draft:
                self.sequence.keep(len(tokens))
                speculation = self.sequence.timings.speculation
                speculation.add_step(len(draft), len(tokens) - n, self._verify_s)
            if self._is_told and self.drafts is not None:
                self.drafts.checked(len(draft), len(tokens) - n, self._verify_s)
            self._draft, self._is_told = [], False
        return is_done

    def _choose(self, outcome: Outcome, tokens: Ids[int]) -> bool:
        """Chooses the token that follows ``tokens``. Returns whether the answer ends with it."""
        if isinstance(outcome, int):
            self.token = outcome
        else:
            self.token = self.sample(outcome, tokens)
        if self.push(self.token):
            return True
        is_full = len(tokens) >= self.sequence.n_ctx
        return is_full or len(self.answer.tokens) == self._n_predict

    def push(self, token: int) -> bool:
        """Adds a chosen token to the answer. Returns whether the answer ends with it."""
        is_end = token in self._end_ids
        if not is_end:
            self.answer.tokens.append(token)
        is_mark = token in self._characters
        if self._special or is_mark or (not is_end and self._tokenizer.is_shown(token)):
            self._emit(self._matcher.push(self._decoder.push(token)))
        if self._matcher.found and not is_end:
            self._stop()
            return True
        if is_end or (self._constraint is not None and self._constraint.is_finished):
            self.answer.stop_reason = STOP_EOS
            return True
        return False

    def finish(self) -> Answer:
        """Ends the answer: writes the text that was held back. Returns the answer."""
        if not self._matcher.found:
            self._emit(self._matcher.push(self._decoder.flush()))
            if self._matcher.found:
                self._stop()
            else:
                self._emit(self._matcher.flush())
        if self._splitter is not None:
            self._tell(*self._splitter.flush())
        self.answer.is_cut = self.is_cut
        if self.logprobs is not None:
            self.answer.logprobs = self.logprobs.entries[: len(self.answer.tokens)]
        return self.answer

    def _stop(self) -> None:
        self.answer.stop_reason, self.answer.stopped_by = STOP_TEXT, self._matcher.found

    def _emit(self, text: str) -> None:
        text = self._stop_forms.without(text, is_spelled=self._special)
        if text:
            self.answer.written += plain(text)
            self._tell(*(self._splitter.push(text) if self._splitter is not None else ("", text)))

    def _tell(self, thought: str, text: str) -> None:
        if thought:
            self.answer.thinking += plain(thought)
            self._write_thinking(plain(thought))
        if text:
            self.answer.text += plain(text)
            self._write(text if self._is_read else plain(text))


def step(engine: Engine, generations: Ids[Generation]) -> dict[int, Exception]:
    """Decodes the chosen tokens and the drafts of all generations in one step.

    Returns the errors of failed generations by their index. If all have failed, it raises.
    """
    rows = [each.rows(len(generations) == 1) for each in generations]
    sequences, started = [each.sequence for each in generations], time.perf_counter()
    failed: dict[int, Exception] = {}
    try:
        outcomes = engine.decode(sequences, rows, [each.sample for each in generations])
    except StepError as error:
        failed, outcomes = error.errors, error.outcomes
    seconds = time.perf_counter() - started
    for i, (each, of_each, new) in enumerate(zip(generations, rows, outcomes, strict=True)):
        if i not in failed:
            each.take(of_each[1:], new, seconds)
    return failed
