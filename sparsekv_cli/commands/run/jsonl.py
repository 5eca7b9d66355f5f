"""``run --jsonl``: answers many prompts, one a line, and decodes several together."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsekv_cli.commands.run.lines import id_of, read_task
from sparsekv_cli.commands.run.task import Task
from sparsekv_cli.commands.shared.answer import answer_fields, full_context_line
from sparsekv_cli.commands.shared.progress import PrefillProgress
from sparsekv_cli.commands.shared.terminal import one_line, say
from sparsekv_cli.errors import LacksMemoryError, LostModelError, SparseKVError
from sparsekv_cli.generation.generation import Generation, step
from sparsekv_cli.system.files import naming

if TYPE_CHECKING:
    from sparsekv_cli.model import Model
    from sparsekv_cli.prefix.prefixes import Prefixes
    from sparsekv_cli.sequence import Sequence


class Output:
    """Writes answers in the order of their lines, although they end in another order."""

    def __init__(self, write: Callable[[str], object], tell: Callable[[str], object] = say) -> None:
        """write: gets the answers. tell: gets remarks about lines."""
        self.n_failed = self.n_answered = 0
        self.tell = tell
        self._write = write
        self._waiting: dict[int, str] = {}
        self._order: deque[int] = deque()

    def expect(self, number: int) -> None:
        """Adds the number of the next line. Answers are written in the order of these calls."""
        self._order.append(number)

    def put(self, number: int, result: dict[str, Any]) -> None:
        """Adds the answer to a line that was expected."""
        self.n_answered += "error" not in result
        self._waiting[number] = json.dumps(result) + "\n"
        while self._order and self._order[0] in self._waiting:
            self._write(self._waiting.pop(self._order.popleft()))

    def fail(self, number: int, task_id: Any, reason: str) -> None:
        """Adds the reason why a line has no answer, and tells the user."""
        self.n_failed += 1
        self.tell(f"error: line {number}: {one_line(reason)}")
        self.put(number, with_id(number, task_id, {"error": one_line(reason)}))


def with_id(number: int, task_id: Any, result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object to write for a line: its number, its id if any, and the result."""
    head = {"line": number} if task_id is None else {"line": number, "id": task_id}
    return {**head, **result}


@dataclass
class Line:
    """A line whose answer is being generated."""

    number: int
    task: Task
    n_prompt: int  # tokens
    generation: Generation

    def result(self, model: Model, tell: Callable[[str], object]) -> dict[str, Any]:
        """Returns the object to write for the line. tell: called with a remark on a cut answer."""
        answer = self.generation.finish()
        if line := full_context_line(model, self.generation.sequence, answer):
            tell(f"line {self.number}: {line}")
        result = answer_fields(answer, self.n_prompt) | self.generation.sequence.moved.usage()
        if self.task.logprobs is not None:
            result["logprobs"] = answer.logprobs
        return with_id(self.number, self.task.id, result)


class LineAnswers:
    """Answers lines, at most ``n_parallel`` at a time. These decode in common steps."""

    def __init__(
        self,
        model: Model,
        n_parallel: int,
        output: Output,
        rows: Prefixes | None,
    ) -> None:
        """rows: finds and stores the rows of prompts on disk."""
        from sparsekv_cli.cache.counters import Timings  # which imports numba
        from sparsekv_cli.serve.rows import SharedRows

        self.timings = Timings(load_s=model.load_s)
        self._model, self._n_parallel = model, n_parallel
        self._output = output
        repair = None if rows is None else rows.repair
        self._rows = SharedRows(lambda _: rows, self._donors, repair)
        self._rows.use(model.method)
        self._active: list[Line] = []
        self._held: tuple[int, Task] | None = None  # waits for the memory of an active line
        self._n_room = n_parallel  # most active lines; fewer while a line is held

    def run(self, lines: Iterable[tuple[int, bytes]], defaults: Task) -> None:
        """Answers every line. lines: their numbers and texts."""
        tasks = self._tasks(lines, defaults)
        try:
            while True:
                while len(self._active) < self._n_room:
                    following = self._held or next(tasks, None)
                    if following is None:
                        break
                    self._start(*following)
                if not self._active:
                    return
                for line in list(self._active):
                    self._choose(line)
                if self._active:
                    started = time.perf_counter()
                    active = list(self._active)
                    failed = step(self._model.engine, [line.generation for line in active])
                    for i, error in failed.items():
                        reason = str(error) or type(error).__name__
                        self._output.fail(active[i].number, active[i].task.id, reason)
                        self._leave(active[i])
                    self.timings.decode_s += time.perf_counter() - started
        finally:
            self._rows.close()

    def _donors(self) -> Iterable[Sequence]:
        """Returns the sequences with rows that a prompt with the same beginning can read."""
        return [line.generation.sequence for line in self._active]

    def _tasks(
        self, lines: Iterable[tuple[int, bytes]], defaults: Task
    ) -> Iterator[tuple[int, Task]]:
        """Yields the tasks of valid lines. Reports other lines."""
        for number, line in lines:
            if not line.strip():
                continue
            self._output.expect(number)
            try:
                task = read_task(line, defaults)
            except SparseKVError as error:
                self._output.fail(number, id_of(line), str(error))
                continue
            yield number, task

    def _start(self, number: int, task: Task) -> None:
        """Prefills the prompt of a task, or reports why that is impossible.

        If there is no memory because of other lines, the line waits until one of them has its
        answer.
        """
        model = self._model
        self._held, self._n_room = None, self._n_parallel
        try:
            ids, begin = task.ids(model), task.prepared(model)
            sequence = model.sequence()
            with PrefillProgress(f"line {number}") as bar:
                sequence.prefill(ids, bar, rows=self._rows)
            self._rows.finish()
            generation = begin(sequence)
        except LostModelError:
            raise
        except SparseKVError as error:
            if isinstance(error, LacksMemoryError) and self._active:
                self._held, self._n_room = (number, task), len(self._active)
            else:
                self._output.fail(number, task.id, str(error))
            return
        self.timings.add(sequence.timings)
        self._active.append(Line(number, task, len(ids), generation))

    def _choose(self, line: Line) -> None:
        """Chooses the next token of an answer. If the answer is done, it is written and removed."""
        generation = line.generation
        try:
            if not generation.choose():
                return
        except SparseKVError as error:
            self._output.fail(line.number, line.task.id, str(error))
        else:
            self._output.put(line.number, line.result(self._model, self._output.tell))
        self._leave(line)

    def _leave(self, line: Line) -> None:
        """Removes a line from the active ones, and adds up its counts."""
        self._active.remove(line)
        timings = line.generation.sequence.timings
        self.timings.decode_tokens += timings.decode_tokens
        self.timings.speculation.add(timings.speculation)


def resume(path: Path) -> tuple[int, int, int]:
    """Returns the number of the last line in a file of answers, and counts of answers and errors.

    It cuts off an incomplete line at the end. All results are 0 without a file, and for a pipe or
    device. Raises SparseKVError for a file with other content.
    """
    if not path.is_file():
        return 0, 0, 0
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    n_whole = last = n_answered = n_failed = 0
    for line in lines:
        if not line.endswith(b"\n"):
            break
        try:
            record = json.loads(line)
            number = record["line"]
            if not isinstance(number, int) or number <= last:
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            raise SparseKVError(
                f"{path}: is not a file of answers of run --jsonl: name another file"
            ) from None
        n_whole, last = n_whole + len(line), number
        n_failed += "error" in record
        n_answered += "error" not in record
    if n_whole < len(data):
        with naming(path):
            os.truncate(path, n_whole)
    return last, n_answered, n_failed
