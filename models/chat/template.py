"""Renders a conversation with the model's Jinja chat template, in the form of the model's training.

The template is in the model file. It runs in ``BoundedEnvironment``. Each of its failures becomes
one line for the user. Templates are written for transformers' ``apply_chat_template``, so options
and extra functions are the same as there.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from types import CodeType
from typing import Any

from jinja2 import Template, TemplateSyntaxError
from jinja2.exceptions import SecurityError

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.chat.limits import LimitError, Limits
from sparsekv_cli.models.chat.sandbox import BoundedEnvironment, RefusalError
from sparsekv_cli.models.chat.watchdog import watched

MAX_TEMPLATE_CHARS = 1 << 17  # the longest known template is about a quarter of this
SPARE_CHARS = 1 << 20  # characters of output besides CHARS_PER_INPUT_CHAR times the conversation
CHARS_PER_INPUT_CHAR = 16
MAX_MESSAGE_CHARS = 300

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class RefusedError(SparseKVError):
    """A template refuses a conversation, or fails while it renders the conversation."""


def render(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    tools: Sequence[Mapping[str, Any]] | None = None,
    clock: datetime | None = None,
    **variables: Any,
) -> str:
    """Returns the prompt text for ``messages``, each ``{"role": ..., "content": ...}``.

    template: the model's ``tokenizer.chat_template``; None: ChatML. add_generation_prompt: whether
    the text ends with the start of the model's answer. tools: JSON schemas of functions. clock: the
    time that the template reads; None: the present. variables: the template's own, e.g.
    ``date_string``, ``enable_thinking``; None: the variable is not set.

    Raises RefusedError if the template does not accept the conversation. Raises SparseKVError if
    the template is not valid, does something that is not allowed, or exceeds its time or size. In
    the main thread, a template that hangs in one operation ends the process (watchdog.py).
    """
    source = source_of(template)
    given: dict[str, Any] = {
        "messages": [dict(message) for message in messages],
        "tools": None if tools is None else [dict(tool) for tool in tools],
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
        **{name: value for name, value in variables.items() if value is not None},
    }
    limits = Limits(SPARE_CHARS + CHARS_PER_INPUT_CHAR * sum(map(len, texts_of(given))))
    try:
        with watched():
            parts, n_chars = [], 0
            environment = BoundedEnvironment(limits, clock)
            code = _compiled(source)
            compiled = Template.from_code(environment, code, environment.make_globals(None))
            for part in compiled.generate(given):
                n_chars += len(part)
                limits.fits(n_chars)
                parts.append(part)
            return "".join(parts)
    except TemplateSyntaxError as error:
        raise SparseKVError(
            f"chat template: syntax error at line {error.lineno}: {one_line(error)}"
        ) from None
    except RefusalError as error:
        raise RefusedError(
            f"chat template: does not take this conversation: {one_line(error)}"
        ) from None
    except SecurityError as error:
        raise SparseKVError(f"chat template: not allowed: {one_line(error)}") from None
    except LimitError as error:
        raise SparseKVError(f"chat template: stopped: {one_line(error)}") from None
    except Exception as error:  # the template is a foreign program: it can raise anything
        raise RefusedError(
            f"chat template: failed with {type(error).__name__}: {one_line(error)}"
        ) from None


@lru_cache(8)
def _compiled(source: str) -> CodeType:
    return BoundedEnvironment(Limits(SPARE_CHARS)).compile(source)


def source_of(template: str | None) -> str:
    """Returns the template, or ChatML for None. Raises SparseKVError if it is too long."""
    source = CHATML if template is None else template
    if len(source) > MAX_TEMPLATE_CHARS:
        raise SparseKVError(
            f"chat template: {len(source)} characters, at most {MAX_TEMPLATE_CHARS} expected"
        )
    return source


def texts_of(value: Any) -> Iterator[str]:
    """Yields all texts in ``value``, keys of dicts included."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, Sequence):
            waiting += item


def one_line(error: BaseException) -> str:
    """Returns an exception's message without line breaks, cut to MAX_MESSAGE_CHARS."""
    text = " ".join(str(error)[: 4 * MAX_MESSAGE_CHARS].split())
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 3] + "..."
