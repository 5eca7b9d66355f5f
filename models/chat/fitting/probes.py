"""Tries a chat template on short conversations, to learn what it accepts.

Templates refuse some conversations. Some silently drop a message, or write it in another place.
Each question is asked once for each template.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.chat.template import render

Messages = list[dict[str, Any]]
WORDS = FIRST, SECOND = ("first-probe", "second-probe")
USER = {"role": "user", "content": "Well?"}
ANSWER = {"role": "assistant", "content": "Yes."}
TOOL_NAME = "probe_function"
TOOL = {
    "type": "function",
    "function": {"name": TOOL_NAME, "description": "", "parameters": {"type": "object"}},
}


def writes(template: str | None, messages: Messages, words: Sequence[str] = WORDS) -> bool:
    """Returns whether a template accepts a conversation and writes ``words`` in this order."""
    return _in_order(rendered(template, messages), words)


def rendered(
    template: str | None, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (TOOL,)
) -> str:
    """Returns the text of a conversation; "" if the template does not accept it."""
    try:
        return render(template, messages, tools=list(tools) or None)
    except SparseKVError:
        return ""


def said(role: str, content: str) -> dict[str, Any]:
    """Returns a message with a role and a text."""
    return {"role": role, "content": content}


@lru_cache(16)
def takes_system(template: str | None) -> bool:
    """Returns whether a template writes a system message, with and without later answers."""
    messages = [said("system", FIRST), said("user", SECOND), ANSWER, USER]
    return writes(template, messages) and writes(template, messages[:2])


@lru_cache(16)
def takes_systems(template: str | None) -> bool:
    """Returns whether a template writes several system messages, each in its place."""
    first, second = (said("system", word) for word in WORDS)
    return writes(template, [first, second, USER]) and writes(
        template,
        [first, said("user", "Well?"), ANSWER, second, said("user", "And?")],
        [FIRST, "Well?", "Yes.", SECOND, "And?"],
    )


@lru_cache(16)
def alternates(template: str | None) -> bool:
    """Returns whether a template wants users and assistants to take turns."""
    both = [[said(role, word) for word in WORDS] for role in ("user", "assistant")]
    return not (writes(template, both[0]) and writes(template, [USER, *both[1], USER]))


@lru_cache(16)
def needs_user(template: str | None) -> bool:
    """Returns whether the first message, after a system message, must be the user's."""
    answered = [said("assistant", FIRST), said("user", SECOND)]
    system = [said("system", FIRST)] if takes_system(template) else []
    alone = not system or writes(template, system, [FIRST])
    return not (alone and writes(template, answered))


@lru_cache(16)
def ends_thinking(template: str | None) -> bool:
    """Returns whether a template drops a call's thinking if a user's text follows the result."""
    call = {"id": "probe0000", "type": "function", "function": {"name": "f", "arguments": {}}}
    asked = {**said("assistant", ""), "reasoning_content": FIRST, "tool_calls": [call]}
    messages = [USER, asked, {**said("tool", SECOND), "tool_call_id": "probe0000"}]
    return writes(template, messages) and not writes(template, [*messages, USER])


@lru_cache(16)
def writes_results(template: str | None) -> bool:
    """Returns whether a template writes the results of tools without calls before them."""
    results = [{**said("tool", word), "tool_call_id": "probe0000"} for word in WORDS]
    return writes(template, [USER, *results, ANSWER, USER], [*WORDS, "Yes."])


@lru_cache(16)
def place_of_tools(template: str | None) -> str:
    """Returns where a template reads the tools: ``tools``, ``system``, or "" for nowhere.

    ``tools``: its variable of this name. ``system``: a JSON text in the field ``tools`` of a system
    message (Phi-4-mini).
    """
    if TOOL_NAME in rendered(template, [USER]):
        return "tools"
    system = {**said("system", FIRST), "tools": TOOL_NAME}
    return "system" if TOOL_NAME in rendered(template, [system, USER], ()) else ""


def _in_order(text: str, words: Sequence[str]) -> bool:
    places = [text.find(word) for word in words]
    return -1 not in places and places == sorted(places)
