"""PDF files: values of forms, notes, pages that are pictures, and encryption without a password."""

from __future__ import annotations

import sys
from io import BytesIO
from typing import Any

import pytest
from pypdf import PdfReader, PdfWriter
from pypdf.generic import (
    ArrayObject,
    DictionaryObject,
    NameObject,
    NumberObject,
    StreamObject,
    TextStringObject,
)
from sample_documents import pdf_of

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.system.documents import document_text


def pdf(value: Any) -> Any:
    """A value of Python as one of PDF; a text that begins with a slash is a name."""
    if isinstance(value, dict):
        return DictionaryObject({NameObject(k): pdf(v) for k, v in value.items()})
    if isinstance(value, list):
        return ArrayObject(map(pdf, value))
    if isinstance(value, str):
        return NameObject(value) if value.startswith("/") else TextStringObject(value)
    return NumberObject(value) if isinstance(value, int) else value


def written(writer: PdfWriter) -> bytes:
    out = BytesIO()
    writer.write(out)
    return out.getvalue()


def with_annotations(*found: dict[str, Any], pages: tuple[str, ...] = ("Form",)) -> PdfWriter:
    """A writer of a PDF whose first page has annotations. Those with /FT are also in the form."""
    writer = PdfWriter(clone_from=PdfReader(BytesIO(pdf_of(*pages))))
    made = []
    for each in found:
        parent = each.pop("/Parent", None)
        item = pdf({"/Type": "/Annot", "/Rect": [0, 0, 9, 9], **each})
        if parent is not None:
            item[NameObject("/Parent")] = parent
        made.append(writer._add_object(item))
    writer.pages[0][NameObject("/Annots")] = ArrayObject(made)
    form = DictionaryObject({NameObject("/Fields"): ArrayObject(made)})
    writer.root_object[NameObject("/AcroForm")] = form
    return writer


def widget(**keys: Any) -> dict[str, Any]:
    return {"/Subtype": "/Widget", **{f"/{key}": value for key, value in keys.items()}}


BOX = {"/N": {"/Yes": {}, "/Off": {}}}


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        (widget(FT="/Tx", T="account", V="DE 42"), ["account: DE 42"]),
        (widget(FT="/Tx", T="a1", TU="Account number", V="42\n43"), ["Account number: 42 43"]),
        (widget(FT="/Tx", T="Off", V="Off"), ["Off: Off"]),
        (widget(FT="/Tx", T="empty"), []),
        (widget(FT="/Tx", T="empty", V=""), []),
        (widget(FT="/Tx", V="nameless"), ["field: nameless"]),
        (widget(FT="/Btn", T="agree", V="/Yes", AS="/Yes", AP=BOX), ["[x] agree"]),
        (widget(FT="/Btn", T="agree", V="/Off", AS="/Off", AP=BOX), ["[ ] agree"]),
        (widget(FT="/Btn", T="agree", AP=BOX), ["[ ] agree"]),
        (widget(FT="/Btn", T="agree", AS="/Yes", AP=BOX), ["[x] agree"]),
        (widget(FT="/Btn", T="no appearance", V="/1"), ["[x] no appearance"]),
        (widget(FT="/Btn", T="no appearance", V="/Off"), ["[ ] no appearance"]),
        (widget(FT="/Btn", T="send", Ff=1 << 16), []),
        (widget(FT="/Btn", T="colour", Ff=1 << 15, V="/red"), ["colour: red"]),
        (widget(FT="/Ch", T="land", V="de", Opt=[["de", "Germany"], ["fr", "France"]]),
         ["land: Germany"]),
        (widget(FT="/Ch", T="many", V=["a", "b"], Opt=["a", "b", "c"]), ["many: a, b"]),
        (widget(FT="/Sig", T="name", V={"/Type": "/Sig"}), ["name: signed"]),
        ({"/Subtype": "/Text", "/Contents": "Is this right?"}, ["[note] Is this right?"]),
        ({"/Subtype": "/FreeText", "/Contents": "typed on it"}, ["[note] typed on it"]),
        ({"/Subtype": "/FileAttachment"}, ["[attached file left out]"]),
        ({"/Subtype": "/Link", "/Contents": "x"}, []),
    ],
)  # fmt: skip
def test_the_values_of_a_form_and_notes_follow_their_page(found, lines):
    data = written(with_annotations(found, pages=("Form", "Next")))
    assert document_text(data, "x") == "\n\n".join(["\n".join(["Form", *lines]), "Next"])


