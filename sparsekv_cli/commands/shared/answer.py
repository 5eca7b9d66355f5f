"""Streaming one answer: token ids in, text out, until it ends, is stopped or is interrupted."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, cast

from sparsekv_cli.commands.shared.progress import PrefillProgress
from sparsekv_cli.generation.answer import STOP_INTERRUPT, STOP_LENGTH, Answer, AnswerBuilder
from sparsekv_cli.models.chat.thinking import N_TAIL, Thinking

if TYPE_CHECKING:
    from sparsekv_cli.generation.constraint import AnswerConstraint
    from sparsekv_cli.session import Sample, Session

# Tokens that are prefilled again after the cache was cut: a method begins its index with the last
# queries of a prefill (32 by default). None are where the last prefill ended.
N_REFRESH = 64

# Called with an answer's tokens: the ids to prefill and go on from, or None.
MakeRoom = Callable[[Sequence[int]], Sequence[int] | None]

# So few tokens are prefilled again ahead of as many new ones where prompts are kept on disk, which
# finds and keeps whole ones only.
N_WHOLE = 512


class Interrupt:
    """Ctrl-C as a question: the first sets ``requested``, the second raises KeyboardInterrupt.

    Stopping between two tokens leaves the KV cache whole, which an exception in the middle of a
    layer would not.
    """

    def __init__(self) -> None:
        self.requested = False

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    @contextlib.contextmanager
    def watch(self) -> Iterator[Interrupt]:
        """Handles SIGINT while the block runs (in the main thread; elsewhere nothing changes)."""
        try:
            previous = signal.signal(signal.SIGINT, self._handle)
        except ValueError:
            yield self
            return
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, previous)


class PrefillInterrupted(Exception):
    """Ctrl-C between two chunks of a prefill."""


def stream_answer(
    session: Session,
    ids: Sequence[int],
    sample: Sample,
    n_predict: int,
    stops: Sequence[str],
    write: Callable[[str], None],
    constraint: AnswerConstraint | None = None,
    *,
    special: bool = False,
    thinking: Thinking | None = None,
    write_thinking: Callable[[str], None] = lambda text: None,
    make_room: MakeRoom | None = None,
) -> Answer:
    """Prefills ``ids`` after what the session holds, generates, hands every text to ``write``.

    n_predict: most tokens to generate; negative: until the end of the answer or the context.
    constraint: what the answer has to match, with which ``sample`` was made. It ends the answer.
    special: control tokens are part of the text. thinking: markers of what ``write_thinking`` gets.
    make_room: asked for the ids to go on from when the context is full; None: the answer ends.
    Raises PrefillInterrupted when Ctrl-C comes before the first token. The session then holds what
    it held before; or nothing, if a method that drops rows for good (snapkv, h2o) had done so in
    some layer by then: what it held has to be prefilled again.
    """
    prompt = [*session.tokens[-N_TAIL:], *ids]
    builder = AnswerBuilder(
        session.tokenizer,
        stops,
        write,
        constraint,
        special=special,
        thinking=thinking,
        write_thinking=write_thinking,
        prompt=prompt,
    )
    tokens = builder.answer.tokens
    with Interrupt().watch() as interrupt, PrefillProgress() as bar, _keeping_prompt(session):

        def progress(done: int, total: int) -> None:
            if interrupt.requested and done < total:
                raise PrefillInterrupted
            bar(done, total)

        if constraint is not None:
            n_room = session.n_ctx - len(session.tokens) - len(ids)
            constraint.restart(prompt, n_room if n_predict < 0 else min(n_room, n_predict))
        going_on: Sequence[int] | None = ids
        while going_on is not None:
            left = n_predict if n_predict < 0 else n_predict - len(tokens)
            generated = session.generate(going_on, sample, left, progress=progress)
            going_on = None
            try:
                if _generate(generated, builder, interrupt) and make_room is not None:
                    going_on = make_room(tokens) if len(tokens) != n_predict else None
            except PrefillInterrupted:
                if not tokens:
                    raise
                builder.answer.stop_reason = STOP_INTERRUPT
    return builder.finish()


def _generate(generated: Iterator[int], builder: AnswerBuilder, interrupt: Interrupt) -> bool:
    """Adds what is generated to an answer; whether it could go on, had it been allowed more."""
    with contextlib.closing(cast(Generator[int, None, None], generated)) as tokens:
        for token in tokens:
            if builder.push(token):
                return False
            if interrupt.requested:
                builder.answer.stop_reason = STOP_INTERRUPT
                return False
    return True


@contextlib.contextmanager
def _keeping_prompt(session: Session) -> Iterator[None]:
    """Keeps the prompt's rows on disk, if the session does that, when the answer is out."""
    try:
        yield
    finally:
        if session.prefixes is not None:
            session.prefixes.finish()


