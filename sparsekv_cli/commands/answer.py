"""Streaming one answer: token ids in, text out, until it ends, is stopped or is interrupted."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, cast

from sparsekv_cli.commands.progress import PrefillProgress
from sparsekv_cli.generation.answer import STOP_INTERRUPT, Answer, AnswerBuilder

if TYPE_CHECKING:
    from sparsekv_cli.sampling.grammar import Constraint
    from sparsekv_cli.session import Sample, Session

# Tokens that are prefilled again after the cache was cut: a method begins its index with the last
# queries of a prefill (32 by default). None are where the last prefill ended.
N_REFRESH = 64

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
    constraint: Constraint | None = None,
    *,
    special: bool = False,
) -> Answer:
    """Prefills ``ids`` after what the session holds, generates, hands every text to ``write``.

    n_predict: most tokens to generate; negative: until the end of the answer or the context.
    constraint: what the answer has to match, with which ``sample`` was made. It ends the answer.
    special: control tokens are part of the text.
    Raises PrefillInterrupted when Ctrl-C comes before the first token. The session then holds what
    it held before; or nothing, if a method that drops rows for good (snapkv, h2o) had done so in
    some layer by then: what it held has to be prefilled again.
    """
    builder = AnswerBuilder(session.tokenizer, stops, write, constraint, special=special)
    with Interrupt().watch() as interrupt, PrefillProgress() as bar, _keeping_prompt(session):

        def progress(done: int, total: int) -> None:
            if interrupt.requested and done < total:
                raise PrefillInterrupted
            bar(done, total)

        if constraint is not None:
            constraint.restart()
        generated = session.generate(ids, sample, n_predict, progress=progress)
        tokens = cast(Generator[int, None, None], generated)
        with contextlib.closing(tokens):
            for token in tokens:
                if builder.push(token):
                    break
                if interrupt.requested:
                    builder.answer.stop_reason = STOP_INTERRUPT
                    break
    return builder.finish()


@contextlib.contextmanager
def _keeping_prompt(session: Session) -> Iterator[None]:
    """Keeps the prompt's rows on disk, if the session does that, when the answer is out."""
    try:
        yield
    finally:
        if session.prefixes is not None:
            session.prefixes.finish()


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many ids two sequences have in common at their beginning."""
    n_common = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        n_common += 1
    return n_common


def keep_common(session: Session, ids: Sequence[int]) -> Sequence[int]:
    """Keeps what the session has of ``ids``; returns the others, which are to be prefilled.

    None are left if its last prefill ended where ``ids`` end.
    """
    n_common, at = common_prefix(ids, session.tokens), session.checkpoint
    if session.prefixes is not None and n_common < N_WHOLE <= len(ids) - n_common:
        session.rewind(0)
        return ids
    if n_common < len(session.tokens) or n_common == len(ids):
        again = 0 if at is not None and at.n == n_common == len(ids) else N_REFRESH
        session.rewind(min(n_common, max(0, len(ids) - again)))
    return ids[len(session.tokens) :]


def speed(count: int, seconds: float) -> float:
    """Tokens a second; 0.0 when nothing was timed."""
    return count / seconds if seconds > 0 else 0.0


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
