"""The fields of requests, as pydantic models.

Every field has an effect or is refused by name. Labels are the exception: a hosted service reads
them, and they cannot change an answer here. clients.py takes out what known clients send without
an effect.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
)
from pydantic import model_validator as check_model

from sparsekv_cli.generation.answer_fields import AnswerFields
from sparsekv_cli.generation.fields import (
    FieldError,
    Fields,
    Many,
    Off,
    Text,
    as_texts,
    check_length,
    names_of,
)
from sparsekv_cli.methods import METHODS
from sparsekv_cli.serve.forms.offers import ChosenTool, ToolFields, as_function
from sparsekv_cli.settings.option import MAX_WHOLE

MAX_CHOICES = 16
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1024
MAX_LOGPROBS = 20
MAX_BINS = 256
MAX_TOKENS = AliasChoices("max_tokens", "n_predict")  # the second is llama.cpp's


def _option_text(value: Any) -> Any:
    """Returns the value of a method's option as the command line takes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list) and all(isinstance(each, int) for each in value):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError("expected a text, a number, true or false, or a list of whole numbers")


def _few(value: Any) -> Any:
    return check_length(value) if isinstance(value, dict) else value


def _limit(value: int) -> int:
    if value == 0:
        raise ValueError("expected 1 or more, or -1 for no limit")
    return value


OptionText = Annotated[str, BeforeValidator(_option_text, json_schema_input_type=str | int)]
MethodOptions = Annotated[dict[str, OptionText], BeforeValidator(_few)]
MaxTokens = Annotated[int, Field(ge=-1, le=MAX_WHOLE)]  # of an answer; -1: no limit
SomeTokens = Annotated[MaxTokens, AfterValidator(_limit)]
Stop = Annotated[Text, Field(max_length=MAX_STOP_CHARACTERS)]
ListOfStops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]
Stops = Annotated[
    tuple[Stop, ...],
    Field(max_length=MAX_STOPS),
    BeforeValidator(as_texts, json_schema_input_type=Stop | ListOfStops),
]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Prompt = Annotated[
    str | list[Any],
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
                {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
            ]
        }
    ),
]
Objects = Many[dict[str, Any]]
Messages = Annotated[Objects, Field(min_length=1)]


class ServedFields(AnswerFields):
    """The fields that requests of all protocols share.

    model: any name if the server has one model; empty: the first one. method, method_options,
    budget, sparse_from: as on the command line. sparsekv_rows: parts of the context in the live
    picture of attended rows; 0: none.
    """

    model: str = ""
    stream: bool = False
    method: Annotated[str, Field(json_schema_extra={"enum": list(METHODS)})] | None = None
    method_options: MethodOptions = Field({})
    budget: OptionText | None = None
    sparse_from: Annotated[int, Field(ge=-1, le=MAX_WHOLE)] | None = None
    sparsekv_rows: Annotated[int, Field(ge=0, le=MAX_BINS)] = 0

    @property
    def forbids_calls(self) -> bool:
        """Whether the answer must not call the request's tools."""
        return False

    @check_model(mode="after")
    def _check_stream(self) -> ServedFields:
        if not self.stream and self.sparsekv_rows:
            raise FieldError("sparsekv_rows", " needs stream: true")
        return self


class StreamOptions(Fields):
    """include_usage: whether a last event has the numbers of tokens."""

    include_usage: bool = False


class Labels(Fields):
    """Fields that a hosted service reads. They change no answer here."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class OpenAIFields(ServedFields, Labels):
    """Fields of ``/v1/chat/completions`` and ``/v1/completions``."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Stops = ()
    stream_options: StreamOptions | None = None
    return_progress: bool = False
    modalities: Many[Literal["text"]] = Field(["text"])


class AnswerSchema(Fields):
    """The schema of ``response_format``. Its name and description are labels."""

    name: str | None = None
    description: str | None = None
    strict: bool = True
    definition: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Fields):
    """The form of the answer. ``json_object`` may have a schema, as in llama.cpp."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    definition: dict[str, Any] | None = Field(default=None, alias="schema")
    json_schema: AnswerSchema | None = None

    @check_model(mode="after")
    def _check_type(self) -> ResponseFormat:
        needs = {"definition": ("json_object",), "json_schema": ("json_schema",)}
        for name, kinds in needs.items():
            if getattr(self, name) is not None and self.type not in kinds:
                named = "schema" if name == "definition" else name
                raise FieldError(f"response_format.{named}", f" needs the type {kinds[0]}")
        if self.type == "json_schema" and self.json_schema is None:
            raise FieldError("response_format.json_schema", ": is missing")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The schema that the answer must fit; None: any text."""
        if self.type == "text":
            return None
        if self.json_schema is not None:
            return self.json_schema.definition
        return self.definition or {"type": "object"}


