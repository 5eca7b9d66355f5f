"""Files of ``chat``: saved conversations, and texts to send."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsekv_cli.commands.shared.prompt import decode_file
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.system.files import replace_file

ROLES = ("system", "user", "assistant")


def read_text(name: str) -> str:
    """Returns a file's text without its last line break. Raises SparseKVError for a bad file."""
    text = decode_file(_read(name), name).removesuffix("\n")
    if not text.strip():
        raise SparseKVError(f"{name}: the file has no text: choose a file with words")
    return text


def save_messages(name: str, messages: list[dict[str, str]]) -> None:
    """Writes a conversation, whole or not at all. It never replaces a file of another kind."""
    text = json.dumps({"messages": messages}, ensure_ascii=False, indent=1) + "\n"
    with _usable(name) as path:
        if path.exists():
            try:
                load_messages(name)
            except SparseKVError:
                raise SparseKVError(
                    f"{name}: exists and is no conversation: choose another name"
                ) from None
        replace_file(path, text.encode())


def load_messages(name: str) -> list[dict[str, str]]:
    """Returns the conversation in a file. Raises SparseKVError for another file."""
    from sparsekv_cli.generation.fields import read_json  # which imports pydantic

    data = _read(name)
    try:
        value = read_json(data)
    except SparseKVError as error:
        raise SparseKVError(f"{name}: {error}") from None
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages:
        raise SparseKVError(f'{name}: expected {{"messages": [...]}} with one message at least')
    return [_message(name, i, message, messages) for i, message in enumerate(messages)]


def _message(name: str, i: int, message: Any, messages: list[Any]) -> dict[str, str]:
    """Returns a message if its role is possible there: first system, then user and model in turn.

    Two messages of the user may follow each other, as after a file that ends with one. Raises
    SparseKVError for another role.
    """
    place = f"{name}: message {i + 1}"
    if not isinstance(message, dict) or not all(
        isinstance(message.get(key), str) for key in ("role", "content")
    ):
        raise SparseKVError(f"{place}: expected an object with the texts 'role' and 'content'")
    role = message["role"]
    if role not in ROLES:
        raise SparseKVError(f"{place}: role {role!r}: expected {', '.join(ROLES)}")
    n_ahead = i - (messages[0]["role"] == "system")
    expected: tuple[str, ...] = ("user", "assistant")
    if n_ahead <= 0 or messages[i - 1]["role"] == "assistant":
        expected = ("system" if n_ahead < 0 else "user",)
    if role not in expected:
        words = " or ".join(map(repr, expected))
        raise SparseKVError(f"{place}: role {role!r}: expected {words} there")
    return {"role": role, "content": message["content"]}


def _read(name: str) -> bytes:
    with _usable(name) as path:
        return path.read_bytes()


@contextlib.contextmanager
def _usable(name: str) -> Iterator[Path]:
    """Yields the path that ``name`` means. Raises SparseKVError if no file can have this name."""
    try:
        yield Path(name).expanduser()
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte, or ~ of an unknown user
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SparseKVError(f"{name}: {reason}") from None
