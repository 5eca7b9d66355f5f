"""The text of a PDF: its pages, the values of its form, its notes, read by the package pypdf.

A line in brackets stands for a page that is a picture, and for an attached file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from io import BytesIO
from typing import Any

from sparsekv_cli.errors import SparseKVError

LARGE = 0.5  # a page may be a scan if a picture covers this share of it
RADIO, PUSH = 1 << 15, 1 << 16  # flags of buttons (ISO 32000-1, table 226)
MOST_PARENTS = 50  # parents of a field; more are a circle


def pdf_text(data: bytes) -> str:
    """Returns the text of a PDF; "" if its pages have none.

    Raises ImportError without pypdf, or without the package that decrypts AES. Raises SparseKVError
    for a PDF with a password, and pypdf's errors for a damaged file.
    """
    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # the error already says what pypdf logs
    try:
        reader = PdfReader(BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise SparseKVError("the PDF is encrypted: save it without a password")
        return _text(reader)
    except DependencyError as error:
        raise ImportError(str(error)) from None


def _text(reader: Any) -> str:
    seen: set[int] = set()  # ids of fields that have a line; negative: ids of their widgets
    texts, has_text = [], False
    for number, page in enumerate(reader.pages, 1):
        text, is_picture = _page_text(page)
        lines = list(_annotations(page, seen))
        has_text = has_text or bool(text or lines)
        if not text:
            lines.insert(0, f"[page {number} has no text: it may be a picture]")
        elif is_picture:
            lines.append(f"[page {number} has a large picture: its text is left out]")
        texts.append("\n".join([text, *lines] if text else lines))
    if not has_text:
        return ""
    return "\n\n".join([*texts, *_apart(reader, seen)])


def _page_text(page: Any) -> tuple[str, bool]:
    """Returns the text of a page, and whether a picture covers most of it."""
    room = abs(float(page.mediabox.width) * float(page.mediabox.height)) or 1.0
    shares = [0.0]

    def look(operator: bytes, operands: Any, matrix: Any, _: Any) -> None:
        if operator == b"INLINE IMAGE" or (operator == b"Do" and operands and operands[0] in names):
            a, b, c, d = (float(each) for each in matrix[:4])
            shares.append(abs(a * d - b * c) / room)

    names = _pictures(page)
    text = page.extract_text(visitor_operand_before=look)
    return text.rstrip(), max(shares) >= LARGE


def _pictures(page: Any) -> set[str]:
    """Returns the names of the pictures that a page may draw."""
    found = _get(_get(page, "/Resources"), "/XObject")
    items = found.items() if isinstance(found, dict) else ()
    return {name for name, each in items if _get(each.get_object(), "/Subtype") == "/Image"}


def _annotations(page: Any, seen: set[int]) -> Iterator[str]:
    """Yields a line for each form field and each note on a page."""
    found = _get(page, "/Annots")
    for each in found if isinstance(found, list) else ():
        item = each.get_object()
        kind = _get(item, "/Subtype")
        if kind == "/Widget":
            yield from _field(item, seen)
        elif kind not in ("/Link", "/Popup"):
            text = _words(_get(item, "/Contents"))
            if text:
                yield f"[note] {text}"
            elif kind == "/FileAttachment":
                yield "[attached file left out]"


def _field(widget: Any, seen: set[int]) -> Iterator[str]:
    """Yields the line of a form field: name and value. It has one line for all its widgets."""
    chain = [widget]
    while len(chain) < MOST_PARENTS and isinstance(parent := _get(chain[-1], "/Parent"), dict):
        chain.append(parent)

    def inherited(key: str) -> Any:
        return next((_get(each, key) for each in chain if key in each), None)

    names = [_words(_get(each, "/T")) for each in reversed(chain)]
    name = _words(inherited("/TU")) or ".".join(filter(None, names)) or "field"
    kind, flags, value = inherited("/FT"), inherited("/Ff"), inherited("/V")
    flags = int(flags) if isinstance(flags, int) else 0
    seen.add(-id(widget))
    if kind == "/Btn" and not flags & RADIO:
        if not flags & PUSH:
            states = _get(_get(widget, "/AP"), "/N")
            of_this = set(states if isinstance(states, dict) else [value]) - {"/Off"}
            state = _get(widget, "/AS") if value is None else value
            yield f"[{'x' if state in (of_this or {state} - {'/Off', None}) else ' '}] {name}"
        return
    owner = next((each for each in chain if "/T" in each), widget)
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if kind == "/Sig":
        text = "signed" if value is not None else ""
    elif kind == "/Btn":
        text = "" if value == "/Off" else _words(value)
    else:
        options = _options(inherited("/Opt"))
        values = value if isinstance(value, list) else [value]
        texts = [_words(each) for each in values]
        text = ", ".join(options.get(each, each) for each in texts)
    if text:
        yield f"{name}: {text}"


def _options(found: Any) -> dict[str, str]:
    """Returns value -> shown text for the entries of a list."""
    pairs = [each.get_object() for each in found] if isinstance(found, list) else []
    return {
        _words(pair[0]): _words(pair[1])
        for pair in pairs
        if isinstance(pair, list) and len(pair) > 1
    }


def _apart(reader: Any, seen: set[int]) -> Iterator[str]:
    """Yields lines for what is on no page: fields, a second form in XML, attached files."""
    form = _get(reader.trailer["/Root"], "/AcroForm")
    left = [*(_get(form, "/Fields") or ())]
    for item in left:  # fields that no page shows
        field = item.get_object()
        if not isinstance(field, dict) or -id(field) in seen:
            continue
        kids = _get(field, "/Kids")
        if isinstance(kids, list):
            seen.add(-id(field))
            left += kids
        else:
            yield from _field(field, seen)
    if _get(form, "/XFA") is not None:
        yield "[the form has a second form in XML, whose values may be left out]"
    for name in reader.attachments:
        yield f"[attached file {_words(name)} left out]"


def _get(found: Any, key: str) -> Any:
    """Returns the entry ``key`` of a dictionary, with references followed; None if missing."""
    value: Any = found.get(key) if isinstance(found, dict) else None
    return value.get_object() if hasattr(value, "get_object") else value


def _words(found: Any) -> str:
    """Returns a value as one line of text. Names lose their slash, and streams are read."""
    value: Any = found.get_object() if hasattr(found, "get_object") else found
    value = value.get_data() if hasattr(value, "get_data") else value
    if value is None:
        return ""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return " ".join(text.removeprefix("/").split())