def test_a_field_of_several_places_and_one_of_none_have_a_line_each():
    writer = with_annotations()
    group = writer._add_object(pdf({"/FT": "/Tx", "/T": "person", "/V": "Ann"}))
    inner = writer._add_object(pdf({"/T": "first"}))
    inner.get_object()[NameObject("/Parent")] = group
    places = [writer._add_object(pdf({"/Subtype": "/Widget"})) for _ in range(2)]
    for each in places:
        each.get_object()[NameObject("/Parent")] = inner
    inner.get_object()[NameObject("/Kids")] = ArrayObject(places)
    apart = writer._add_object(pdf({"/FT": "/Tx", "/T": "apart"}))
    below = writer._add_object(pdf({"/T": "below", "/V": "x"}))
    below.get_object()[NameObject("/Parent")] = apart
    apart.get_object()[NameObject("/Kids")] = ArrayObject([below, apart])
    writer.pages[0][NameObject("/Annots")] = ArrayObject(places)
    form = writer.root_object["/AcroForm"]
    form[NameObject("/Fields")] = ArrayObject([inner, *places, apart])
    form[NameObject("/XFA")] = TextStringObject("x")
    writer.add_attachment("table.csv", b"1")
    assert document_text(written(writer), "x").split("\n") == [
        "Form", "person.first: Ann", "", "apart.below: x", "",
        "[the form has a second form in XML, whose values may be left out]", "",
        "[attached file table.csv left out]",
    ]  # fmt: skip


def test_a_circle_of_fields_ends():
    writer = with_annotations(widget(FT="/Tx", T="a", V="b"))
    item = writer.pages[0]["/Annots"][0]
    item.get_object()[NameObject("/Parent")] = item
    assert document_text(written(writer), "x").startswith("Form\n")


def picture_on(page: Any, writer: PdfWriter, side: int) -> None:
    """Draws a picture of that width and height on a page of 300."""
    image = StreamObject()
    image.set_data(b"\0")
    image.update(pdf({"/Type": "/XObject", "/Subtype": "/Image", "/Width": 1, "/Height": 1,
                      "/ColorSpace": "/DeviceGray", "/BitsPerComponent": 8}))  # fmt: skip
    page["/Resources"][NameObject("/XObject")] = pdf({"/P": writer._add_object(image)})
    drawn = page["/Contents"].get_data() + b"\nq %d 0 0 %d 0 0 cm /P Do Q" % (side, side)
    content = StreamObject()
    content.set_data(drawn)
    page[NameObject("/Contents")] = writer._add_object(content)


def test_pages_without_a_text_are_named():
    assert document_text(pdf_of("one", "", "three"), "x").split("\n\n") == [
        "one", "[page 2 has no text: it may be a picture]", "three",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("side", "lines"), [(290, ["[page 1 has a large picture: its text is left out]"]), (30, [])]
)
def test_a_scan_with_a_line_of_text_is_named(side, lines):
    writer = with_annotations(pages=("Scanned with a phone",))
    picture_on(writer.pages[0], writer, side)
    assert document_text(written(writer), "x").split("\n") == ["Scanned with a phone", *lines]


@pytest.mark.parametrize("algorithm", ["AES-128", "AES-256", "RC4-128"])
@pytest.mark.parametrize("password", ["", "secret"])
def test_encryption_without_a_password_is_no_hindrance(algorithm, password, monkeypatch):
    writer = PdfWriter(clone_from=PdfReader(BytesIO(pdf_of("the text"))))
    writer.encrypt(password, "owner", algorithm=algorithm)
    data = written(writer)
    if not password:
        assert document_text(data, "x") == "the text"
        return
    with pytest.raises(SparseKVError, match="the PDF is encrypted: save it without a password"):
        document_text(data, "x")


def test_without_the_package_that_decrypts_the_command_that_installs_it_is_named(monkeypatch):
    from pypdf import _encryption
    from pypdf.errors import DependencyError

    writer = PdfWriter(clone_from=PdfReader(BytesIO(pdf_of("the text"))))
    writer.encrypt("", "owner", algorithm="AES-256")
    data = written(writer)

    def missing(*_: Any, **__: Any) -> Any:
        raise DependencyError("cryptography>=3.1 is required for AES algorithm")

    for name in [each for each in vars(_encryption) if each.startswith("aes_")]:
        monkeypatch.setattr(_encryption, name, missing)
    with pytest.raises(SparseKVError, match=r"x is a PDF, which needs .*\[docs"):
        document_text(data, "x")
    assert "pypdf" in sys.modules
