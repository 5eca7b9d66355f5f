"""The text of a Word file, from its XML: paragraphs, tables, and what lies apart from them.

The source is ECMA-376, part 1. Only the local names of elements count, because the strict form of
the standard has other namespaces. Deleted text, codes of fields and the second form of an
alternative are no text of the document. A line in brackets stands for what has no text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element, fromstring
from zipfile import ZipFile

from sparsekv_cli.errors import SparseKVError

SKIPPED = {  # elements whose texts are not the document's: deleted, or settings
    *("del", "moveFrom", "delText", "delInstrText", "instrText", "pPr", "rPr", "tblPr", "tblGrid"),
    *("trPr", "tcPr", "sdtPr", "sdtEndPr", "sectPr", "softHyphen", "Fallback", "annotationRef"),
    *("footnoteRef", "endnoteRef", "fldData", "ctrlPr"),
}
LEFT_OUT = {  # what has no text that is read here -> its name
    "altChunk": "inserted document", "subDoc": "subdocument", "chart": "chart",
    "control": "form control", "contentPart": "drawing in ink", "relIds": "diagram",
}  # fmt: skip
BLOCKS = {"p", "tbl", "oMathPara", *LEFT_OUT}
MERGES = ("vMerge", "hMerge")  # a cell goes on with the one above, or before it
NOTES = {"footnote": "footnotes", "endnote": "endnotes", "comment": "comments"}
MOST_TAGS = 4_000_000  # of a part: about .6 GB while it is read
MARK = re.compile(r"\[(header|footer|picture|[^\]]* left out)\]")
PRIVATE = range(0xF000, 0xF100)  # a symbol font's characters, which mean nothing without it


def word_text(archive: ZipFile) -> str:
    """Returns headers, the body, notes, comments and footers, a line a paragraph or table row.

    Returns nothing if there are no words, but pictures or objects at most. Raises KeyError for a
    missing part, and other exceptions for a damaged file.
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
    """The parts of the file, and what each part refers to."""

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
        """Returns the kind and the part of each relation of a part, by its id."""
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
    """Reads the text of a part. Notes that it refers to are numbered in their order."""

    parts: _Parts
    part: str
    text: list[str] = field(default_factory=list)  # of the paragraph that is read
    boxes: list[Element] = field(default_factory=list)  # text boxes in it
    fields: list[bool] = field(default_factory=list)  # open fields: whether the result has begun
    noted: dict[str, dict[str, str]] = field(default_factory=dict)  # kind -> id -> mark
    alternative: str = ""  # the text that stands for the next picture

    def lines_of(self, element: Element) -> list[str]:
        """Returns the lines of the paragraphs and tables in an element."""
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
        self.fields = [True] * len(self.fields)  # so a field without an end hides nothing further
        lines, boxes = "".join(self.text).split("\n"), self.boxes
        for box in boxes:
            lines += self.lines_of(box)
        return lines

    def _row(self, row: Element) -> list[str]:
        """Returns the line of a row. The rows of tables in its cells follow it."""
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
        """Adds the text of a paragraph's or run's children to ``text``."""
        for child in element:
            name = local(child)
            if name == "fldChar":
                self._field(child)
            elif name == "ruby":  # a word, and how it is spoken
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
        """Opens a field, begins its result or closes it. Check boxes and lists have a value."""
        kind = attribute(mark, "fldCharType")
        if kind == "begin":
            self._add(form_value(mark))
            self.fields.append(False)
        elif kind == "separate" and self.fields:
            self.fields[-1] = True
        elif kind == "end" and self.fields:
            self.fields.pop()

    def notes(self) -> Iterator[str]:
        """Yields the lines of the notes and comments that the text refers to."""
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
    """Returns an attribute of any namespace, or nothing."""
    return next((v for k, v in element.items() if k.rpartition("}")[2] == name), "")


def _chosen(element: Element) -> Element:
    """Returns the form of an alternative that is read: the first one, or the fallback."""
    if local(element) != "AlternateContent":
        return element
    choices = [each for each in element if local(each) == "Choice"]
    return choices[0] if choices else next(iter(element), element)


def _inner(element: Element, names: Container[str]) -> Iterator[Element]:
    """Yields the children of these names, also those within other elements, such as controls."""
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
    """Returns the state of a check box, or the choice of a list. Texts are a field's result."""
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
    """Returns a character, or the font and the code of one that means nothing without its font."""
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
    """Returns the text of an equation in a line: fractions as (a)/(b), powers as (a)^(b)."""
    texts = [(local(each), each.text or "" if local(each) == "t" else equation(each))
             for each in element if local(each) not in SKIPPED]  # fmt: skip
    if local(element) not in FORMS:
        return "".join(text for _, text in texts)
    sign = next((attribute(each, "val") for each in element.iterfind("{*}naryPr/{*}chr")), "∫")
    form, *names = FORMS[local(element)]
    return form.format(*(", ".join(t for n, t in texts if n == name) for name in names), sign=sign)


# An equation's element -> how it is written, and the children for the places in that.
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
