"""Tools as requests describe them, as templates read them, and calls as their clients expect them.

A model calls functions only. So a custom tool, whose input is one text, becomes a function with the
argument ``input``. The local shell becomes a function with a command, and a tool of a namespace one
whose name begins with the namespace.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from pydantic import AliasChoices, ConfigDict, Field
from pydantic import model_validator as check_model

from sparsekv_cli.generation.fields import FieldError, Fields, Many, Text

BETWEEN = "__"  # between a namespace and a name
SHELL = "local_shell"


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [required]}


TEXT = {"type": "string"}
ONE_INPUT = _object("input", input=TEXT)
COMMAND = {"type": "array", "items": TEXT, "description": "The program and its arguments."}
SHELL_INPUT = _object(
    "command", command=COMMAND, working_directory=TEXT, timeout_ms={"type": "integer"}
)

WHOLE = {"type": "integer"}
EDITS = {
    "path": TEXT, "file_text": TEXT, "old_str": TEXT, "new_str": TEXT, "insert_text": TEXT,
    "insert_line": WHOLE, "view_range": {"type": "array", "items": WHOLE},
}  # fmt: skip


def _editor(*commands: str, **more: Any) -> dict[str, Any]:
    return _object("command", command={"type": "string", "enum": [*commands]}, **EDITS, **more)


# Tools that the client runs, by the beginning of their type: Anthropic's models know their form.
KNOWN_TOOLS = {
    "bash_": (
        "Runs a command in a shell that stays open. restart: begins a new shell.",
        {"type": "object", "properties": {"command": TEXT, "restart": {"type": "boolean"}}},
    ),
    "text_editor_": (
        "Shows, creates and edits files.",
        _editor("view", "create", "str_replace", "insert"),
    ),
    "memory_": (
        "Shows, creates, edits, renames and deletes files below /memories.",
        _editor("view", "create", "str_replace", "insert", "delete", "rename",
                old_path=TEXT, new_path=TEXT),
    ),
}  # fmt: skip


def as_function(tool: Any) -> Any:
    """Returns a tool of KNOWN_TOOLS with its description and schema, and others as they are."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    known = KNOWN_TOOLS.items() if isinstance(kind, str) else ()
    form = next((form for name, form in known if str(kind).startswith(name)), None)
    if form is None:
        return tool
    return {**tool, "type": "custom", "description": form[0], "input_schema": form[1]}


class FunctionFields(Fields):
    """A function that may be called. It keeps other fields, because a template may use them."""

    model_config = ConfigDict(extra="allow")

    name: Text
    description: str = ""
    parameters: dict[str, Any] | None = None


class ToldGrammar(Fields):
    """A grammar of a custom tool's input."""

    definition: Text
    syntax: Literal["lark", "regex"] = "lark"


class CustomFormat(Fields):
    """The form of a custom tool's input. The model is told a grammar, but is not bound by it.

    grammar: as a chat has it. definition, syntax: as a response has them.
    """

    type: Literal["text", "grammar"] = "text"
    grammar: ToldGrammar | None = None
    definition: Text | None = None
    syntax: Literal["lark", "regex"] | None = None

    @check_model(mode="after")
    def _check_grammar(self) -> CustomFormat:
        if (self.type == "grammar") == (self.grammar is None and self.definition is None):
            reason = ": the type grammar, and no other, needs a definition"
            raise FieldError("tools[].format", reason)
        return self

    @property
    def told(self) -> str:
        """The text that tells the model its grammar; empty if there is none."""
        if self.type == "text":
            return ""
        given = self.grammar or self
        kind = "regular expression" if given.syntax == "regex" else "Lark grammar"
        return f"\n\nThe input fits this {kind}:\n{given.definition}"


class CustomFields(Fields):
    """A tool whose input is one text."""

    name: Text
    description: str = ""
    format: CustomFormat = CustomFormat()

    def as_function(self) -> FunctionFields:
        """Returns the function that the model calls."""
        description = self.description + self.format.told
        return FunctionFields(name=self.name, description=description, parameters=ONE_INPUT)