def keep_common(session: Session, ids: Sequence[int]) -> Sequence[int]:
    """Keeps what the session has of ``ids``; returns the others, which are to be prefilled.

    None are left if its last prefill ended where ``ids`` end.
    """
    from sparsekv_cli.prefix.prefixes import n_common

    n, at = n_common(ids, session.tokens), session.checkpoint
    if session.prefixes is not None and n < N_WHOLE <= len(ids) - n:
        session.rewind(0)
        return ids
    if n < len(session.tokens) or n == len(ids):
        again = 0 if at is not None and at.n == n == len(ids) else N_REFRESH
        session.rewind(min(n, max(0, len(ids) - again)))
    return ids[len(session.tokens) :]


def speed(count: int, seconds: float) -> float:
    """Tokens a second; 0.0 when nothing was timed."""
    return count / seconds if seconds > 0 else 0.0


def is_cut_by_context(session: Session, answer: Answer, n_predict: int) -> bool:
    """Whether an answer ended because no more tokens fit."""
    is_full = answer.stop_reason == STOP_LENGTH and len(answer.tokens) != n_predict
    return is_full and len(session.tokens) >= session.n_ctx


def full_context_line(session: Session, answer: Answer, n_predict: int) -> str | None:
    """One line with the numbers, if the context has cut the answer."""
    if not is_cut_by_context(session, answer, n_predict):
        return None
    n_prompt = len(session.tokens) - len(answer.tokens) + 1
    return (
        f"the answer is cut, the context of {session.n_ctx} tokens is full: {n_prompt} of the "
        f"prompt and {len(answer.tokens)} of the answer; raise --ctx-size (the model was trained "
        f"for {session.hparams.n_ctx_train})"
    )


def timing_line(session: Session) -> str:
    """One line about what the session has done since its timings were reset."""
    timings = session.timings
    parts = []
    if timings.prefill_tokens:
        rate = speed(timings.prefill_tokens, timings.prefill_s)
        parts.append(f"prefill {timings.prefill_tokens} tokens, {rate:.1f} t/s")
    if timings.cached_tokens:
        parts.append(f"{timings.cached_tokens} tokens from the prefix cache")
    if timings.decode_tokens:
        rate = speed(timings.decode_tokens, timings.decode_s)
        parts.append(f"decode {timings.decode_tokens} tokens, {rate:.1f} t/s")
    return " | ".join(parts) or "nothing was computed"


def ledger_line(session: Session, method: str) -> str:
    """One line about the KV rows that decoding touched and the memory they take."""
    ledger = session.ledger.as_dict()
    total = ledger["rows_total"] or 1
    text = (
        f"{method}: {len(session.tokens)} of {session.n_ctx} tokens in the cache, "
        f"{100 * ledger['rows_scored'] / total:.1f}% of rows scored, "
        f"{100 * ledger['rows_attended'] / total:.1f}% attended, "
        f"{ledger['bytes_host'] / 2**20:.1f} MiB host"
    )
    for kind in (name.removeprefix("bytes_host_") for name in ledger if "bytes_host_" in name):
        text += f" ({ledger[f'bytes_host_{kind}'] / 2**20:.1f} in {kind} layers)"
    if session.sparse_from:
        text += f", sparse from {session.sparse_from} tokens on"
    if ledger["bytes_device"]:
        text += f", {ledger['bytes_device'] / 2**20:.1f} MiB device"
    if "pages_recalled" in ledger:
        text += (
            f", {ledger['pages_recalled']} pages recalled ({ledger['us_waited'] / 1000:.1f} ms "
            f"waited), {ledger['heads_corrected']} of {ledger['heads_stepped']} heads corrected"
        )
    return text
