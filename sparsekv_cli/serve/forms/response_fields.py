"""The fields of ``/v1/responses``, and the fields of ``/v1/chat/completions`` for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema
from pydantic import model_validator as check_model

from sparsekv_cli.generation.fields import FieldError, Fields, Many, Off, Text
from sparsekv_cli.serve.forms.schema import (
    AnswerSchema,
    ChatFields,
    ChosenTool,
    FunctionFields,
    Labels,
    NamedFunction,
    PlainStream,
    ResponseFormat,
    ServedFields,
    SomeTokens,
    ToolFields,
)

Input = Annotated[
    str | list[Any],
    Field(min_length=1),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "object"}},
            ]
        }
    ),
]


class ResponseTool(Fields):
    """A function that may be called. strict is a label."""

    type: Literal["function"] = "function"
    name: Text
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(Fields):
    """A ``tool_choice`` that names a function."""

    type: Literal["function"] = "function"
    name: Text


class TextFormat(Fields):
    """The form of the answer. name, description and strict are labels."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    definition: dict[str, Any] | None = Field(default=None, alias="schema")

    @check_model(mode="after")
    def _check_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.definition is not None):
            raise FieldError("text.format", ": the type json_schema, and no other, needs a schema")
        return self


class TextFields(Fields):
    """The form of the answer. verbosity: its only value."""

    format: TextFormat = TextFormat()
    verbosity: Literal["medium"] = "medium"


class ReasoningFields(Fields):
    """effort: as reasoning_effort. summary: no effect, because all thinking is sent."""

    effort: Text | None = None
    summary: Literal["auto"] | None = None


class ResponseFields(ServedFields, Labels):
    """``/v1/responses``. store: the response is kept, so that others can continue it.

    include: reasoning.encrypted_content is the thinking in base64. truncation, background: only
    the values that change nothing.
    """

    input: Input
    instructions: str | None = None
    previous_response_id: Text | None = None
    store: bool = True
    max_output_tokens: SomeTokens | None = None
    text: TextFields = TextFields()
    reasoning: ReasoningFields = ReasoningFields()
    tools: Many[ResponseTool] = Field([])
    tool_choice: Literal["auto", "none", "required"] | ResponseToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field({})
    include: Many[Literal["reasoning.encrypted_content"]] = Field([])
    stream_options: PlainStream | None = None
    truncation: Literal["disabled"] = "disabled"
    background: Off = False

    def as_chat(self, messages: Sequence[dict[str, Any]]) -> ChatFields:
        """Returns the same request of ``/v1/chat/completions``. messages: instructions and input.

        All values were checked, so they are not checked again.
        """
        same = ChatFields.model_fields.keys() & ResponseFields.model_fields.keys()
        values = {name: getattr(self, name) for name in same - {"stream_options", "store"}}
        if isinstance(self.tool_choice, ResponseToolChoice):
            function = NamedFunction(name=self.tool_choice.name)
            values["tool_choice"] = ChosenTool(function=function)
        values["tools"] = [_tool(tool) for tool in self.tools]
        values |= {"messages": messages, "max_completion_tokens": self.max_output_tokens}
        values |= {"reasoning_effort": self.reasoning.effort}
        form = self.text.format
        if form.definition is not None:
            schema = AnswerSchema.model_construct(definition=form.definition)
            values["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
        elif form.type == "json_object":
            values["response_format"] = ResponseFormat(type="json_object")
        return ChatFields.model_construct(**values)


def _tool(tool: ResponseTool) -> ToolFields:
    function = tool.model_dump(exclude={"type", "strict"}, exclude_none=True)
    return ToolFields(function=FunctionFields.model_construct(**function))
