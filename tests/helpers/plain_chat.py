"""A chat template that a reader follows at a glance, and what is said to a fake model with it."""

from typing import Any

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def prompts_of(fake: Any) -> list[str]:
    return [bytes(ids).decode() for ids in fake.prompts]


def lines(*messages: str) -> bytes:
    return "".join(message + "\n" for message in messages).encode()
