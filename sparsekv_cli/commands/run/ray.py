"""``run --jsonl --ray``: shards of lines are answered by sessions on the nodes of a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from sparsekv_cli.commands.options.prefix import PrefixOptions, use_prefixes
from sparsekv_cli.commands.run.jsonl import Answering, Output
from sparsekv_cli.commands.run.tasks import Task
from sparsekv_cli.commands.shared.terminal import say
from sparsekv_cli.distributed.settings import SessionSettings, room_of, settings_of

if TYPE_CHECKING:
    from sparsekv_cli.methods.base import Method
    from sparsekv_cli.session import Session

Lines = Sequence[tuple[int, bytes]]
SHARDS_A_BATCH = 2  # lines of a shard, times those that are answered together


@dataclass(frozen=True)
class LineSettings:
    """What every node answers lines with."""

    session: SessionSettings
    prefix: PrefixOptions
    task: Task
    n_parallel: int


@dataclass(frozen=True)
class AnsweredLines:
    """What a shard gives: the lines to write, what there is to say, how many there are of each."""

    written: Sequence[str]
    told: Sequence[str]
    n_answered: int
    n_failed: int


def open_answers(settings: LineSettings) -> Callable[[Lines], AnsweredLines]:
    """Opens a session on a node; what it returns answers lines."""
    session = settings.session.open()
    use_prefixes(session, settings.prefix)

    def answer(lines: Lines) -> AnsweredLines:
        written: list[str] = []
        told: list[str] = []
        output = Output(written.append, told.append)
        Answering(session, settings.n_parallel, output).run(lines, settings.task)
        return AnsweredLines(written, told, output.n_answered, output.n_failed)

    return answer


def shards_of(lines: Iterable[tuple[int, bytes]], size: int) -> Iterator[Lines]:
    """The lines, ``size`` at a time, read as they are asked for."""
    following = iter(lines)
    while shard := list(islice(following, size)):
        yield shard


def answer_lines(
    address: str,
    session: Session,
    method: Method,
    prefix: PrefixOptions,
    task: Task,
    n_parallel: int,
    lines: Iterable[tuple[int, bytes]],
    write: Callable[[str], object],
) -> tuple[int, int]:
    """Answers lines on a cluster; how many were answered, and how many could not be.

    session: opened here with ``method``, so that every node decides as this machine does; closed.
    """
    from sparsekv_cli.distributed.workers import workers_at

    settings = LineSettings(settings_of(session, method), prefix, task, n_parallel)
    room = room_of(session, n_parallel)
    session.gguf.close()
    n_answered = n_failed = 0
    started = time.monotonic()
    with workers_at(address, room, open_answers, settings, say) as workers:
        for answered in workers.map(shards_of(lines, SHARDS_A_BATCH * n_parallel)):
            for line in answered.told:
                say(line)
            for line in answered.written:
                write(line)
            n_answered += answered.n_answered
            n_failed += answered.n_failed
        say(f"{n_answered} lines in {time.monotonic() - started:.1f} s: {workers.summary()}")
    return n_answered, n_failed
