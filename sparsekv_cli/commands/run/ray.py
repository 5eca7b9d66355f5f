"""``run --jsonl --ray``: models on the nodes of a Ray cluster answer shards of lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from sparsekv_cli.commands.options.prefix import PrefixOptions, open_prompt_rows
from sparsekv_cli.commands.run.jsonl import LineAnswers, Output
from sparsekv_cli.commands.run.task import Task
from sparsekv_cli.commands.shared.terminal import say
from sparsekv_cli.distributed.settings import SessionSettings, room_of, settings_of

if TYPE_CHECKING:
    from sparsekv_cli.methods.base import Method
    from sparsekv_cli.model import Model

Lines = Sequence[tuple[int, bytes]]
SHARDS_A_BATCH = 2  # lines of a shard, in multiples of ``--parallel``


# The result of a shard: lines to write, remarks, number of answers, number of failures.
AnsweredLines = tuple[list[str], list[str], int, int]


def open_answers(
    session: SessionSettings, *, prefix: PrefixOptions, task: Task, n_parallel: int
) -> Callable[[Lines], AnsweredLines]:
    """Opens the model on a node. Returns a function that answers lines."""
    model = session.open()
    rows = open_prompt_rows(model, prefix, model.method)

    def answer(lines: Lines) -> AnsweredLines:
        written: list[str] = []
        remarks: list[str] = []
        output = Output(written.append, remarks.append)
        LineAnswers(model, n_parallel, output, rows).run(lines, task)
        return written, remarks, output.n_answered, output.n_failed

    return answer


def shards_of(lines: Iterable[tuple[int, bytes]], size: int) -> Iterator[Lines]:
    """Yields the lines, ``size`` at a time. Lines are read only when they are needed."""
    following = iter(lines)
    while shard := list(islice(following, size)):
        yield shard


def answer_lines(
    address: str,
    model: Model,
    method: Method,
    prefix: PrefixOptions,
    task: Task,
    n_parallel: int,
    lines: Iterable[tuple[int, bytes]],
    write: Callable[[str], object],
) -> tuple[int, int]:
    """Answers lines on a cluster. Returns the numbers of answers and of failures.

    model: opened on this machine with ``method``, so that all nodes use its settings. It is closed
    here.
    """
    from sparsekv_cli.distributed.workers import workers_at

    open_work = partial(open_answers, prefix=prefix, task=task, n_parallel=n_parallel)
    sent = settings_of(model, method)
    room = room_of(model, n_parallel)
    model.close()
    n_answered = n_failed = 0
    started = time.monotonic()
    with workers_at(address, room, open_work, sent, say) as workers:
        shards = shards_of(lines, SHARDS_A_BATCH * n_parallel)
        for written, remarks, n_new, n_new_failed in workers.map(shards):
            for line in remarks:
                say(line)
            for line in written:
                write(line)
            n_answered += n_new
            n_failed += n_new_failed
        say(f"{n_answered} lines in {time.monotonic() - started:.1f} s: {workers.summary()}")
    return n_answered, n_failed
