"""Conversations as Cline's extension sends them: its tools are XML in texts, without ``tools``.

A text of the user is a list of parts, and the last part tells the environment. An answer is a call
in XML, and the next message of the user begins with its result.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

TOOLS = {
    "execute_command": ("Runs a command of the system.", ("command", "requires_approval")),
    "read_file": ("Reads the contents of a file at the path.", ("path",)),
    "write_to_file": ("Writes the content to a file at the path.", ("path", "content")),
    "replace_in_file": ("Replaces sections by SEARCH/REPLACE blocks.", ("path", "diff")),
    "search_files": ("Searches files by a regular expression.", ("path", "regex")),
    "list_files": ("Lists the files within a folder.", ("path", "recursive")),
    "ask_followup_question": ("Asks the user a question.", ("question", "options")),
    "attempt_completion": ("Presents the result to the user.", ("result", "command")),
}
HEAD = """You are Cline, a highly skilled software engineer with knowledge of many languages.

====

TOOL USE

You have tools that run with the user's approval. You can use one tool per message, and the result \
comes in the user's response. A tool's name and its parameters are XML tags:

<tool_name>
<parameter_name>value</parameter_name>
</tool_name>

# Tools
"""
TAIL = """
====

RULES

- Your current working directory is: /home/user/project
- At the end of each user message there are environment_details, which the user did not write.

====

OBJECTIVE

Work step by step. When the task is done, use attempt_completion."""
NO_TOOL = """[ERROR] You did not use a tool in your previous response! Please retry with a tool use.

# Reminder: Instructions for Tool Use
Tool uses are XML tags: <read_file><path>src/main.js</path></read_file>

(This is an automated message, so do not respond to it conversationally.)"""
READ = re.compile(r"<read_file>\s*<path>(.*?)</path>\s*</read_file>", re.S)


def system_text() -> str:
    """The system's text: the tools in XML, rules and the aim."""
    tools = [
        f"## {name}\nDescription: {about}\nUsage:\n<{name}>\n"
        + "".join(f"<{each}>{each} here</{each}>\n" for each in given)
        + f"</{name}>\n"
        for name, (about, given) in TOOLS.items()
    ]
    return HEAD + "\n".join(tools) + TAIL


def environment(turn: int, files: Sequence[str]) -> str:
    """The last part of each message of the user."""
    return (
        "<environment_details>\n# VSCode Visible Files\n(No visible files)\n\n"
        "# VSCode Open Tabs\n(No open tabs)\n\n"
        f"# Current Time\n11/29/2026, 10:{turn:02}:00 AM (Etc/UTC, UTC+0:00)\n\n"
        "# Current Working Directory (/home/user/project) Files\n" + "\n".join(files) + "\n\n"
        f"# Context Window Usage\n{turn}K / 32K tokens used\n\n"
        "# Current Mode\nACT MODE\n</environment_details>"
    )


def said(*texts: str) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": [{"type": "text", "text": each} for each in texts]}


def fields_of(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fields of a request."""
    return {
        "model": "local", "messages": [*messages], "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def result_of(answer: str, folder: Path) -> tuple[str, ...]:
    """The parts that tell the result of an answer's call."""
    found = READ.search(answer)
    if found is None:
        return (NO_TOOL,)
    file = folder / Path(found[1].strip()).name
    text = file.read_text("utf-8") if file.is_file() else "Error: there is no such file."
    return f"[read_file for '{found[1].strip()}'] Result:", text


def conversation(
    ask: Callable[[dict[str, Any]], str], folder: Path, questions: Sequence[str]
) -> Iterator[None]:
    """Sends a request for each question, with the result of the answer before."""
    files = sorted(each.name for each in folder.iterdir() if each.is_file())
    messages: list[dict[str, Any]] = [{"role": "system", "content": system_text()}]
    answer = ""
    for turn, question in enumerate(questions, 1):
        before = result_of(answer, folder) if turn > 1 else ()
        tag = "feedback" if turn > 1 else "task"
        parts = (*before, f"<{tag}>\n{question}\n</{tag}>", environment(turn, files))
        messages.append(said(*parts))
        answer = ask(fields_of(messages))
        messages.append({"role": "assistant", "content": answer})
        yield


def turns_of_cline_texts(url: str, folder: Path, questions: Sequence[str]) -> Iterator[None]:
    """Asks a server."""

    def ask(fields: dict[str, Any]) -> str:
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(fields).encode(),
            {"content-type": "application/json", "authorization": "Bearer none"},
        )
        texts: list[str] = []
        with urllib.request.urlopen(request, timeout=900) as stream:
            for line in stream:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        texts.append(choice["delta"].get("content") or "")
        return "".join(texts) or "(no answer)"

    yield from conversation(ask, folder, questions)
