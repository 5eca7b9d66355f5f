"""Conversations of four kinds of agents, as their protocols are read into messages."""

from typing import Any

Messages = list[dict[str, Any]]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The tool {name}.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read_file", "write_file")
]


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(*paths: str, turn: int, content: str = "", **more: Any) -> dict[str, Any]:
    calls = [
        {
            "id": f"call_{turn}_{i}",
            "type": "function",
            "function": {"name": "read_file", "arguments": {"path": path}},
        }
        for i, path in enumerate(paths)
    ]
    return said("assistant", content, tool_calls=calls, **more)


def result(turn: int, content: str, i: int = 0) -> dict[str, Any]:
    return said("tool", content, tool_call_id=f"call_{turn}_{i}")


TOOL_LOOP: Messages = [
    said("system", "You help with code."),
    said("user", "What does a.py do?"),
    called("a.py", turn=1, content="I read it."),
    result(1, "print(1)"),
    called("b.py", "c.py", turn=2),
    result(2, "two"),
    result(2, "three", 1),
    said("assistant", "It prints."),
    said("user", "And d.py?"),
    called("d.py", turn=3),
    result(3, "four"),
    said("assistant", "It is empty."),
    said("user", "Thank you."),
]
REMINDED: Messages = [
    said("system", "You are a coding agent."),
    said("system", "The folder is /home/x."),
    said("user", "<system-reminder>Today is Monday.</system-reminder>"),
    said("user", "Mend the tests."),
    called("t.py", turn=1, content="I look.", reasoning_content="Where are they?"),
    result(1, "assert 0"),
    said("user", "<system-reminder>The list is empty.</system-reminder>"),
    called("u.py", turn=2, reasoning_content="One more."),
    result(2, "assert 1"),
    said("system", "The file t.py has changed."),
    said("assistant", "Done."),
    said("system", "Answer in German."),
    said("user", "What did you do?"),
    said("assistant", "Nichts."),
    said("user", "Go on."),
]
ITEMS: Messages = [
    said("system", "You are an agent at a terminal."),
    said("system", "<permissions>all</permissions>"),
    said("user", "<environment>linux</environment>"),
    said("user", "List the files."),
    said("assistant", "I list them.", reasoning_content="ls"),
    called("x", turn=1),
    result(1, "a b c"),
    said("assistant", "a, b and c."),
    said("user", "How many?"),
    said("assistant", "", reasoning_content="Count."),
    called("y", turn=2),
    result(2, "3"),
    said("assistant", "Three."),
    said("user", "Sure?"),
]
PLAIN: Messages = [
    said("user", "Hi."),
    said("assistant", "Hello.", reasoning_content="A greeting."),
    said("user", "What is 2 + 2?"),
    said("assistant", "4", reasoning_content="Sum."),
    said("user", "And 3 + 3?"),
    said("assistant", "6"),
    said("user", "Thank you."),
]
AGENTS = {"tool loop": TOOL_LOOP, "reminded": REMINDED, "items": ITEMS, "plain": PLAIN}


def requests(messages: Messages) -> list[Messages]:
    """What a client sends: the conversation before each answer, and the whole one."""
    places = [
        i
        for i, message in enumerate(messages)
        if message["role"] == "assistant" and messages[i - 1]["role"] != "assistant"
    ]
    return [messages[:i] for i in places] + [messages]
