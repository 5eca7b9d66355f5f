"""The texts of PDF and Word files, and what is said of those that cannot be read."""

import sys
from io import BytesIO
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
from docx import Document

from sparsekv_cli.commands.shared import documents
from sparsekv_cli.commands.shared.prompt import decode_file, read_prompt
from sparsekv_cli.errors import SparseKVError


def pdf_of(*pages: str) -> bytes:
    """A PDF whose pages have a line each."""
    n, parts = len(pages), [b"<< /Type /Catalog /Pages 2 0 R >>", b""]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(n))
    parts[1] = f"<< /Type /Pages /Count {n} /Kids [{kids}] >>".encode()
    parts.append(b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    for i, text in enumerate(pages):
        page = f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 300] /Contents {5 + 2 * i} 0 R "
        parts.append(f"{page}/Resources << /Font << /F1 3 0 R >> >> >>".encode())
        drawn = f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode()
        parts.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(drawn), drawn))
    data, starts = b"%PDF-1.4\n", []
    for i, part in enumerate(parts, 1):
        starts.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (i, part)
    table = b"".join(b"%010d 00000 n \n" % start for start in starts)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(parts) + 1)
    end = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
    return data + head + table + end % (len(parts) + 1, len(data))


def word_of(*lines: str) -> bytes:
    document, out = Document(), BytesIO()
    for line in lines:
        document.add_paragraph(line)
    table = document.add_table(rows=1, cols=2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "left", "right"
    document.add_paragraph("after it")
    document.save(out)
    return out.getvalue()


def test_pages_paragraphs_and_tables(tmp_path):
    assert decode_file(pdf_of("first page", "second"), "x.pdf") == "first page\n\nsecond"
    path = tmp_path / "x.docx"
    path.write_bytes(word_of("Größe", "two"))
    assert read_prompt("why?", str(path)) == "Größe\ntwo\nleft | right\nafter it\n\nwhy?"


def test_other_archives_are_no_documents():
    out = BytesIO()
    with ZipFile(out, "w") as archive:
        archive.writestr("a.txt", "a")
    assert documents.kind_of(out.getvalue()) == documents.kind_of(b"PK\3\4") == ""
    with pytest.raises(SparseKVError, match="is not UTF-8"):
        decode_file(out.getvalue() + b"\xff", "x.zip")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (pdf_of(""), "the PDF has no text"),
        (b"%PDF-1.7\n" + bytes(500), "the PDF cannot be read"),
        (pdf_of("text")[:200], "the PDF cannot be read"),
        (word_of("text")[:-30], "is not UTF-8"),
    ],
)
def test_what_cannot_be_read_is_a_line(data, said, caplog):
    with pytest.raises(SparseKVError, match=said) as caught:
        decode_file(data, "x")
    assert "\n" not in str(caught.value)
    assert not caplog.records


def test_a_word_file_that_unpacks_to_too_much(monkeypatch):
    monkeypatch.setattr(documents, "MOST_UNPACKED", 1 << 20)
    out = BytesIO()
    with ZipFile(out, "w", ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", bytes(2 << 20))
    with pytest.raises(SparseKVError, match="unpacks to 2 MiB, of which 1 are read"):
        decode_file(out.getvalue(), "x.docx")


def test_without_the_extra_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(SparseKVError, match=r"x.pdf is a PDF, which needs .*\[docs\]"):
        decode_file(pdf_of("text"), "x.pdf")
