"""The text of a Word file, from its XML: paragraphs, tables, and texts apart from the body.

The source is ECMA-376, part 1. Elements are compared by their local names, because the strict form
of the standard has other namespaces. Deleted text, codes of fields and the second form of an
alternative are not part of the text. A line in brackets stands for an object without text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element, fromstring
from zipfile import ZipFile

from sparsekv_cli.errors import SparseKVError

SKIPPED = {  # elements whose texts are deleted or are settings
    *("del", "moveFrom", "delText", "delInstrText", "instrText", "pPr", "rPr", "tblPr", "tblGrid"),
    *("trPr", "tcPr", "sdtPr", "sdtEndPr", "sectPr", "softHyphen", "Fallback", "annotationRef"),
    *("footnoteRef", "endnoteRef", "fldData", "ctrlPr"),
}
LEFT_OUT = {  # elements whose text is not read -> their names
    "altChunk": "inserted document", "subDoc": "subdocument", "chart": "chart",
    "control": "form control", "contentPart": "drawing in ink", "relIds": "diagram",
}  # fmt: skip
BLOCKS = {"p", "tbl", "oMathPara", *LEFT_OUT}
MERGES = ("vMerge", "hMerge")  # the cell continues the cell above it, or left of it
NOTES = {"footnote": "footnotes", "endnote": "endnotes", "comment": "comments"}
MOST_TAGS = 4_000_000  # tags of a part; reading so many takes about .6 GB
MARK = re.compile(r"\[(header|footer|picture|[^\]]* left out)\]")
PRIVATE = range(0xF000, 0xF100)  # characters of symbol fonts, which mean nothing in other fonts


def word_text(archive: ZipFile) -> str:
    """Returns the text of a Word file, one line for each paragraph or row of a table.

    Headers come first, then body, notes, comments and footers. Returns "" if there are no words,
    only pictures or objects. Raises KeyError for a missing part, and other exceptions for a damaged
    file.
    """
    parts = _Parts(archive)
    main = next(
        (target for kind, target in parts.targets("").values() if kind == "officeDocument"),
        "word/document.xml",
    )
    body = _Reader(parts, main)
    lines = body.lines_of(parts.tree(main))
    apart: dict[str, list[str]] = {"header": [], "footer": []}
    for kind, target in dict.fromkeys(parts.targets(main).values()):
        if kind in apart:
            found = _Reader(parts, target).lines_of(parts.tree(target))
            apart[kind] += [f"[{kind}] {line}" for line in found if line.strip()]
    headers, footers = (dict.fromkeys(found) for found in apart.values())
    text = "\n".join([*headers, *lines, *body.notes(), *footers])
    return text if MARK.sub("", text).strip(" |\n\t") else ""


class _Parts:
    """The parts of the file, and the parts to which each part refers."""

    def __init__(self, archive: ZipFile) -> None:
        self._archive = archive
        self._names = set(archive.namelist())
        self._targets: dict[str, dict[str, tuple[str, str]]] = {}

    def tree(self, name: str) -> Element:
        data = self._archive.read(name)
        if (n_tags := data.count(b"<")) > MOST_TAGS:
            raise SparseKVError(
                f"the Word file has {n_tags} marks in a part, more than {MOST_TAGS}: split it, or "
                "give its text"
            )
        return fromstring(data)

    def targets(self, name: str) -> dict[str, tuple[str, str]]:
        """Returns id -> (kind, part) for each relation of the part ``name``."""
        if name not in self._targets:
            folder, base = posixpath.split(name)
            path = posixpath.join(folder, "_rels", base + ".rels")
            relations = list(self.tree(path)) if path in self._names else []
            self._targets[name] = {
                each.get("Id", ""): (
                    each.get("Type", "").rpartition("/")[2],
                    posixpath.normpath(posixpath.join("/", folder, each.get("Target", "")))[1:],
                )
                for each in relations
                if each.get("TargetMode") != "External"
            }
        return self._targets[name]


@dataclass
class _Reader:
    """Reads the text of one part. Its notes are numbered in the order in which it names them."""

    parts: _Parts
    part: str
    text: list[str] = field(default_factory=list)  # text of the current paragraph so far
    boxes: list[Element] = field(default_factory=list)  # text boxes in the current paragraph
    # for each open field, whether its result has begun
    fields: list[bool] = field(default_factory=list)
    noted: dict[str, dict[str, str]] = field(default_factory=dict)  # kind -> id -> mark
    alternative: str = ""  # description of the next picture

    def lines_of(self, element: Element) -> list[str]:
        """Returns the lines of all paragraphs and tables within an element."""
        lines: list[str] = []
        for block in _inner(element, BLOCKS):
            name = local(block)
            if name == "p":
                lines += self._paragraph(block)
            elif name == "tbl":
                for row in _inner(block, ("tr",)):
                    lines += self._row(row)
            else:
                lines.append(equation(block) if name == "oMathPara" else left_out(name))
        return lines

    def _paragraph(self, element: Element) -> list[str]:
        self.text, self.boxes = [], []
        self._inline(element)
        # a field without an end hides no text after this paragraph
        self.fields = [True] * len(self.fields)
        lines, boxes = "".join(self.text).split("\n"), self.boxes
        for box in boxes:
            lines += self.lines_of(box)
        return lines

    def _row(self, row: Element) -> list[str]:
        """Returns the line of a row, then the lines of tables within its cells."""
        if any(local(each) == "del" for each in _properties(row, "trPr")):
            return []
        cells, below = [], []
        for cell in _inner(row, ("tc",)):
            merges = [each for each in _properties(cell, "tcPr") if local(each) in MERGES]
            is_first = all(attribute(each, "val") == "restart" for each in merges)
            lines: list[str] = []
            for block in _inner(cell, BLOCKS) if is_first else ():
                if local(block) == "tbl":
                    for inner in _inner(block, ("tr",)):
                        below += self._row(inner)
                elif local(block) == "p":
                    lines += self._paragraph(block)
                else:
                    lines.append(left_out(local(block)))
            cells.append(" ".join(" ".join(lines).split()))
        return [" | ".join(cells), *below]

    def _inline(self, element: Element) -> None:
        """Adds the text within a paragraph or run to ``text``."""
        for child in element:
            name = local(child)
            if name == "fldChar":
                self._field(child)
            elif name == "ruby":  # a word and its pronunciation
                for part, form in (("rubyBase", "{}"), ("rt", "({})")):
                    before, self.text = self.text, []
                    for each in child.iterfind(f"{{*}}{part}"):
                        self._inline(each)
                    self.text = [*before, form.format("".join(self.text))]
            elif name == "txbxContent":
                self.boxes.append(child)
            elif name == "docPr":
                self.alternative = attribute(child, "descr")
            elif name == "pic":
                self._add(f"[picture: {self.alternative}]" if self.alternative else "[picture]")
            elif name.endswith("Reference") and name[:-9] in NOTES:
                marks = self.noted.setdefault(name[:-9], {})
                mark = marks.setdefault(attribute(child, "id"), f"{name[:-9]} {len(marks) + 1}")
                self._add(f"[{mark}]")
            elif name in TEXTS:
                self._add(TEXTS[name](child))
            elif name in LEFT_OUT:
                self._add(left_out(name))
            elif name not in SKIPPED:
                self._inline(_chosen(child))

    def _add(self, text: str) -> None:
        if all(self.fields):
            self.text.append(text)

    def _field(self, mark: Element) -> None:
        """Begins a field, its result, or ends it. Check boxes and lists add their value."""
        kind = attribute(mark, "fldCharType")
        if kind == "begin":
            self._add(form_value(mark))
            self.fields.append(False)
        elif kind == "separate" and self.fields:
            self.fields[-1] = True
        elif kind == "end" and self.fields:
            self.fields.pop()

    def notes(self) -> Iterator[str]:
        """Yields the lines of the notes and comments to which the text refers."""
        targets = dict(self.parts.targets(self.part).values())
        for kind, marks in self.noted.items():
            part = targets.get(NOTES[kind], "")
            reader = _Reader(self.parts, part)
            found = {attribute(note, "id"): note for note in self.parts.tree(part)}
            for number, mark in marks.items():
                note = found.get(number)
                author = "" if note is None else attribute(note, "author")
                lines = ["left out"] if note is None else reader.lines_of(note)
                name = f"{mark}, {author}" if author else mark
                yield from (f"[{name}] {line}" for line in lines if line.strip())


def local(element: Element) -> str:
    """Returns an element's name without its namespace."""
    return str(element.tag).rpartition("}")[2]