class ToolFields(Fields):
    """A tool of OpenAI's protocol: a function, or a custom tool."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function", "custom"] = "function"
    function: FunctionFields | None = None
    custom: CustomFields | None = None

    @check_model(mode="after")
    def _check_type(self) -> ToolFields:
        if getattr(self, self.type) is None:
            raise FieldError("tools", f": a tool of type {self.type} needs {self.type}")
        return self

    @property
    def as_function(self) -> FunctionFields:
        """The function that the model calls."""
        given = self.function if self.custom is None else self.custom.as_function()
        assert given is not None
        return given


class NamedFunction(Fields):
    """The function that an answer must call."""

    name: Text


class ChosenTool(Fields):
    """A ``tool_choice`` of OpenAI's protocol that names a function or a custom tool."""

    type: Literal["function", "custom"] = "function"
    function: NamedFunction = Field(validation_alias=AliasChoices("function", "custom"))


class ResponseTool(Fields):
    """A tool of the Responses API. strict is a label. tools: those of a namespace."""

    type: Literal["function", "custom", "namespace", "local_shell"] = "function"
    name: Text = SHELL
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat = CustomFormat()
    tools: Many[ResponseTool] = Field([])

    @check_model(mode="after")
    def _check_name(self) -> ResponseTool:
        if self.type != SHELL and "name" not in self.model_fields_set:
            raise FieldError("tools", f": a tool of type {self.type} needs a name")
        return self

    def told(self) -> dict[str, Any]:
        """Returns the tool as a response repeats it."""
        return {"type": self.type, **self.model_dump(exclude_unset=True)}


class ResponseToolChoice(Fields):
    """A ``tool_choice`` that names a function or a custom tool."""

    type: Literal["function", "custom"] = "function"
    name: Text


class Offer(NamedTuple):
    """A tool as its client knows it."""

    kind: str  # function, custom or local_shell
    name: str
    namespace: str = ""


def offers_of(tools: Iterable[ResponseTool]) -> list[tuple[Offer, ToolFields]]:
    """Returns the tools of a response with the functions that the model calls."""
    found: list[tuple[Offer, ToolFields]] = []
    for tool in tools:
        if tool.type == "namespace":
            for offer, inner in offers_of(tool.tools):
                named = inner.as_function.model_copy(
                    update={"name": joined_name(tool.name, offer.name)}
                )
                found.append((offer._replace(namespace=tool.name), ToolFields(function=named)))
            continue
        parameters = SHELL_INPUT if tool.type == SHELL else tool.parameters
        given = {"name": tool.name, "description": tool.description}
        if tool.type == "custom":
            function = CustomFields(**given, format=tool.format).as_function()
        else:
            more = {} if parameters is None else {"parameters": parameters}
            function = FunctionFields.model_validate({**given, **more})
        found.append((Offer(tool.type, tool.name), ToolFields(function=function)))
    return found


def joined_name(namespace: str, name: str) -> str:
    """Returns the name of the function for a tool of a namespace; "" is none."""
    return f"{namespace}{BETWEEN}{name}" if namespace else name


def told_only(tools: Iterable[Any]) -> set[str]:
    """Returns the paths of grammars that the model is told and not bound by."""
    found: set[str] = set()
    for tool in tools:
        if isinstance(tool, ResponseTool):
            found |= {f"tools[].{path}" for path in told_only(tool.tools)}
            own = {"tools[].format": tool.format}
        else:
            custom = tool.custom if isinstance(tool, ToolFields) else None
            own = {} if custom is None else {"tools[].custom.format": custom.format}
        found |= {path for path, form in own.items() if form.type == "grammar"}
    return found


def custom_input(arguments: str) -> str:
    """Returns the input of a custom tool from the arguments that the model wrote.

    It is the argument ``input``, or a text that is the only argument.
    """
    given = json.loads(arguments)
    if not isinstance(given, dict):
        return arguments
    values = [*given.values()] or [""]
    text = given.get("input", values[0] if len(values) == 1 else None)
    return text if isinstance(text, str) else arguments


def shell_action(arguments: str) -> dict[str, Any]:
    """Returns the action of a call of the local shell."""
    given = json.loads(arguments)
    given = given if isinstance(given, dict) else {}
    command = given.get("command")
    words = [command] if isinstance(command, str) else command
    words = [str(word) for word in words] if isinstance(words, list) else []
    known = {key: given[key] for key in ("timeout_ms", "working_directory") if given.get(key)}
    return {"type": "exec", "command": words, "env": {}, **known}