class ChatFields(OpenAIFields):
    """Fields of ``/v1/chat/completions``.

    parallel_tool_calls: false returns only the first call.
    reasoning_effort, chat_template_kwargs: variables of the chat template.
    continue_final_message: the answer continues the last message. If the field is missing, it does
    so after an assistant's message.
    add_generation_prompt: false leaves out the template's beginning of an answer.
    """

    # OpenAI's old names.
    elsewhere: ClassVar = {"functions": "tools", "function_call": "tool_choice"}

    messages: Messages
    max_tokens: SomeTokens | None = Field(None, validation_alias=MAX_TOKENS)
    max_completion_tokens: SomeTokens | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat = ResponseFormat()
    tools: Many[ToolFields] = Field([])
    tool_choice: Literal["auto", "none", "required"] | ChosenTool = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Text | None = None
    chat_template_kwargs: dict[str, Any] = Field({})
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def effort(self) -> str | None:
        """How much the model shall think."""
        return self.reasoning_effort

    @property
    def forbids_calls(self) -> bool:
        return self.tool_choice == "none"

    @check_model(mode="after")
    def _check_chat(self) -> ChatFields:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", " needs logprobs: true")
        if self.max_tokens not in (None, self.max_completion_tokens or self.max_tokens):
            raise FieldError("max_tokens", " and max_completion_tokens are two names of one field")
        return self


class CompletionFields(OpenAIFields):
    """``/v1/completions``. prompt: a text, token ids, or a list of either.

    suffix: the text after the answer, for models that fill gaps. echo and best_of take only values
    that change nothing.
    """

    prompt: Prompt
    max_tokens: MaxTokens = Field(16, validation_alias=MAX_TOKENS)
    logprobs: TopLogprobs | None = None
    echo: Off = False
    suffix: str = ""
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    @check_model(mode="after")
    def _check_best(self) -> CompletionFields:
        if self.best_of not in (None, self.n):
            raise FieldError("best_of", f" = {self.best_of}: expected n = {self.n}, or none")
        return self


class OtherFile(Fields):
    """Another file of the project that is edited."""

    filename: str = ""
    text: str


class InfillFields(ServedFields):
    """``/infill``, as in llama-server: the text between input_prefix and input_suffix.

    prompt: the beginning of this text.
    """

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Many[OtherFile] = Field([])
    prompt: str = ""
    max_tokens: MaxTokens = Field(-1, validation_alias=MAX_TOKENS)
    stop: Stops = ()

    @check_model(mode="before")
    @classmethod
    def _without_infill(cls, values: Any) -> Any:
        """Leaves out llama.cpp's sampler ``infill``, which ends short answers early."""
        chain = values.get("samplers") if isinstance(values, dict) else None
        if isinstance(chain, list) and "infill" in chain:
            values = {**values, "samplers": [name for name in chain if name != "infill"]}
        return values

    def as_completion(self, ids: list[int]) -> CompletionFields:
        """Returns the same request of ``/v1/completions``. ids: of the prompt."""
        same = CompletionFields.model_fields.keys() & InfillFields.model_fields.keys()
        values = {name: getattr(self, name) for name in same - {"prompt"}}
        return CompletionFields.model_construct(**values, prompt=ids)


class ThinkingFields(Fields):
    """Whether the model thinks first. budget_tokens: the most tokens of its thinking."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_WHOLE)] | None = None
    display: Literal["summarized", "omitted"] = "summarized"


class MessageTool(Fields):
    """A tool of Anthropic's protocol, which the client runs."""

    model_config = ConfigDict(extra="allow")

    type: Literal["custom"] = "custom"
    name: Text
    description: str = ""
    input_schema: dict[str, Any] = Field({})

    @check_model(mode="before")
    @classmethod
    def _check_known(cls, values: Any) -> Any:
        return as_function(values)


class MessageToolChoice(Fields):
    """A ``tool_choice`` of Anthropic's protocol."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False

    @check_model(mode="after")
    def _check_name(self) -> MessageToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise FieldError("tool_choice", ": the type tool, and no other, needs a name")
        return self


class OutputConfig(Fields):
    """effort: ``reasoning_effort`` if the chat template has it. format: the form of the answer."""

    effort: Text | None = None
    format: MessageFormat | None = None


class MessageFormat(Fields):
    """The form of the answer."""

    type: Literal["json_schema"]
    definition: dict[str, Any] = Field(alias="schema")


class CountFields(Fields):
    """``/v1/messages/count_tokens``. Other fields of ``/v1/messages`` have no effect."""

    model: str = ""
    messages: Messages
    system: str | Objects | None = None
    tools: Many[MessageTool] = Field([])
    tool_choice: MessageToolChoice = MessageToolChoice(type="auto")
    thinking: ThinkingFields | None = None
    output_config: OutputConfig = OutputConfig()
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    @property
    def effort(self) -> str | None:
        """How much the model shall think."""
        return self.output_config.effort

    @property
    def forbids_calls(self) -> bool:
        return self.tool_choice.type == "none"

    @check_model(mode="before")
    @classmethod
    def _of_messages(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        config = values.get("output_config") or {}
        if "output_format" in values and isinstance(config, dict):  # its name in a beta
            values["output_config"] = {"format": values.pop("output_format"), **config}
        if cls is CountFields:
            unread = {*names_of(MessageFields)} - {*names_of(CountFields)}
            values = {key: value for key, value in values.items() if key not in unread}
        return values


class MessageFields(CountFields, ServedFields):
    """``/v1/messages``."""

    max_tokens: SomeTokens
    stop_sequences: Stops = ()


class TokenizeFields(Fields):
    """``/tokenize``, as in llama-server. add_special: adds the tokens that begin and end a text."""

    model: str = ""
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeFields(Fields):
    """``/detokenize``, as in llama-server."""

    model: str = ""
    tokens: Many[Annotated[int, Field(ge=0, le=MAX_WHOLE)]]