def attribute(element: Element, name: str) -> str:
    """Returns an attribute's value, whatever its namespace; "" if it is missing."""
    return next((v for k, v in element.items() if k.rpartition("}")[2] == name), "")


def _chosen(element: Element) -> Element:
    """Returns the form of an alternative to read: the first one, or else the fallback.

    Other elements are returned as they are.
    """
    if local(element) != "AlternateContent":
        return element
    choices = [each for each in element if local(each) == "Choice"]
    return choices[0] if choices else next(iter(element), element)


def _inner(element: Element, names: Container[str]) -> Iterator[Element]:
    """Yields the elements with these names, also those within other elements, such as controls."""
    left = [iter(element)]
    while left:
        child = next(left[-1], None)
        if child is None:
            left.pop()
        elif local(child) in names:
            yield child
        elif local(child) not in SKIPPED:
            left.append(iter(_chosen(child)))


def _properties(element: Element, name: str) -> Iterable[Element]:
    return (each for child in element if local(child) == name for each in child)


def form_value(mark: Element) -> str:
    """Returns the state of a check box or the choice of a list, "" for other fields."""
    for each in mark.iter():
        settings = {local(child): attribute(child, "val") for child in each}
        if local(each) == "checkBox":
            state = settings.get("checked", settings.get("default", "0"))
            return "[ ]" if state in ("0", "false", "off") else "[x]"
        if local(each) == "ddList":
            entries = [attribute(child, "val") for child in each if local(child) == "listEntry"]
            chosen = settings.get("result", settings.get("default", "0"))
            at = int(chosen) if chosen.isdigit() else 0
            return entries[at] if at < len(entries) else ""
    return ""


