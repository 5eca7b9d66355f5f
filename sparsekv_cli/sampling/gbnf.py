"""Turns GBNF, llama.cpp's grammars, into the Lark grammars that llguidance reads.

llguidance has a converter, but it refuses some grammars that llama.cpp accepts. This module first
writes a grammar in a form that the converter accepts. Rules get numbers, and escapes become
characters.
"""

import re
from collections.abc import Callable
from importlib import import_module

RULE = re.compile(r"(?m)^\s*[\w-]+\s*::=")
LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:)")
NUMBERED = re.compile(r"(?i)\brule_(\d+)\b")
TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    | (?P<text>"(?:\\.|[^"\\])*")
    | (?P<chars>\[(?:\\.|[^\]\\])*\])
    | (?P<times>\{[^}]*\}|[*+?])
    | (?P<name>[\w-]+)
    | (?P<define>::=)
    | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
NEVER = re.compile(r"\{\s*0+\s*(,\s*0+\s*)?\}")
CODE = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|(\\.)|(.)", re.S)
IN_TEXT = {'"': r"\"", "\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
ROOT = "root"
ANY = f"[\\x00-{chr(0x10FFFF)}]"  # a regular expression's dot does not match a line break


def is_gbnf(text: str) -> bool:
    """Returns whether a grammar is GBNF: it has ``::=``, or nothing shows that it is Lark."""
    return RULE.search(text) is not None or LARK.search(text) is None


def lark_of(text: str) -> str:
    """Returns a GBNF grammar as a Lark grammar.

    Raises ValueError for a wrong grammar. Its text has the rules' own names.
    """
    names: dict[str, str] = {}
    written = _rewritten(text, lambda name: names.setdefault(name, f"rule_{len(names)}"))
    convert: Callable[[str], str] = import_module("llguidance.gbnf_to_lark").gbnf_to_lark
    try:
        return convert(written)
    except RecursionError:
        raise
    except Exception as error:  # the converter raises plain ones
        own = list(names)
        raise ValueError(NUMBERED.sub(lambda found: own[int(found[1])], str(error))) from None


def _rewritten(text: str, number: Callable[[str], str]) -> str:
    """Returns the grammar in the form of llguidance's converter. number: rule name -> new name."""
    parts: list[str] = []
    groups: list[int] = []  # index in ``parts`` where each open group starts
    atom = 0  # index in ``parts`` of the last item that can be repeated
    for token in TOKEN.finditer(text):
        kind, part = token.lastgroup, token[0]
        if kind == "times":
            if NEVER.fullmatch(part):
                parts[atom:] = ['""']
                continue
            if parts[-1:] == [")"]:  # otherwise the converter writes (x+)* as x+*
                parts[-1] = ' "")'
        elif part == ")" and groups:
            atom = groups.pop()
        elif kind != "space":
            atom = len(parts)
        if part in ("[", '"', "{"):
            line = text.count("\n", 0, token.start()) + 1
            raise ValueError(f"Unexpected end of input at line {line}: {part} is not closed")
        if part == "(":
            groups.append(atom)
        if kind == "name":
            part = part if part == ROOT else number(part)
        elif kind == "text":
            part = _text(part[1:-1])
        elif kind == "chars":
            part = _class(part[1:-1])
        elif part == ".":
            part = ANY
        parts.append(part)
    return "".join(parts)


def _text(written: str) -> str:
    """Returns a quoted text for Lark. Control characters become classes between quoted texts."""
    plain = CODE.sub(_text_character, written)
    parts = re.split(r"([\x00-\x08\x0b-\x1f\x7f])", plain)
    if len(parts) == 1:
        return f'"{plain}"'
    texts = (f"[\\x{ord(part):02x}]" if i % 2 else f'"{part}"' for i, part in enumerate(parts))
    return f"({' '.join(texts)})"


def _text_character(found: re.Match[str]) -> str:
    if found[4]:
        return found[4]
    char = _character(found)
    return IN_TEXT.get(char, char)


def _class(written: str) -> str:
    """Returns a character class in which only the hyphen of a range has a meaning.

    Other signs are escaped, because a regular expression reads some of them, such as ``&&``.
    """
    negation = "^" * written.startswith("^")
    left = list(CODE.finditer(written[len(negation) :]))[::-1]
    parts = [negation]
    while left:
        parts.append(_class_character(left.pop()))
        if len(left) > 1 and left[-1][0] == "-":
            left.pop()
            parts += ["-", _class_character(left.pop())]
    return f"[{''.join(parts)}]"


def _class_character(found: re.Match[str]) -> str:
    if found[4]:
        return found[0]
    char = _character(found)
    return char if ord(char) >= 128 or char.isalnum() else f"\\x{ord(char):02x}"


def _character(found: re.Match[str]) -> str:
    r"""Returns the character that an escape or a plain match stands for.

    Raises ValueError for an escape such as \uD800 that is no character.
    """
    code = found[1] or found[2] or found[3]
    if not code:
        return found[5]
    if int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) < 0xE000:
        raise ValueError(f"{found[0]} is no character")
    return chr(int(code, 16))
