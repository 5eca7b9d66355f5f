"""Turns prompts and values of Python types into those that the rest of the program expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsekv_cli.errors import SparseKVError

Messages = Sequence[Mapping[str, Any]]
GENERATE = "a text, a list of token ids, or a list of such prompts"
CHAT = "a text, a list of messages, or a list of such conversations"


def plain(value: Any) -> Any:
    """Returns ``value`` with numpy's types as Python's, and with texts as keys of mappings."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def several(prompt: Any, expected: str) -> list[Any] | None:
    """Returns the prompts if ``prompt`` is a list of prompts, or None if it is a single prompt.

    expected: words for an error, what a prompt may be. Raises SparseKVError for other values.
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
    """Returns ``prompt`` if it is a list of token ids. Raises SparseKVError for other lists."""
    for i, token in enumerate(prompt):
        if type(token) is not int:
            found = type(token).__name__
            raise SparseKVError(f"prompt[{i}] is of type {found}: expected {GENERATE}")
    return prompt


def messages_of_prompt(messages: Any) -> list[Any]:
    """Returns a conversation. A text becomes a message of the user.

    Raises SparseKVError if an element is no message.
    """
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            found = type(message).__name__
            raise SparseKVError(f"messages[{i}] is of type {found}: expected {CHAT}")
    return list(messages)
