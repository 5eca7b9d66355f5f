"""The lines of ``run --jsonl``: what each asks for, checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sparsekv_cli.commands.prompt import decode_utf8
from sparsekv_cli.commands.terminal import one_line
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.conversation import continues_last
from sparsekv_cli.generation.fields import GRAMMARS, SAMPLING, read_sampling
from sparsekv_cli.generation.sampler import SamplingOptions
from sparsekv_cli.option import did_you_mean


@dataclass(frozen=True)
class Task:
    """What one line asks for; the command line's options are the defaults.

    prompt: a text, or a conversation that the assistant is to continue. continue_final_message:
    its last message is the beginning of the answer. add_generation_prompt: False: the template does
    not begin one. thinks: whether anything may be thought ahead of the answer.
    """

    prompt: str | list[dict[str, str]] = ""
    id: Any = None
    system: str | None = None
    raw: bool = False
    parse_special: bool = False
    special: bool = False
    think: bool | None = None
    inline_thinking: bool = False
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    n_predict: int = -1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    sampling: SamplingOptions = SamplingOptions({})

    @property
    def thinks(self) -> bool:
        return not (self.raw or self.continue_final_message or self.add_generation_prompt is False)


KEYS = {
    "prompt",
    "messages",
    "ignore_eos",
    "think_budget",
    *(each.name for each in fields(Task)),
    *GRAMMARS,
}
KEYS = (KEYS | SAMPLING) - {"sampling"}


def read_task(line: bytes, defaults: Task) -> Task:
    """A line's task. Raises SparseKVError for what is no task."""
    try:
        values = json.loads(decode_utf8(line, "the line"))
    except (ValueError, RecursionError) as error:
        raise SparseKVError(f"not JSON: {one_line(str(error))}") from None
    if not isinstance(values, dict):
        raise SparseKVError(f"expected an object, found {type(values).__name__}")
    for key in values.keys() - KEYS:
        raise SparseKVError(f"{one_line(key)!r}: no such key{did_you_mean(key, KEYS)}")
    if ("prompt" in values) == ("messages" in values):
        raise SparseKVError("expected either 'prompt' or 'messages'")
    given: dict[str, Any] = {"id": values.get("id")}
    given["prompt"] = _prompt(values)
    for key, kind, words in TYPES:
        if key in values:
            given[key] = _checked(key, values[key], kind, words)
    if "stop" in values:
        stops = [values["stop"]] if isinstance(values["stop"], str) else values["stop"]
        if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
            raise SparseKVError("stop: expected a text or a list of texts, none of them empty")
        given["stop"] = tuple(stops)
    if "messages" in values:
        given["system"] = None
    given["sampling"] = read_sampling(values, defaults.sampling)
    task, given_budget = replace(defaults, **given), values.get("think_budget")
    needing = {
        "messages": "messages" in values,
        "system": task.system is not None,
        "think": task.think is not None,
        "think_budget": given_budget is not None,
    }
    for key in (key for key, is_given in needing.items() if is_given and task.raw):
        raise SparseKVError(f"{key} needs the chat template, which raw switches off")
    if "messages" in values:
        flags = task.continue_final_message, task.add_generation_prompt
        is_continued = continues_last(values["messages"], *flags)
        task = replace(task, continue_final_message=is_continued)
    elif {"continue_final_message", "add_generation_prompt"} & values.keys():
        raise SparseKVError("continue_final_message and add_generation_prompt need 'messages'")
    if not task.thinks or task.think is False:
        if given_budget is not None:
            raise SparseKVError("think_budget: nothing is thought ahead of this answer")
        task = replace(task, sampling=replace(task.sampling, think_budget=None))
    return task


TYPES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("system", lambda value: isinstance(value, str), "a text"),
    ("raw", lambda value: isinstance(value, bool), "true or false"),
    ("parse_special", lambda value: isinstance(value, bool), "true or false"),
    ("special", lambda value: isinstance(value, bool), "true or false"),
    ("think", lambda value: isinstance(value, bool), "true or false"),
    ("inline_thinking", lambda value: isinstance(value, bool), "true or false"),
    ("continue_final_message", lambda value: isinstance(value, bool), "true or false"),
    ("add_generation_prompt", lambda value: isinstance(value, bool), "true or false"),
    ("n_predict", lambda value: _is_whole(value) and value >= -1, "-1 or more"),
    ("seed", lambda value: _is_whole(value) and 0 <= value < 2**64, "0 to 2**64 - 1"),
    ("logprobs", lambda value: _is_whole(value) and value >= 0, "0 or more"),
)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked(key: str, value: Any, permits: Callable[[Any], bool], words: str) -> Any:
    if not permits(value):
        raise SparseKVError(f"{key} = {json.dumps(value)[:40]}: expected {words}")
    return value


def _prompt(values: Mapping[str, Any]) -> str | list[dict[str, str]]:
    if "prompt" in values:
        if not isinstance(values["prompt"], str) or not values["prompt"]:
            raise SparseKVError("prompt: expected a text that is not empty")
        return values["prompt"]
    messages = values["messages"]
    if "system" in values or not isinstance(messages, list) or not messages:
        raise SparseKVError("messages: expected a list of messages, the system message among them")
    for message in messages:
        texts = message.values() if isinstance(message, dict) else ()
        if {"role", "content"} != set(message) or not all(isinstance(t, str) for t in texts):
            raise SparseKVError("messages: expected objects with the texts 'role' and 'content'")
    return messages
