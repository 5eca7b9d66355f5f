"""The chat template that the user gives instead of the model's: a known name, or a file.

Names and forms are llama.cpp's. If a form has no place for a system message, its text comes before
the first text of the user.
"""

from collections.abc import Callable
from pathlib import Path

from jinja2 import TemplateError

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.chat.limits import Limits
from sparsekv_cli.models.chat.sandbox import BoundedEnvironment
from sparsekv_cli.models.chat.template import CHATML, one_line, source_of
from sparsekv_cli.settings.option import did_you_mean
from sparsekv_cli.system.files import naming, open_regular


def _by_role(before: str, role: str, after: str, end: str, start: str, bos: str = "") -> str:
    """Returns a template in which all messages have one form. start: the answer's beginning."""
    return (
        f"{bos}{{% for m in messages %}}{before}{{{{ {role} }}}}{after}{{{{ m['content'] }}}}{end}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{start}{{% endif %}}"
    )


# Puts the system message's text into ``head`` and the other messages into ``rest``.
_SYSTEM = (
    "{% set head = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% set rest = messages[1:] if head else messages %}"
)


def _in_turn(
    user: Callable[[str], str], answer: str, system: str = "", start: str = "", first: str = ""
) -> str:
    """Returns a template in which messages of the user and the assistant have different forms.

    user: expression of a text -> form of a user's message. answer, system: forms that contain their
    text in ``{{ }}``. start: the beginning of the answer. first: the expression of the first user's
    text, if it differs.
    """
    opening = other = user("m['content']")
    if first:
        opening = f"{{% if loop.first %}}{user(first)}{{% else %}}{other}{{% endif %}}"
    return (
        f"{_SYSTEM}{system}{{% for m in rest %}}{{% if m['role'] == 'assistant' %}}{answer}"
        f"{{% else %}}{opening}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{start}{{% endif %}}"
    )


_WITH_HEAD = "(head + '\\n\\n' if head else '') + m['content']"
_ANSWER = "{{ m['content'] }}{{ eos_token }}"
_LLAMA2_HEAD = "('<<SYS>>\\n' + head + '\\n<</SYS>>\\n\\n' if head else '') + m['content']"

NAMED: dict[str, str] = {
    "chatml": CHATML,
    "gemma": "{{ bos_token }}"
    + _in_turn(
        lambda text: f"<start_of_turn>user\n{{{{ ({text}) | trim }}}}<end_of_turn>\n",
        "<start_of_turn>model\n{{ m['content'] | trim }}<end_of_turn>\n",
        start="<start_of_turn>model\n",
        first=_WITH_HEAD,
    ),
    "granite": _by_role(
        "<|start_of_role|>", "m['role']", "<|end_of_role|>", "<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    "llama2": _in_turn(
        lambda text: f"{{{{ bos_token }}}}[INST] {{{{ {text} }}}} [/INST]",
        " {{ m['content'] }} {{ eos_token }}",
        first=_LLAMA2_HEAD,
    ),
    "llama3": _by_role(
        "<|start_header_id|>", "m['role']", "<|end_header_id|>\n\n", "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n", "{{ bos_token }}",
    ),
    "mistral-v1": "{{ bos_token }}"
    + _in_turn(
        lambda text: f" [INST] {{{{ {text} }}}} [/INST]", " " + _ANSWER, first=_WITH_HEAD
    ),
    "mistral-v3": "{{ bos_token }}"
    + _in_turn(lambda text: f"[INST] {{{{ {text} }}}}[/INST]", " " + _ANSWER, first=_WITH_HEAD),
    "mistral-v7": "{{ bos_token }}"
    + _in_turn(
        lambda text: f"[INST] {{{{ {text} }}}}[/INST]",
        " " + _ANSWER,
        "{% if head %}[SYSTEM_PROMPT] {{ head }}[/SYSTEM_PROMPT]{% endif %}",
    ),
    "phi3": _by_role("<|", "m['role']", "|>\n", "<|end|>\n", "<|assistant|>\n"),
    "phi4": _by_role(
        "<|im_start|>", "m['role']", "<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"
    ),
    "vicuna": "{{ bos_token }}"
    + _in_turn(
        lambda text: f"USER: {{{{ {text} }}}}\n",
        "ASSISTANT: {{ m['content'] }}{{ eos_token }}\n",
        "{% if head %}{{ head }}\n\n{% endif %}",
        "ASSISTANT:",
    ),
    "zephyr": _by_role("<|", "m['role']", "|>\n", "{{ eos_token }}\n", "<|assistant|>\n"),
}  # fmt: skip


def named_template(named: str) -> str:
    """Returns the template with the name ``named``, or in the file ``named``, or ``named`` itself.

    The last is returned if it is a template. Raises SparseKVError for another text, and for a
    template with wrong syntax.
    """
    if named in NAMED:
        return NAMED[named]
    source = named
    if "{%" not in named and "{{" not in named:
        names = ", ".join(NAMED)
        if not Path(named).is_file():
            raise SparseKVError(
                f"--chat-template {named}: no such file, nor one of {names}"
                f"{did_you_mean(named, NAMED)}"
            )
        with naming(f"--chat-template {named}"), open_regular(named) as file:
            data = file.read()
        try:
            source = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise SparseKVError(f"--chat-template {named}: is not UTF-8") from None
        if not source.strip():
            raise SparseKVError(f"--chat-template {named}: is empty: expected a Jinja template")
    try:
        BoundedEnvironment(Limits(0)).from_string(source_of(source))
    except TemplateError as error:
        line = getattr(error, "lineno", 0)
        raise SparseKVError(
            f"--chat-template: syntax error at line {line}: {one_line(error)}"
        ) from None
    return source
