"""An answer that is generated a token at a time, beside others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sparsekv_cli.generation.answer import Answer, AnswerBuilder
from sparsekv_cli.generation.logprobs import LogProbs
from sparsekv_cli.generation.sampler import SamplingOptions, new_sampler

if TYPE_CHECKING:
    from sparsekv_cli.generation.constraint import AnswerConstraint
    from sparsekv_cli.models.chat.thinking import Thinking
    from sparsekv_cli.sampling.plain import Outcome
    from sparsekv_cli.session import Sample, Session


class GrowingAnswer:
    """An answer while it is generated, and the token that comes next.

    n_predict: most tokens, negative: as many as fit. logprobs: most likely tokens that are
    remembered for each, None: no log probabilities. write: gets the text as soon as it is certain.
    The others are as ``new_sampler`` and ``AnswerBuilder`` take them.
    """

    def __init__(
        self,
        session: Session,
        sampling: SamplingOptions,
        *,
        seed: int | None,
        n_predict: int,
        stops: Sequence[str],
        logprobs: int | None = None,
        constraint: AnswerConstraint | None = None,
        special: bool = False,
        write: Callable[[str], None] = lambda text: None,
        thinking: Thinking | None = None,
        write_thinking: Callable[[str], None] = lambda text: None,
        prompt: Sequence[int] = (),
    ) -> None:
        self.token = -1
        self.logprobs: LogProbs | None = None
        self._n_predict = n_predict
        if constraint is not None:
            n_room = session.n_ctx - len(prompt)
            constraint.restart(prompt, n_room if n_predict < 0 else min(n_room, n_predict))
        self.sample: Sample = new_sampler(session, sampling, seed, constraint)
        if logprobs is not None:
            self.sample = self.logprobs = LogProbs(self.sample, logprobs, session.tokenizer)
        self._builder = AnswerBuilder(
            session.tokenizer,
            stops,
            write,
            constraint,
            special=special,
            thinking=thinking,
            write_thinking=write_thinking,
            prompt=prompt,
        )

    def choose(self, outcome: Outcome, session: Session) -> bool:
        """Chooses the next token of the session's sequence; whether the answer is done.

        outcome: of the step or the prefill that the sequence ends with.
        """
        if self._n_predict == 0:
            return True
        if isinstance(outcome, int):
            self.token = outcome
        else:
            self.token = self.sample(outcome, session.tokens)
        if self._builder.push(self.token):
            return True
        tokens = self._builder.answer.tokens
        return len(tokens) == self._n_predict or len(session.tokens) >= session.n_ctx

    def finish(self) -> Answer:
        """The answer, to which nothing is added any more."""
        return self._builder.finish()
