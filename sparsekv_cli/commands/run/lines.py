"""The lines of ``run --jsonl``: their fields, checked."""

from dataclasses import fields, replace
from typing import Annotated, Any

from pydantic import Field

from sparsekv_cli.commands.run.task import Task
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.answer_fields import AnswerFields
from sparsekv_cli.generation.conversation import continues_last
from sparsekv_cli.generation.fields import (
    FieldError,
    Many,
    Text,
    Texts,
    Whole,
    read_fields,
    read_object,
)
from sparsekv_cli.generation.messages import read_messages
from sparsekv_cli.settings.option import MAX_WHOLE


class LineFields(AnswerFields):
    """The fields of a line. A missing field has its value from the command line."""

    elsewhere = dict.fromkeys(("max_tokens", "max_completion_tokens"), "n_predict")

    prompt: Text | None = None
    messages: Annotated[Many[dict[str, Any]], Field(min_length=1)] | None = None
    id: Any = None
    system: str | None = None
    raw: bool | None = None
    parse_special: bool | None = None
    special: bool | None = None
    think: bool | None = None
    inline_thinking: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    n_predict: Annotated[Whole, Field(ge=-1)] | None = None
    stop: Texts | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_WHOLE)] | None = None


# Fields that LineFields and Task have with the same name and form.
SAME = {each.name for each in fields(Task)} & set(LineFields.model_fields)
SAME -= {"prompt", "continue_final_message"}


def id_of(line: bytes) -> Any:
    """Returns the id in a line whose other fields may be invalid; None if there is none."""
    try:
        return read_object(line).get("id")
    except SparseKVError:
        return None


def read_task(line: bytes, defaults: Task) -> Task:
    """Returns the task that a line describes. Raises SparseKVError for an invalid line."""
    asked = read_fields(LineFields, read_object(line))
    if (asked.prompt is None) == (asked.messages is None):
        raise FieldError("", "expected either 'prompt' or 'messages'")
    given = {name: value for name in SAME if (value := getattr(asked, name)) is not None}
    if asked.messages is not None:
        if asked.system is not None:
            raise FieldError("system", ": expected it among the messages")
        messages = read_messages(asked.messages)
        flags = asked.continue_final_message, asked.add_generation_prompt
        given |= {"prompt": messages, "system": None}
        given["continue_final_message"] = continues_last(messages, *flags)
    else:
        given["prompt"] = asked.prompt
        for name in ("continue_final_message", "add_generation_prompt"):
            if getattr(asked, name) is not None:
                raise FieldError(name, " needs 'messages'")
    given["sampling"] = asked.sampling(defaults.sampling)
    task = replace(defaults, **given)
    needing = {
        "messages": asked.messages is not None,
        "system": task.system is not None,
        "think": task.think is not None,
        "think_budget": asked.think_budget is not None,
    }
    for key in (key for key, is_given in needing.items() if is_given and task.raw):
        raise FieldError(key, " needs the chat template, which raw switches off")
    if not task.thinks or task.think is False:
        if asked.think_budget is not None:
            raise FieldError("think_budget", ": the model does not think before this answer")
        task = replace(task, sampling=replace(task.sampling, think_budget=None))
    return task
