"""Writes one answer while it is generated, until it ends or the user interrupts it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from types import FrameType
from typing import TYPE_CHECKING, Any

from sparsekv_cli.commands.shared.progress import PrefillProgress
from sparsekv_cli.generation.answer import STOP_INTERRUPT, STOP_LENGTH, Answer
from sparsekv_cli.generation.generation import Generation, step
from sparsekv_cli.settings.config import dense_below

if TYPE_CHECKING:
    from sparsekv_cli.cache.counters import Timings
    from sparsekv_cli.model import Model
    from sparsekv_cli.prefix.prompt_rows import PromptRows
    from sparsekv_cli.sequence import Sequence

# (tokens of an answer) -> ids to prefill and continue from; None: end the answer.
MakeRoom = Callable[[Ids[int]], Ids[int] | None]


class Interrupt:
    """Turns Ctrl-C into a request: the first sets ``requested``, the second is KeyboardInterrupt.

    A stop between two tokens leaves the KV cache whole. An exception within a layer would not.
    """

    def __init__(self) -> None:
        self.requested = False

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    @contextlib.contextmanager
    def watch(self) -> Iterator[Interrupt]:
        """Handles Ctrl-C while the block runs. Outside the main thread it does nothing."""
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
    """The user pressed Ctrl-C, and the prefill ended between two chunks."""


def stream_answer(
    sequence: Sequence,
    ids: Ids[int],
    begin: Callable[[], Generation],
    *,
    rows: PromptRows | None = None,
    make_room: MakeRoom | None = None,
    interrupt: Interrupt | None = None,
) -> Answer:
    """Prefills ``ids`` after the sequence's tokens, then generates until the answer is done.

    Without ``ids`` the sequence must end with its last prefill. begin: makes the generation after
    the prefill. rows: finds and stores the rows of prompts. make_room: called when the context is
    full. It returns the ids to continue from, or None to end the answer. interrupt: may already
    have seen a Ctrl-C.

    Raises PrefillInterrupted if Ctrl-C comes before the first token. The sequence is then as
    before. It is empty if a method that drops rows for good (snapkv, h2o) has already done so in a
    layer.
    """
    started = time.perf_counter()
    with (
        (interrupt or Interrupt()).watch() as interrupt,
        PrefillProgress() as bar,
        contextlib.ExitStack() as at_end,
    ):
        if rows is not None:
            at_end.callback(rows.finish)  # it does nothing if the rows are stored already
        _prefill(sequence, ids, rows, interrupt, bar)
        generation = begin()
        answer = generation.answer
        is_done = generation.choose()
        sequence.timings.ttft_s = time.perf_counter() - started
        while True:
            if interrupt.requested and (not is_done or answer.stop_reason == STOP_LENGTH):
                answer.stop_reason = STOP_INTERRUPT
                break
            if not is_done:
                step(sequence.engine, [generation])
            elif make_room is not None and generation.is_cut:
                if rows is not None:
                    rows.finish()  # ``finish`` reads rows that change below
                going_on = make_room(answer.tokens)
                if going_on is None:
                    break
                try:
                    _prefill(sequence, going_on, None, interrupt, bar)
                except PrefillInterrupted:
                    answer.stop_reason = STOP_INTERRUPT
                    break
                generation.resume()
            else:
                break
            is_done = generation.choose()
    return generation.finish()


def _prefill(
    sequence: Sequence,
    ids: Ids[int],
    rows: PromptRows | None,
    interrupt: Interrupt,
    bar: PrefillProgress,
) -> None:
    """Prefills ``ids``, if any. Raises PrefillInterrupted if Ctrl-C comes between two chunks."""

    def progress(done: int, total: int) -> None:
        if interrupt.requested and done < total:
            raise PrefillInterrupted
        bar(done, total)

    at = sequence.checkpoint
    if len(ids) or at is None or at.n != len(sequence.tokens):
        sequence.prefill(ids, progress, rows=rows)


def full_context_line(model: Model, sequence: Sequence, answer: Answer) -> str:
    """Returns a line with the numbers if a full context has cut the answer, else ""."""
    if not answer.is_cut:
        return ""
    from sparsekv_cli.models.hparams import room_for  # which imports numpy

    n_prompt = len(sequence.tokens) - len(answer.tokens) + 1
    return (
        f"the answer is cut, the context of {sequence.n_ctx} tokens is full: {n_prompt} of the "
        f"prompt and {len(answer.tokens)} of the answer; "
        f"{room_for(model.hparams, sequence.n_ctx + 1)}"
    )


def answer_fields(answer: Answer, n_prompt: int) -> dict[str, Any]:
    """Returns the fields of an answer in the JSON of ``run``. n_prompt: tokens of its prompt."""
    return {
        "text": answer.text,
        "thinking": answer.thinking,
        "prompt_tokens": n_prompt,
        "generated_tokens": len(answer.tokens),
        "tokens": [int(token) for token in answer.tokens],
        "stop_reason": answer.stop_reason,
    }


def timing_line(timings: Timings) -> str:
    """Returns a line about the tokens computed and their times."""
    from sparsekv_cli.cache.counters import speed

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


def moved_note(sequence: Sequence) -> str:
    """Returns a text for the end of the timing line if rows of passages were moved, else ""."""
    moved = sequence.moved
    if not moved.reused:
        return ""
    return f" | {moved.reused} tokens of known passages, {moved.repaired} of them computed again"


def depth_note(sequence: Sequence, n_prompt: int) -> str:
    """Returns a text for the end of the timing line if the method was dense, else ""."""
    if n_prompt >= sequence.sparse_from:
        return ""
    return f" | {sequence.method.name}: {dense_below(sequence.sparse_from)}"


def speculation_line(timings: Timings) -> str:
    """Returns a line about drafted and accepted tokens; "" without drafts."""
    counts = timings.speculation.as_dict()
    if not counts["steps"]:
        return ""
    return (
        f"{counts['source']} drafts: {counts['accepted']} of {counts['drafted']} tokens accepted "
        f"in {counts['steps']} steps, {counts['mean_length']:.1f} tokens a step with a draft"
    )


def ledger_line(sequence: Sequence, method: str) -> str:
    """Returns a line about the rows that decoding has read, and their memory."""
    ledger = sequence.ledger()
    total = ledger["rows_total"] or 1
    text = (
        f"{method}: {len(sequence.tokens)} of {sequence.n_ctx} tokens in the cache, "
        f"{100 * ledger['rows_scored'] / total:.1f}% of rows scored, "
        f"{100 * ledger['rows_attended'] / total:.1f}% attended, "
        f"{ledger['bytes_host'] / 2**20:.1f} MiB host"
    )
    for kind in (name.removeprefix("bytes_host_") for name in ledger if "bytes_host_" in name):
        text += f" ({ledger[f'bytes_host_{kind}'] / 2**20:.1f} in {kind} layers)"
    if sequence.sparse_from:
        text += f", sparse from {sequence.sparse_from} tokens on"
    if ledger["bytes_device"]:
        text += f", {ledger['bytes_device'] / 2**20:.1f} MiB device"
    if "pages_recalled" in ledger:
        text += (
            f", {ledger['pages_recalled']} pages recalled ({ledger['us_waited'] / 1000:.1f} ms "
            f"waited), {ledger['heads_corrected']} of {ledger['heads_stepped']} heads corrected"
        )
    return text
