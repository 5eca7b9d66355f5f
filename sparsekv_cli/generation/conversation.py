"""Makes the input ids of a model from a prompt or a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.file import TEMPLATE_KEY

if TYPE_CHECKING:
    from sparsekv_cli.model import Model
    from sparsekv_cli.models.chat.fitting.fitted import FittedConversation
    from sparsekv_cli.models.chat.thinking import Thinking
    from sparsekv_cli.models.gguf.file import GGUFFile
    from sparsekv_cli.models.tokenizer.tokenizer import Tokenizer

CHATML_END = "<|im_end|>"


def chat_template(file: GGUFFile) -> str | None:
    """Returns the model's chat template, None if it has none."""
    template = file.metadata.get(TEMPLATE_KEY)
    if template is not None and not isinstance(template, str):
        kind = file.value_types[TEMPLATE_KEY]
        raise SparseKVError(f"{file.path}: {TEMPLATE_KEY} is of type {kind}, not string")
    return template or None


def messages_of(system: str | None, prompt: str) -> list[dict[str, str]]:
    """Returns a conversation: the system message, if it is not None, and one user message."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": prompt}]


def encode_messages(
    tokenizer: Tokenizer,
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    parse_special: bool = False,
    think: bool | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
    continues: bool = False,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Returns the ids of a conversation that the assistant continues, with at most one BOS.

    Tools are sorted by name. A template that prints the time gets the time at which the
    conversation began. So the prompts of one conversation begin with the same ids.

    continues: the last message is the beginning of the answer. The answer continues its text,
    without its thinking. add_generation_prompt: whether the template adds the beginning of an
    answer. parse_special: whether control tokens such as ``<|im_end|>`` are also parsed in messages
    and tools. Otherwise only those that the template writes are parsed. think: whether the model
    thinks first; None: the template decides. variables: the template's variables by name.

    Raises SparseKVError if ``think`` is not None and the template has no such choice.
    """
    from sparsekv_cli.models.chat.cover import Cover
    from sparsekv_cli.models.chat.fitting.fitted import fitted, flattened
    from sparsekv_cli.models.chat.fitting.lasting import in_one_order, started_at
    from sparsekv_cli.models.chat.template import RefusedError, render
    from sparsekv_cli.models.chat.thinking import thinking_of

    bos, eos = (token_text(tokenizer, tokenizer.bos_id), token_text(tokenizer, tokenizer.eos_id))
    plain, clock = None, started_at(messages)
    tools = in_one_order(tools) if tools else None
    thinking = thinking_of(template, tokenizer)
    if not parse_special:
        markers = () if thinking is None else thinking.markers
        told = [*messages, *(tools or ()), variables]
        cover = Cover(tokenizer.control_texts, template, told, markers)
        messages, plain = cover.messages(messages), cover.lift
        tools = tools and cover.value(tools)
        variables = {name: cover.value(value) for name, value in variables.items()}
    variables = {**variables, **thinking_switch(template, think)}

    def written(form: FittedConversation) -> tuple[str, Mapping[str, Any] | None]:
        said, last = form.messages, None
        if continues:
            *said, last = said
        text = render(
            template,
            said,
            add_generation_prompt=add_generation_prompt,
            bos_token=bos,
            eos_token=eos,
            tools=form.tools,
            clock=clock,
            **variables,
        )
        return text, last

    try:
        text, last = written(fitted(template, messages, tools))
    except RefusedError as error:
        try:
            text, last = written(flattened(messages, tools))
        except RefusedError:
            raise error from None
    if last is not None:
        thought = str(last.get("reasoning_content") or last.get("thinking") or "").strip()
        text += "" if thinking is None else thinking.written(text, thought)
        text += last["content"] or ""
    add_bos = False if bos and text.startswith(bos) else None
    return tokenizer.encode(text, add_bos=add_bos, add_eos=False, parse_special=True, plain=plain)


def model_thinking(model: Model) -> Thinking | None:
    """Returns the markers of the model's thinking; None if its template has none."""
    from sparsekv_cli.models.chat.thinking import thinking_of

    return thinking_of(chat_template(model.gguf), model.tokenizer)


def thinking_switch(template: str | None, think: bool | None) -> dict[str, bool]:
    """Returns the template's variable for ``think`` with its value; {} if think is None.

    Raises SparseKVError if the template has no such variable. A template without any thinking needs
    none to switch it off, and the result is {}.
    """
    from sparsekv_cli.models.chat.thinking import markers_of, switch_of

    if think is None:
        return {}
    name = switch_of(template)
    if name is None and not think and markers_of(template) is None:
        return {}
    if name is None:
        raise SparseKVError(
            "thinking cannot be switched on or off: the model's chat template has no variable "
            "enable_thinking; leave out the choice"
        )
    return {name: think}


class _HasTemplate(Protocol):
    """A Model, or an open GGUF file together with its tokenizer."""

    @property
    def gguf(self) -> GGUFFile: ...
    @property
    def tokenizer(self) -> Any: ...


def prompt_ids(
    model: _HasTemplate,
    prompt: str | Sequence[Mapping[str, Any]],
    system: str | None,
    *,
    raw: bool,
    parse_special: bool,
    think: bool | None = None,
    continues: bool = False,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Returns the ids of a prompt: a conversation, or a text with a system message before it.

    system: None: no system message. raw: a text is encoded without the model's chat template. The
    other arguments are those of ``encode_messages``. Raises SparseKVError if a message needs a
    template and the model has none.
    """
    template = chat_template(model.gguf)
    if template is None:
        thinking_switch(None, think)
    if template is None or (raw and isinstance(prompt, str)):
        if system is not None:
            raise SparseKVError(
                "this model has no chat template, so there is no place for a system message: "
                "leave out -sys and put it into the prompt"
            )
        if not isinstance(prompt, str):
            raise SparseKVError(
                "this model has no chat template, which messages need: give a prompt"
            )
        return model.tokenizer.encode(prompt, add_eos=False, parse_special=True)
    messages = messages_of(system, prompt) if isinstance(prompt, str) else prompt
    return encode_messages(
        model.tokenizer,
        template,
        messages,
        parse_special=parse_special,
        think=think,
        continues=continues,
        add_generation_prompt=add_generation_prompt,
    )


def continues_last(
    messages: Sequence[Mapping[str, Any]], continues: bool | None, adds_prompt: bool | None
) -> bool:
    """Returns whether an answer continues the last message of a conversation.

    continues, adds_prompt: continue_final_message and add_generation_prompt of a request; None:
    missing. If both are missing, an answer continues a last message of the assistant without calls.
    Raises SparseKVError if they contradict each other or the messages.
    """
    last = messages[-1] if messages else {}
    is_open = last.get("role") == "assistant" and not last.get("tool_calls")
    if continues is None:
        return is_open and adds_prompt is None
    if continues and adds_prompt:
        raise SparseKVError("continue_final_message and add_generation_prompt exclude each other")
    if continues and not is_open:
        raise SparseKVError(
            "continue_final_message: the last message is not one of the assistant without calls"
        )
    return continues


def token_text(tokenizer: Tokenizer, token: int | None) -> str:
    """Returns the text of a special token; "" if ``token`` is None or negative."""
    if token is None or token < 0:
        return ""
    return tokenizer.token_bytes(token).decode("utf-8", errors="replace")
