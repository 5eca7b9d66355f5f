"""``run --jsonl``: many prompts, one a line, and as many answers, some decoded together."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsekv_cli.commands.run.tasks import Task, read_task
from sparsekv_cli.commands.shared.answer import full_context_line
from sparsekv_cli.commands.shared.terminal import one_line, say
from sparsekv_cli.errors import LostModelError, SparseKVError
from sparsekv_cli.generation.conversation import model_thinking, prompt_ids
from sparsekv_cli.generation.growing import GrowingAnswer
from sparsekv_cli.generation.sampler import constraint_maker

if TYPE_CHECKING:
    from sparsekv_cli.generation.constraint import AnswerConstraint
    from sparsekv_cli.generation.sampler import MakeConstraint
    from sparsekv_cli.sampling.plain import Outcome
    from sparsekv_cli.session import Session


class Output:
    """Where answers go, in the order of their lines, however they are done."""

    def __init__(self, write: Callable[[str], object], tell: Callable[[str], object] = say) -> None:
        """tell: gets remarks about lines, which are no answers."""
        self.n_failed = self.n_answered = 0
        self.tell = tell
        self._write = write
        self._waiting: dict[int, str] = {}
        self._order: deque[int] = deque()

    def expect(self, number: int) -> None:
        """The next line that there will be an answer to."""
        self._order.append(number)

    def put(self, number: int, result: dict[str, Any]) -> None:
        """The answer to a line that was expected."""
        self.n_answered += "error" not in result
        self._waiting[number] = json.dumps(result) + "\n"
        while self._order and self._order[0] in self._waiting:
            self._write(self._waiting.pop(self._order.popleft()))

    def fail(self, number: int, task_id: Any, reason: str) -> None:
        """A line that has no answer, and why."""
        self.n_failed += 1
        self.tell(f"error: line {number}: {one_line(reason)}")
        self.put(number, with_id(number, task_id, {"error": one_line(reason)}))


def with_id(number: int, task_id: Any, result: Mapping[str, Any]) -> dict[str, Any]:
    """What is written for a line: its number, its id if it has one, the result."""
    head = {"line": number} if task_id is None else {"line": number, "id": task_id}
    return {**head, **result}


class LineAnswer:
    """The answer to a line while it is generated, and the token that comes next."""

    def __init__(
        self,
        number: int,
        task: Task,
        prompt: Sequence[int],
        session: Session,
        constraint: AnswerConstraint | None,
    ) -> None:
        self.number = number
        self.task = task
        is_whole = not task.thinks or task.special or task.inline_thinking
        self.growing = GrowingAnswer(
            session,
            task.sampling,
            seed=task.seed,
            n_predict=task.n_predict,
            stops=task.stop,
            logprobs=task.logprobs,
            constraint=constraint,
            special=task.special,
            thinking=None if is_whole else model_thinking(session),
            prompt=prompt,
        )
        self._n_prompt = len(prompt)

    def result(self, session: Session, tell: Callable[[str], object]) -> dict[str, Any]:
        """What is written when it is done; tells if the context has cut it. session: at its end."""
        answer = self.growing.finish()
        line = full_context_line(session, answer, self.task.n_predict)
        if line is not None:
            tell(f"line {self.number}: {line}")
        result = {
            "text": answer.text,
            "thinking": answer.thinking,
            "prompt_tokens": self._n_prompt,
            "generated_tokens": len(answer.tokens),
            "tokens": answer.tokens,
            "stop_reason": answer.stop_reason,
        }
        if self.growing.logprobs is not None:
            result["logprobs"] = self.growing.logprobs.of(answer)
        return with_id(self.number, self.task.id, result)


class Answering:
    """Answers lines, up to ``n_parallel`` at a time, whose decode steps are one."""

    def __init__(self, session: Session, n_parallel: int, output: Output) -> None:
        from sparsekv_cli.batch import Batch  # which imports numba

        self._session = session
        self._batch = Batch(session, n_parallel)
        self._n_parallel = n_parallel
        self._output = output
        self._make_constraint: MakeConstraint | None = None
        self._active: list[LineAnswer] = []
        self._outcomes: list[Outcome] = []  # of each active answer, after its last token

    def run(self, lines: Iterable[tuple[int, bytes]], defaults: Task) -> None:
        """Answers every line. lines: their numbers and texts."""
        tasks = self._tasks(lines, defaults)
        while True:
            while len(self._active) < self._n_parallel:
                following = next(tasks, None)
                if following is None:
                    break
                self._start(*following)
            if not self._active:
                return
            self._choose()
            self._step()

    def _tasks(
        self, lines: Iterable[tuple[int, bytes]], defaults: Task
    ) -> Iterator[tuple[int, Task]]:
        """The lines that ask for something; the others are reported."""
        for number, line in lines:
            if not line.strip():
                continue
            self._output.expect(number)
            try:
                task = read_task(line, defaults)
            except SparseKVError as error:
                self._output.fail(number, None, str(error))
                continue
            yield number, task

    def _start(self, number: int, task: Task) -> None:
        """Prefills the prompt of a task, or reports why that cannot be."""
        session = self._session
        try:
            ids = prompt_ids(
                session,
                task.prompt,
                task.system,
                raw=task.raw,
                parse_special=task.parse_special,
                think=task.think,
                continues=bool(task.continue_final_message),
                add_generation_prompt=task.add_generation_prompt is not False,
            )
            answer = LineAnswer(number, task, ids, session, self._constraint(task))
            self._batch.use(len(self._active)).reset()
            logits = session.prefill(ids)
            if session.prefixes is not None:
                session.prefixes.finish()
        except LostModelError:
            raise
        except SparseKVError as error:
            self._output.fail(number, task.id, str(error))
            return
        self._active.append(answer)
        self._outcomes.append(logits.copy())

    def _constraint(self, task: Task) -> AnswerConstraint | None:
        if self._make_constraint is None:
            self._make_constraint = constraint_maker(self._session.tokenizer)
        thinking = model_thinking(self._session) if task.thinks else None
        return self._make_constraint(task.sampling, thinking, task.think)

    def _choose(self) -> None:
        """The next token of every answer; those that are done are written and go."""
        i = 0
        while i < len(self._active):
            answer = self._active[i]
            try:
                is_done = answer.growing.choose(self._outcomes[i], self._batch.use(i))
            except SparseKVError as error:
                self._output.fail(answer.number, answer.task.id, str(error))
                self._drop(i)
                continue
            if is_done:
                self._output.put(answer.number, answer.result(self._session, self._output.tell))
                self._drop(i)
            else:
                i += 1

    def _drop(self, i: int) -> None:
        """The last answer takes the place of the i-th."""
        self._batch.exchange(i, len(self._active) - 1)
        self._active[i], self._outcomes[i] = self._active[-1], self._outcomes[-1]
        del self._active[-1], self._outcomes[-1]

    def _step(self) -> None:
        """Decodes the tokens that were chosen."""
        if self._active:
            growing = [answer.growing for answer in self._active]
            tokens, samples = [each.token for each in growing], [each.sample for each in growing]
            self._outcomes = self._batch.decode_next(tokens, samples)


def resume(path: Path) -> int:
    """The number of the last line that a file of answers has one to, 0 if there is no such file.

    A pipe or device has none. Half a line at its end is cut off. Raises SparseKVError for a file of
    something else.
    """
    if not path.is_file():
        return 0
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    n_whole, last = 0, 0
    for line in lines:
        if not line.endswith(b"\n"):
            break
        try:
            number = json.loads(line)["line"]
            if not isinstance(number, int) or number <= last:
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            raise SparseKVError(
                f"{path}: holds something else than the answers of run --jsonl: name another file"
            ) from None
        n_whole, last = n_whole + len(line), number
    if n_whole < len(data):
        os.truncate(path, n_whole)
    return last
