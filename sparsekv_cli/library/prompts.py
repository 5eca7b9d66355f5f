"""Prompts and values of Python's own types, as the rest of the program takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsekv_cli.errors import SparseKVError

Messages = Sequence[Mapping[str, Any]]
GENERATE = "a text, a list of token ids, or a list of such prompts"
CHAT = "a text, a list of messages, or a list of such conversations"


def plain(value: Any) -> Any:
    """Returns a value without numpy's types, and a mapping with texts as keys."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def several(prompt: Any, expected: str) -> list[Any] | None:
    """Returns the prompts of a list of prompts, or None for a single prompt.

    expected: the words for what a prompt may be. Raises SparseKVError for something else.
    """
    if isinstance(prompt, str):
        return None
    found = type(prompt).__name__
    if not isinstance(prompt, list):
        raise SparseKVError(f"the prompt is of type {found}: expected {expected}")
    if not prompt:
        raise SparseKVError(f"the prompt is an empty list: expected {expected}")
    are_many = [isinstance(each, str | list) for each in prompt]
    if all(are_many):
        return prompt
    if any(are_many):
        kinds = " and ".join(sorted({type(each).__name__ for each in prompt}))
        raise SparseKVError(f"the prompt is a list of {kinds}: expected {expected}")
    return None


def token_ids(prompt: list[Any]) -> list[int]:
    """Returns the ids of a prompt that is a list of them. Raises SparseKVError for other lists."""
    for i, token in enumerate(prompt):
        if type(token) is not int:
            found = type(token).__name__
            raise SparseKVError(f"prompt[{i}] is of type {found}: expected {GENERATE}")
    return prompt


def messages_of_prompt(messages: Any) -> list[Any]:
    """Returns a conversation: one message of the user for a text."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            found = type(message).__name__
            raise SparseKVError(f"messages[{i}] is of type {found}: expected {CHAT}")
    return list(messages)
