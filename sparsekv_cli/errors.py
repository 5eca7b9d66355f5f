"""The one exception that reaches the user as a line."""

import os
import re
from typing import Any

# The name and password of a URL, also with a ``/`` that should be written ``%2F``.
CREDENTIALS = re.compile(r"(?<=://)(?:[^\s/?#'\"]*|[^\s/@'\"]*:[^\s'\"]*)@")
SECRET_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
HIDDEN = "***"


def without_secrets(text: str) -> str:
    """Returns ``text`` with *** for passwords in URLs and for the hub's token."""
    if "://" in text:
        text = CREDENTIALS.sub(f"{HIDDEN}@", text)
    for token in filter(None, map(os.environ.get, SECRET_VARIABLES)):
        for form in (token, token.strip(), repr(token)[1:-1]):
            text = text.replace(form, HIDDEN) if len(form) > 3 else text
    return text


class SparseKVError(Exception):
    """A failure that the user can act on; its text is one line: found, expected, what to do.

    Only ``cli.py`` turns it into ``error: ...`` on stderr and exit code 1. The text has no
    passwords.
    """

    def __str__(self) -> str:
        return without_secrets(super().__str__())


class BusyError(SparseKVError):
    """The server is busy. The caller may ask again later."""


class LacksMemoryError(SparseKVError):
    """The machine has no memory for this now. It may have some when other work is done."""


class LostModelError(SparseKVError):
    """The model's file has changed since it was opened. The model cannot go on."""


class UnsupportedModelError(SparseKVError):
    """The file is valid, but this program cannot run such a model."""


class NoRoomError(SparseKVError):
    """The GPU has too little free memory for a model."""


class OptionError(SparseKVError):
    """An option does not work with another option or with the machine."""


class StepError(SparseKVError):
    """A step has failed for some of its sequences. The others have their tokens.

    errors: by the place of a sequence. outcomes: as Engine.decode returns them; those of a failed
    sequence are not valid.
    """

    def __init__(self, errors: dict[int, Exception], outcomes: list[Any]) -> None:
        first = next(iter(errors.values()))
        super().__init__(str(first) or type(first).__name__)
        self.errors, self.outcomes = errors, outcomes
