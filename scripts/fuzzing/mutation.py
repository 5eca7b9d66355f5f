"""Changes to a case of a fuzz target: to bytes, to texts, to JSON values and to packed files."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

# Numbers at which sizes, signs and types end.
NUMBERS = (
    *(0, 1, 2, 3, 7, 15, 16, 31, 32, 63, 64, 100, 127, 128, 255, 256, 511, 512, 1000, 4096, 65535),
    *(1 << 16, 1 << 20, (1 << 24) + 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40),
    *((1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
TEXTS = (
    *("", " ", "\0", "\n", "a", "0", "-1", "1e999", "nan", "é", "\u2028", "\U0001f600", "\ud800"),
    *("../x", "/", "%s", "{}", "null", "a" * 300, "<|im_start|>", "<|im_end|>", "</think>", "x.y"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0.5, -0.0, 1e308, -1e-308, float("nan"), float("inf"), [], {}, [[]]),
    *([None], {"": 0}, {"a": {"a": []}}),
)
Change = Callable[[random.Random, bytes], bytes]


class FoundError(Exception):
    """A fault: no input may cause it."""


def number(rng: random.Random) -> int:
    value = rng.choice(NUMBERS) + rng.choice((0, 0, 0, -1, 1))
    return -value if rng.random() < 0.2 else value


def changed_bytes(rng: random.Random, data: bytes, words: Sequence[bytes] = ()) -> bytes:
    """Changes a few bytes, integers or parts; ``words`` are what the format has."""
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at = rng.randrange(len(data) + 1)
        n = min(len(data) - at, 1 << rng.randrange(9))
        kind = rng.randrange(8)
        if kind == 0:
            part, n = bytes(rng.randrange(256) for _ in range(n)), n
        elif kind == 1:  # one bit
            part, n = bytes(byte ^ 1 << rng.randrange(8) for byte in data[at : at + 1]), 1
        elif kind == 2:
            form, bits = rng.choice((("<B", 8), ("<H", 16), ("<I", 32), ("<Q", 64)))
            part = struct.pack(form, number(rng) % (1 << bits))
            n = len(part)
        elif kind == 3:
            part = b""
        elif kind == 4:
            start = rng.randrange(len(data) + 1)
            part, n = data[start : start + n], rng.choice((0, n))
        elif kind == 5 and words:
            part, n = rng.choice(words), rng.choice((0, n))
        elif kind == 6:
            part, n = data[at : at + n] * rng.choice((2, 3, 100 if n < 64 else 2)), n
        else:
            part, n = b"", len(data) if rng.random() < 0.1 else n
        data = data[:at] + part + data[at + n :]
    return data


def changed_text(rng: random.Random, text: str, words: Sequence[str] = TEXTS) -> str:
    """Puts words in, takes parts out, and repeats or exchanges parts."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, n = rng.randrange(len(text) + 1), 1 << rng.randrange(7)
        of_words = rng.choice(words), rng.choice(words)
        repeated = text[at : at + n] * rng.choice((2, 3, 50))
        character = chr(rng.choice((rng.randrange(128), rng.randrange(0xD800))))
        part = rng.choice((*of_words, repeated, character, str(number(rng)), ""))
        text = text[:at] + part + text[at + rng.choice((0, n)) :]
    return text[: 1 << 16]


def changed_value(rng: random.Random, value: Any, words: Sequence[str] = TEXTS) -> Any:
    """Changes one place in a JSON value, or a few; the value that is given stays as it is."""
    holder = [copy.deepcopy(value)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(holder))
        place, key = rng.choice(places)
        if isinstance(place, dict) and rng.random() < 0.25:
            name = rng.choice((rng.choice(words), key))
            moved = place.pop(key) if rng.random() < 0.5 else copy.deepcopy(place[key])
            place[name] = moved
        elif isinstance(place, dict | list) and place is not holder and rng.random() < 0.2:
            del place[key]
        elif isinstance(place, list) and place is not holder and rng.random() < 0.3:
            place[key:key] = [copy.deepcopy(place[key])] * rng.choice((1, 2, 300))
        else:
            place[key] = _other(rng, place[key], places, words)
    return holder[0]


def _places(value: Any, depth: int = 0) -> Any:
    """Every place in a value, as its container and key; of long lists, and of depths, a part."""
    keys: Any = value if isinstance(value, dict) else range(len(value))
    for key in list(keys)[:200]:
        yield value, key
        if isinstance(value[key], dict | list) and depth < 20:
            yield from _places(value[key], depth + 1)


def _other(rng: random.Random, old: Any, places: Any, words: Sequence[str]) -> Any:
    kind = rng.randrange(6)
    if kind == 0:
        return number(rng)
    if kind == 1:
        return copy.deepcopy(rng.choice(VALUES))
    if kind == 2:
        return rng.choice(words)
    if kind == 3:
        place, key = rng.choice(places)
        return copy.deepcopy(place[key])
    if kind == 4:
        return [old] * rng.choice((1, 2, 50)) if rng.random() < 0.5 else {"a": old}
    if isinstance(old, str):
        return changed_text(rng, old, words)
    if isinstance(old, int | float) and not isinstance(old, bool):
        return old + rng.choice((-1, 1, 0.5, 1 << 31, -2 * old))
    return number(rng)


def changed_json(rng: random.Random, data: bytes, words: Sequence[str] = TEXTS) -> bytes:
    """Changes a JSON text as a value; and one that is none, and now and then any, as bytes."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return changed_bytes(rng, data)
    if rng.random() < 0.05:
        return changed_bytes(rng, data)
    return packed_json(changed_value(rng, value, words))


def packed_json(value: Any) -> bytes:
    return json.dumps(value).encode()


# --- several files in one case --------------------------------------------------------------------

LENGTHS = struct.Struct("<II")


def packed(files: dict[str, bytes]) -> bytes:
    """Files by name, one after the other: the lengths of name and content, then both."""
    parts = []
    for name, content in files.items():
        label = name.encode()
        parts += [LENGTHS.pack(len(label), len(content)), label, content]
    return b"".join(parts)


def unpacked(case: bytes) -> dict[str, bytes]:
    """The files of a case; as many as it has whole."""
    files, at = {}, 0
    while at + LENGTHS.size <= len(case):
        n_name, n = LENGTHS.unpack_from(case, at)
        at += LENGTHS.size
        name = case[at : at + n_name].decode(errors="replace").replace("/", "").replace("\0", "")
        files[name[:200]] = case[at + n_name : at + n_name + n]
        at += n_name + n
    return files


def changing_one(change: Change) -> Change:
    """Changes one of the files of a case; seldom it drops one, or gives it another's content."""

    def changed(rng: random.Random, case: bytes) -> bytes:
        files = unpacked(case)
        if not files:
            return case
        name = rng.choice(list(files))
        if len(files) > 1 and rng.random() < 0.05:
            del files[name]
        elif len(files) > 1 and rng.random() < 0.05:
            files[name] = rng.choice(list(files.values()))
        else:
            files[name] = change(rng, files[name])
        return packed(files)

    return changed
