"""The fields of ``/v1/responses``, and the same fields on ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema
from pydantic import model_validator as check_model

from sparsekv_cli.generation.fields import FieldError, Fields, Many, Off, Text
from sparsekv_cli.serve.forms.offers import (
    ChosenTool,
    NamedFunction,
    ResponseTool,
    ResponseToolChoice,
    offers_of,
)
from sparsekv_cli.serve.forms.schema import (
    AnswerSchema,
    ChatFields,
    Labels,
    ResponseFormat,
    ServedFields,
    SomeTokens,
)

Input = Annotated[
    str | list[Any],
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]
Include = Literal[
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
]  # fmt: skip


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
    """The text of an answer."""

    format: TextFormat = TextFormat()


class ReasoningFields(Fields):
    """effort: as reasoning_effort."""

    effort: Text | None = None


class ResponseFields(ServedFields, Labels):
    """``/v1/responses``. store: the response is kept, so that a later one can continue it.

    include: reasoning.encrypted_content is the thinking in base64; results of hosted tools are
    never there. top_logprobs, background: take only the values that change nothing.
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
    include: Many[Include] = Field([])
    stream_options: dict[str, Any] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] = 0
    background: Off = False

    @property
    def effort(self) -> str | None:
        """How much the model shall think."""
        return self.reasoning.effort

    def as_chat(self, messages: Sequence[dict[str, Any]]) -> ChatFields:
        """Returns the same request of ``/v1/chat/completions``. messages: instructions and input.

        The values are checked already, so they are not checked again.
        """
        same = ChatFields.model_fields.keys() & ResponseFields.model_fields.keys()
        values = {name: getattr(self, name) for name in same - {"stream_options"}}
        if isinstance(self.tool_choice, ResponseToolChoice):
            function = NamedFunction(name=self.tool_choice.name)
            values["tool_choice"] = ChosenTool(function=function)
        values["tools"] = [tool for _, tool in offers_of(self.tools)]
        values |= {"messages": messages, "max_completion_tokens": self.max_output_tokens}
        values |= {"reasoning_effort": self.reasoning.effort}
        form = self.text.format
        if form.definition is not None:
            schema = AnswerSchema.model_construct(definition=form.definition)
            values["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
        elif form.type == "json_object":
            values["response_format"] = ResponseFormat(type="json_object")
        return ChatFields.model_construct(**values)
