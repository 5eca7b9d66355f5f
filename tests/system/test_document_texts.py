"""The texts of PDF and Word files, and what is said of those that cannot be read."""

import sys

import pytest
from sample_documents import archive_of, pdf_of, word_of

from sparsekv_cli.commands.shared.prompt import decode_file, read_prompt
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.system import documents


def test_pages_paragraphs_and_tables(tmp_path):
    assert decode_file(pdf_of("first page", "second"), "x.pdf") == "first page\n\nsecond"
    path = tmp_path / "x.docx"
    path.write_bytes(word_of("Größe", "two"))
    assert read_prompt("why?", str(path)) == "Größe\ntwo\nleft | right\nafter it\n\nwhy?"


def encrypted(version: int) -> bytes:
    """A PDF with a password. version: 2: RC4; 4: a cipher for which a package may be missing."""
    start, text, end = pdf_of("text").partition(b"trailer << ")
    rest = b"/O <%s> /U <%s> /P -4 " % (b"41" * 32, b"42" * 32)
    if version == 4:
        rest += b"/CF << /StdCF << /CFM /AESV2 /Length 16 >> >> /StmF /StdCF /StrF /StdCF "
    rest += b"/Length 128 /V %d /R %d" % (version, 3 if version == 2 else 4)
    return start + text + b"/ID [<43> <43>] /Encrypt << /Filter /Standard %s >> " % rest + end


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xef\xbb\xbfa\r\n", "a\r\n"),
        ("\ufeffG\xf6".encode("utf-16-le"), "G\xf6"),
        ("\ufeffG\xf6\n".encode("utf-16-be"), "G\xf6\n"),
        (b"a\xef\xbb\xbf", "a\ufeff"),  # only a mark at the start is one
        (b"\xef\xbb\xbf", ""),
        (b"", ""),
    ],
)
def test_a_byte_order_mark_is_no_text(data, text):
    assert decode_file(data, "x") == text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xffa", "x is not UTF-8: byte 0xff at offset 0"),
        (b"\xff\xfea", "x is not UTF-16: byte 0x61 at offset 2"),
        (b"\xff\xfe\x00\xd8\x00\x00", "x is not UTF-16"),
    ],
)
def test_bytes_of_no_text_are_named(data, said):
    with pytest.raises(SparseKVError, match=said):
        decode_file(data, "x")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (pdf_of(""), "the PDF has no text"),
        (b"%PDF-1.7\n" + bytes(500), "the PDF cannot be read: .*; save it again, or give its text"),
        (pdf_of("text")[:200], "the PDF cannot be read"),
        (encrypted(2), "the PDF is encrypted: save it without a password"),
        (encrypted(4), "the PDF is encrypted: save it without a password"),
        (word_of(), "the Word file has no text"),
        (word_of("text")[:-30], "the archive is damaged: copy or save it again"),
        (archive_of({"a.txt": b"a"}), "the archive is no Word file: unpack it"),
        (archive_of({"word/document.xml": b"a"}), "the Word file cannot be read"),
        (b"\xd0\xcf\x11\xe0" + bytes(500), "save it as .docx without one"),
    ],
)
def test_what_cannot_be_read_is_a_line(data, said, caplog):
    with pytest.raises(SparseKVError, match=said) as caught:
        decode_file(data, "x")
    assert "\n" not in str(caught.value)
    assert not caplog.records


def test_a_word_file_that_unpacks_to_too_much(monkeypatch):
    monkeypatch.setattr(documents, "MOST_UNPACKED", 1 << 20)
    with pytest.raises(SparseKVError, match="unpacks to 2 MiB, more than 1: split it"):
        decode_file(archive_of({"word/document.xml": bytes(2 << 20)}), "x.docx")


def test_halves_of_characters_become_text(monkeypatch):
    monkeypatch.setattr(documents, "pdf_text", lambda data: "\ud83d\ude00 \ud800")
    assert documents.document_text(b"%PDF-", "x") == "\U0001f600 \ufffd"


def test_without_the_extra_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(SparseKVError, match=r"x.pdf is a PDF, which needs .*\[docs\]"):
        decode_file(pdf_of("text"), "x.pdf")