def symbol(element: Element) -> str:
    """Returns a symbol's character. If it means nothing in other fonts: its font and code."""
    code, font = attribute(element, "char"), attribute(element, "font")
    try:
        number = int(code, 16)
        return f"[{font} {code}]" if number in PRIVATE else chr(number)
    except (ValueError, OverflowError):
        return f"[{font} {code}]"


def left_out(name: str) -> str:
    return f"[{LEFT_OUT[name]} left out]"


def embedded(element: Element) -> str:
    programs = [attribute(each, "ProgID") for each in element.iter() if local(each) == "OLEObject"]
    return f"[embedded object {' '.join(programs)}".rstrip() + " left out]"


def equation(element: Element) -> str:
    """Returns an equation in one line: fractions as (a)/(b), powers as (a)^(b)."""
    texts = [(local(each), each.text or "" if local(each) == "t" else equation(each))
             for each in element if local(each) not in SKIPPED]  # fmt: skip
    if local(element) not in FORMS:
        return "".join(text for _, text in texts)
    sign = next((attribute(each, "val") for each in element.iterfind("{*}naryPr/{*}chr")), "∫")
    form, *names = FORMS[local(element)]
    return form.format(*(", ".join(t for n, t in texts if n == name) for name in names), sign=sign)


# Element of an equation -> how it is written, and the children that fill the places.
FORMS = {
    "d": ("({})", "e"), "f": ("({})/({})", "num", "den"), "rad": ("root({})({})", "deg", "e"),
    "sSup": ("({})^({})", "e", "sup"), "sSub": ("({})_({})", "e", "sub"),
    "sSubSup": ("({})_({})^({})", "e", "sub", "sup"),
    "nary": ("{sign}_({})^({})({})", "sub", "sup", "e"),
}  # fmt: skip
TEXTS: dict[str, Callable[[Element], str]] = {
    "t": lambda element: element.text or "", "tab": lambda _: "\t", "ptab": lambda _: "\t",
    "br": lambda _: "\n", "cr": lambda _: "\n", "noBreakHyphen": lambda _: "-", "sym": symbol,
    "object": embedded, "oMath": equation, "imagedata": lambda _: "[picture]",
}  # fmt: skip
